"""The specification: attention with all of its scores at once, left to the compiler."""

import jax
import jax.numpy as jnp

from modules.kernels.attention.scores import MASKED, Scores, exact, share_heads


def reference(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """out_t = sum_s p_ts v_s over the tokens that t sees; float32 at least up to the probabilities.

        s_ts = scale q_t . k_s                        scale: 1 / sqrt(H) unless given
        s_ts = softcap tanh(s_ts / softcap)           where softcap is not 0
        s_ts = s_ts + bias_ts
        p_ts = exp(s_ts) / (sum_s exp(s_ts) + exp(sinks_n))    the last where there are sinks

    t sees s where s <= t, both are in one segment, and t - s < window. A sink takes probability and
    gives no value. Sources: arXiv:1706.03762, equation 1; softcap arXiv:2408.00118, section 2;
    window arXiv:2310.06825, section 2; sinks arXiv:2508.10925 and the code beside it (gpt-oss);
    bias such as that of arXiv:2108.12409.
    """
    n_heads, length, head_dim = q_BNTH.shape[1:]
    k_BNSH, v_BNSH = share_heads(k_BKSH, n_heads), share_heads(v_BKSH, n_heads)
    scores_BNTS = jnp.einsum(
        'bnth,bnsh->bnts',
        q_BNTH * scores.scale_of(head_dim),
        k_BNSH,
        preferred_element_type=exact(q_BNTH),
    )
    if scores.softcap:
        scores_BNTS = scores.softcap * jnp.tanh(scores_BNTS / scores.softcap)
    if bias is not None:
        scores_BNTS = scores_BNTS + jnp.broadcast_to(bias, scores_BNTS.shape)
    seen_BNTS = jnp.broadcast_to(seen(length, scores.window)[None, None], scores_BNTS.shape)
    if segments_BT is not None:
        same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
        seen_BNTS = seen_BNTS & same_BTS[:, None]
    scores_BNTS = jnp.where(seen_BNTS, scores_BNTS, MASKED)
    if sinks_N is None:
        probs_BNTS = jax.nn.softmax(scores_BNTS, axis=-1)
    else:
        sinks_BNT1 = jnp.broadcast_to(
            sinks_N.astype(scores_BNTS.dtype)[None, :, None, None], (*scores_BNTS.shape[:-1], 1)
        )
        with_sinks = jnp.concatenate([scores_BNTS, sinks_BNT1], axis=-1)
        probs_BNTS = jax.nn.softmax(with_sinks, axis=-1)[..., :-1]
    return jnp.einsum('bnts,bnsh->bnth', probs_BNTS.astype(v_BNSH.dtype), v_BNSH)


def seen(length: int, window: int | None) -> jax.Array:
    """[T, S]: whether token t reads token s, in a row that is one document."""
    seen_TS = jnp.tril(jnp.ones((length, length), bool))
    if window is None:
        return seen_TS
    return seen_TS & ~jnp.tril(jnp.ones((length, length), bool), -window)
