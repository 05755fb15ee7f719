"""Descriptions of parameters, made where each parameter is created.

A layer calls `self.param(name, declare(init, role, axes, fan_in), shape)`. The description travels
in a Flax metadata box through `nn.scan`, which adds the `layer` axis. `split_boxes` separates it
from the value after init. Parametrisation, weight decay, optimizer, sharding and reparametrisation
all read it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import meta

ROLES = ('embedding', 'hidden', 'readout', 'vector')
LAYER = 'layer'  # the axis along which nn.scan stacks parameters
# What a token does with a parameter: look its row up, be multiplied by it, or neither.
USES = LOOKUP, MATMUL, VECTOR = 'lookup', 'matmul', 'vector'
NORM, LORA = 'norm', 'lora'  # parts of the model that train.trainable can select
STREAM, VALUES = 'stream', 'values'  # parameters of model.stream, and tables of values by token


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Description of a parameter.

    Its role determines how it scales: `embedding` (rows are looked up), `hidden` (both sides grow
    with width), `readout` (width in, vocabulary out) or `vector` (gains, biases, scalars).
    """

    role: str
    axes: tuple[str, ...]  # a logical name for each dimension, such as ('layer', 'embed', 'mlp')
    fan_in: tuple[str, ...] = ()  # axes summed over in the forward pass; empty for an embedding
    # NORM for parameters of a norm, LORA for the factors that model.reparam adds, STREAM, VALUES.
    part: str = ''
    init_gain: float = 1.0  # a factor of its initial standard deviation
    decayed: bool = False  # whether a vector decays too; matrices and embeddings always do
    frozen: bool = False  # whether it keeps its initial value, whatever train.trainable says

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f'role must be one of {", ".join(ROLES)}; got {self.role!r}')
        unknown = set(self.fan_in) - set(self.axes)
        if unknown:
            raise ValueError(
                f'fan_in names axes {sorted(unknown)}, which are not among {self.axes}'
            )

    def drop_axis(self, axis: str) -> 'ParamSpec':
        """Returns the description of a slice along `axis`."""
        return dataclasses.replace(self, axes=tuple(a for a in self.axes if a != axis))

    def fan_in_size(self, shape: tuple[int, ...]) -> int:
        """Returns the number of terms in each sum of the forward pass."""
        return math.prod(n for n, axis in zip(shape, self.axes, strict=True) if axis in self.fan_in)


class ParamBox(struct.PyTreeNode, meta.AxisMetadata):
    """A box of a parameter with its description. `nn.scan` calls `add_axis` to stack layers."""

    value: Any
    spec: ParamSpec = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> 'ParamBox':  # `val` is Flax's name
        return self.replace(value=val)

    def add_axis(self, index: int, params: Any) -> 'ParamBox':
        axes = (*self.spec.axes[:index], LAYER, *self.spec.axes[index:])
        return self.replace(spec=dataclasses.replace(self.spec, axes=axes))

    def remove_axis(self, index: int, params: Any) -> 'ParamBox':
        axes = (*self.spec.axes[:index], *self.spec.axes[index + 1 :])
        return self.replace(spec=dataclasses.replace(self.spec, axes=axes))


def declare(
    init: Callable[..., jax.Array],
    role: str,
    axes: tuple[str, ...],
    fan_in: tuple[str, ...] = (),
    **spec_fields: Any,
) -> Callable[..., Any]:
    """Makes an initializer whose value carries ParamSpec(role, axes, fan_in, **spec_fields).

    Args:
      init: `init(key, shape, dtype)` draws at unit scale. The parametrisation multiplies matrices
        by their standard deviation afterwards (`modules.scaling`), so that no layer sets a scale.
      role: a row of ROLES.
      axes: a logical name for each dimension.
      fan_in: the axes summed over in the forward pass.
      **spec_fields: other fields of `ParamSpec`.

    Returns:
      `initializer(key, shape, dtype)` -> `ParamBox`; `module.param` unboxes it, hence the type.
    """
    spec = ParamSpec(role, tuple(axes), tuple(fan_in), **spec_fields)

    def initializer(key, shape, dtype=jnp.float32):
        if len(shape) != len(spec.axes):
            raise ValueError(f'axes {spec.axes} must name each dimension of shape {tuple(shape)}')
        return ParamBox(init(key, shape, dtype), spec)

    return initializer


def split_boxes(boxed_params: Any) -> tuple[Any, Any]:
    """Returns (params, specs), two parallel plain dict trees.

    Raises ValueError for a parameter without a description.
    """
    boxes, tree = jax.tree_util.tree_flatten_with_path(boxed_params, is_leaf=is_box)
    for path, box in boxes:
        if not is_box(box):
            raise ValueError(
                f'parameter {path_name(path)} was created without `declare`, so its role and axes '
                'are unknown and it cannot be scaled, decayed or sharded'
            )
    return tuple(tree.unflatten([getattr(box, n) for _, box in boxes]) for n in ('value', 'spec'))


def is_box(leaf: Any) -> bool:
    return isinstance(leaf, ParamBox)


def matrix_axes(spec: ParamSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the dimensions of a parameter that are (batch, rows, columns) of matrices.

    The forward pass sums over the rows, or looks them up in an embedding. Each index of the
    dimensions before the rows (layer, expert) is a matrix. Raises ValueError for a vector.
    """
    rows = spec.fan_in or (spec.axes[-2:-1] if spec.role == 'embedding' else ())
    if not rows:
        raise ValueError(f'{spec} is not a matrix: the forward pass sums over none of its axes')
    summed = tuple(i for i, axis in enumerate(spec.axes) if axis in rows)
    not_summed = tuple(i for i in range(len(spec.axes)) if i not in summed)
    batch = tuple(i for i in not_summed if i < summed[0])
    return batch, summed, not_summed[len(batch) :]


def batch_axes(spec: ParamSpec) -> tuple[int, ...]:
    """Returns the dimensions along which separate matrices, or separate vectors, are stacked."""
    if spec.role == 'vector':
        return tuple(i for i, axis in enumerate(spec.axes) if axis == LAYER)
    return matrix_axes(spec)[0]


def root_mean_square(spec: ParamSpec, x: jax.Array) -> jax.Array:
    """Returns sqrt(mean(x^2)) of each matrix or vector of a parameter; reduced axes keep size 1."""
    axes = tuple(i for i in range(x.ndim) if i not in batch_axes(spec))
    return jnp.sqrt(jnp.mean(jnp.square(x), axes, keepdims=True))


def as_matrices(spec: ParamSpec, weight: jax.Array) -> jax.Array:
    """Returns the matrices [..., I, O] of a parameter, for each index of its batch axes.

    They are W in y = x W with x [I]. Queries, keys and values are separate parameters.
    """
    batch, rows, columns = matrix_axes(spec)
    sizes = [math.prod(weight.shape[i] for i in axes) for axes in (rows, columns)]
    ordered = jnp.transpose(weight, (*batch, *rows, *columns))
    return ordered.reshape(*(weight.shape[i] for i in batch), *sizes)


def from_matrices(spec: ParamSpec, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverts `as_matrices`.

    Args:
      spec: describes the parameter.
      matrices: [..., I, O].
      shape: the shape of the parameter.

    Returns:
      The parameter.
    """
    order = [axis for axes in matrix_axes(spec) for axis in axes]
    ordered = matrices.reshape([shape[i] for i in order])
    return jnp.transpose(ordered, [order.index(i) for i in range(len(shape))])


def path_name(path: tuple[Any, ...]) -> str:
    """Returns 'blocks/attention/query' for a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator='/')


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {'blocks/attention/query': leaf, ...}; a ParamSpec is a leaf."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
