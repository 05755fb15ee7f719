"""`reference` tile by tile, of which the backward pass keeps what grows with T alone."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from modules.kernels.attention.reference import sees
from modules.kernels.attention.scores import MASKED, Scores, exact, share_heads
from modules.statistics import at_least_float32

# Logits of all heads in one tile, and the bounds of its side. Of the sides tried on two CPU cores,
# forward and backward, H = 64, those of 512 were fastest for 4 heads and 4,096 tokens, of 256 for
# 16 and 1,024, of 128 for 64 and 256. tests/bench/RESULTS.md has times and memory.
TILE_LOGITS, LEAST, MOST = 2**20, 128, 512
UNROLLED = 2  # tiles a side: so few are no loop of the program


@dataclasses.dataclass(frozen=True)
class Static:
    """What a program is compiled for: queries and keys are in `tiles` tiles of `side` tokens."""

    scores: Scores
    side: int
    tiles: int


class Rows(NamedTuple):
    """What logits need besides q and k, of G rows (a head of a sequence each); None where unused.

    As in `reference`, of float32 at least.
    """

    sinks_G: jax.Array | None
    slopes_G: jax.Array | None
    key_bias_GS: jax.Array | None


def blocked(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    slopes_N: jax.Array | None = None,
    key_bias_BKS: jax.Array | None = None,
) -> jax.Array:
    """As `reference`, tile by tile of queries and keys (arXiv:2112.05682, arXiv:2205.14135).

    Tiles of keys after the queries, or before their window, are left out. Softmax over the tiles of
    a row has a running maximum and sum. Kept for the backward pass are the output and the
    log-sum-exp of each row, as in FlashAttention; the probabilities are computed again. The custom
    backward pass rules out forward-mode differentiation; `reference` has that.
    """
    batch, n_heads, length, head_dim = q_BNTH.shape
    static = tiles_for(scores, batch * n_heads, length)
    extra = static.side * static.tiles - length  # tokens behind all others, which none of them see

    def flat(x_BNT_, axis=2):  # XLA:CPU likes one batch axis
        widths = [(0, extra if i == axis else 0) for i in range(x_BNT_.ndim)]
        x_BNT_ = jnp.pad(x_BNT_, widths)
        return x_BNT_.reshape(-1, *x_BNT_.shape[2:])

    def of_rows(x_N):
        if x_N is None:
            return None
        return jnp.broadcast_to(x_N.astype(exact(q_BNTH))[None], (batch, n_heads)).reshape(-1)

    q_GTH = flat(q_BNTH * scores.scale_of(head_dim))
    k_GSH, v_GSH = (flat(share_heads(x, n_heads)) for x in (k_BKSH, v_BKSH))
    key_bias_GS, segments_GT = None, None
    if key_bias_BKS is not None:
        key_bias_GS = flat(share_heads(key_bias_BKS, n_heads).astype(exact(q_BNTH)))
    if segments_BT is not None:
        segments_BT = jnp.pad(segments_BT, ((0, 0), (0, extra)), constant_values=-1)
        segments_GT = jnp.repeat(segments_BT, n_heads, axis=0)
    rows = Rows(of_rows(sinks_N), of_rows(slopes_N), key_bias_GS)
    out_GTH = _tiled(static, q_GTH, k_GSH, v_GSH, rows, segments_GT)
    return out_GTH[:, :length].reshape(q_BNTH.shape)


def tiles_for(scores: Scores, rows: int, length: int) -> Static:
    """As few as the bounds above allow, and no larger than they have to be."""
    most = 2 ** math.floor(math.log2(max(1.0, math.sqrt(TILE_LOGITS / rows))))
    most = min(MOST, max(LEAST, most))
    tiles = math.ceil(length / most)
    side = math.ceil(length / tiles)
    if tiles > 1:
        side = math.ceil(side / 8) * 8
    return Static(scores, side, tiles)


def _over(start: Any, stop: Any, body: Callable, carry: Any) -> Any:
    """fori_loop; of numbers that are no tracers, in Python."""
    if isinstance(start, int) and isinstance(stop, int):
        for i in range(start, stop):
            carry = body(i, carry)
        return carry
    return jax.lax.fori_loop(start, stop, body, carry)


def _over_tiles(static: Static, body: Callable, carry: Any) -> Any:
    """`body(i, carry)` for each tile of queries."""
    if static.tiles <= UNROLLED:
        return _over(0, static.tiles, body, carry)
    return jax.lax.fori_loop(0, static.tiles, body, carry)


class Span(NamedTuple):
    """`size` tokens from `start` on."""

    start: Any
    size: int


def _over_keys(static: Static, has_segments: bool, i: Any, body: Callable, of_tile: Any) -> tuple:
    """What tile i of queries holds and shares, after all keys that it sees.

    of_tile = (fixed, own, shared): arrays of the tile's tokens on axis 1, the same ones for all
    keys and those that each tile of keys changes; and a tree that is of no tile of queries.
    `body(queries, keys, is_masked, fixed, own, shared)` gives the last two anew. The tile's own
    keys come last, so that the running maximum of each row is one of tokens that it sees, and
    in two parts, so that the first half of the queries does without the second half of the keys.
    """
    (fixed, own, shared), side, window = of_tile, static.side, static.scores.window
    first, always, tile = 0, has_segments or window is not None, Span(i * side, side)
    if window is not None:
        first = (tile.start - window + 1) // side
        first = max(first, 0) if isinstance(i, int) else jnp.maximum(first, 0)

    def before(j, carry):
        return body(tile, Span(j * side, side), always, fixed, *carry)

    own, shared = _over(first, i, before, (own, shared))
    half = side // 2
    if not half:
        return body(tile, tile, True, fixed, own, shared)
    upper = Span(tile.start, half)
    lower = Span(tile.start + half, side - half)
    halves = []
    for queries, keys, part in ((upper, upper, slice(half)), (lower, tile, slice(half, None))):
        of_part = jax.tree.map(lambda x, part=part: x[:, part], (fixed, own))
        changed, shared = body(queries, keys, True, *of_part, shared)
        halves.append(changed)
    return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *halves), shared


def _cut(x: jax.Array | None, span: Span, axis: int = 1) -> jax.Array | None:
    if x is None:
        return None
    return jax.lax.dynamic_slice_in_dim(x, *span, axis)


def _put(x: jax.Array, part: jax.Array, span: Span, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), span.start, axis)


def _add(x: jax.Array, part: jax.Array, span: Span, axis: int) -> jax.Array:
    return _put(x, _cut(x, span, axis) + part, span, axis)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, dtype: Any = None) -> jax.Array:
    """Batched over axis 0."""
    dimensions = (((axis_a,), (axis_b,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def _along(x_G: jax.Array, logits: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x_G[:, None, None], logits.shape)


def _back(queries: Span, keys: Span, like: jax.Array) -> jax.Array:
    """[G, T, S]: how many tokens each key is before each query."""
    at_T, at_S = (jnp.arange(span.size, dtype=jnp.int32) for span in (queries, keys))
    back_TS = queries.start - keys.start + at_T[:, None] - at_S[None]
    return jnp.broadcast_to(back_TS[None], like.shape)


def _logits(static, rows, segments_GT, q, k, queries, keys, is_masked):
    """(logits of a tile, float32 at least; their slope in q k, None where that is 1)."""
    logits, slope, softcap = _dot(q, k, 2, 2, exact(q)), None, static.scores.softcap
    if rows.key_bias_GS is not None:
        bias = _cut(rows.key_bias_GS, keys)[:, None]
        logits = logits + jnp.broadcast_to(bias, logits.shape)
    if softcap:
        bent = jnp.tanh(logits / softcap)
        logits, slope = softcap * bent, 1 - jnp.square(bent)
    back = _back(queries, keys, logits)
    if rows.slopes_G is not None:
        logits = logits - _along(rows.slopes_G, logits) * back
    if is_masked:
        seen = sees(back, static.scores.window)
        if segments_GT is not None:
            own, other = (_cut(segments_GT, span) for span in (queries, keys))
            seen = seen & (own[:, :, None] == other[:, None])
        logits = jnp.where(seen, logits, MASKED)
    return logits, slope


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(static, q_GTH, k_GSH, v_GSH, rows, segments_GT):
    return _forward(static, q_GTH, k_GSH, v_GSH, rows, segments_GT)[0]


def _forward(static, q_GTH, k_GSH, v_GSH, rows, segments_GT):
    count, dtype = len(q_GTH), exact(q_GTH)
    shape = (count, static.side, q_GTH.shape[2])

    def of_keys(queries, keys, is_masked, q, own, shared):
        largest, total, mixed = own
        k, v = _cut(k_GSH, keys), _cut(v_GSH, keys)
        logits, _ = _logits(static, rows, segments_GT, q, k, queries, keys, is_masked)
        new = jnp.maximum(largest, logits.max(-1, keepdims=True))
        weights, kept = jnp.exp(logits - new), jnp.exp(largest - new)
        total = total * kept + weights.sum(-1, keepdims=True)
        mixed = mixed * kept + _dot(weights.astype(v.dtype), v, 2, 1, dtype)
        return (new, total, mixed), shared

    def of_queries(i, results):
        tile, sinks = Span(i * static.side, static.side), rows.sinks_G
        largest = jnp.full((*shape[:2], 1), MASKED, dtype)
        if sinks is not None:
            largest = _along(sinks, largest)
        own = largest, jnp.full(largest.shape, float(sinks is not None), dtype)
        of_tile = _cut(q_GTH, tile), (*own, jnp.zeros(shape, dtype)), ()
        (largest, total, mixed), _ = _over_keys(
            static, segments_GT is not None, i, of_keys, of_tile
        )
        out, log_sum = results
        return _put(out, mixed / total, tile), _put(log_sum, largest + jnp.log(total), tile)

    results = jnp.zeros(q_GTH.shape, v_GSH.dtype), jnp.zeros((*q_GTH.shape[:2], 1), dtype)
    out_GTH, log_sum_GT1 = _over_tiles(static, of_queries, results)
    return out_GTH, (q_GTH, k_GSH, v_GSH, rows, segments_GT, out_GTH, log_sum_GT1)


def _backward(static, residuals, grad_GTH):
    """dS = P * (dP - rowsum(dO * O)); each tile adds to its queries and to its keys and values.

    The sums over queries are rows of a product, [H, T] by [T, S]: XLA:CPU multiplies by a
    transposed left side at half its rate, and those on the left are small.
    """
    q_GTH, k_GSH, v_GSH, rows, segments_GT, out_GTH, log_sum_GT1 = residuals
    dtype = exact(q_GTH)
    correction_GT1 = jnp.sum(at_least_float32(grad_GTH * out_GTH), -1, keepdims=True)

    def of_keys(queries, keys, is_masked, fixed, grad_q, shared):
        (q, grad, log_sum, correction), (grad_k, grad_v, grad_rows) = fixed, shared
        k, v = _cut(k_GSH, keys), _cut(v_GSH, keys)
        logits, slope = _logits(static, rows, segments_GT, q, k, queries, keys, is_masked)
        probs = jnp.exp(logits - log_sum)
        grad_logits = probs * (_dot(grad, v, 2, 2, dtype) - correction)
        grad_scores = grad_logits if slope is None else slope * grad_logits
        grad_rows = _of_rows(grad_rows, grad_logits, grad_scores, queries, keys)
        grad_scores, probs = grad_scores.astype(q.dtype), probs.astype(grad.dtype)
        q_GHT, grad_GHT = jnp.swapaxes(q, 1, 2), jnp.swapaxes(grad, 1, 2)
        grad_q = grad_q + _dot(grad_scores, k, 2, 1, dtype)
        grad_k = _add(grad_k, _dot(q_GHT, grad_scores, 2, 1, dtype), keys, 2)
        grad_v = _add(grad_v, _dot(grad_GHT, probs, 2, 1, dtype), keys, 2)
        return grad_q, (grad_k, grad_v, grad_rows)

    def of_queries(i, results):
        (grad_q, *shared), tile = results, Span(i * static.side, static.side)
        fixed = tuple(_cut(x, tile) for x in (q_GTH, grad_GTH, log_sum_GT1, correction_GT1))
        of_tile = fixed, jnp.zeros(fixed[0].shape, dtype), tuple(shared)
        own, shared = _over_keys(static, segments_GT is not None, i, of_keys, of_tile)
        return _put(grad_q, own, tile), *shared

    zeros = jnp.zeros((len(q_GTH), q_GTH.shape[2], q_GTH.shape[1]), dtype)
    grad_rows = jax.tree.map(jnp.zeros_like, rows)
    results = jnp.zeros(q_GTH.shape, q_GTH.dtype), zeros, zeros, grad_rows
    grad_q, grad_k, grad_v, grad_rows = _over_tiles(static, of_queries, results)
    if rows.sinks_G is not None:
        shares = jnp.exp(_along(rows.sinks_G, log_sum_GT1) - log_sum_GT1)
        grad_rows = grad_rows._replace(sinks_G=-jnp.sum(shares * correction_GT1, (1, 2)))
    grad_k, grad_v = jnp.swapaxes(grad_k, 1, 2), jnp.swapaxes(grad_v, 1, 2)
    return grad_q, grad_k.astype(k_GSH.dtype), grad_v.astype(v_GSH.dtype), grad_rows, None


def _of_rows(grad_rows, grad_logits, grad_scores, queries, keys):
    """What a tile adds to the gradients of slopes and of the keys' biases."""
    if grad_rows.slopes_G is not None:
        back = _back(queries, keys, grad_logits)
        slopes_G = grad_rows.slopes_G - jnp.sum(grad_logits * back, (1, 2))
        grad_rows = grad_rows._replace(slopes_G=slopes_G)
    if grad_rows.key_bias_GS is not None:
        bias_GS = _add(grad_rows.key_bias_GS, jnp.sum(grad_scores, 1), keys, 1)
        grad_rows = grad_rows._replace(key_bias_GS=bias_GS)
    return grad_rows


_tiled.defvjp(_forward, _backward)
