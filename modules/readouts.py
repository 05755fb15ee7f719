"""Readouts: the matrix that makes logits of the last activations. A new one is a row of `READOUTS`.

A row says how its matrix starts, whether training changes it, and what the product takes.
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

from modules.facts import accept_any
from modules.options import Option
from modules.statistics import at_least_float32

MIN_SQUARE = 1e-12  # of a length, so that what is 0 keeps a gradient
SPREAD_STEPS, SPREAD_RATE, THRESHOLD_SHARE = 300, 0.5, 0.9  # of `spread_rows`
ROWS_AT_ONCE = 1024  # rows whose cosines with all others are held


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedReadout:
    """x W, all of it trained."""

    is_frozen: ClassVar[bool] = False
    init: ClassVar[Callable[..., jax.Array]] = staticmethod(nn.initializers.normal(1.0))

    check = staticmethod(accept_any)

    def inputs(self, x: jax.Array, weight_DV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the activations and the matrix whose product the logits are."""
        return x, weight_DV


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineReadout(LearnedReadout):
    """cos(x, w_v) / temperature, W trained: logits of directions alone.

    What `random` and `equiangular` are to be compared with: they have the same logits of rows that
    stay as drawn. Source of the form: arXiv:2303.11637.
    """

    readout_temperature: Annotated[
        float, Option('what cosines are divided by', 1e-6, sys.float_info.max)
    ] = 0.07

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:
        """Raises ValueError for rows that start at 0, and so have no direction."""
        if 'readout' in recipe.zero_starts:
            raise ValueError(
                f'{part} reads the directions of rows, and the readout starts at 0 '
                f'(scaling.zero_init={recipe.config.scaling.zero_init}, {recipe.scaling}). Leave '
                'one of them out.'
            )

    def inputs(self, x: jax.Array, weight_DV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the unit activations, and unit rows over the temperature."""
        return normalize(x, -1), normalize(weight_DV, 0) / self.readout_temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomReadout(CosineReadout):
    """cos(x, e_v) / temperature, with unit rows e_v that are drawn once and never trained.

    They have neither gradients nor decay nor state of an optimizer. The control of `equiangular`
    (arXiv:2303.11637).
    """

    is_frozen = True

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:
        """Raises ValueError for rows that are embeddings too, or that a reparametrisation maps."""
        super().check(recipe, part)
        if recipe.model.tie_embeddings:
            raise ValueError(
                f'{part} is never trained, and with model.tie_embeddings=True it is the embedding '
                'too. Set model.tie_embeddings=False, or choose model.readout=cosines.'
            )
        for own in recipe.reparam:
            if 'readout' in own.options.get('roles', '').split('+'):
                raise ValueError(
                    f'{part} stays as it is drawn, and {own} maps it, as reparam.roles='
                    f'{own.options["roles"]} names the readout. Leave one of them out.'
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EquiangularReadout(RandomReadout):
    """cos(x, e_v) / temperature, with rows e_v that are spread apart once and never trained.

    Their largest |cosine| is pushed down before training (`spread_rows`): Equiangular Basis Vectors
    (arXiv:2303.11637). That takes some hundred products of [V, D] with [D, V] at the start.
    """

    init = staticmethod(lambda key, shape, dtype=jnp.float32: init_spread_rows(key, shape, dtype))


def normalize(x: jax.Array, axis: int) -> jax.Array:
    """Returns x / |x| over an axis, reduced in float32."""
    x32 = at_least_float32(x)
    square = jnp.sum(jnp.square(x32), axis, keepdims=True)
    return (x32 * jax.lax.rsqrt(square + MIN_SQUARE)).astype(x.dtype)


def init_spread_rows(key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Returns `spread_rows` as a matrix [D, V] at unit scale, as all matrices start."""
    width, vocab = shape
    return (math.sqrt(width) * spread_rows(key, vocab, width).T).astype(dtype)


def spread_rows(key: jax.Array, vocab: int, width: int, steps: int = SPREAD_STEPS) -> jax.Array:
    """Returns unit rows [V, D], drawn and then moved until their largest |cosine| is small.

    Descends sum over pairs of max(0, |cosine| - threshold)^2, with rows set back to unit length and
    a rate that falls to 0. The published loss (arXiv:2303.11637 and its Generate_EBV.py) is without
    the square, at a threshold that is given. One that cannot be met lets rows coincide there, as
    many pairs just above it weigh more than one at 1; here the threshold is FOLLOWS times the
    largest |cosine| there is, so that it need not be known. `welch_bound` is the least that can be.
    """
    rows_VD = normalize(jax.random.normal(key, (vocab, width)), 1)

    def turn(i, carried):
        rows_VD, largest = carried
        pulls_VD, most_V = jax.lax.map(
            functools.partial(_row_gradient, rows_VD, THRESHOLD_SHARE * largest),
            (jnp.arange(vocab), rows_VD),
            batch_size=ROWS_AT_ONCE,
        )
        rate = SPREAD_RATE * (1 - i / steps)
        return normalize(rows_VD - rate * pulls_VD, 1), jnp.max(most_V)

    return jax.lax.fori_loop(0, steps, turn, (rows_VD, jnp.float32(1.0)))[0]


def _row_gradient(
    rows_VD: jax.Array, threshold: jax.Array, indexed_row: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The gradient of half of the loss in one row, and its largest |cosine| with another."""
    number, row_D = indexed_row
    cosines_V = jnp.where(jnp.arange(len(rows_VD)) == number, 0.0, rows_VD @ row_D)
    sizes_V = jnp.abs(cosines_V)
    over_V = jnp.sign(cosines_V) * jnp.maximum(sizes_V - threshold, 0)
    return over_V @ rows_VD, jnp.max(sizes_V)


def welch_bound(vocab: int, width: int) -> float:
    """Returns sqrt((V - D) / (D (V - 1))), below which no V unit vectors have all their |cosines|;
    0 where they can be orthogonal.
    """
    return math.sqrt(max(0, vocab - width) / (width * (vocab - 1)))


READOUTS = {
    'learned': LearnedReadout,
    'cosines': CosineReadout,
    'equiangular': EquiangularReadout,
    'random': RandomReadout,
}
