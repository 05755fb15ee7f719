"""Causal softmax attention and its variants, which change scores or probabilities."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.attention.base import MultiHead
from modules.kernels.attention.base import Scores, attend_to_cache, is_visible, repeat_kv_heads
from modules.kernels.attention.observed import attention_statistics
from modules.options import Option
from modules.parallel.axes import count_axis_shards
from modules.parallel.kernel_calls import gather_tokens, map_shards
from modules.params import declare
from modules.sequence import Sequence, segment_starts
from modules.statistics import STATS, at_least_float32, is_training, token_mean

AFFINE_DECAY = 0.9  # decay of the running mean of affine-scaled attention, per update
SINK_DEVIATION = 0.02  # learned sinks at the start: gpt-oss's initializer_range


class SoftmaxAttention(MultiHead):
    """Softmax attention (arXiv:1706.03762): `mix(q, k, v) = softmax(s) v`.

    `s = rotate(q) rotate(k)^T / sqrt(H)`

    `H` is the width of a head, and `rotate` applies the positions. The options change the scores
    `s` or the denominator of the softmax; the card of `kernels.attention=reference` has the
    equation with all of them. Their sources:

    - `softcap`: arXiv:2408.00118.
    - `logit_scale=mup`: arXiv:2203.03466, appendix B.1.
    - `logit_scale=learned`, a learned temperature per head: arXiv:2010.04245.
    - `sinks=off_by_one`: https://www.evanmiller.org/attention-is-off-by-one.html.
    - `sinks=learned`: arXiv:2508.10925.
    - `affine_scaled`: arXiv:2602.23057.
    - `window`: arXiv:2310.06825; with full layers between (`full_every`): arXiv:2408.00118.

    The model fills in two fields: `slopes`, which maps the number of heads to their ALiBi slopes,
    and `block`, the number of the layer from 1.
    """

    slopes: Callable[[int], jax.Array] | None = None
    base_head_dim: int | None = None  # scale is sqrt(base_head_dim) / H; None: 1 / sqrt(H)
    block: jax.Array | float = 1.0
    softcap: Annotated[
        float,
        Option('c in c tanh(s / c) for attention logits s; 0: no softcap', 0, sys.float_info.max),
    ] = 0.0
    logit_scale: Annotated[
        str,
        Option(
            'factor of q k: 1/sqrt(H), 1/H, or learned per head', choices=('root', 'mup', 'learned')
        ),
    ] = 'root'
    sinks: Annotated[
        str,
        Option(
            'extra logit in the softmax denominator: none, 0, or learned',
            choices=('none', 'off_by_one', 'learned'),
        ),
    ] = 'none'
    affine_scaled: Annotated[
        bool, Option('whether each query scales and shifts its attention weights')
    ] = False
    window: Annotated[
        int | None,
        Option('tokens that a query attends to, itself included; None: all earlier tokens', 1),
    ] = None
    full_every: Annotated[
        int, Option('every n-th layer ignores the window; 0: no layer does', 0)
    ] = 0
    full_at: Annotated[
        int, Option('position of the full layer in each group of full_every, from 1; 0: last', 0)
    ] = 0

    has_scores = True
    takes_slopes = True
    supports_context_axis = True

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:
        """Raises ValueError for options that contradict each other or the objective.

        `full_every` needs a window, `full_at` a larger `full_every`. `affine_scaled` adds a mean of
        earlier tokens, so no objective may let tokens see later tokens.
        """
        super().check(recipe, part)
        options = part.options
        if options['full_every'] and options['window'] is None:
            raise ValueError(
                f'attention.full_every={options["full_every"]} selects layers without a window, '
                'but attention.window=None: no layer has one. Set attention.window, or leave '
                'attention.full_every out.'
            )
        if options['full_at'] and options['full_at'] >= options['full_every']:
            raise ValueError(
                f'attention.full_at={options["full_at"]} must be below '
                f'attention.full_every={options["full_every"]}. For the last layer of each group, '
                'leave it at 0, the default.'
            )
        for objective in recipe.objectives:
            if objective.row.has_prefix and options['affine_scaled']:
                raise ValueError(
                    'attention.affine_scaled=True adds a mean over earlier tokens, but with '
                    f'{objective} the tokens of a prefix see each other. Leave one of them out.'
                )

    @classmethod
    def attended_tokens(  # ty: ignore[incompatible-method-override]  # callers pass all options
        cls,
        length: int,
        head_dim: int,
        block: int,
        *,
        window: int | None,
        full_every: int,
        full_at: int = 0,
        **options,
    ) -> float:
        """Returns the mean number of tokens that a query attends to.

        This is T / 2, as half of the pairs are causal; W - W^2 / (2 T) in a window of W < T.

        Args:
          length: tokens in a row, T.
          head_dim: the width of a head.
          block: the number of the layer, from 1.
          window: W, the tokens that a query attends to; None: all earlier tokens.
          full_every: every n-th layer has no window; 0: all layers have it.
          full_at: the place of that layer among n; 0: the last.
          **options: ignored.
        """
        lacks_window = bool(full_every) and block % full_every == full_at
        if window is None or window >= length or lacks_window:
            return length / 2
        return window - window**2 / (2 * length)

    @classmethod
    def attended_tokens_unmasked(cls, length: int, head_dim: int, block: int, **options) -> float:
        """Returns T: each query with every token of the row.

        Args:
          length: tokens in a row, T.
          head_dim: the width of a head.
          block: the number of the layer.
          **options: ignored.
        """
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
        # Falls as 1 / H, and equals 1 / sqrt(H) at the base width.
        return math.sqrt(self.base_head_dim) / self.head_dim

    def mix(
        self,
        x_BTD: Any,
        q_BNTH: jax.Array,
        k_BKTH: jax.Array,
        v_BKTH: jax.Array,
        sequence: Sequence,
    ) -> jax.Array:
        """Computes causal softmax attention, scaled affinely if `affine_scaled` is set.

        Args:
          x_BTD: the layer's input, which sets the affine scale.
          q_BNTH: queries, normalized but without positions.
          k_BKTH: keys, likewise.
          v_BKTH: values.
          sequence: positions, segments and validity of the tokens.
        """
        q_BNTH, k_BKTH = (self.apply_positions(y, sequence) for y in (q_BNTH, k_BKTH))
        temperature_N = self.temperature()
        if temperature_N is not None:
            temperature_BNTH = jnp.broadcast_to(temperature_N[None, :, None, None], q_BNTH.shape)
            q_BNTH = (q_BNTH * temperature_BNTH).astype(q_BNTH.dtype)
        if sequence.capacity is not None:
            k_BKTH, v_BKTH = self.update_cache(sequence, key=k_BKTH, value=v_BKTH)
        arrays = self.score_arrays(k_BKTH, temperature_N)
        mixed_BNTH = self.attend(q_BNTH, k_BKTH, v_BKTH, sequence, arrays)
        if not self.affine_scaled:
            return mixed_BNTH
        alpha_BTN = self.project('affine', x_BTD, ('embed', 'heads'), self.n_heads)
        if sequence.capacity is None:
            mean_BKTH = visible_mean(v_BKTH, sequence, self.window, self.is_full())
        else:
            positions_BT = sequence.positions_BT
            mean_BKTH = visible_mean_at(v_BKTH, positions_BT, self.window, self.is_full())
        mean_BNTH = repeat_kv_heads(mean_BKTH, self.n_heads)
        alpha_BTN = jax.nn.sigmoid(at_least_float32(alpha_BTN))
        return scale_affinely(self, alpha_BTN, mixed_BNTH, mean_BNTH, sequence.valid_BT1)

    def attend(
        self,
        q_BNTH: jax.Array,
        k_BKSH: jax.Array,
        v_BKSH: jax.Array,
        sequence: Sequence,
        arrays: dict[str, Any],
    ) -> jax.Array:
        """Calls the kernel, or the reference implementation for queries that follow a cache.

        Args:
          q_BNTH: queries, with positions.
          k_BKSH: keys; S is T, or the cache's capacity.
          v_BKSH: values.
          sequence: positions and segments of the tokens, and the dropout.
          arrays: the arrays of `score_arrays`, by name.

        Returns:
          [B, N, T, H] in the type of v.
        """
        if self.is_initializing():  # only the parameters matter, so skip compiling a kernel
            return q_BNTH
        scores, is_full = self.scores(), self.is_full()
        if sequence.capacity is not None:
            arrays = arrays | {'is_full': is_full}
            return attend_to_cache(q_BNTH, k_BKSH, v_BKSH, scores, sequence.positions_BT, **arrays)
        segments_BT = sequence.segments_BT

        def statistics():
            options = {
                'segments_BT': segments_BT,
                'valid_BT': sequence.valid_BT,
                'is_full': is_full,
            }
            return attention_statistics(q_BNTH, k_BKSH, self.scores(), **options, **arrays)

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
        """Returns whether this layer has no window; None if all layers agree."""
        return is_full(self.block, self.window, self.full_every, self.full_at)

    def temperature(self) -> jax.Array | None:
        """Returns a learned factor of q k for each head, [N], 1 at the start; None: not learned."""
        if self.logit_scale != 'learned':
            return None
        ones = declare(nn.initializers.ones, 'vector', ('heads',))
        temperature_N: Any = self.param('temperature', ones, (self.n_heads,))  # unboxed by Flax
        return temperature_N

    def score_arrays(self, k_BKSH: jax.Array, temperature_N: jax.Array | None) -> dict[str, Any]:
        """Returns the arrays that `Scores` describes, by the kernel's argument names."""
        arrays: dict[str, Any] = {}
        if self.sinks == 'off_by_one':
            arrays['sinks_N'] = jnp.zeros(self.n_heads)
        if self.sinks == 'learned':
            init = declare(nn.initializers.normal(SINK_DEVIATION), 'vector', ('heads',))
            arrays['sinks_N'] = self.param('sinks', init, (self.n_heads,))
        if self.slopes is not None:
            arrays['slopes_N'] = self.slopes(self.n_heads)
        return arrays


class L2Attention(SoftmaxAttention):
    """L2 attention of PPGT (arXiv:2504.12588): `s = (q k^T - |k|^2 / 2) / sqrt(H)`.

    Softmax attention whose scores fall with the distance of query and key: `s` is
    `-|q - k|^2 / (2 sqrt(H))` without its term in `|q|^2`, which is the same for all keys and
    changes no probability. The released code divides only the second term by `sqrt(H)`; `l2_scaled`
    selects either form. PPGT's positions, which are for graphs, are left out.
    """

    l2_scaled: Annotated[
        str, Option('sqrt(H) divides both terms, or only the |k|^2 term', choices=('both', 'key'))
    ] = 'both'

    def scores(self) -> Scores:
        scores = super().scores()
        scale = 1.0 if self.l2_scaled == 'key' else scores.scale
        return dataclasses.replace(scores, scale=scale, key_bias=True)

    def score_arrays(self, k_BKSH: jax.Array, temperature_N: jax.Array | None) -> dict[str, Any]:
        scale = Scores(super().scores().scale).compute_scale(self.head_dim)
        bias_BKS = -0.5 * scale * jnp.sum(jnp.square(at_least_float32(k_BKSH)), -1)
        if temperature_N is not None:
            bias_BNS = repeat_kv_heads(bias_BKS[..., None], self.n_heads)[..., 0]
            bias_BKS = bias_BNS * jnp.broadcast_to(temperature_N[None, :, None], bias_BNS.shape)
        return super().score_arrays(k_BKSH, temperature_N) | {'key_bias_BKS': bias_BKS}


def is_full(
    block: jax.Array | float,
    window: int | None = None,
    full_every: int = 0,
    full_at: int = 0,
    **options,
) -> jax.Array | None:
    """Returns whether layer `block` has no window; None if all layers agree.

    Args:
      block: the number of the layer, from 1; may be traced.
      window: tokens that a query attends to; None: all layers are full.
      full_every: every n-th layer has no window; 0: none is full.
      full_at: the place of that layer among n; 0: the last.
      **options: ignored.
    """
    if window is None or not full_every:
        return None
    return jnp.mod(block, full_every) == full_at


def scale_affinely(module: nn.Module, alpha_BTN, mixed_BNTH, mean_BNTH, valid_BT1) -> jax.Array:
    """Computes sum_s (alpha_t p_ts + (m - alpha_t) / n_t) v_s over the n_t tokens s that t sees.

    m is the running mean of alpha for each head, carried as a statistic. Rows of weights sum to m
    if the rows of p sum to 1, and single weights may be negative.

    Source: arXiv:2602.23057; m starts at 0 there. Here m starts at 0.5, as alpha does, and has no
    gradient. A step uses the m from before its batch, so that no token depends on a later one.

    Args:
      module: holds the statistic `affine_mean`.
      alpha_BTN: the scale of each query and head, in (0, 1).
      mixed_BNTH: sum_s p_ts v_s.
      mean_BNTH: the mean of v_s over the tokens that t sees.
      valid_BT1: 0 for padding, which does not move m; None: no padding.

    Returns:
      [B, N, T, H] in the type of mixed_BNTH.
    """
    start = jnp.full(alpha_BTN.shape[-1:], 0.5)
    mean_N = module.variable(STATS, 'affine_mean', lambda: start)
    alpha_BTN = at_least_float32(alpha_BTN)
    m_BTN = jnp.broadcast_to(jax.lax.stop_gradient(mean_N.value), alpha_BTN.shape)
    if is_training(module):
        batch_mean_N = token_mean(jax.lax.stop_gradient(alpha_BTN), valid_BT1)
        mean_N.value = AFFINE_DECAY * mean_N.value + (1 - AFFINE_DECAY) * batch_mean_N
    alpha_BNT1, m_BNT1 = (jnp.swapaxes(a, 1, 2)[..., None] for a in (alpha_BTN, m_BTN))
    scaled_BNTH = alpha_BNT1 * mixed_BNTH + (m_BNT1 - alpha_BNT1) * mean_BNTH
    return scaled_BNTH.astype(mixed_BNTH.dtype)


def visible_mean(
    v_BKTH: jax.Array, sequence: Sequence, window: int | None, is_full: jax.Array | None
) -> jax.Array:
    """Returns the mean of v over the tokens that each token sees, itself included, [B, K, T, H].

    Adds only these tokens, in float32 at least. A difference of two prefix sums over the row would
    carry the rounding error of all earlier tokens, and an inf in another document would turn into
    NaN. Sums restart at documents and, with a window, also at every `window` tokens. A window then
    overlaps at most one earlier piece; the sum from the window's start to the end of that piece is
    added. If T is sharded, each device gathers all tokens and keeps the means of its own tokens.

    Args:
      v_BKTH: the values.
      sequence: has the documents.
      window: tokens that a token sees, itself included; None: all earlier tokens in its document.
      is_full: turns the window off where true; may be traced.
    """
    parts = count_axis_shards('T')
    is_cut = parts > 1 and v_BKTH.shape[2] % parts == 0
    compute = functools.partial(_mean_on_device, window, 'context' if is_cut else None)
    return map_shards(compute, (v_BKTH, sequence.segments_BT, is_full), ('BKT', 'B', ''), 'BKT')


def _mean_on_device(window, axis_name, v_BKTH, segments_BT, is_full):
    """Computes `visible_mean`; axis_name: the mesh axis that shards the tokens, or None."""
    local_length, v_BKSH = v_BKTH.shape[2], at_least_float32(v_BKTH)
    if axis_name is not None:
        v_BKSH = gather_tokens(v_BKSH, axis_name)
    length = v_BKSH.shape[2]
    place_1T = jnp.arange(length, dtype=jnp.int32)[None]
    start_BT = jnp.zeros_like(place_1T) if segments_BT is None else segment_starts(segments_BT)
    place_BT = jnp.broadcast_to(place_1T, start_BT.shape)
    if window is None or window >= length:
        sums = segmented_sum(v_BKSH, place_BT == start_BT)
    else:
        # Pieces are at most `window` tokens long, so a window reaches into one earlier piece.
        window_start_BT = jnp.maximum(start_BT, place_BT - window + 1)
        is_start_BT = place_BT % window == 0
        if is_full is not None:
            is_start_BT = is_start_BT & ~is_full
            window_start_BT = jnp.where(is_full, start_BT, window_start_BT)
        is_start_BT = is_start_BT | (place_BT == start_BT)
        piece_start_BT = jax.lax.cummax(jnp.where(is_start_BT, place_BT, 0), axis=1)
        is_end_BT = jnp.pad(is_start_BT[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        start_BT, suffix_sums = window_start_BT, segmented_sum(v_BKSH, is_end_BT, reverse=True)
        index = jnp.broadcast_to(start_BT[:, None, :, None], (len(v_BKSH), 1, length, 1))
        overlap = jnp.take_along_axis(suffix_sums, index, 2)
        has_overlap = (start_BT < piece_start_BT)[:, None, :, None]
        sums = segmented_sum(v_BKSH, is_start_BT) + jnp.where(has_overlap, overlap, 0.0)
    count = (place_BT - start_BT + 1)[:, None, :, None].astype(sums.dtype)
    if axis_name is None:
        return sums / count
    first = jax.lax.axis_index(axis_name) * local_length
    return jax.lax.dynamic_slice_in_dim(sums / count, first, local_length, 2)


def segmented_sum(x_BKTH: jax.Array, opens_BT: jax.Array, reverse: bool = False) -> jax.Array:
    """Returns the sum of x from the start of each token's piece up to the token itself.

    This is an associative scan: its error grows with log T, and no piece adds to another (Blelloch,
    "Prefix sums and their applications", 1990, section 1.5).

    Args:
      x_BKTH: the summands.
      opens_BT: whether a piece begins at a token; the batch may be 1.
      reverse: whether pieces begin at their last token, and sums run towards the first.

    Returns:
      [B, K, T, H].
    """

    def add(before, after):
        (opened, total), (opens, x) = before, after
        return opened | opens, jnp.where(opens, x, total + x)

    pieces = opens_BT[:, None, :, None], x_BKTH
    return jax.lax.associative_scan(add, pieces, reverse=reverse, axis=2)[1]


def visible_mean_at(
    v_BKSH: jax.Array, positions_BT: jax.Array, window: int | None, is_full: jax.Array | None
) -> jax.Array:
    """Computes `visible_mean` for queries at given positions, with the values of a cache.

    Args:
      v_BKSH: values of the tokens 0 to S - 1.
      positions_BT: positions of the queries.
      window: tokens that a token sees, itself included; None: all earlier tokens.
      is_full: turns the window off where true; may be traced.
    """
    distance_BTS = (
        positions_BT[..., None] - jnp.arange(v_BKSH.shape[2], dtype=jnp.int32)[None, None]
    )
    v_BKSH = at_least_float32(v_BKSH)
    visible_BTS = is_visible(distance_BTS, window, is_full).astype(v_BKSH.dtype)
    # HIGHEST: this is a mean, not a matmul of the layer, and must not be rounded to bfloat16.
    highest = jax.lax.Precision.HIGHEST
    sums_BKTH = jnp.einsum('bts,bksh->bkth', visible_BTS, v_BKSH, precision=highest)
    return sums_BKTH / jnp.sum(visible_BTS, -1)[:, None, :, None]
