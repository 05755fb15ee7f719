"""What attention layers keep of the tokens they have read: the Linen collection `cache`.

A layer keeps something where its `Sequence` has a capacity: rows are then read in parts, one token
or many at a time, each behind what the cache holds of its row. Rows may differ in length: padding
behind the tokens of a row is not kept.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.sequence import Sequence

CACHE = 'cache'


def remembered(module: nn.Module, name: str, x_BKTH: jax.Array, sequence: Sequence) -> jax.Array:
    """[B, K, S, H]: x of all tokens so far, each at its position, S being the capacity.

    Places beyond the tokens of a row hold what no query may read: zeros, or an earlier use of them.
    """
    batch, n_heads, _, head_dim = x_BKTH.shape
    shape = (batch, n_heads, sequence.capacity, head_dim)
    kept = module.variable(CACHE, name, jnp.zeros, shape, x_BKTH.dtype)
    places_BT = sequence.positions_BT
    if sequence.valid_BT is not None:  # what is written beyond the last place is dropped
        places_BT = jnp.where(sequence.valid_BT > 0, places_BT, sequence.capacity)

    def write(kept_KSH, x_KTH, places_T):
        return kept_KSH.at[:, places_T].set(x_KTH, mode='drop')

    kept.value = jax.vmap(write)(kept.value, x_BKTH, places_BT)
    return kept.value
