"""Reference linear attention, which computes the weights of all pairs of tokens, and its state."""

import jax
import jax.numpy as jnp
from flax import struct

from modules.kernels.attention.base import repeat_kv_heads
from modules.sequence import segment_starts
from modules.statistics import at_least_float32


class AttentionSums(struct.PyTreeNode):
    """The state: sums over earlier tokens, in float32 at least.

    These are sum_s k_num_s v_s^T [B, K, F, H] and sum_s k_den_s [B, K, F]. One per key head
    suffices, since query heads share them.
    """

    products_BKFH: jax.Array
    keys_BKF: jax.Array


def quadratic(
    q_num_BNTF: jax.Array,
    k_num_BKTF: jax.Array,
    q_den_BNTF: jax.Array,
    k_den_BKTF: jax.Array,
    v_BKTH: jax.Array,
    eps: float,
    segments_BT: jax.Array | None = None,
    state: AttentionSums | None = None,
) -> tuple[jax.Array, AttentionSums]:
    """Linear attention in plain operations, over all pairs of tokens (arXiv:2006.16236).

    `y_t = sum_(s <= t) (q_t^T k_s) v_s / (sum_(s <= t) a_t^T b_s + eps)`

    `q` and `k` are the features of the numerator, and `a` and `b` those of the denominator.
    Computed in float32 or wider. A document, consecutive tokens of equal segments, attends only to
    itself, and the returned state is the state of the last document. Source: section 3.3.

    Args:
      q_num_BNTF: query features of the numerator.
      k_num_BKTF: key features of the numerator; K divides N.
      q_den_BNTF: query features of the denominator.
      k_den_BKTF: key features of the denominator.
      v_BKTH: values.
      eps: added to the denominator.
      segments_BT: the number of each token's segment; None: a single segment.
      state: sums over the tokens before the first; None: there are none.

    Returns:
      ([B, N, T, H] in the type of v, the state after the last token).

    Raises:
      ValueError: for a state together with segments, since the segment of the state is unknown.
    """
    n_heads = q_num_BNTF.shape[1]
    q_num_BNTF, k_num_BKTF, q_den_BNTF, k_den_BKTF, v = map(
        at_least_float32, (q_num_BNTF, k_num_BKTF, q_den_BNTF, k_den_BKTF, v_BKTH)
    )
    start_BT = document_starts(v_BKTH.shape[2], segments_BT, state)
    position_T = jnp.arange(v_BKTH.shape[2], dtype=jnp.int32)
    visible_BTS = causal_mask(position_T, position_T, start_BT)

    def masked_weights(q_BNTF, k_BKTF):
        weights_BNTS = jnp.einsum('bntf,bnsf->bnts', q_BNTF, repeat_kv_heads(k_BKTF, n_heads))
        return jnp.where(
            jnp.broadcast_to(visible_BTS[:, None], weights_BNTS.shape), weights_BNTS, 0.0
        )

    numerator_BNTH = jnp.einsum(
        'bnts,bnsh->bnth', masked_weights(q_num_BNTF, k_num_BKTF), repeat_kv_heads(v, n_heads)
    )
    denominator_BNT = jnp.sum(masked_weights(q_den_BNTF, k_den_BKTF), -1)
    # The keys that the last token sees are those of the last document, to which the state belongs.
    in_last_BS = jnp.broadcast_to(visible_BTS[:, -1], (len(v), v.shape[2])).astype(v.dtype)
    products_BKFH = jnp.einsum('bs,bksf,bksh->bkfh', in_last_BS, k_num_BKTF, v)
    keys_BKF = jnp.einsum('bs,bksf->bkf', in_last_BS, k_den_BKTF)
    if state is not None:
        products_BNFH = repeat_kv_heads(state.products_BKFH, n_heads)
        keys_BN1F = repeat_kv_heads(state.keys_BKF[:, :, None], n_heads)
        numerator_BNTH = numerator_BNTH + jnp.einsum('bntf,bnfh->bnth', q_num_BNTF, products_BNFH)
        denominator_BNT = denominator_BNT + jnp.einsum('bntf,bnuf->bnt', q_den_BNTF, keys_BN1F)
        products_BKFH, keys_BKF = products_BKFH + state.products_BKFH, keys_BKF + state.keys_BKF
    out_BNTH = divide(numerator_BNTH, denominator_BNT, eps).astype(v_BKTH.dtype)
    return out_BNTH, AttentionSums(products_BKFH, keys_BKF)


def document_starts(
    length: int, segments_BT: jax.Array | None, state: AttentionSums | jax.Array | None
) -> jax.Array:
    """Returns where the document of each token begins, [1 or B, T] int32.

    It is negative if the document continues from `state`.

    Args:
      length: T, tokens in a row.
      segments_BT: the number of each token's segment; None: a single segment.
      state: sums over earlier tokens; None: there are none.

    Raises:
      ValueError: for a state together with segments.
    """
    if segments_BT is None:
        return jnp.full((1, length), 0 if state is None else -1, jnp.int32)
    if state is not None:
        raise ValueError('a state belongs to a single document: pass either a state or segments')
    return segment_starts(segments_BT)


def causal_mask(query_T: jax.Array, key_S: jax.Array, start_BT: jax.Array) -> jax.Array:
    """Returns whether queries see keys, [B, T, S].

    Args:
      query_T: positions of the queries.
      key_S: positions of the keys.
      start_BT: where the document of each query begins.
    """
    causal_TS = query_T[:, None] >= key_S[None]
    return causal_TS[None] & (key_S[None, None] >= start_BT[..., None])


def divide(numerator: jax.Array, denominator: jax.Array, eps: float) -> jax.Array:
    """Returns numerator [..., H] / (denominator [...] + eps).

    Args:
      numerator: a vector per query.
      denominator: a number per query.
      eps: added to the denominator.
    """
    return numerator / jnp.broadcast_to((denominator + eps)[..., None], numerator.shape)
