"""Reference linear recurrence, which reads one token at a time."""

import math

import jax
import jax.numpy as jnp

from modules.facts import accept_any, row_decorator
from modules.kernels.linear_attention.base import document_starts
from modules.statistics import at_least_float32

kernel_row = row_decorator(check=accept_any)


@kernel_row()
def token_by_token(
    q_BNTK: jax.Array,
    k_BNTK: jax.Array,
    v_BNTV: jax.Array,
    g_BNT: jax.Array,
    beta_BNT: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    state_BNKV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A linear recurrence over tokens, in plain operations (arXiv:2412.06464).

    `S <- e^(g_t) S`

    `S <- S + b_t k_t (v_t - S^T k_t)^T`

    `o_t = S^T q_t / sqrt(K)`

    The second line is the delta rule, with `b_t` in `beta_BNT`. Without it, the second line is
    `S <- S + k_t v_t^T` (arXiv:2312.06635, with a decay per head). `S` is 0 before each document,
    which is a piece of consecutive tokens of equal segments. Computed in float32 or wider.

    Args:
      q_BNTK: queries.
      k_BNTK: keys.
      v_BNTV: values.
      g_BNT: logarithms of the decay, at most 0.
      beta_BNT: how much of the difference to the value a key writes; None: no delta rule.
      segments_BT: the number of each token's segment; None: a single segment.
      state_BNKV: the state before the first token; None: zeros.

    Returns:
      ([B, N, T, V], the state after the last token).

    Raises:
      ValueError: for a state together with segments, since the segment of the state is unknown.
    """
    batch, _, length, width = k_BNTK.shape
    start_BT = document_starts(length, segments_BT, state_BNKV)
    place_1T = jnp.arange(length, dtype=jnp.int32)[None]
    begins_BT = jnp.broadcast_to(start_BT == place_1T, (batch, length))
    q_BNTK, k_BNTK, v_BNTV, g_BNT = map(at_least_float32, (q_BNTK, k_BNTK, v_BNTV, g_BNT))
    if state_BNKV is None:
        state_BNKV = zero_state(k_BNTK, v_BNTV)

    def read_token(state_BNKV, token):
        q_BNK, k_BNK, v_BNV, g_BN, beta_BN, begins_B = token
        decay_BN = jnp.where(begins_B[:, None], 0.0, jnp.exp(g_BN))
        state_BNKV = jnp.einsum('bn,bnkv->bnkv', decay_BN, state_BNKV)
        if beta_BN is not None:
            difference_BNV = v_BNV - jnp.einsum('bnkv,bnk->bnv', state_BNKV, k_BNK)
            v_BNV = jnp.einsum('bn,bnv->bnv', beta_BN, difference_BNV)
        state_BNKV = state_BNKV + jnp.einsum('bnk,bnv->bnkv', k_BNK, v_BNV)
        return state_BNKV, jnp.einsum('bnkv,bnk->bnv', state_BNKV, q_BNK)

    if beta_BNT is not None:
        beta_BNT = at_least_float32(beta_BNT)
    tokens = jax.tree.map(
        lambda x: jnp.moveaxis(x, 2, 0),
        (q_BNTK / math.sqrt(width), k_BNTK, v_BNTV, g_BNT, beta_BNT),
    )
    state_BNKV, out_TBNV = jax.lax.scan(read_token, state_BNKV, (*tokens, begins_BT.T))
    return jnp.moveaxis(out_TBNV, 0, 2), state_BNKV


def zero_state(k_BNTK: jax.Array, v_BNTV: jax.Array) -> jax.Array:
    """Returns the state before any token, [B, N, K, V], in the type of v."""
    return jnp.zeros((*k_BNTK.shape[:2], k_BNTK.shape[-1], v_BNTV.shape[-1]), v_BNTV.dtype)
