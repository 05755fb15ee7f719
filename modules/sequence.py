"""What layers know of the rows [B, T] besides their activations: positions, documents, padding."""

import jax
import jax.numpy as jnp
from flax import struct


class Sequence(struct.PyTreeNode):
    """positions_BT: int32, [1, T] where all rows agree. segments_BT: int32 document number of each
    token, attended within; None: the whole row is one document. valid_BT: 0 for padding, which
    statistics leave out; None: there is none. prefix_BT: int32, tokens of one number that is not 0
    see each other, later ones too; None: all see those before them alone.

    capacity: how many tokens of each row a cache has room for, where the row is read in parts
    (`modules.attention.cache`): these ones come behind those it holds. None: they are the whole.
    """

    positions_BT: jax.Array
    segments_BT: jax.Array | None = None
    valid_BT: jax.Array | None = None
    prefix_BT: jax.Array | None = None
    capacity: int | None = struct.field(pytree_node=False, default=None)

    @property
    def valid_BT1(self) -> jax.Array | None:
        """valid_BT beside activations [B, T, D]."""
        return None if self.valid_BT is None else self.valid_BT[..., None]


def whole_rows(length: int) -> Sequence:
    """Every row is one document from its first token."""
    return Sequence(jnp.arange(length, dtype=jnp.int32)[None])


def documents(segments_BT: jax.Array) -> Sequence:
    """Documents packed into rows: positions restart where the segment number changes."""
    index_1T = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)[None]
    index_BT = jnp.broadcast_to(index_1T, segments_BT.shape)
    return Sequence(index_BT - start_of(segments_BT), segments_BT)


def start_of(segments_BT: jax.Array) -> jax.Array:
    """[B, T] int32: the place in its row at which the document of each token begins."""
    index_1T = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)[None]
    previous_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    begins_BT = segments_BT != previous_BT
    index_BT = jnp.broadcast_to(index_1T, segments_BT.shape)
    return jax.lax.cummax(jnp.where(begins_BT, index_BT, 0), axis=1)


def part_of_rows(start_B: jax.Array, count_B: jax.Array, length: int, capacity: int) -> Sequence:
    """Tokens start to start + count of each row, of whose `length` columns the rest is padding."""
    column_1T = jnp.arange(length, dtype=jnp.int32)[None]
    positions_BT = start_B[:, None] + column_1T
    valid_BT = (column_1T < count_B[:, None]).astype(jnp.float32)
    return Sequence(positions_BT, valid_BT=valid_BT, capacity=capacity)
