"""Positions, documents and padding of the rows [B, T] that layers read."""

import jax
import jax.numpy as jnp
from flax import struct

from modules.dropout import Dropout


class Sequence(struct.PyTreeNode):
    """Positions and masks of tokens; segments and prefixes are int32.

    Tokens attend within their segment. Tokens with the same nonzero prefix number see each other,
    later tokens included. If a row is read in parts (`modules.attention.base`), these tokens follow
    the tokens in a cache with room for `capacity` tokens per row.
    """

    positions_BT: jax.Array  # int32, [1, T] if all rows agree
    segments_BT: jax.Array | None = None  # number of the document; None: a row is one document
    valid_BT: jax.Array | None = None  # 0 for padding, which statistics exclude; None: no padding
    prefix_BT: jax.Array | None = None  # None: each token sees earlier ones only
    # Rates of dropout by place ('attention', 'embedding', 'residual'), and the dropout of attention
    # probabilities in the current layer; None: no dropout.
    rates: dict[str, jax.Array] | None = None
    dropout: Dropout | None = None
    # Tokens that the cache has room for; None: the tokens are whole rows.
    capacity: int | None = struct.field(pytree_node=False, default=None)

    @property
    def valid_BT1(self) -> jax.Array | None:
        """Returns valid_BT in the shape that broadcasts with activations [B, T, D]."""
        return None if self.valid_BT is None else self.valid_BT[..., None]


def whole_rows(length: int) -> Sequence:
    """Makes the Sequence of rows with a single document each."""
    return Sequence(jnp.arange(length, dtype=jnp.int32)[None])


def packed_rows(segments_BT: jax.Array) -> Sequence:
    """Makes the Sequence of packed documents: positions restart where the segment changes."""
    index_1T = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)[None]
    index_BT = jnp.broadcast_to(index_1T, segments_BT.shape)
    return Sequence(index_BT - segment_starts(segments_BT), segments_BT)


def segment_starts(segments_BT: jax.Array) -> jax.Array:
    """Returns the index in its row, int32 [B, T], at which the document of each token begins."""
    index_1T = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)[None]
    previous_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    begins_BT = segments_BT != previous_BT
    index_BT = jnp.broadcast_to(index_1T, segments_BT.shape)
    return jax.lax.cummax(jnp.where(begins_BT, index_BT, 0), axis=1)


def partial_rows(start_B: jax.Array, count_B: jax.Array, length: int, capacity: int) -> Sequence:
    """Makes the Sequence of tokens start to start + count of each row, padded to `length`.

    Args:
      start_B: the position of the first token.
      count_B: the number of tokens.
      length: T.
      capacity: tokens that the cache has room for.

    Returns:
      The Sequence.
    """
    column_1T = jnp.arange(length, dtype=jnp.int32)[None]
    positions_BT = start_B[:, None] + column_1T
    valid_BT = (column_1T < count_B[:, None]).astype(jnp.float32)
    return Sequence(positions_BT, valid_BT=valid_BT, capacity=capacity)
