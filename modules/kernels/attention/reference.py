"""The specification: attention with all of its scores at once, left to the compiler."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from modules.devices import sharded
from modules.kernels.attention.scores import MASKED, Scores, exact, share_heads


def reference(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
    prefix_BT: jax.Array | None = None,
    softmax: Callable[..., jax.Array] | None = None,
    **arrays: jax.Array,
) -> jax.Array:
    """out_t = sum_s p_ts v_s over the tokens that t sees; float32 at least up to the probabilities.

        s_ts = scale q_t . k_s + key_bias_s           scale: 1 / sqrt(H) unless given
        s_ts = softcap tanh(s_ts / softcap)           where softcap is not 0
        s_ts = s_ts - slope_n (t - s)
        p_ts = exp(s_ts) / (sum_s exp(s_ts) + exp(sinks_n))    the last where there are sinks

    t sees s where s <= t, both are in one segment, and t - s < window. Tokens of one prefix (of one
    number in prefix_BT that is not 0) see each other, and |t - s| stands for t - s throughout. A
    sink takes probability and gives no value. Sources: arXiv:1706.03762, equation 1; softcap
    arXiv:2408.00118, section 2; window arXiv:2310.06825, section 2; sinks arXiv:2508.10925 and the
    code beside it (gpt-oss); slopes arXiv:2108.12409, section 3; prefixes arXiv:1910.10683.
    """
    position_1T = jnp.arange(q_BNTH.shape[2], dtype=jnp.int32)[None]
    same_BTS = None
    if segments_BT is not None:
        same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    mutual_BTS = None
    if prefix_BT is not None:
        mutual_BTS = of_one_prefix(prefix_BT, prefix_BT)
    given = {'mutual_BTS': mutual_BTS, 'softmax': softmax, **arrays}
    return attend_from(q_BNTH, k_BKSH, v_BKSH, scores, position_1T, same_BTS, **given)


def attend_from(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    positions_BT: jax.Array,
    same_BTS: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    slopes_N: jax.Array | None = None,
    key_bias_BKS: jax.Array | None = None,
    is_full: jax.Array | None = None,
    mutual_BTS: jax.Array | None = None,
    softmax: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """`reference` for queries at `positions_BT` among the keys 0 to S - 1.

    positions_BT may have a batch of 1. same_BTS: whether both are in one segment; None: all are.
    is_full: where it is true, the window does not hold; it may be traced. mutual_BTS: whether both
    are in one prefix; None: there is none. softmax: a kernel that masks, caps and has sinks; None:
    plain operations.
    """
    n_heads, head_dim = q_BNTH.shape[1], q_BNTH.shape[-1]
    k_BKSH, v_BKSH = (sharded(x, 'BKSH') for x in (k_BKSH, v_BKSH))  # all keys where T is cut
    k_BNSH, v_BNSH = share_heads(k_BKSH, n_heads), share_heads(v_BKSH, n_heads)
    scores_BNTS = jnp.einsum(
        'bnth,bnsh->bnts',
        q_BNTH * scores.scale_of(head_dim),
        k_BNSH,
        preferred_element_type=exact(q_BNTH),
    )
    back_BTS = positions_BT[..., None] - jnp.arange(k_BKSH.shape[2], dtype=jnp.int32)[None, None]
    if key_bias_BKS is not None:
        bias_BN1S = share_heads(key_bias_BKS, n_heads)[:, :, None].astype(scores_BNTS.dtype)
        scores_BNTS = scores_BNTS + jnp.broadcast_to(bias_BN1S, scores_BNTS.shape)
    in_kernel = softmax is not None and slopes_N is None  # slopes come between
    if scores.softcap and not in_kernel:
        scores_BNTS = scores.softcap * jnp.tanh(scores_BNTS / scores.softcap)
    if mutual_BTS is not None:
        back_BTS = jnp.broadcast_to(back_BTS, mutual_BTS.shape)
        back_BTS = jnp.where(mutual_BTS, jnp.abs(back_BTS), back_BTS)
    if slopes_N is not None:
        fall = jnp.einsum('n,bts->bnts', slopes_N, back_BTS.astype(scores_BNTS.dtype))
        scores_BNTS = scores_BNTS - jnp.broadcast_to(fall, scores_BNTS.shape)
    seen_BTS = sees(back_BTS, scores.window, is_full)
    if same_BTS is not None:
        seen_BTS = seen_BTS & same_BTS
    if softmax is not None:
        sinks_1N1 = None if sinks_N is None else sinks_N[None, :, None]
        softcap = scores.softcap if in_kernel else 0.0
        probs_BNTS = softmax(scores_BNTS, seen_BTS[:, None], sinks_1N1, softcap=softcap)
        return jnp.einsum('bnts,bnsh->bnth', probs_BNTS.astype(v_BNSH.dtype), v_BNSH)
    seen_BNTS = jnp.broadcast_to(seen_BTS[:, None], scores_BNTS.shape)
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


def of_one_prefix(own_BT: jax.Array, other_BS: jax.Array) -> jax.Array:
    """[B, T, S]: whether both have the same number, and it is not 0."""
    own_BT1 = own_BT[:, :, None]
    return (own_BT1 == other_BS[:, None]) & (own_BT1 > 0)


def sees(back: jax.Array, window: int | None, is_full: jax.Array | None = None) -> jax.Array:
    """Whether a token reads one that is `back` tokens before it, negative for a later one."""
    if window is None:
        return back >= 0
    within = back < window if is_full is None else (back < window) | is_full
    return (back >= 0) & within
