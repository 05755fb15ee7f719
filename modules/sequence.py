"""What layers know of the rows [B, T] besides their activations: positions, documents, padding."""

import jax
import jax.numpy as jnp
from flax import struct


class Sequence(struct.PyTreeNode):
    """positions_BT: int32, [1, T] where all rows agree. segments_BT: int32 document number of each
    token, attended within; None: the whole row is one document. valid_BT: 0 for padding, which
    statistics leave out; None: there is none.
    """

    positions_BT: jax.Array
    segments_BT: jax.Array | None = None
    valid_BT: jax.Array | None = None

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
    previous_BT = jnp.pad(segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    start_BT = jnp.where(segments_BT != previous_BT, index_BT, 0)
    return Sequence(index_BT - jax.lax.cummax(start_BT, axis=1), segments_BT)
