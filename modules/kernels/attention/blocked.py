"""Attention by tiles. The backward pass keeps only arrays that grow linearly with T."""

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

# The queries in a tile, over all heads of all rows, and the bounds of its side. Of the sides 128,
# 256, 512 and 1,024, these were fastest on two CPU cores (forward and backward, heads of 64
# features): 512 for 4 heads and 4,096 tokens, 256 for 8 and 2,048, 128 for 16 and 1,024, 32 and
# 512, and 64 and 256. tests/bench/RESULTS.md has times and memory.
TILE_QUERIES, MIN_TILE, MAX_TILE = 2048, 128, 512
MAX_UNROLLED_TILES = 2  # tiles of queries that need no loop


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """Static sizes: queries are in `tiles` tiles of `side` tokens, keys in `key_tiles`."""

    scores: Scores
    side: int
    tiles: int
    key_tiles: int


class LogitTerms(NamedTuple):
    """Terms of the logits besides q k, for G rows (one head of one sequence each).

    They are as in `reference`, in float32 at least; None if unused.
    """

    sinks_G: jax.Array | None
    slopes_G: jax.Array | None
    key_bias_GS: jax.Array | None


class KeyLabels(NamedTuple):
    """The document and the prefix of each key of G rows; None if unused.

    first_tile: the tile of keys at which the queries begin; None: they begin at the first.
    """

    segments_GS: jax.Array | None
    prefix_GS: jax.Array | None
    first_tile: jax.Array | None

    def key_tile(self, i: Any) -> Any:
        """Returns the tile of keys with the same tokens as tile i of queries."""
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
    """Attention in tiles of queries and keys (arXiv:2112.05682, arXiv:2205.14135).

    Computes the same as `reference`. Tiles of keys after the queries, or before their window, are
    skipped. With prefixes no tile is skipped, since their places are unknown at compile time. The
    softmax over the tiles of a row uses a running maximum and sum. The backward pass keeps the
    output and the log-sum-exp of each row, as in FlashAttention, and recomputes the probabilities.
    There is no forward-mode derivative.

    If heads are sharded, each device computes its heads. If tokens are sharded, each device has its
    queries and gathers all keys and values; their gradients are scattered.

    Args:
      q_BNTH: queries.
      k_BKSH: keys, S = T; K divides N.
      v_BKSH: values.
      scores: which terms the scores have.
      segments_BT: the number of each token's segment; None: a single segment.
      sinks_N: a logit of each head that stands for no token.
      slopes_N: the decrease of a head's logits per token of distance.
      key_bias_BKS: added to all logits of a key.
      prefix_BT: the number of each token's prefix, 0 outside of prefixes.

    Returns:
      [B, N, T, H] in the type of v.
    """
    n_heads, head_shards, token_shards = (
        q_BNTH.shape[1],
        count_axis_shards('N'),
        count_axis_shards('T'),
    )
    if k_BKSH.shape[1] % head_shards:
        k_BKSH, v_BKSH = (repeat_kv_heads(x, n_heads) for x in (k_BKSH, v_BKSH))
        key_bias_BKS = None if key_bias_BKS is None else repeat_kv_heads(key_bias_BKS, n_heads)
    is_sharded = token_shards > 1 and q_BNTH.shape[2] % token_shards == 0
    compute = functools.partial(_attend_on_device, scores, 'context' if is_sharded else None)
    arrays = (q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, slopes_N, key_bias_BKS, prefix_BT)
    if head_shards * token_shards == 1:
        return compute(*arrays)
    return map_shards(compute, arrays, ('BNT', 'BKT', 'BKT', 'B', 'N', 'N', 'BKT', 'B'), 'BNT')


def _attend_on_device(scores, axis_name, q_BNTH, k_BKSH, v_BKSH, segments_BT, *arrays):
    """Computes `blocked_attention`; axis_name: the mesh axis that shards tokens, or None."""
    sinks_N, slopes_N, key_bias_BKS, prefix_BT = arrays
    batch, n_heads, length, head_dim = q_BNTH.shape
    first_tile, n_shards = None, 1
    if axis_name is not None:
        n_shards = jax.lax.axis_size(axis_name)
        k_BKSH, v_BKSH, key_bias_BKS = jax.tree.map(
            functools.partial(gather_tokens, axis_name=axis_name), (k_BKSH, v_BKSH, key_bias_BKS)
        )
    grid = select_tiles(scores, batch * n_heads, length, n_shards)
    if axis_name is not None:
        first_tile = jax.lax.axis_index(axis_name) * grid.tiles
    n_padding = grid.side * grid.tiles - length  # padding after the last token, which no token sees

    def flatten_heads(x_BNT_):  # a single batch axis, which XLA:CPU computes faster
        x_BNT_ = jnp.pad(x_BNT_, [(0, n_padding if i == 2 else 0) for i in range(x_BNT_.ndim)])
        return x_BNT_.reshape(-1, *x_BNT_.shape[2:])

    def repeat_rows(x_N):
        if x_N is None:
            return None
        return jnp.broadcast_to(
            x_N.astype(accumulator_dtype(q_BNTH))[None], (batch, n_heads)
        ).reshape(-1)

    def repeat_labels(label_BT):
        if label_BT is None:
            return None
        # -1: padding is a document apart, and in no prefix, whose numbers are above 0.
        label_BT = jnp.pad(label_BT, ((0, 0), (0, n_padding)), constant_values=-1)
        return jnp.repeat(label_BT, n_heads, axis=0)

    q_GTH = flatten_heads(q_BNTH * scores.compute_scale(head_dim))
    k_GSH, v_GSH = (flatten_heads(repeat_kv_heads(x, n_heads)) for x in (k_BKSH, v_BKSH))
    key_bias_GS = None
    if key_bias_BKS is not None:
        key_bias_GS = flatten_heads(
            repeat_kv_heads(key_bias_BKS, n_heads).astype(accumulator_dtype(q_BNTH))
        )
    labels = KeyLabels(repeat_labels(segments_BT), repeat_labels(prefix_BT), first_tile)
    terms = LogitTerms(repeat_rows(sinks_N), repeat_rows(slopes_N), key_bias_GS)
    out_GTH = _attend_tiles(grid, q_GTH, k_GSH, v_GSH, terms, labels)
    return out_GTH[:, :length].reshape(q_BNTH.shape)


def select_tiles(scores: Scores, n_rows: int, length: int, parts: int = 1) -> TileGrid:
    """Selects the fewest tiles within the bounds above, no larger than necessary.

    Args:
      scores: stored in the result.
      n_rows: G, heads of all sequences.
      length: tokens of the queries.
      parts: `length` is one of this many equal parts of the keys; tiles then divide it.
    """
    max_side = 2 ** math.floor(math.log2(max(1.0, TILE_QUERIES / n_rows)))
    max_side = min(MAX_TILE, max(MIN_TILE, max_side))
    tiles = math.ceil(length / max_side)
    if parts > 1:  # the queries of each part must start with a tile of keys
        while length % tiles:
            tiles += 1
    side = math.ceil(length / tiles)
    if tiles > 1 and parts == 1:
        side = math.ceil(side / 8) * 8
    return TileGrid(scores, side, tiles, tiles * parts)


def _loop(start: Any, stop: Any, body: Callable, carry: Any) -> Any:
    """Loops like fori_loop, but in Python if both bounds are Python integers."""
    if isinstance(start, int) and isinstance(stop, int):
        for i in range(start, stop):
            carry = body(i, carry)
        return carry
    return jax.lax.fori_loop(start, stop, body, carry)


def _loop_query_tiles(grid: TileGrid, body: Callable, carry: Any) -> Any:
    """Loops over the tiles of queries, carry = body(i, carry)."""
    loop = _loop if grid.tiles <= MAX_UNROLLED_TILES else jax.lax.fori_loop
    return loop(0, grid.tiles, body, carry)


def _loop_key_tiles(grid: TileGrid, has_segments: bool, i: Any, body: Callable, carry: Any) -> Any:
    """Loops over the tiles of keys that tile i of queries sees, carry = body(j, carry, is_masked).

    Tile i comes last: it has a visible key for each query, so the running maximum becomes finite,
    and the sums of entirely masked tiles before it are scaled by exp(MASKED - maximum) = 0.
    """
    first, window = 0, grid.scores.window
    if grid.scores.prefix:
        # All tiles, all masked: a prefix may begin and end anywhere, also behind the queries.
        carry = _loop(0, i, lambda j, carry: body(j, carry, True), carry)
        carry = _loop(i + 1, grid.key_tiles, lambda j, carry: body(j, carry, True), carry)
        return body(i, carry, True)
    if window is not None:
        first = (i * grid.side - window + 1) // grid.side
        first = max(first, 0) if isinstance(i, int) else jnp.maximum(first, 0)
    # Only the diagonal tile needs a mask, unless segments or a window hide earlier keys too.
    is_masked = has_segments or window is not None
    carry = _loop(first, i, lambda j, carry: body(j, carry, is_masked), carry)
    return body(i, carry, True)


def _slice_tile(grid: TileGrid, x: jax.Array, i: Any, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i * grid.side, grid.side, axis)


def _write_tile(grid: TileGrid, x: jax.Array, tile: jax.Array, i: Any, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, tile.astype(x.dtype), i * grid.side, axis)


def _accumulate_tile(grid: TileGrid, x: jax.Array, tile: jax.Array, i: Any, axis: int) -> jax.Array:
    return _write_tile(grid, x, _slice_tile(grid, x, i, axis) + tile, i, axis)


def _batched_matmul(
    a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, dtype: Any = None
) -> jax.Array:
    """Multiplies matrices, batched over axis 0."""
    dimensions = (((axis_a,), (axis_b,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def _broadcast_rows(x_G: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcasts a number per row to the shape of a tile [G, T, S]."""
    return jnp.broadcast_to(x_G[:, None, None], like.shape)


def _token_distances(
    grid: TileGrid, labels: KeyLabels, i: Any, j: Any, like: jax.Array
) -> jax.Array:
    """Returns how far keys of tile j are before queries of tile i, [G, T, S].

    Within a prefix this is the absolute distance.
    """
    position = jnp.arange(grid.side, dtype=jnp.int32)
    distance_TS = (i - j) * grid.side + position[:, None] - position[None]
    distance = jnp.broadcast_to(distance_TS[None], like.shape)
    if labels.prefix_GS is not None:
        query_prefix, key_prefix = (_slice_tile(grid, labels.prefix_GS, tile) for tile in (i, j))
        distance = jnp.where(in_same_prefix(query_prefix, key_prefix), jnp.abs(distance), distance)
    return distance


def _tile_logits(grid, terms, labels, q, k, i, j, is_masked):
    """Returns (logits of a tile, float32 at least; their derivative by q k, None if it is 1)."""
    logits = _batched_matmul(q, k, 2, 2, accumulator_dtype(q))
    slope, softcap = None, grid.scores.softcap
    if terms.key_bias_GS is not None:
        bias = _slice_tile(grid, terms.key_bias_GS, j)[:, None]
        logits = logits + jnp.broadcast_to(bias, logits.shape)
    if softcap:
        bounded = jnp.tanh(logits / softcap)
        logits, slope = softcap * bounded, 1 - jnp.square(bounded)
    distance = _token_distances(grid, labels, i, j, logits)
    if terms.slopes_G is not None:
        logits = logits - _broadcast_rows(terms.slopes_G, logits) * distance
    if is_masked:
        visible = is_visible(distance, grid.scores.window)
        if labels.segments_GS is not None:
            query_segment, key_segment = (
                _slice_tile(grid, labels.segments_GS, tile) for tile in (i, j)
            )
            visible = visible & (query_segment[:, :, None] == key_segment[:, None])
        logits = jnp.where(visible, logits, MASKED)
    return logits, slope


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_tiles(grid, q_GTH, k_GSH, v_GSH, terms, labels):
    return _forward(grid, q_GTH, k_GSH, v_GSH, terms, labels)[0]


def _forward(grid, q_GTH, k_GSH, v_GSH, terms, labels):
    n_rows, dtype = len(q_GTH), accumulator_dtype(q_GTH)
    shape = (n_rows, grid.side, q_GTH.shape[2])

    def attend_query_tile(tile, accumulators):
        q, i = _slice_tile(grid, q_GTH, tile), labels.key_tile(tile)

        def attend_key_tile(j, carry, is_masked):
            largest, total, mixed = carry
            k, v = _slice_tile(grid, k_GSH, j), _slice_tile(grid, v_GSH, j)
            logits, _ = _tile_logits(grid, terms, labels, q, k, i, j, is_masked)
            maximum = jnp.maximum(largest, logits.max(-1, keepdims=True))
            weights, scale = jnp.exp(logits - maximum), jnp.exp(largest - maximum)
            total = total * scale + weights.sum(-1, keepdims=True)
            mixed = mixed * scale + _batched_matmul(weights.astype(v.dtype), v, 2, 1, dtype)
            return maximum, total, mixed

        sinks = terms.sinks_G
        largest = jnp.full((*shape[:2], 1), MASKED, dtype)
        if sinks is not None:
            largest = _broadcast_rows(sinks, largest)
        # A sink is a first term: exp(sink - maximum) = 1 in the sum, and 0 in the values.
        total = jnp.full(largest.shape, float(sinks is not None), dtype)
        carry = largest, total, jnp.zeros(shape, dtype)
        has_segments = labels.segments_GS is not None
        largest, total, mixed = _loop_key_tiles(grid, has_segments, i, attend_key_tile, carry)
        out_GTH, log_sum_GT1 = accumulators
        log_total = largest + jnp.log(total)
        return _write_tile(grid, out_GTH, mixed / total, tile), _write_tile(
            grid, log_sum_GT1, log_total, tile
        )

    accumulators = jnp.zeros(q_GTH.shape, v_GSH.dtype), jnp.zeros((*q_GTH.shape[:2], 1), dtype)
    accumulators = _loop_query_tiles(grid, attend_query_tile, accumulators)
    out_GTH, log_sum_GT1 = checkpoint_name(accumulators, ATTENTION_OUTPUT)
    return out_GTH, (q_GTH, k_GSH, v_GSH, terms, labels, out_GTH, log_sum_GT1)


def _backward(grid, residuals, grad_GTH):
    """Computes dS = P * (dP - rowsum(dO * O)); each tile adds to its queries, keys and values.

    Sums over queries are products [H, T] by [T, S]. The small q and dO are transposed in advance,
    because XLA:CPU multiplies by a transposed left side at half the speed.
    """
    q_GTH, k_GSH, v_GSH, terms, labels, out_GTH, log_sum_GT1 = residuals
    dtype, has_segments = accumulator_dtype(q_GTH), labels.segments_GS is not None
    # Both are cast before they are multiplied: a bfloat16 product would round each term.
    products_GTH = at_least_float32(grad_GTH) * at_least_float32(out_GTH)
    correction_GT1 = jnp.sum(products_GTH, -1, keepdims=True)
    q_GHT, grad_GHT = jnp.swapaxes(q_GTH, 1, 2), jnp.swapaxes(grad_GTH, 1, 2)

    def add_query_tile(tile, accumulators):
        q, grad, log_sum, correction = (
            _slice_tile(grid, x, tile) for x in (q_GTH, grad_GTH, log_sum_GT1, correction_GT1)
        )
        q_HT, grad_HT = _slice_tile(grid, q_GHT, tile, 2), _slice_tile(grid, grad_GHT, tile, 2)
        i = labels.key_tile(tile)

        def add_key_tile(j, carry, is_masked):
            grad_q, grad_k, grad_v, grad_terms = carry
            k, v = _slice_tile(grid, k_GSH, j), _slice_tile(grid, v_GSH, j)
            logits, slope = _tile_logits(grid, terms, labels, q, k, i, j, is_masked)
            probs = jnp.exp(logits - log_sum)
            grad_logits = probs * (_batched_matmul(grad, v, 2, 2, dtype) - correction)
            grad_scores = grad_logits if slope is None else slope * grad_logits
            grad_terms = _add_term_gradients(
                grid, labels, grad_terms, grad_logits, grad_scores, i, j
            )
            # Back to the type of the inputs, as in the forward pass; products still accumulate in
            # `dtype`.
            grad_scores, probs = grad_scores.astype(q.dtype), probs.astype(grad.dtype)
            grad_q = grad_q + _batched_matmul(grad_scores, k, 2, 1, dtype)
            grad_k = _accumulate_tile(
                grid, grad_k, _batched_matmul(q_HT, grad_scores, 2, 1, dtype), j, 2
            )
            grad_v = _accumulate_tile(
                grid, grad_v, _batched_matmul(grad_HT, probs, 2, 1, dtype), j, 2
            )
            return grad_q, grad_k, grad_v, grad_terms

        grad_q, *key_accumulators = accumulators
        carry = jnp.zeros(q.shape, dtype), *key_accumulators
        tile_grad_q, *key_accumulators = _loop_key_tiles(grid, has_segments, i, add_key_tile, carry)
        return _write_tile(grid, grad_q, tile_grad_q, tile), *key_accumulators

    zeros = jnp.zeros(jnp.swapaxes(k_GSH, 1, 2).shape, dtype)
    grad_terms = jax.tree.map(jnp.zeros_like, terms)
    accumulators = jnp.zeros(q_GTH.shape, q_GTH.dtype), zeros, zeros, grad_terms
    grad_q, grad_k, grad_v, grad_terms = _loop_query_tiles(grid, add_query_tile, accumulators)
    if terms.sinks_G is not None:
        sink_probs_GT1 = jnp.exp(_broadcast_rows(terms.sinks_G, log_sum_GT1) - log_sum_GT1)
        # A sink has no value, so its dP is 0: d sink = P (0 - rowsum(dO * O)).
        grad_terms = grad_terms._replace(sinks_G=-jnp.sum(sink_probs_GT1 * correction_GT1, (1, 2)))
    grad_k, grad_v = jnp.swapaxes(grad_k, 1, 2), jnp.swapaxes(grad_v, 1, 2)
    return grad_q, grad_k.astype(k_GSH.dtype), grad_v.astype(v_GSH.dtype), grad_terms, None


def _add_term_gradients(grid, labels, grad_terms, grad_logits, grad_scores, i, j):
    """Adds a tile to the gradients of slopes and key biases."""
    # Slopes are added after the cap and key biases before it: hence the gradient of the logits for
    # slopes, and of the scores before the cap for biases.
    if grad_terms.slopes_G is not None:
        distance = _token_distances(grid, labels, i, j, grad_logits)
        slopes_G = grad_terms.slopes_G - jnp.sum(grad_logits * distance, (1, 2))
        grad_terms = grad_terms._replace(slopes_G=slopes_G)
    if grad_terms.key_bias_GS is not None:
        bias_GS = _accumulate_tile(grid, grad_terms.key_bias_GS, jnp.sum(grad_scores, 1), j, 1)
        grad_terms = grad_terms._replace(key_bias_GS=bias_GS)
    return grad_terms


_attend_tiles.defvjp(_forward, _backward)
