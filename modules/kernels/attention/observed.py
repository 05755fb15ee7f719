"""Recorded statistics of attention, exact for each head, from a block of scores at a time.

They follow from the log-sum-exp of each row, as attention does (arXiv:2205.14135), and have no
gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from modules.kernels.attention.base import (
    MASKED,
    Scores,
    attention_logits,
    is_visible,
    repeat_kv_heads,
)
from modules.sequence import segment_starts

BLOCK = 128  # queries at a time; a block of scores is [B, N, BLOCK, T]

LogWeights = Callable[[jax.Array], jax.Array]


def attention_statistics(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    scores: Scores,
    slopes_N: jax.Array | None = None,
    key_bias_BKS: jax.Array | None = None,
    **rows: Any,
) -> dict[str, jax.Array]:
    """Returns `weight_statistics` softmax attention, S = T, with the logits of `base.reference`.

    rows: the other arguments of `weight_statistics`.
    """
    n_heads, length = q_BNTH.shape[1:3]
    q_BNTH, k_BNSH = map(jax.lax.stop_gradient, (q_BNTH, repeat_kv_heads(k_BKSH, n_heads)))

    def log_weights(rows_Q):
        q_BNQH = jnp.take(q_BNTH, rows_Q, axis=2)
        back_1QS = rows_Q[None, :, None] - jnp.arange(length)[None, None]
        return attention_logits(
            q_BNQH, k_BNSH, scores, scores.softcap, back_1QS, slopes_N, key_bias_BKS
        )

    return weight_statistics(log_weights, length, scores.window, **rows)


def weight_statistics(
    block_log_weights: LogWeights,
    length: int,
    window: int | None = None,
    segments_BT: jax.Array | None = None,
    valid_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    is_full: jax.Array | None = None,
    block: int = BLOCK,
) -> dict[str, jax.Array]:
    """Returns five numbers of each head, [N] float32, of attention p_ts = w_ts / sum_s w_ts.

    log_weights_of_block(rows_Q) returns log w [B, N, Q, T] of the queries at those positions to all
    keys; unseen keys are left out here. A sink, of logit sinks_N, is one more outcome.

    attention_entropy: -sum p log p in nats, mean over queries (arXiv:2303.06296).
    attention_entropy_share: the entropy over its maximum, the log of the number of outcomes; mean
      over the queries with at least two.
    attention_largest_logit: the largest log w of seen keys, without sinks (arXiv:2309.14322).
    attention_logit_size: the mean of |log w| over the seen keys of nonzero weight, then over
      queries; for a coordinate check (arXiv:2203.03466, appendix D.1).
    attention_first_token: the probability of the first token of the document, mean over the queries
      behind it; 0 for a query whose window no longer holds it (arXiv:2505.06708).

    is_full: a scalar that turns the window off where it is true. Padding, where valid_BT is 0, is
    no query. The mean over no queries is NaN.
    """
    first_BT = jnp.zeros((1, length), int) if segments_BT is None else segment_starts(segments_BT)
    counted_BT = jnp.ones((1, length)) if valid_BT is None else valid_BT.astype(jnp.float32)
    index_S = jnp.arange(length)

    def visible_keys(rows_Q):
        """Returns which keys the queries see, [1 or B, Q, S]."""
        seen_QS = is_visible(rows_Q[:, None] - index_S[None], window, is_full)
        if segments_BT is None:
            return seen_QS[None]
        own_BQ = jnp.take(segments_BT, rows_Q, axis=1)
        return seen_QS[None] & (own_BQ[:, :, None] == segments_BT[:, None])

    def block_sums(start):
        rows_Q = start + jnp.arange(min(block, length))
        within_Q = rows_Q < length  # the last block is padded with repetitions
        rows_Q = jnp.minimum(rows_Q, length - 1)
        first_BQ = jnp.take(first_BT, rows_Q, axis=1)
        counted_BQ = jnp.take(counted_BT, rows_Q, axis=1) * within_Q[None]
        log_weights_BNQS = jax.lax.stop_gradient(block_log_weights(rows_Q))
        is_first_BQS = index_S[None, None] == first_BQ[:, :, None]
        found = _row_statistics(log_weights_BNQS, visible_keys(rows_Q), is_first_BQS, sinks_N)
        return _sum_queries(*found, counted_BQ, counted_BQ * (rows_Q[None] > first_BQ))

    with jax.named_scope('diagnostics'):
        sums = jax.lax.map(block_sums, jnp.arange(0, length, min(block, length)))
        total = {name: jnp.sum(parts, 0) for name, parts in sums.items() if name != 'largest'}
        return {
            'attention_entropy': total['entropy'] / total['queries'],
            'attention_entropy_share': total['share'] / total['choosing'],
            'attention_largest_logit': jnp.max(sums['largest'], 0),
            'attention_logit_size': total['size'] / total['queries'],
            'attention_first_token': total['first'] / total['behind'],
        }


def _row_statistics(log_weights_BNQS, seen_BQS, is_first_BQS, sinks_N):
    """Returns (entropy, entropy over its maximum, largest logit, mean of |logit|, probability of
    the first token) [B, N, Q], and the number of outcomes [B, 1, Q]. Logits are relative to the
    largest, so that nothing cancels.
    """
    seen_BNQS = jnp.broadcast_to(seen_BQS[:, None], log_weights_BNQS.shape)
    logits_BNQS = jnp.where(seen_BNQS, log_weights_BNQS, MASKED)
    largest_BNQ = shift_BNQ = jnp.max(logits_BNQS, -1)
    finite_BNQS = seen_BNQS & (log_weights_BNQS > -jnp.inf)
    sizes_BNQS = jnp.where(finite_BNQS, jnp.abs(logits_BNQS), 0.0)
    size_BNQ = jnp.sum(sizes_BNQS, -1) / jnp.maximum(jnp.sum(finite_BNQS, -1), 1)
    outcomes_B1Q = jnp.sum(seen_BQS, -1)[:, None]
    if sinks_N is not None:
        sinks_BNQ = jax.lax.stop_gradient(sinks_N).astype(shift_BNQ.dtype)[None, :, None]
        sinks_BNQ = jnp.broadcast_to(sinks_BNQ, shift_BNQ.shape)
        shift_BNQ = jnp.maximum(shift_BNQ, sinks_BNQ)
        outcomes_B1Q += 1
    below_BNQS = logits_BNQS - shift_BNQ[..., None]
    weights_BNQS = jnp.where(seen_BNQS, jnp.exp(below_BNQS), 0.0)
    total_BNQ = jnp.sum(weights_BNQS, -1)
    mean_BNQ = jnp.sum(jnp.where(weights_BNQS == 0, 0.0, weights_BNQS * below_BNQS), -1)
    if sinks_N is not None:
        of_sink_BNQ = jnp.exp(sinks_BNQ - shift_BNQ)
        total_BNQ += of_sink_BNQ
        mean_BNQ += of_sink_BNQ * (sinks_BNQ - shift_BNQ)
    entropy_BNQ = jnp.log(total_BNQ) - mean_BNQ / total_BNQ
    share_BNQ = entropy_BNQ / jnp.log(jnp.maximum(outcomes_B1Q, 2))
    of_first_BNQ = jnp.sum(jnp.where(is_first_BQS[:, None], weights_BNQS, 0.0), -1) / total_BNQ
    return entropy_BNQ, share_BNQ, largest_BNQ, size_BNQ, of_first_BNQ, outcomes_B1Q


def _sum_queries(
    entropy_BNQ, share_BNQ, largest_BNQ, size_BNQ, first_BNQ, outcomes_B1Q, counted_BQ, behind_BQ
):
    """Sums over queries, [N] float32 each; counted_BQ and behind_BQ are 0 or 1."""

    def add(x_BNQ, weights_B1Q):
        kept_BNQ = jnp.where(weights_B1Q > 0, x_BNQ, 0.0)  # padding may hold anything
        return jnp.sum(kept_BNQ, (0, 2)).astype(jnp.float32)

    ones_BNQ = jnp.ones_like(entropy_BNQ)
    counted_B1Q, behind_B1Q = counted_BQ[:, None], behind_BQ[:, None]
    choosing_B1Q = counted_B1Q * (outcomes_B1Q > 1)
    seen_BNQ = jnp.where(counted_B1Q > 0, largest_BNQ, -jnp.inf)
    return {
        'entropy': add(entropy_BNQ, counted_B1Q),
        'queries': add(ones_BNQ, counted_B1Q),
        'share': add(share_BNQ, choosing_B1Q),
        'choosing': add(ones_BNQ, choosing_B1Q),
        'largest': jnp.max(seen_BNQ, (0, 2)).astype(jnp.float32),
        'size': add(size_BNQ, counted_B1Q),
        'first': add(first_BNQ, behind_B1Q),
        'behind': add(ones_BNQ, behind_B1Q),
    }
