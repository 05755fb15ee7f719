"""Statistics of attention that are recorded, exact for each head, from blocks of scores.

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
    """Returns `weight_statistics` of softmax attention, S = T, with the logits of `base.reference`.

    Args:
      q_BNTH: queries, scaled as in the layer.
      k_BKSH: keys; K divides N.
      scores: which terms there are.
      slopes_N: the decrease of a head's logits per token of distance.
      key_bias_BKS: added to all logits of a key.
      **rows: segments_BT, valid_BT, sinks_N, is_full and block of `weight_statistics`.
    """
    n_heads, length = q_BNTH.shape[1:3]
    q_BNTH, k_BNSH = map(jax.lax.stop_gradient, (q_BNTH, repeat_kv_heads(k_BKSH, n_heads)))

    def log_weights(rows_Q):
        q_BNQH = jnp.take(q_BNTH, rows_Q, axis=2)
        distance_1QS = rows_Q[None, :, None] - jnp.arange(length)[None, None]
        return attention_logits(
            q_BNQH, k_BNSH, scores, scores.softcap, distance_1QS, slopes_N, key_bias_BKS
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

    attention_entropy: -sum p log p in nats, mean over queries (arXiv:2303.06296).
    attention_entropy_share: the entropy over its maximum, the log of the number of outcomes; mean
      over the queries with at least two.
    attention_largest_logit: the largest log w of visible keys, without sinks (arXiv:2309.14322).
    attention_logit_size: the mean of |log w| over the visible keys of nonzero weight, then over
      queries; for a coordinate check (arXiv:2203.03466, appendix D.1).
    attention_first_token: the probability of the first token of the document, mean over the queries
      behind it; 0 for a query whose window excludes it (arXiv:2505.06708).

    A sink, of logit sinks_N, is one more outcome. The mean over no queries is NaN.

    Args:
      block_log_weights: maps positions [Q] of queries to log w [B, N, Q, T] of all keys, masked
        here.
      length: T, tokens in a row.
      window: tokens that a query sees, itself included; None: all earlier tokens.
      segments_BT: the number of each token's segment; None: a single segment.
      valid_BT: 0 for padding, which is no query; None: no padding.
      sinks_N: a logit of each head that stands for no token.
      is_full: turns the window off where true; may be traced.
      block: queries per block.
    """
    first_BT = jnp.zeros((1, length), int) if segments_BT is None else segment_starts(segments_BT)
    weight_BT = jnp.ones((1, length)) if valid_BT is None else valid_BT.astype(jnp.float32)
    index_S = jnp.arange(length)

    def visible_from(rows_Q):
        """Returns which keys the queries see, [1 or B, Q, S]."""
        visible_QS = is_visible(rows_Q[:, None] - index_S[None], window, is_full)
        if segments_BT is None:
            return visible_QS[None]
        segment_BQ = jnp.take(segments_BT, rows_Q, axis=1)
        return visible_QS[None] & (segment_BQ[:, :, None] == segments_BT[:, None])

    def block_sums(start):
        rows_Q = start + jnp.arange(min(block, length))
        is_real_Q = rows_Q < length  # the last block repeats the last query
        rows_Q = jnp.minimum(rows_Q, length - 1)
        first_BQ = jnp.take(first_BT, rows_Q, axis=1)
        weight_BQ = jnp.take(weight_BT, rows_Q, axis=1) * is_real_Q[None]
        log_weights_BNQS = jax.lax.stop_gradient(block_log_weights(rows_Q))
        is_first_BQS = index_S[None, None] == first_BQ[:, :, None]
        statistics = _row_statistics(log_weights_BNQS, visible_from(rows_Q), is_first_BQS, sinks_N)
        return _sum_queries(*statistics, weight_BQ, weight_BQ * (rows_Q[None] > first_BQ))

    with jax.named_scope('diagnostics'):
        # Block by block, so that no array [B, N, T, T] is held.
        sums = jax.lax.map(block_sums, jnp.arange(0, length, min(block, length)))
        total = {name: jnp.sum(parts, 0) for name, parts in sums.items() if name != 'largest'}
        return {
            'attention_entropy': total['entropy'] / total['queries'],
            'attention_entropy_share': total['share'] / total['choosing'],
            'attention_largest_logit': jnp.max(sums['largest'], 0),
            'attention_logit_size': total['size'] / total['queries'],
            'attention_first_token': total['first'] / total['behind'],
        }


def _row_statistics(log_weights_BNQS, visible_BQS, is_first_BQS, sinks_N):
    """Returns five statistics of each query, [B, N, Q], and the number of outcomes [B, 1, Q].

    The statistics are entropy, entropy over its maximum, largest logit, mean of |logit|, and
    probability of the first token. Logits are relative to the largest, which avoids cancellation.
    """
    visible_BNQS = jnp.broadcast_to(visible_BQS[:, None], log_weights_BNQS.shape)
    logits_BNQS = jnp.where(visible_BNQS, log_weights_BNQS, MASKED)
    largest_BNQ = shift_BNQ = jnp.max(logits_BNQS, -1)
    finite_BNQS = visible_BNQS & (log_weights_BNQS > -jnp.inf)
    sizes_BNQS = jnp.where(finite_BNQS, jnp.abs(logits_BNQS), 0.0)
    size_BNQ = jnp.sum(sizes_BNQS, -1) / jnp.maximum(jnp.sum(finite_BNQS, -1), 1)
    outcomes_B1Q = jnp.sum(visible_BQS, -1)[:, None]
    if sinks_N is not None:
        sinks_BNQ = jax.lax.stop_gradient(sinks_N).astype(shift_BNQ.dtype)[None, :, None]
        sinks_BNQ = jnp.broadcast_to(sinks_BNQ, shift_BNQ.shape)
        shift_BNQ = jnp.maximum(shift_BNQ, sinks_BNQ)
        outcomes_B1Q += 1
    relative_BNQS = logits_BNQS - shift_BNQ[..., None]
    weights_BNQS = jnp.where(visible_BNQS, jnp.exp(relative_BNQS), 0.0)
    total_BNQ = jnp.sum(weights_BNQS, -1)
    # 0 log 0 is 0: the log of a weight of 0 may be -inf, and 0 times -inf is NaN.
    mean_BNQ = jnp.sum(jnp.where(weights_BNQS == 0, 0.0, weights_BNQS * relative_BNQS), -1)
    if sinks_N is not None:
        sink_weight_BNQ = jnp.exp(sinks_BNQ - shift_BNQ)
        total_BNQ += sink_weight_BNQ
        mean_BNQ += sink_weight_BNQ * (sinks_BNQ - shift_BNQ)
    entropy_BNQ = jnp.log(total_BNQ) - mean_BNQ / total_BNQ
    share_BNQ = entropy_BNQ / jnp.log(jnp.maximum(outcomes_B1Q, 2))
    first_BNQ = jnp.sum(jnp.where(is_first_BQS[:, None], weights_BNQS, 0.0), -1) / total_BNQ
    return entropy_BNQ, share_BNQ, largest_BNQ, size_BNQ, first_BNQ, outcomes_B1Q


def _sum_queries(
    entropy_BNQ, share_BNQ, largest_BNQ, size_BNQ, first_BNQ, outcomes_B1Q, counted_BQ, behind_BQ
):
    """Sums over queries, [N] float32 each; counted_BQ and behind_BQ are 0 or 1."""

    def add(x_BNQ, weights_B1Q):
        finite_BNQ = jnp.where(weights_B1Q > 0, x_BNQ, 0.0)  # padding may hold anything
        return jnp.sum(finite_BNQ, (0, 2)).astype(jnp.float32)

    ones_BNQ = jnp.ones_like(entropy_BNQ)
    counted_B1Q, behind_B1Q = counted_BQ[:, None], behind_BQ[:, None]
    choosing_B1Q = counted_B1Q * (outcomes_B1Q > 1)
    largest_valid_BNQ = jnp.where(counted_B1Q > 0, largest_BNQ, -jnp.inf)
    return {
        'entropy': add(entropy_BNQ, counted_B1Q),
        'queries': add(ones_BNQ, counted_B1Q),
        'share': add(share_BNQ, choosing_B1Q),
        'choosing': add(ones_BNQ, choosing_B1Q),
        'largest': jnp.max(largest_valid_BNQ, (0, 2)).astype(jnp.float32),
        'size': add(size_BNQ, counted_B1Q),
        'first': add(first_BNQ, behind_B1Q),
        'behind': add(ones_BNQ, behind_B1Q),
    }
