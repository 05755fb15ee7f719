"""Attention tile by tile, whose backward pass keeps only arrays that grow with T."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from modules.kernels.attention.base import (
    MASKED,
    Scores,
    accumulator_dtype,
    in_same_prefix,
    is_visible,
    repeat_kv_heads,
)
from modules.numerics import ATTENTION_OUTPUT
from modules.parallel.axes import count_axis_shards
from modules.parallel.kernel_calls import gather_tokens, map_shards
from modules.statistics import at_least_float32

# Logits of all heads in one tile, and the bounds of its side. Of the sides tried on two CPU cores,
# forward and backward, H = 64, those of 512 were fastest for 4 heads and 4,096 tokens, of 256 for
# 16 and 1,024, of 128 for 64 and 256. tests/bench/RESULTS.md has times and memory.
TILE_LOGITS, MIN_TILE, MAX_TILE = 2**20, 128, 512
MAX_UNROLLED_TILES = 2  # tiles of queries that need no loop


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """Static sizes: queries are in `tiles` tiles of `side` tokens, keys in `key_tiles`."""

    scores: Scores
    side: int
    tiles: int
    key_tiles: int


class LogitTerms(NamedTuple):
    """Terms of the logits besides q k, of G rows (a head of a sequence each), as in `reference` and
    float32 at least; None where unused.
    """

    sinks_G: jax.Array | None
    slopes_G: jax.Array | None
    key_bias_GS: jax.Array | None


class KeyLabels(NamedTuple):
    """The document and the prefix of each key of G rows, and the tile of keys at which the queries
    begin; None where unused.
    """

    segments_GS: jax.Array | None
    prefix_GS: jax.Array | None
    first_tile: jax.Array | None

    def key_tile(self, i: Any) -> Any:
        """Returns which tile of keys has the same tokens as tile i of queries."""
        return i if self.first_tile is None else self.first_tile + i


def blocked_attention(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    slopes_N: jax.Array | None = None,
    key_bias_BKS: jax.Array | None = None,
    prefix_BT: jax.Array | None = None,
) -> jax.Array:
    """Computes `reference` by tiles of queries and keys (arXiv:2112.05682, arXiv:2205.14135).

    Tiles of keys after the queries, or before their window, are skipped; with prefixes none is, as
    a program does not know where they are. Softmax over the tiles of a row has a running maximum
    and sum. The backward pass keeps the output and the log-sum-exp of each row, as in
    FlashAttention, and computes the probabilities again. It rules out forward-mode differentiation.

    Heads that are cut over devices are computed where they are. Of rows whose tokens are cut, each
    device has its queries and gathers all keys and values, and their gradients are scattered.
    """
    n_heads, heads_parts, parts = q_BNTH.shape[1], count_axis_shards('N'), count_axis_shards('T')
    if k_BKSH.shape[1] % heads_parts:
        k_BKSH, v_BKSH = (repeat_kv_heads(x, n_heads) for x in (k_BKSH, v_BKSH))
        key_bias_BKS = None if key_bias_BKS is None else repeat_kv_heads(key_bias_BKS, n_heads)
    is_cut = parts > 1 and q_BNTH.shape[2] % parts == 0
    compute = functools.partial(_attend_on_device, scores, 'context' if is_cut else None)
    arrays = (q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, slopes_N, key_bias_BKS, prefix_BT)
    if heads_parts * parts == 1:
        return compute(*arrays)
    return map_shards(compute, arrays, ('BNT', 'BKT', 'BKT', 'B', 'N', 'N', 'BKT', 'B'), 'BNT')


def _attend_on_device(scores, axis_name, q_BNTH, k_BKSH, v_BKSH, segments_BT, *arrays):
    """Computes `blocked`; axis_name: the mesh axis that tokens are cut over, None where none is."""
    sinks_N, slopes_N, key_bias_BKS, prefix_BT = arrays
    batch, n_heads, length, head_dim = q_BNTH.shape
    first, parts = None, 1
    if axis_name is not None:
        parts = jax.lax.axis_size(axis_name)
        k_BKSH, v_BKSH, key_bias_BKS = jax.tree.map(
            functools.partial(gather_tokens, axis_name=axis_name), (k_BKSH, v_BKSH, key_bias_BKS)
        )
    static = select_tiles(scores, batch * n_heads, length, parts)
    if axis_name is not None:
        first = jax.lax.axis_index(axis_name) * static.tiles
    extra = static.side * static.tiles - length  # padding behind all tokens, which none sees

    def flatten_heads(x_BNT_):  # XLA:CPU likes one batch axis
        x_BNT_ = jnp.pad(x_BNT_, [(0, extra if i == 2 else 0) for i in range(x_BNT_.ndim)])
        return x_BNT_.reshape(-1, *x_BNT_.shape[2:])

    def repeat_rows(x_N):
        if x_N is None:
            return None
        return jnp.broadcast_to(
            x_N.astype(accumulator_dtype(q_BNTH))[None], (batch, n_heads)
        ).reshape(-1)

    def repeat_labels(number_BT):
        if number_BT is None:
            return None
        number_BT = jnp.pad(number_BT, ((0, 0), (0, extra)), constant_values=-1)
        return jnp.repeat(number_BT, n_heads, axis=0)

    q_GTH = flatten_heads(q_BNTH * scores.compute_scale(head_dim))
    k_GSH, v_GSH = (flatten_heads(repeat_kv_heads(x, n_heads)) for x in (k_BKSH, v_BKSH))
    key_bias_GS = None
    if key_bias_BKS is not None:
        key_bias_GS = flatten_heads(
            repeat_kv_heads(key_bias_BKS, n_heads).astype(accumulator_dtype(q_BNTH))
        )
    places = KeyLabels(repeat_labels(segments_BT), repeat_labels(prefix_BT), first)
    rows = LogitTerms(repeat_rows(sinks_N), repeat_rows(slopes_N), key_bias_GS)
    out_GTH = _attend_tiles(static, q_GTH, k_GSH, v_GSH, rows, places)
    return out_GTH[:, :length].reshape(q_BNTH.shape)


def select_tiles(scores: Scores, n_rows: int, length: int, parts: int = 1) -> TileGrid:
    """Picks as few tiles as the bounds above allow, and no larger than they have to be; without a
    rest where `length` queries are one of several parts of the keys.
    """
    most = 2 ** math.floor(math.log2(max(1.0, math.sqrt(TILE_LOGITS / n_rows))))
    most = min(MAX_TILE, max(MIN_TILE, most))
    tiles = math.ceil(length / most)
    if parts > 1:
        while length % tiles:
            tiles += 1
    side = math.ceil(length / tiles)
    if tiles > 1 and parts == 1:
        side = math.ceil(side / 8) * 8
    return TileGrid(scores, side, tiles, tiles * parts)


def _loop(start: Any, stop: Any, body: Callable, carry: Any) -> Any:
    """Loops as fori_loop does, in Python where both ends are numbers."""
    if isinstance(start, int) and isinstance(stop, int):
        for i in range(start, stop):
            carry = body(i, carry)
        return carry
    return jax.lax.fori_loop(start, stop, body, carry)


def _loop_query_tiles(static: TileGrid, body: Callable, carry: Any) -> Any:
    """Loops over the tiles of queries, carry = body(i, carry)."""
    loop = _loop if static.tiles <= MAX_UNROLLED_TILES else jax.lax.fori_loop
    return loop(0, static.tiles, body, carry)


def _loop_key_tiles(
    static: TileGrid, has_segments: bool, i: Any, body: Callable, carry: Any
) -> Any:
    """Loops over the tiles of keys that tile i of queries sees, carry = body(j, carry, is_masked).

    Its own tile is the last, so that the running maximum of each row is one of tokens that it sees.
    """
    first, window = 0, static.scores.window
    if static.scores.prefix:
        carry = _loop(0, i, lambda j, carry: body(j, carry, True), carry)
        carry = _loop(i + 1, static.key_tiles, lambda j, carry: body(j, carry, True), carry)
        return body(i, carry, True)
    if window is not None:
        first = (i * static.side - window + 1) // static.side
        first = max(first, 0) if isinstance(i, int) else jnp.maximum(first, 0)
    always = has_segments or window is not None
    carry = _loop(first, i, lambda j, carry: body(j, carry, always), carry)
    return body(i, carry, True)


def _slice_tile(static: TileGrid, x: jax.Array | None, i: Any, axis: int = 1) -> jax.Array | None:
    if x is None:
        return None
    return jax.lax.dynamic_slice_in_dim(x, i * static.side, static.side, axis)


def _write_tile(
    static: TileGrid, x: jax.Array, part: jax.Array, i: Any, axis: int = 1
) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), i * static.side, axis)


def _accumulate_tile(
    static: TileGrid, x: jax.Array, part: jax.Array, i: Any, axis: int
) -> jax.Array:
    return _write_tile(static, x, _slice_tile(static, x, i, axis) + part, i, axis)


def _batched_matmul(
    a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, dtype: Any = None
) -> jax.Array:
    """Multiplies matrices, batched over axis 0."""
    dimensions = (((axis_a,), (axis_b,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def _broadcast_rows(x_G: jax.Array, logits: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x_G[:, None, None], logits.shape)


def _token_distances(
    static: TileGrid, places: KeyLabels, i: Any, j: Any, like: jax.Array
) -> jax.Array:
    """Returns how many tokens keys of tile j are before queries of tile i, [G, T, S]; in one prefix
    how many they are apart.
    """
    place = jnp.arange(static.side, dtype=jnp.int32)
    back_TS = (i - j) * static.side + place[:, None] - place[None]
    back = jnp.broadcast_to(back_TS[None], like.shape)
    if places.prefix_GS is not None:
        own, other = (_slice_tile(static, places.prefix_GS, tile) for tile in (i, j))
        back = jnp.where(in_same_prefix(own, other), jnp.abs(back), back)
    return back


def _tile_logits(static, rows, places, q, k, i, j, is_masked):
    """Returns (logits of a tile, float32 at least; their slope in q k, None where that is 1)."""
    logits, slope, softcap = (
        _batched_matmul(q, k, 2, 2, accumulator_dtype(q)),
        None,
        static.scores.softcap,
    )
    if rows.key_bias_GS is not None:
        bias = _slice_tile(static, rows.key_bias_GS, j)[:, None]
        logits = logits + jnp.broadcast_to(bias, logits.shape)
    if softcap:
        bent = jnp.tanh(logits / softcap)
        logits, slope = softcap * bent, 1 - jnp.square(bent)
    back = _token_distances(static, places, i, j, logits)
    if rows.slopes_G is not None:
        logits = logits - _broadcast_rows(rows.slopes_G, logits) * back
    if is_masked:
        seen = is_visible(back, static.scores.window)
        if places.segments_GS is not None:
            own, other = (_slice_tile(static, places.segments_GS, tile) for tile in (i, j))
            seen = seen & (own[:, :, None] == other[:, None])
        logits = jnp.where(seen, logits, MASKED)
    return logits, slope


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_tiles(static, q_GTH, k_GSH, v_GSH, rows, places):
    return _forward(static, q_GTH, k_GSH, v_GSH, rows, places)[0]


def _forward(static, q_GTH, k_GSH, v_GSH, rows, places):
    count, dtype = len(q_GTH), accumulator_dtype(q_GTH)
    shape = (count, static.side, q_GTH.shape[2])

    def attend_query_tile(tile, accumulators):
        q, i = _slice_tile(static, q_GTH, tile), places.key_tile(tile)

        def attend_key_tile(j, carry, is_masked):
            largest, total, mixed = carry
            k, v = _slice_tile(static, k_GSH, j), _slice_tile(static, v_GSH, j)
            logits, _ = _tile_logits(static, rows, places, q, k, i, j, is_masked)
            new = jnp.maximum(largest, logits.max(-1, keepdims=True))
            weights, kept = jnp.exp(logits - new), jnp.exp(largest - new)
            total = total * kept + weights.sum(-1, keepdims=True)
            mixed = mixed * kept + _batched_matmul(weights.astype(v.dtype), v, 2, 1, dtype)
            return new, total, mixed

        sinks = rows.sinks_G
        largest = jnp.full((*shape[:2], 1), MASKED, dtype)
        if sinks is not None:
            largest = _broadcast_rows(sinks, largest)
        total = jnp.full(largest.shape, float(sinks is not None), dtype)
        start = largest, total, jnp.zeros(shape, dtype)
        has_segments = places.segments_GS is not None
        largest, total, mixed = _loop_key_tiles(static, has_segments, i, attend_key_tile, start)
        out, log_sum = accumulators
        log_total = largest + jnp.log(total)
        return _write_tile(static, out, mixed / total, tile), _write_tile(
            static, log_sum, log_total, tile
        )

    results = jnp.zeros(q_GTH.shape, v_GSH.dtype), jnp.zeros((*q_GTH.shape[:2], 1), dtype)
    results = _loop_query_tiles(static, attend_query_tile, results)
    out_GTH, log_sum_GT1 = checkpoint_name(results, ATTENTION_OUTPUT)
    return out_GTH, (q_GTH, k_GSH, v_GSH, rows, places, out_GTH, log_sum_GT1)


def _backward(static, residuals, grad_GTH):
    """Computes dS = P * (dP - rowsum(dO * O)); each tile adds to its queries, keys and values.

    Sums over queries are products [H, T] by [T, S], with q and dO transposed, which are small:
    XLA:CPU multiplies by a transposed left side at half its rate.
    """
    q_GTH, k_GSH, v_GSH, rows, places, out_GTH, log_sum_GT1 = residuals
    dtype, has_segments = accumulator_dtype(q_GTH), places.segments_GS is not None
    # Both are cast before they are multiplied: a bfloat16 product would round each term.
    products_GTH = at_least_float32(grad_GTH) * at_least_float32(out_GTH)
    correction_GT1 = jnp.sum(products_GTH, -1, keepdims=True)
    q_GHT, grad_GHT = jnp.swapaxes(q_GTH, 1, 2), jnp.swapaxes(grad_GTH, 1, 2)

    def add_query_tile(tile, accumulators):
        q, grad, log_sum, correction = (
            _slice_tile(static, x, tile) for x in (q_GTH, grad_GTH, log_sum_GT1, correction_GT1)
        )
        q_HT, grad_HT = _slice_tile(static, q_GHT, tile, 2), _slice_tile(static, grad_GHT, tile, 2)
        i = places.key_tile(tile)

        def add_key_tile(j, carry, is_masked):
            grad_q, grad_k, grad_v, grad_rows = carry
            k, v = _slice_tile(static, k_GSH, j), _slice_tile(static, v_GSH, j)
            logits, slope = _tile_logits(static, rows, places, q, k, i, j, is_masked)
            probs = jnp.exp(logits - log_sum)
            grad_logits = probs * (_batched_matmul(grad, v, 2, 2, dtype) - correction)
            grad_scores = grad_logits if slope is None else slope * grad_logits
            grad_rows = _add_term_gradients(
                static, places, grad_rows, grad_logits, grad_scores, i, j
            )
            grad_scores, probs = grad_scores.astype(q.dtype), probs.astype(grad.dtype)
            grad_q = grad_q + _batched_matmul(grad_scores, k, 2, 1, dtype)
            grad_k = _accumulate_tile(
                static, grad_k, _batched_matmul(q_HT, grad_scores, 2, 1, dtype), j, 2
            )
            grad_v = _accumulate_tile(
                static, grad_v, _batched_matmul(grad_HT, probs, 2, 1, dtype), j, 2
            )
            return grad_q, grad_k, grad_v, grad_rows

        grad_q, *others = accumulators
        start = jnp.zeros(q.shape, dtype)
        found, *others = _loop_key_tiles(static, has_segments, i, add_key_tile, (start, *others))
        return _write_tile(static, grad_q, found, tile), *others

    zeros = jnp.zeros(jnp.swapaxes(k_GSH, 1, 2).shape, dtype)
    grad_rows = jax.tree.map(jnp.zeros_like, rows)
    results = jnp.zeros(q_GTH.shape, q_GTH.dtype), zeros, zeros, grad_rows
    grad_q, grad_k, grad_v, grad_rows = _loop_query_tiles(static, add_query_tile, results)
    if rows.sinks_G is not None:
        shares = jnp.exp(_broadcast_rows(rows.sinks_G, log_sum_GT1) - log_sum_GT1)
        grad_rows = grad_rows._replace(sinks_G=-jnp.sum(shares * correction_GT1, (1, 2)))
    grad_k, grad_v = jnp.swapaxes(grad_k, 1, 2), jnp.swapaxes(grad_v, 1, 2)
    return grad_q, grad_k.astype(k_GSH.dtype), grad_v.astype(v_GSH.dtype), grad_rows, None


def _add_term_gradients(static, places, grad_rows, grad_logits, grad_scores, i, j):
    """Adds a tile to the gradients of slopes and of the keys' biases."""
    if grad_rows.slopes_G is not None:
        back = _token_distances(static, places, i, j, grad_logits)
        slopes_G = grad_rows.slopes_G - jnp.sum(grad_logits * back, (1, 2))
        grad_rows = grad_rows._replace(slopes_G=slopes_G)
    if grad_rows.key_bias_GS is not None:
        bias_GS = _accumulate_tile(static, grad_rows.key_bias_GS, jnp.sum(grad_scores, 1), j, 1)
        grad_rows = grad_rows._replace(key_bias_GS=bias_GS)
    return grad_rows


_attend_tiles.defvjp(_forward, _backward)
