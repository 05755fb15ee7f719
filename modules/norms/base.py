"""Base class, options and helpers of norm layers."""

from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.choices import check_divides
from modules.facts import longest_horizon
from modules.options import Option
from modules.params import NORM, declare

# Options that several norms share.
Eps = Annotated[float, Option('small number added inside the denominator', 0, 1)]
HasScale = Annotated[bool, Option('whether to learn a gain')]
HasBias = Annotated[bool, Option('whether to learn a bias')]
Groups = Annotated[
    int | None, Option('feature groups with separate statistics; None: 32, or fewer if narrow', 1)
]
EmaDecay = Annotated[float, Option('share of a running statistic kept at each update', 0, 1)]
Momentum = Annotated[float, Option('weight of the new batch in a running statistic', 0, 1)]
WarmupUpdates = Annotated[
    int,
    Option('first updates with statistics of the current batch only', 0, time_unit='updates'),
]


class Norm(nn.Module):
    """A map of x [..., D] over its last axis, which has the logical name `axis`.

    Options are further fields (`modules.options`). The model fills in fields with these names:
    `site` ('embedding', 'attention', 'mlp', 'qk' or 'final'), `valid` ([..., 1], 0 for padding),
    `order` (the norm's place in the order of removal).
    """

    axis: str = 'embed'  #: the logical name of the last axis of x

    #: In training, the output for a token also depends on this; '': on nothing else.
    leaks: ClassVar[str] = ''
    #: How many coordinates fewer the stream has with this norm.
    dropped_coordinates: ClassVar[int] = 0
    #: Whether it has a derivative in forward mode.
    forward_mode: ClassVar[bool] = True
    #: Whether the embeddings are multiplied by a learned scalar, sqrt(D) at the start.
    scales_embedding: ClassVar[bool] = False
    #: Whether it divides by the root mean square, which has kernels.
    divides_by_rms: ClassVar[bool] = False
    #: Options that must divide the width.
    divide_width: ClassVar[tuple[str, ...]] = ('groups',)
    #: Options that must divide a microbatch's sequences.
    divide_sequences: ClassVar[tuple[str, ...]] = ()

    lasts = staticmethod(longest_horizon)

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:
        """Raises ValueError for options that do not divide the axes that this norm normalizes.

        Args:
          recipe: the resolved config (`lm.config.recipe`).
          part: the norm at this place, with its options.
        """
        if cls.dropped_coordinates and recipe.model.d_model % 2 and part is recipe.norm:
            raise ValueError(
                f'{part} uses d_model - {cls.dropped_coordinates} coordinates of the stream and '
                f'needs an even model.d_model; got {recipe.model.d_model}. Nearest that works: '
                f'{recipe.model.d_model + 1}.'
            )
        sizes = {name: size for name, size in part.options.items() if size is not None}
        for name in sizes.keys() & cls.divide_sequences:
            axis_name = 'the sequences of a microbatch'
            check_divides(f'norm.{name}', sizes[name], axis_name, recipe.microbatch_size)
        for width in recipe.norm_widths(part.path):
            for name in sizes.keys() & cls.divide_width:
                axis_name = f'the width {width} that {part} normalizes'
                check_divides(f'norm.{name}', sizes[name], axis_name, width)
            if sizes.get('groups') == width:
                raise ValueError(
                    f'norm.groups={width} leaves one feature in each group of {part}, which has no '
                    'variance. Choose fewer groups.'
                )

    def vector(
        self, name: str, features: int, value: float, axis: str | None = None, decayed: bool = False
    ) -> jax.Array:
        """Creates a vector parameter of the norm.

        Args:
          name: of the parameter.
          features: the length; 0: a scalar.
          value: the initial value.
          axis: its logical name; None: the norm's.
          decayed: whether weight decay applies.

        Returns:
          The parameter, float32 [features].
        """
        axes = (axis or self.axis,) if features else ()
        init = declare(nn.initializers.constant(value), 'vector', axes, part=NORM, decayed=decayed)
        param: Any = self.param(name, init, (features,) if features else ())  # unboxed by Flax
        return param


def broadcast_like(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Broadcasts [D] or a scalar to the shape of x [..., D]."""
    return jnp.broadcast_to(vector, x.shape)


def apply_affine(norm: Norm, y: jax.Array, scale: bool = True, bias: bool = True) -> jax.Array:
    """Returns y * scale + bias with learned parameters that start at 1 and 0.

    Args:
      norm: owns the parameters.
      y: [..., D].
      scale: whether there is a scale.
      bias: whether there is a bias.
    """
    if scale:
        y = y * broadcast_like(norm.vector('scale', y.shape[-1], 1.0), y)
    if bias:
        y = y + broadcast_like(norm.vector('bias', y.shape[-1], 0.0), y)
    return y


def default_groups(features: int) -> int:
    """Returns the published 32 groups, or the most below that leave at least 8 features a group."""
    return max(n for n in range(1, 33) if features % n == 0 and (n == 1 or features >= 8 * n))


def reshape_groups(x: jax.Array, groups: int | None) -> jax.Array:
    """Splits [..., D] into [..., groups, D / groups].

    Args:
      x: [..., D].
      groups: the number of groups; None: `default_groups`.

    Raises:
      ValueError: if the number of groups does not divide D.
    """
    groups = default_groups(x.shape[-1]) if groups is None else groups
    check_divides('the number of groups', groups, 'the width', x.shape[-1])
    return x.reshape(*x.shape[:-1], groups, -1)
