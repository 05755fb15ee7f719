"""Causal softmax attention and its variants, which change scores or probabilities."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.attention.base import MultiHead
from modules.kernels.attention.base import Scores, attend_at_positions, is_visible, repeat_kv_heads
from modules.kernels.attention.observed import attention_statistics
from modules.options import Option
from modules.parallel.axes import count_axis_shards
from modules.parallel.kernel_calls import gather_tokens, map_shards
from modules.params import declare
from modules.sequence import Sequence, segment_starts
from modules.statistics import STATS, at_least_float32, is_training, token_mean

AFFINE_DECAY = 0.9  # share of the running mean of affine-scaled attention that an update keeps
SINK_DEVIATION = 0.02  # learned sinks at the start: gpt-oss's initializer_range


class SoftmaxAttention(MultiHead):
    """mix(q, k, v) = softmax(s) v with s = rotate(q) rotate(k)^T / sqrt(H) (arXiv:1706.03762).

    The options change s and the sum that softmax divides by; `modules.kernels.attention.base`
    has the equation. Sources: softcap arXiv:2408.00118; `mup` arXiv:2203.03466, appendix B.1; a
    learned temperature of each head arXiv:2010.04245; sinks off by one
    (https://www.evanmiller.org/attention-is-off-by-one.html) and learned (arXiv:2508.10925);
    affine-scaled arXiv:2602.23057; windows arXiv:2310.06825, with full layers between them
    arXiv:2408.00118. slopes(N) makes the slopes of ALiBi for N heads. `block` is the number of the
    layer, from 1.
    """

    slopes: Callable[[int], jax.Array] | None = None
    base_head_dim: int | None = None  # the H at which q k / H is q k / sqrt(H); None: no such
    block: jax.Array | float = 1.0
    softcap: Annotated[
        float, Option('c of c tanh(s / c) on the logits; 0: none', 0, sys.float_info.max)
    ] = 0.0
    logit_scale: Annotated[
        str, Option('of q k: 1/sqrt(H), 1/H, learned by head', choices=('root', 'mup', 'learned'))
    ] = 'root'
    sinks: Annotated[
        str, Option('logit of no token: 0, or learned', choices=('none', 'off_by_one', 'learned'))
    ] = 'none'
    affine_scaled: Annotated[bool, Option('whether the query scales and shifts weights')] = False
    window: Annotated[
        int | None, Option('tokens that one attends to, itself included; None: all before it', 1)
    ] = None
    full_every: Annotated[
        int, Option('each n-th layer attends to all, whatever the window; 0: none does', 0)
    ] = 0

    has_scores = True
    takes_slopes = True
    supports_context_axis = True

    @classmethod
    def check(cls, recipe, part):
        """Raises ValueError for `full_every` without a window, and for `affine_scaled`, which adds
        a mean of earlier tokens, with an objective whose tokens see later ones.
        """
        super().check(recipe, part)
        given = part.options
        if given['full_every'] and given['window'] is None:
            raise ValueError(
                f'attention.full_every={given["full_every"]} says which layers have no window, and '
                'attention.window is None: all have none. Set the window, or leave it out.'
            )
        for objective in recipe.objectives:
            if objective.row.has_prefix and given['affine_scaled']:
                raise ValueError(
                    f'{objective} lets the tokens of a prefix see each other, and the mean that '
                    'attention.affine_scaled=True adds is of earlier ones. Leave one of them out.'
                )

    @classmethod
    def attended_tokens(cls, length, head_dim, block, *, window, full_every, **options):
        """Returns T / 2, as half of the pairs are causal; W - W^2 / 2 T in a window of W < T."""
        if window is None or window >= length or (full_every and block % full_every == 0):
            return length / 2
        return window - window**2 / (2 * length)

    @classmethod
    def attended_tokens_unmasked(cls, length, head_dim, block, **options):
        return length

    def scores(self) -> Scores:
        """Describes the scores to the kernel."""
        return Scores(
            scale=self.scale(),
            softcap=self.softcap,
            window=self.window,
            sinks=self.sinks != 'none',
            slopes=self.slopes is not None,
        )

    def scale(self) -> float | None:
        """Returns the factor of q k; None: 1 / sqrt(H)."""
        if self.logit_scale == 'mup':
            return 1 / self.head_dim
        if self.base_head_dim in (None, self.head_dim):
            return None
        return math.sqrt(self.base_head_dim) / self.head_dim

    def mix(self, x_BTD, q_BNTH, k_BKTH, v_BKTH, sequence):
        q_BNTH, k_BKTH = (self.apply_positions(y, sequence) for y in (q_BNTH, k_BKTH))
        temperature_N = self.temperature()
        if temperature_N is not None:
            by_head = jnp.broadcast_to(temperature_N[None, :, None, None], q_BNTH.shape)
            q_BNTH = (q_BNTH * by_head).astype(q_BNTH.dtype)
        if sequence.capacity is not None:
            k_BKTH = self.update_cache('key', k_BKTH, sequence)
            v_BKTH = self.update_cache('value', v_BKTH, sequence)
        arrays = self.score_arrays(k_BKTH, temperature_N)
        mixed_BNTH = self.attend(q_BNTH, k_BKTH, v_BKTH, sequence, arrays)
        if not self.affine_scaled:
            return mixed_BNTH
        alpha_BTN = self.project('affine', x_BTD, ('embed', 'heads'), self.n_heads)
        if sequence.capacity is None:
            mean_BKTH = visible_mean(v_BKTH, sequence, self.window, self.is_full())
        else:
            places_BT = sequence.positions_BT
            mean_BKTH = visible_mean_at(v_BKTH, places_BT, self.window, self.is_full())
        mean_BNTH = repeat_kv_heads(mean_BKTH, self.n_heads)
        alpha_BTN = jax.nn.sigmoid(at_least_float32(alpha_BTN))
        return scale_affinely(self, alpha_BTN, mixed_BNTH, mean_BNTH, sequence.valid_BT1)

    def attend(self, q_BNTH, k_BKSH, v_BKSH, sequence, arrays):
        """Returns what the kernel computes, or the specification for queries behind a cache."""
        if self.is_initializing():  # of which the parameters alone are wanted
            return q_BNTH
        scores, is_full = self.scores(), self.is_full()
        if sequence.capacity is not None:
            arrays = arrays | {'is_full': is_full}
            return attend_at_positions(
                q_BNTH, k_BKSH, v_BKSH, scores, sequence.positions_BT, **arrays
            )
        segments_BT = sequence.segments_BT

        def statistics():
            rows = {'segments_BT': segments_BT, 'valid_BT': sequence.valid_BT, 'is_full': is_full}
            return attention_statistics(q_BNTH, k_BKSH, self.scores(), **rows, **arrays)

        self.record(statistics)
        if sequence.prefix_BT is not None:
            scores = dataclasses.replace(scores, prefix=True)
            arrays = arrays | {'prefix_BT': sequence.prefix_BT}
        if sequence.dropout is not None:
            scores = dataclasses.replace(scores, dropout=True)
            arrays = arrays | {'dropout_BNTS': sequence.dropout}
        return self.kernels.attention(
            q_BNTH, k_BKSH, v_BKSH, scores, segments_BT, is_full=is_full, **arrays
        )

    def is_full(self) -> jax.Array | None:
        """Whether this layer has no window; None where all layers are alike in that."""
        return is_full(self.block, self.window, self.full_every)

    def temperature(self) -> jax.Array | None:
        """Returns a factor of q k for each head, [N], 1 at the start; None: none is learned."""
        if self.logit_scale != 'learned':
            return None
        ones = declare(nn.initializers.ones, 'vector', ('heads',))
        return self.param('temperature', ones, (self.n_heads,))

    def score_arrays(self, k_BKSH, temperature_N) -> dict[str, jax.Array]:
        """Returns the arrays that go with `scores`."""
        found = {}
        if self.sinks == 'off_by_one':
            found['sinks_N'] = jnp.zeros(self.n_heads)
        if self.sinks == 'learned':
            init = declare(nn.initializers.normal(SINK_DEVIATION), 'vector', ('heads',))
            found['sinks_N'] = self.param('sinks', init, (self.n_heads,))
        if self.slopes is not None:
            found['slopes_N'] = self.slopes(self.n_heads)
        return found


class L2Attention(SoftmaxAttention):
    """s = (q k^T - |k|^2 / 2) / sqrt(H): softmax of distances (PPGT, arXiv:2504.12588).

    This is -|q - k|^2 / 2 without its term in |q|^2, which is the same for all keys. The released
    code divides the second term alone; `l2_scaled` has both forms. PPGT's positions, which are of
    graphs, are left out.
    """

    l2_scaled: Annotated[
        str, Option('what sqrt(H) divides: all, or the key term alone', choices=('both', 'key'))
    ] = 'both'

    def scores(self) -> Scores:
        scores = super().scores()
        scale = 1.0 if self.l2_scaled == 'key' else scores.scale
        return dataclasses.replace(scores, scale=scale, key_bias=True)

    def score_arrays(self, k_BKSH, temperature_N):
        scale = Scores(super().scores().scale).compute_scale(self.head_dim)
        bias_BKS = -0.5 * scale * jnp.sum(jnp.square(at_least_float32(k_BKSH)), -1)
        if temperature_N is not None:
            bias_BNS = repeat_kv_heads(bias_BKS[..., None], self.n_heads)[..., 0]
            bias_BKS = bias_BNS * jnp.broadcast_to(temperature_N[None, :, None], bias_BNS.shape)
        return super().score_arrays(k_BKSH, temperature_N) | {'key_bias_BKS': bias_BKS}


def is_full(
    block: jax.Array | float, window: int | None = None, full_every: int = 0, **options
) -> jax.Array | None:
    """Whether layer `block` has no window; None where all layers are alike in that."""
    if window is None or not full_every:
        return None
    return jnp.mod(block, full_every) == 0


def scale_affinely(module: nn.Module, alpha_BTN, mixed_BNTH, mean_BNTH, valid_BT1) -> jax.Array:
    """sum_s (alpha_t p_ts + (m - alpha_t) / n_t) v_s, for the n_t tokens s that t sees.

    mixed_BNTH: sum_s p_ts v_s. mean_BNTH: the mean of the v_s. m is the running mean of alpha for
    each head, carried as a statistic. Rows of weights sum to m where those of p sum to 1, and
    single weights may be negative. Source: arXiv:2602.23057, whose m starts at 0. Here m starts at
    0.5, as alpha does, has no gradient, and is that of before this batch, so that no token sees a
    later one.
    """
    start = jnp.full(alpha_BTN.shape[-1:], 0.5)
    mean_N = module.variable(STATS, 'affine_mean', lambda: start)
    alpha_BTN = at_least_float32(alpha_BTN)
    m_BTN = jnp.broadcast_to(jax.lax.stop_gradient(mean_N.value), alpha_BTN.shape)
    if is_training(module):
        now_N = token_mean(jax.lax.stop_gradient(alpha_BTN), valid_BT1)
        mean_N.value = AFFINE_DECAY * mean_N.value + (1 - AFFINE_DECAY) * now_N
    alpha_BNT1, m_BNT1 = (jnp.swapaxes(a, 1, 2)[..., None] for a in (alpha_BTN, m_BTN))
    out = alpha_BNT1 * mixed_BNTH + (m_BNT1 - alpha_BNT1) * mean_BNTH
    return out.astype(mixed_BNTH.dtype)


def visible_mean(
    v_BKTH: jax.Array, sequence: Sequence, window: int | None, is_full: jax.Array | None
) -> jax.Array:
    """Returns the mean of v over the tokens that each one sees, itself included, [B, K, T, H].

    Only these tokens are added, in float32 at least: a difference of two sums over the row would
    round with all of it, and a value of another document that is inf would leave nothing. Sums end
    at documents, and with a window at pieces of `window` tokens too. A window reaches back into one
    piece before its own at most, of which the sum from there to the end is added. Where T is cut,
    each device gathers all tokens and keeps the means of its own.

    Args:
      v_BKTH: the values.
      sequence: has the documents.
      window: tokens that one sees, itself included; None: all before it in its document.
      is_full: turns the window off where it is true; it may be traced.
    """
    parts = count_axis_shards('T')
    is_cut = parts > 1 and v_BKTH.shape[2] % parts == 0
    compute = functools.partial(_mean_on_device, window, 'context' if is_cut else None)
    return map_shards(compute, (v_BKTH, sequence.segments_BT, is_full), ('BKT', 'B', ''), 'BKT')


def _mean_on_device(window, axis_name, v_BKTH, segments_BT, is_full):
    """Computes `visible_mean`; axis_name: the mesh axis that tokens are cut over, or None."""
    own, v_BKSH = v_BKTH.shape[2], at_least_float32(v_BKTH)
    if axis_name is not None:
        v_BKSH = gather_tokens(v_BKSH, axis_name)
    length = v_BKSH.shape[2]
    place_1T = jnp.arange(length, dtype=jnp.int32)[None]
    start_BT = jnp.zeros_like(place_1T) if segments_BT is None else segment_starts(segments_BT)
    place_BT = jnp.broadcast_to(place_1T, start_BT.shape)
    if window is None or window >= length:
        sums = segmented_sum(v_BKSH, place_BT == start_BT)
    else:
        narrow_BT = jnp.maximum(start_BT, place_BT - window + 1)
        opens_BT = place_BT % window == 0
        if is_full is not None:
            opens_BT = opens_BT & ~is_full
            narrow_BT = jnp.where(is_full, start_BT, narrow_BT)
        opens_BT = opens_BT | (place_BT == start_BT)
        piece_BT = jax.lax.cummax(jnp.where(opens_BT, place_BT, 0), axis=1)
        closes_BT = jnp.pad(opens_BT[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        start_BT, to_end = narrow_BT, segmented_sum(v_BKSH, closes_BT, reverse=True)
        index = jnp.broadcast_to(start_BT[:, None, :, None], (len(v_BKSH), 1, length, 1))
        before = jnp.take_along_axis(to_end, index, 2)
        reaches_back = (start_BT < piece_BT)[:, None, :, None]
        sums = segmented_sum(v_BKSH, opens_BT) + jnp.where(reaches_back, before, 0.0)
    count = (place_BT - start_BT + 1)[:, None, :, None].astype(sums.dtype)
    if axis_name is None:
        return sums / count
    first = jax.lax.axis_index(axis_name) * own
    return jax.lax.dynamic_slice_in_dim(sums / count, first, own, 2)


def segmented_sum(x_BKTH: jax.Array, opens_BT: jax.Array, reverse: bool = False) -> jax.Array:
    """Returns the sum of x from the last token at which a piece opens up to each token itself.

    A tree of sums: its error grows with log T, and no piece adds to another (Blelloch, "Prefix sums
    and their applications", 1990, section 1.5).

    Args:
      x_BKTH: what is added.
      opens_BT: whether a piece begins at a token; the batch may be 1.
      reverse: whether pieces begin at their last token, and sums run towards the first.
    """

    def add(before, after):
        (opened, total), (opens, x) = before, after
        return opened | opens, jnp.where(opens, x, total + x)

    pieces = opens_BT[:, None, :, None], x_BKTH
    return jax.lax.associative_scan(add, pieces, reverse=reverse, axis=2)[1]


def visible_mean_at(
    v_BKSH: jax.Array, positions_BT: jax.Array, window: int | None, is_full: jax.Array | None
) -> jax.Array:
    """Computes `visible_mean` for queries at `positions_BT` among the values of tokens 0 to S - 1."""
    back_BTS = positions_BT[..., None] - jnp.arange(v_BKSH.shape[2], dtype=jnp.int32)[None, None]
    v_BKSH = at_least_float32(v_BKSH)
    seen_BTS = is_visible(back_BTS, window, is_full).astype(v_BKSH.dtype)
    exact = jax.lax.Precision.HIGHEST  # a mean, not a layer's product
    sums_BKTH = jnp.einsum('bts,bksh->bkth', seen_BTS, v_BKSH, precision=exact)
    return sums_BKTH / jnp.sum(seen_BTS, -1)[:, None, :, None]
