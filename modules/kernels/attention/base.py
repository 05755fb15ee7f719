"""Reference attention, which materializes all scores, and helpers that its kernels share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from modules.parallel.axes import shard_activation

MASKED = -1e30  # finite, so that a fully masked row gives no NaN
MIN_BYTES_FOR_TWO = 1 << 23  # size of keys from which a CPU reads them faster for two queries


@dataclasses.dataclass(frozen=True)
class Scores:
    """Static description of the scores of an attention layer. `reference` has the equations."""

    scale: float | None = None  #: of q k; None: 1 / sqrt(H)
    softcap: float = 0.0  #: the bound c in c tanh(s / c); 0: none
    window: int | None = None  #: tokens that a token sees, itself included; None: all earlier
    sinks: bool = False  #: whether sinks_N is passed, logits of heads that stand for no token
    slopes: bool = False  #: whether slopes_N is passed, the decrease of logits per distance
    key_bias: bool = False  #: whether key_bias_BKS is passed, added to all logits of a key
    #: Whether prefix_BT is passed: tokens with the same nonzero number see each other.
    prefix: bool = False
    dropout: bool = False  #: whether dropout_BNTS is passed, which drops probabilities in training

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(
                f'a window includes the token itself, so it must be at least 1; got {self.window}'
            )

    def compute_scale(self, head_dim: int) -> float:
        """Returns the factor of q k.

        Args:
          head_dim: the width of a head, H.
        """
        return head_dim**-0.5 if self.scale is None else self.scale

    def changed_fields(self) -> dict[str, object]:
        """Returns the fields that are not at their defaults."""
        return {name: value for name, value in vars(self).items() if value != getattr(Scores, name)}

    def collect_arrays(self, **arrays: Any) -> dict[str, Any]:
        """Returns the arrays that are not None, by name.

        Args:
          **arrays: sinks_N, slopes_N, key_bias_BKS, prefix_BT and dropout_BNTS, or None.

        Raises:
          ValueError: if an array is passed and its field is not set, or vice versa.
        """
        for argument, array in arrays.items():
            is_expected = getattr(self, argument.rpartition('_')[0])
            if is_expected != (array is not None):
                problem = 'is missing' if is_expected else 'is not expected'
                raise ValueError(f'{argument} {problem} with {self}')
        return {argument: array for argument, array in arrays.items() if array is not None}


def accumulator_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the type that products are summed in: float32, or float64 if x has it."""
    return jnp.promote_types(x.dtype, jnp.float32)


def repeat_kv_heads(x_BKTH: jax.Array, n_heads: int) -> jax.Array:
    """Repeats each of K key or value heads for n_heads / K consecutive query heads."""
    if x_BKTH.shape[1] == n_heads:
        return x_BKTH
    return jnp.repeat(x_BKTH, n_heads // x_BKTH.shape[1], axis=1)


def reference(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
    prefix_BT: jax.Array | None = None,
    softmax: Callable[..., jax.Array] | None = None,
    **arrays: Any,
) -> jax.Array:
    """Attention in plain operations: `y_t = sum_s p_ts v_s`.

    The probabilities, in float32 or wider, follow from the scores in these steps:

    `s_ts = gamma q_t^T k_s + b_s`
    `s_ts <- c tanh(s_ts / c)`
    `s_ts <- s_ts - a_n (t - s)`
    `p_ts = exp(s_ts) / (sum_s exp(s_ts) + exp(z_n))`

    - `gamma` is the scale, `1 / sqrt(H)` by default, and `b_s` is key_bias.
    - `c` is the softcap (arXiv:2408.00118, section 2); without it the second step is left out.
    - `a_n` is the slope of head `n` (arXiv:2108.12409, section 3).
    - `z_n` is the sink of head `n`, a logit that takes probability and has no value
      (arXiv:2508.10925 and its code, gpt-oss); without sinks the last term is left out.

    Sums are over the tokens that `t` sees: `s <= t`, in the same segment, with `t - s < w` in a
    window of `w` tokens (arXiv:2310.06825, section 2). The tokens of a prefix, which have the same
    nonzero number in prefix_BT, see each other (arXiv:1910.10683), and `|t - s|` replaces `t - s`
    throughout. Source of attention: arXiv:1706.03762, equation 1.

    Args:
      q_BNTH: queries.
      k_BKSH: keys, S = T; K divides N.
      v_BKSH: values.
      scores: which terms the scores have.
      segments_BT: the number of each token's segment; None: a single segment.
      prefix_BT: the number of each token's prefix, 0 outside of prefixes; None: no prefixes.
      softmax: a softmax kernel; None: plain operations.
      **arrays: sinks_N, slopes_N, key_bias_BKS, is_full and dropout_BNTS of `attend`.

    Returns:
      [B, N, T, H] in the type of v.
    """
    position_1T = jnp.arange(q_BNTH.shape[2], dtype=jnp.int32)[None]
    same_BTS = None
    if segments_BT is not None:
        same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    mutual_BTS = None if prefix_BT is None else in_same_prefix(prefix_BT, prefix_BT)
    options: dict[str, Any] = {'mutual_BTS': mutual_BTS, 'softmax': softmax, **arrays}
    return attend_at_positions(q_BNTH, k_BKSH, v_BKSH, scores, position_1T, same_BTS, **options)


def attend_at_positions(
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
    dropout_BNTS: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Computes `reference` for queries at given positions among the keys 0 to S - 1.

    Args:
      q_BNTH: queries.
      k_BKSH: keys; K divides N.
      v_BKSH: values.
      scores: which terms there are.
      positions_BT: positions of the queries; the batch may be 1.
      same_BTS: whether query and key are in the same segment; None: all are.
      sinks_N: a logit of each head that stands for no token.
      slopes_N: the decrease of a head's logits per token of distance.
      key_bias_BKS: added to all logits of a key.
      is_full: turns the window off where true; may be traced.
      mutual_BTS: whether query and key are in the same prefix; None: no prefixes.
      softmax: a kernel that masks, caps and has sinks; None: plain operations.
      dropout_BNTS: drops probabilities; None: all stay.

    Returns:
      [B, N, T, H] in the type of v.
    """
    n_heads = q_BNTH.shape[1]
    # If T is sharded, S is not: each device gets all keys.
    k_BKSH, v_BKSH = (shard_activation(x, 'BKSH') for x in (k_BKSH, v_BKSH))
    k_BNSH, v_BNSH = repeat_kv_heads(k_BKSH, n_heads), repeat_kv_heads(v_BKSH, n_heads)
    distance_BTS = (
        positions_BT[..., None] - jnp.arange(k_BKSH.shape[2], dtype=jnp.int32)[None, None]
    )
    # A later token of the same prefix gets a positive distance, and `is_visible` then admits it.
    if mutual_BTS is not None:
        distance_BTS = jnp.broadcast_to(distance_BTS, mutual_BTS.shape)
        distance_BTS = jnp.where(mutual_BTS, jnp.abs(distance_BTS), distance_BTS)
    # Slopes are added after the cap and before the softmax, so the kernel cannot cap then.
    kernel_caps = softmax is not None and slopes_N is None
    softcap = 0.0 if kernel_caps else scores.softcap
    arrays = {'slopes_N': slopes_N, 'key_bias_BKS': key_bias_BKS}
    scores_BNTS = attention_logits(q_BNTH, k_BNSH, scores, softcap, distance_BTS, **arrays)
    visible_BTS = is_visible(distance_BTS, scores.window, is_full)
    if same_BTS is not None:
        visible_BTS = visible_BTS & same_BTS
    if softmax is not None:
        sinks_1N1 = None if sinks_N is None else sinks_N[None, :, None]
        kernel_softcap = scores.softcap if kernel_caps else 0.0
        probs_BNTS = softmax(scores_BNTS, visible_BTS[:, None], sinks_1N1, softcap=kernel_softcap)
        if dropout_BNTS is not None:
            probs_BNTS = dropout_BNTS(probs_BNTS)
        return jnp.einsum('bnts,bnsh->bnth', probs_BNTS.astype(v_BNSH.dtype), v_BNSH)
    visible_BNTS = jnp.broadcast_to(visible_BTS[:, None], scores_BNTS.shape)
    scores_BNTS = jnp.where(visible_BNTS, scores_BNTS, MASKED)
    if sinks_N is not None:
        sinks_1N11 = sinks_N.astype(scores_BNTS.dtype)[None, :, None, None]
        sinks_BNT1 = jnp.broadcast_to(sinks_1N11, (*scores_BNTS.shape[:-1], 1))
        # The sink is a last column, which is removed from the probabilities.
        scores_BNTS = jnp.concatenate([scores_BNTS, sinks_BNT1], axis=-1)
    probs_BNTS = jax.nn.softmax(scores_BNTS, axis=-1)
    if sinks_N is not None:
        probs_BNTS = probs_BNTS[..., :-1]
    if dropout_BNTS is not None:
        probs_BNTS = dropout_BNTS(probs_BNTS)
    return jnp.einsum('bnts,bnsh->bnth', probs_BNTS.astype(v_BNSH.dtype), v_BNSH)


def attend_to_cache(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    positions_BT: jax.Array,
    **arrays: Any,
) -> jax.Array:
    """Computes `attend_at_positions` for few queries and many keys, which are read once.

    The query heads that share a key head count as further queries of it, so that keys and values
    are not repeated. XLA's CPU compiler multiplies a single query by a matrix on one core, and two
    queries on all of them; therefore a single query for many keys is computed twice.

    Args:
      q_BNTH: queries.
      k_BKSH: keys; K divides N.
      v_BKSH: values.
      scores: which terms there are.
      positions_BT: positions of the queries.
      **arrays: further arrays of `attend_at_positions`.
    """
    batch, n_heads, width, head_dim = q_BNTH.shape
    group_size = 1 if scores.sinks or scores.slopes else n_heads // k_BKSH.shape[1]
    if group_size > 1:
        q_BNTH = q_BNTH.reshape(batch, -1, group_size * width, head_dim)
        positions_BT = jnp.tile(positions_BT, (1, group_size))
    is_twice = (
        q_BNTH.shape[2] == 1
        and k_BKSH.nbytes >= MIN_BYTES_FOR_TWO
        and jax.default_backend() == 'cpu'
    )
    if is_twice:
        q_BNTH = jax.lax.optimization_barrier(jnp.repeat(q_BNTH, 2, 2))
        positions_BT = jnp.repeat(positions_BT, 2, 1)
    mixed_BNTH = attend_at_positions(q_BNTH, k_BKSH, v_BKSH, scores, positions_BT, **arrays)
    if is_twice:
        mixed_BNTH = mixed_BNTH[:, :, :1]
    return mixed_BNTH.reshape(batch, n_heads, width, mixed_BNTH.shape[-1])


def attention_logits(
    q_BNTH: jax.Array,
    k_BNSH: jax.Array,
    scores: Scores,
    softcap: float,
    distance_BTS: jax.Array,
    slopes_N: jax.Array | None = None,
    key_bias_BKS: jax.Array | None = None,
) -> jax.Array:
    """Returns s [B, N, T, S] of `reference` before masking.

    Args:
      q_BNTH: queries.
      k_BNSH: keys, repeated for each query head.
      scores: has the scale.
      softcap: the bound of the logits; 0: none.
      distance_BTS: t - s, or |t - s| within a prefix.
      slopes_N: the decrease of a head's logits per token of distance.
      key_bias_BKS: added to all logits of a key.
    """
    n_heads, head_dim = q_BNTH.shape[1], q_BNTH.shape[-1]
    # Scaling q takes H products per query, scaling the logits S.
    q_BNTH, dtype = q_BNTH * scores.compute_scale(head_dim), accumulator_dtype(q_BNTH)
    s_BNTS = jnp.einsum('bnth,bnsh->bnts', q_BNTH, k_BNSH, preferred_element_type=dtype)
    if key_bias_BKS is not None:
        bias_BN1S = repeat_kv_heads(key_bias_BKS, n_heads)[:, :, None].astype(dtype)
        s_BNTS = s_BNTS + jnp.broadcast_to(bias_BN1S, s_BNTS.shape)
    if softcap:
        s_BNTS = softcap * jnp.tanh(s_BNTS / softcap)
    if slopes_N is not None:
        penalty_BNTS = jnp.einsum('n,bts->bnts', slopes_N, distance_BTS.astype(dtype))
        s_BNTS = s_BNTS - jnp.broadcast_to(penalty_BNTS, s_BNTS.shape)
    return s_BNTS


def in_same_prefix(query_prefix_BT: jax.Array, key_prefix_BS: jax.Array) -> jax.Array:
    """Returns whether query and key have the same nonzero number, [B, T, S]."""
    query_prefix_BT1 = query_prefix_BT[:, :, None]
    return (query_prefix_BT1 == key_prefix_BS[:, None]) & (query_prefix_BT1 > 0)


def is_visible(
    distance: jax.Array, window: int | None, is_full: jax.Array | None = None
) -> jax.Array:
    """Returns whether a query sees a key.

    Args:
      distance: how many tokens the key is before the query; negative: after it.
      window: tokens that a query sees, itself included; None: all earlier tokens.
      is_full: turns the window off where true; may be traced.
    """
    if window is None:
        return distance >= 0
    in_window = distance < window if is_full is None else (distance < window) | is_full
    return (distance >= 0) & in_window
