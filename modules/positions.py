"""How a transformer learns the order of its tokens.

A row of `POSITIONS` is a pair: what is added to the embeddings, and what turns queries and keys.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.params import declare
from modules.statistics import at_least_float32

ROPE_BASE = 10_000.0


def rope(x_BNTH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Rotary embedding: pairs (x_i, x_{i+H/2}) turned by position * ROPE_BASE^(-2i/H).

    x_BNTH has an even H; positions_BT is int32 and may have a batch of 1. The angles are float32,
    float64 where x is.
    Source: arXiv:2104.09864, equation 34, in the half-split layout (rotate_half).
    """
    first, second = jnp.split(at_least_float32(x_BNTH), 2, axis=-1)
    half, exact = first.shape[-1], first.dtype
    frequency_H = ROPE_BASE ** (-jnp.arange(half, dtype=exact) / half)
    angle_BTH = jnp.einsum('bt,h->bth', positions_BT.astype(exact), frequency_H)
    cos, sin = jnp.cos(angle_BTH)[:, None], jnp.sin(angle_BTH)[:, None]
    turned = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.astype(x_BNTH.dtype)


def no_rotation(x_BNTH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    del positions_BT
    return x_BNTH


class LearnedPositions(nn.Module):
    """A table of `length` vectors, added to the embeddings (arXiv:1706.03762, section 3.5)."""

    length: int
    features: int

    @nn.compact
    def __call__(self, positions_BT):
        init = declare(nn.initializers.normal(1.0), role='embedding', axes=('position', 'embed'))
        table_TD = self.param('table', init, (self.length, self.features))
        return table_TD[positions_BT]


@dataclasses.dataclass(frozen=True)
class Position:
    """One line of what it is with its source; what turns queries and keys, the table, if any, that
    is added to the embeddings, and the slopes, of N heads, by which logits fall with distance.
    """

    summary: str
    rotate: Callable[[jax.Array, jax.Array], jax.Array] = no_rotation
    table: type[nn.Module] | None = None
    slopes: Callable[[int], jax.Array] | None = None


POSITIONS = {
    'learned': Position(
        'a table of vectors, added to the embeddings (arXiv:1706.03762)', table=LearnedPositions
    ),
    'none': Position('the causal mask alone tells the order'),
    'rope': Position('queries and keys turned by angles: RoPE (arXiv:2104.09864)', rotate=rope),
}
