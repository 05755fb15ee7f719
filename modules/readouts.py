"""Readouts: the matrix from the last activations to the logits. A new readout is a row of
`READOUTS`.

A row has the initializer of its matrix, whether training changes it, and the operands of the
matmul.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from modules.facts import accept_any
from modules.options import Option
from modules.statistics import at_least_float32

MIN_SQUARE = 1e-12  # added to a squared length, so that a zero vector has a finite gradient
SPREAD_STEPS, SPREAD_RATE, THRESHOLD_SHARE = 300, 0.5, 0.9  # of `spread_rows`
ROWS_AT_ONCE = 1024  # rows whose cosines with all rows are in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedReadout:
    """Learned matrix: `z = x W`."""

    is_frozen: ClassVar[bool] = False
    init: ClassVar[Callable[..., jax.Array]] = staticmethod(nn.initializers.normal(1.0))

    check = staticmethod(accept_any)

    def inputs(self, x: jax.Array, weight_DV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the activations and the matrix that are multiplied."""
        return x, weight_DV


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineReadout(LearnedReadout):
    """Cosines with learned vectors (arXiv:2303.11637): `z_v = cos(x, w_v) / tau`.

    The vector `w_v` of each token `v` is trained, and `tau` is `readout_temperature`. Only the
    directions of `x` and `w_v` matter. This is the baseline for `random` and `equiangular`, which
    have the same logits with fixed vectors.
    """

    readout_temperature: Annotated[
        float, Option('temperature that divides the cosines', 1e-6, sys.float_info.max)
    ] = 0.07

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:  # ty: ignore[incompatible-attribute-override]
        """Raises ValueError for rows that start at 0, which have no direction."""
        if 'readout' in recipe.zero_starts:
            raise ValueError(
                f'{part} uses the directions of the rows of the readout, but these start at 0 '
                f'(scaling.zero_init={recipe.config.scaling.zero_init}, {recipe.scaling}). Leave '
                'one of them out.'
            )

    def inputs(self, x: jax.Array, weight_DV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the unit activations, and unit rows over the temperature."""
        return normalize(x, -1), normalize(weight_DV, 0) / self.readout_temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomReadout(CosineReadout):
    """Cosines with fixed random vectors (arXiv:2303.11637): `z_v = cos(x, e_v) / tau`.

    The unit vectors `e_v` are drawn once and never trained: they have no gradient, no weight decay
    and no optimizer state. `tau` is `readout_temperature`. This is the control for `equiangular`.
    """

    is_frozen = True

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:
        """Raises ValueError for rows that are embeddings too, or that a reparametrisation maps."""
        super().check(recipe, part)
        if recipe.model.tie_embeddings:
            raise ValueError(
                f'{part} is never trained, but with model.tie_embeddings=True it is also the '
                'embedding. Set model.tie_embeddings=False, or choose model.readout=cosines.'
            )
        for reparam in recipe.reparam:
            if 'readout' in reparam.options.get('roles', '').split('+'):
                raise ValueError(
                    f'{part} must keep its initial values, but {reparam} maps the readout '
                    f'(reparam.roles={reparam.options["roles"]}). Leave one of them out.'
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EquiangularReadout(RandomReadout):
    """Cosines with fixed vectors that are spread apart (arXiv:2303.11637):
    `z_v = cos(x, e_v) / tau`.

    The unit vectors `e_v`, called Equiangular Basis Vectors, are never trained. Before training,
    `spread_rows` lowers the largest absolute cosine between two of them, which takes some hundred
    products of [V, D] with [D, V]. `tau` is `readout_temperature`.
    """

    init = staticmethod(lambda key, shape, dtype=jnp.float32: init_spread_rows(key, shape, dtype))


def normalize(x: jax.Array, axis: int) -> jax.Array:
    """Returns x / |x| over an axis, reduced in float32."""
    x32 = at_least_float32(x)
    square = jnp.sum(jnp.square(x32), axis, keepdims=True)
    return (x32 * jax.lax.rsqrt(square + MIN_SQUARE)).astype(x.dtype)


def init_spread_rows(key: jax.Array, shape: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """Returns `spread_rows` as a matrix [D, V] at unit scale, as for every initializer.

    Args:
      key: a random key.
      shape: (D, V).
      dtype: of the matrix.

    Returns:
      The matrix.
    """
    width, vocab = shape
    return (math.sqrt(width) * spread_rows(key, vocab, width).T).astype(dtype)


def spread_rows(key: jax.Array, vocab: int, width: int, steps: int = SPREAD_STEPS) -> jax.Array:
    """Returns unit rows [V, D] that are drawn and then moved until their largest |cosine| is small.

    Descends sum over pairs of max(0, |cosine| - threshold)^2. Each step sets rows back to unit
    length; the rate falls to 0. The published loss (arXiv:2303.11637 and its Generate_EBV.py) lacks
    the square, and its threshold is given. If that threshold cannot be met, rows coincide there,
    because many pairs just above it weigh more than one pair at 1. Here the threshold is
    THRESHOLD_SHARE times the largest |cosine| of the step, so that it need not be known.
    `welch_bound` is a lower bound.

    Args:
      key: a random key.
      vocab: V.
      width: D.
      steps: of the descent.

    Returns:
      The rows.
    """
    rows_VD = normalize(jax.random.normal(key, (vocab, width)), 1)

    def descend(i, carry):
        rows_VD, largest = carry
        grad_VD, max_cosine_V = jax.lax.map(
            functools.partial(_row_gradient, rows_VD, THRESHOLD_SHARE * largest),
            (jnp.arange(vocab), rows_VD),
            batch_size=ROWS_AT_ONCE,
        )
        rate = SPREAD_RATE * (1 - i / steps)
        return normalize(rows_VD - rate * grad_VD, 1), jnp.max(max_cosine_V)

    return jax.lax.fori_loop(0, steps, descend, (rows_VD, jnp.float32(1.0)))[0]


def _row_gradient(
    rows_VD: jax.Array, threshold: jax.Array, indexed_row: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of half the loss in one row, and its largest |cosine| with another."""
    index, row_D = indexed_row
    cosines_V = jnp.where(jnp.arange(len(rows_VD)) == index, 0.0, rows_VD @ row_D)
    magnitudes_V = jnp.abs(cosines_V)
    excess_V = jnp.sign(cosines_V) * jnp.maximum(magnitudes_V - threshold, 0)
    return excess_V @ rows_VD, jnp.max(magnitudes_V)


def welch_bound(vocab: int, width: int) -> float:
    """Returns sqrt((V - D) / (D (V - 1))), a lower bound on the largest |cosine| of V unit vectors.

    It is 0 if they can be orthogonal.
    """
    return math.sqrt(max(0, vocab - width) / (width * (vocab - 1)))


READOUTS = {
    'learned': LearnedReadout,
    'cosines': CosineReadout,
    'equiangular': EquiangularReadout,
    'random': RandomReadout,
}
