"""Attention tile by tile, whose backward pass keeps only arrays that grow with T."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from modules.kernels.attention.base import MASKED, Scores, exact, in_one_prefix, sees, share_heads
from modules.numerics import ATTENDED
from modules.parallel.axes import parts_of
from modules.parallel.kernel_calls import of_all_tokens, over_devices
from modules.statistics import at_least_float32

# Logits of all heads in one tile, and the bounds of its side. Of the sides tried on two CPU cores,
# forward and backward, H = 64, those of 512 were fastest for 4 heads and 4,096 tokens, of 256 for
# 16 and 1,024, of 128 for 64 and 256. tests/bench/RESULTS.md has times and memory.
TILE_LOGITS, LEAST, MOST = 2**20, 128, 512
UNROLLED = 2  # tiles of queries that need no loop


@dataclasses.dataclass(frozen=True)
class Static:
    """Static sizes: queries are in `tiles` tiles of `side` tokens, keys in `key_tiles`."""

    scores: Scores
    side: int
    tiles: int
    key_tiles: int


class RowTerms(NamedTuple):
    """Terms of the logits besides q k, of G rows (a head of a sequence each), as in `reference` and
    float32 at least; None where unused.
    """

    sinks_G: jax.Array | None
    slopes_G: jax.Array | None
    key_bias_GS: jax.Array | None


class Places(NamedTuple):
    """The document and the prefix of each key of G rows, and the tile of keys at which the queries
    begin; None where unused.
    """

    segments_GS: jax.Array | None
    prefix_GS: jax.Array | None
    first: jax.Array | None

    def of_queries(self, i: Any) -> Any:
        """Returns which tile of keys has the same tokens as tile i of queries."""
        return i if self.first is None else self.first + i


def blocked(
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
    n_heads, heads_parts, parts = q_BNTH.shape[1], parts_of('N'), parts_of('T')
    if k_BKSH.shape[1] % heads_parts:
        k_BKSH, v_BKSH = (share_heads(x, n_heads) for x in (k_BKSH, v_BKSH))
        key_bias_BKS = None if key_bias_BKS is None else share_heads(key_bias_BKS, n_heads)
    is_cut = parts > 1 and q_BNTH.shape[2] % parts == 0
    compute = functools.partial(_on_device, scores, 'context' if is_cut else None)
    arrays = (q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, slopes_N, key_bias_BKS, prefix_BT)
    if heads_parts * parts == 1:
        return compute(*arrays)
    return over_devices(compute, arrays, ('BNT', 'BKT', 'BKT', 'B', 'N', 'N', 'BKT', 'B'), 'BNT')


def _on_device(scores, axis_name, q_BNTH, k_BKSH, v_BKSH, segments_BT, *arrays):
    """Computes `blocked`; axis_name: the mesh axis that tokens are cut over, None where none is."""
    sinks_N, slopes_N, key_bias_BKS, prefix_BT = arrays
    batch, n_heads, length, head_dim = q_BNTH.shape
    first, parts = None, 1
    if axis_name is not None:
        parts = jax.lax.axis_size(axis_name)
        k_BKSH, v_BKSH, key_bias_BKS = jax.tree.map(
            functools.partial(of_all_tokens, axis_name=axis_name), (k_BKSH, v_BKSH, key_bias_BKS)
        )
    static = tiles_for(scores, batch * n_heads, length, parts)
    if axis_name is not None:
        first = jax.lax.axis_index(axis_name) * static.tiles
    extra = static.side * static.tiles - length  # padding behind all tokens, which none sees

    def flat(x_BNT_):  # XLA:CPU likes one batch axis
        x_BNT_ = jnp.pad(x_BNT_, [(0, extra if i == 2 else 0) for i in range(x_BNT_.ndim)])
        return x_BNT_.reshape(-1, *x_BNT_.shape[2:])

    def of_rows(x_N):
        if x_N is None:
            return None
        return jnp.broadcast_to(x_N.astype(exact(q_BNTH))[None], (batch, n_heads)).reshape(-1)

    def numbered(number_BT):
        if number_BT is None:
            return None
        number_BT = jnp.pad(number_BT, ((0, 0), (0, extra)), constant_values=-1)
        return jnp.repeat(number_BT, n_heads, axis=0)

    q_GTH = flat(q_BNTH * scores.scale_of(head_dim))
    k_GSH, v_GSH = (flat(share_heads(x, n_heads)) for x in (k_BKSH, v_BKSH))
    key_bias_GS = None
    if key_bias_BKS is not None:
        key_bias_GS = flat(share_heads(key_bias_BKS, n_heads).astype(exact(q_BNTH)))
    places = Places(numbered(segments_BT), numbered(prefix_BT), first)
    rows = RowTerms(of_rows(sinks_N), of_rows(slopes_N), key_bias_GS)
    out_GTH = _tiled(static, q_GTH, k_GSH, v_GSH, rows, places)
    return out_GTH[:, :length].reshape(q_BNTH.shape)


def tiles_for(scores: Scores, rows: int, length: int, parts: int = 1) -> Static:
    """Picks as few tiles as the bounds above allow, and no larger than they have to be; without a
    rest where `length` queries are one of several parts of the keys.
    """
    most = 2 ** math.floor(math.log2(max(1.0, math.sqrt(TILE_LOGITS / rows))))
    most = min(MOST, max(LEAST, most))
    tiles = math.ceil(length / most)
    if parts > 1:
        while length % tiles:
            tiles += 1
    side = math.ceil(length / tiles)
    if tiles > 1 and parts == 1:
        side = math.ceil(side / 8) * 8
    return Static(scores, side, tiles, tiles * parts)


def _over(start: Any, stop: Any, body: Callable, carry: Any) -> Any:
    """Loops as fori_loop does, in Python where both ends are numbers."""
    if isinstance(start, int) and isinstance(stop, int):
        for i in range(start, stop):
            carry = body(i, carry)
        return carry
    return jax.lax.fori_loop(start, stop, body, carry)


def _over_tiles(static: Static, body: Callable, carry: Any) -> Any:
    """Loops over the tiles of queries, carry = body(i, carry)."""
    loop = _over if static.tiles <= UNROLLED else jax.lax.fori_loop
    return loop(0, static.tiles, body, carry)


def _over_keys(static: Static, has_segments: bool, i: Any, body: Callable, carry: Any) -> Any:
    """Loops over the tiles of keys that tile i of queries sees, carry = body(j, carry, is_masked).

    Its own tile is the last, so that the running maximum of each row is one of tokens that it sees.
    """
    first, window = 0, static.scores.window
    if static.scores.prefix:
        carry = _over(0, i, lambda j, carry: body(j, carry, True), carry)
        carry = _over(i + 1, static.key_tiles, lambda j, carry: body(j, carry, True), carry)
        return body(i, carry, True)
    if window is not None:
        first = (i * static.side - window + 1) // static.side
        first = max(first, 0) if isinstance(i, int) else jnp.maximum(first, 0)
    always = has_segments or window is not None
    carry = _over(first, i, lambda j, carry: body(j, carry, always), carry)
    return body(i, carry, True)


def _cut(static: Static, x: jax.Array | None, i: Any, axis: int = 1) -> jax.Array | None:
    if x is None:
        return None
    return jax.lax.dynamic_slice_in_dim(x, i * static.side, static.side, axis)


def _put(static: Static, x: jax.Array, part: jax.Array, i: Any, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), i * static.side, axis)


def _add(static: Static, x: jax.Array, part: jax.Array, i: Any, axis: int) -> jax.Array:
    return _put(static, x, _cut(static, x, i, axis) + part, i, axis)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, dtype: Any = None) -> jax.Array:
    """Multiplies matrices, batched over axis 0."""
    dimensions = (((axis_a,), (axis_b,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


def _along(x_G: jax.Array, logits: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x_G[:, None, None], logits.shape)


def _back(static: Static, places: Places, i: Any, j: Any, like: jax.Array) -> jax.Array:
    """Returns how many tokens keys of tile j are before queries of tile i, [G, T, S]; in one prefix
    how many they are apart.
    """
    place = jnp.arange(static.side, dtype=jnp.int32)
    back_TS = (i - j) * static.side + place[:, None] - place[None]
    back = jnp.broadcast_to(back_TS[None], like.shape)
    if places.prefix_GS is not None:
        own, other = (_cut(static, places.prefix_GS, tile) for tile in (i, j))
        back = jnp.where(in_one_prefix(own, other), jnp.abs(back), back)
    return back


def _logits(static, rows, places, q, k, i, j, is_masked):
    """Returns (logits of a tile, float32 at least; their slope in q k, None where that is 1)."""
    logits, slope, softcap = _dot(q, k, 2, 2, exact(q)), None, static.scores.softcap
    if rows.key_bias_GS is not None:
        bias = _cut(static, rows.key_bias_GS, j)[:, None]
        logits = logits + jnp.broadcast_to(bias, logits.shape)
    if softcap:
        bent = jnp.tanh(logits / softcap)
        logits, slope = softcap * bent, 1 - jnp.square(bent)
    back = _back(static, places, i, j, logits)
    if rows.slopes_G is not None:
        logits = logits - _along(rows.slopes_G, logits) * back
    if is_masked:
        seen = sees(back, static.scores.window)
        if places.segments_GS is not None:
            own, other = (_cut(static, places.segments_GS, tile) for tile in (i, j))
            seen = seen & (own[:, :, None] == other[:, None])
        logits = jnp.where(seen, logits, MASKED)
    return logits, slope


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(static, q_GTH, k_GSH, v_GSH, rows, places):
    return _forward(static, q_GTH, k_GSH, v_GSH, rows, places)[0]


def _forward(static, q_GTH, k_GSH, v_GSH, rows, places):
    count, dtype = len(q_GTH), exact(q_GTH)
    shape = (count, static.side, q_GTH.shape[2])

    def of_queries(own, results):
        q, i = _cut(static, q_GTH, own), places.of_queries(own)

        def of_keys(j, carry, is_masked):
            largest, total, mixed = carry
            k, v = _cut(static, k_GSH, j), _cut(static, v_GSH, j)
            logits, _ = _logits(static, rows, places, q, k, i, j, is_masked)
            new = jnp.maximum(largest, logits.max(-1, keepdims=True))
            weights, kept = jnp.exp(logits - new), jnp.exp(largest - new)
            total = total * kept + weights.sum(-1, keepdims=True)
            mixed = mixed * kept + _dot(weights.astype(v.dtype), v, 2, 1, dtype)
            return new, total, mixed

        sinks = rows.sinks_G
        largest = jnp.full((*shape[:2], 1), MASKED, dtype)
        if sinks is not None:
            largest = _along(sinks, largest)
        total = jnp.full(largest.shape, float(sinks is not None), dtype)
        start = largest, total, jnp.zeros(shape, dtype)
        has_segments = places.segments_GS is not None
        largest, total, mixed = _over_keys(static, has_segments, i, of_keys, start)
        out, log_sum = results
        log_total = largest + jnp.log(total)
        return _put(static, out, mixed / total, own), _put(static, log_sum, log_total, own)

    results = jnp.zeros(q_GTH.shape, v_GSH.dtype), jnp.zeros((*q_GTH.shape[:2], 1), dtype)
    results = _over_tiles(static, of_queries, results)
    out_GTH, log_sum_GT1 = checkpoint_name(results, ATTENDED)
    return out_GTH, (q_GTH, k_GSH, v_GSH, rows, places, out_GTH, log_sum_GT1)


def _backward(static, residuals, grad_GTH):
    """Computes dS = P * (dP - rowsum(dO * O)); each tile adds to its queries, keys and values.

    Sums over queries are products [H, T] by [T, S], with q and dO transposed, which are small:
    XLA:CPU multiplies by a transposed left side at half its rate.
    """
    q_GTH, k_GSH, v_GSH, rows, places, out_GTH, log_sum_GT1 = residuals
    dtype, has_segments = exact(q_GTH), places.segments_GS is not None
    # Both are cast before they are multiplied: a bfloat16 product would round each term.
    products_GTH = at_least_float32(grad_GTH) * at_least_float32(out_GTH)
    correction_GT1 = jnp.sum(products_GTH, -1, keepdims=True)
    q_GHT, grad_GHT = jnp.swapaxes(q_GTH, 1, 2), jnp.swapaxes(grad_GTH, 1, 2)

    def of_queries(own, results):
        q, grad, log_sum, correction = (
            _cut(static, x, own) for x in (q_GTH, grad_GTH, log_sum_GT1, correction_GT1)
        )
        q_HT, grad_HT = _cut(static, q_GHT, own, 2), _cut(static, grad_GHT, own, 2)
        i = places.of_queries(own)

        def of_keys(j, carry, is_masked):
            grad_q, grad_k, grad_v, grad_rows = carry
            k, v = _cut(static, k_GSH, j), _cut(static, v_GSH, j)
            logits, slope = _logits(static, rows, places, q, k, i, j, is_masked)
            probs = jnp.exp(logits - log_sum)
            grad_logits = probs * (_dot(grad, v, 2, 2, dtype) - correction)
            grad_scores = grad_logits if slope is None else slope * grad_logits
            grad_rows = _of_rows(static, places, grad_rows, grad_logits, grad_scores, i, j)
            grad_scores, probs = grad_scores.astype(q.dtype), probs.astype(grad.dtype)
            grad_q = grad_q + _dot(grad_scores, k, 2, 1, dtype)
            grad_k = _add(static, grad_k, _dot(q_HT, grad_scores, 2, 1, dtype), j, 2)
            grad_v = _add(static, grad_v, _dot(grad_HT, probs, 2, 1, dtype), j, 2)
            return grad_q, grad_k, grad_v, grad_rows

        grad_q, *others = results
        start = jnp.zeros(q.shape, dtype)
        found, *others = _over_keys(static, has_segments, i, of_keys, (start, *others))
        return _put(static, grad_q, found, own), *others

    zeros = jnp.zeros(jnp.swapaxes(k_GSH, 1, 2).shape, dtype)
    grad_rows = jax.tree.map(jnp.zeros_like, rows)
    results = jnp.zeros(q_GTH.shape, q_GTH.dtype), zeros, zeros, grad_rows
    grad_q, grad_k, grad_v, grad_rows = _over_tiles(static, of_queries, results)
    if rows.sinks_G is not None:
        shares = jnp.exp(_along(rows.sinks_G, log_sum_GT1) - log_sum_GT1)
        grad_rows = grad_rows._replace(sinks_G=-jnp.sum(shares * correction_GT1, (1, 2)))
    grad_k, grad_v = jnp.swapaxes(grad_k, 1, 2), jnp.swapaxes(grad_v, 1, 2)
    return grad_q, grad_k.astype(k_GSH.dtype), grad_v.astype(v_GSH.dtype), grad_rows, None


def _of_rows(static, places, grad_rows, grad_logits, grad_scores, i, j):
    """Adds a tile to the gradients of slopes and of the keys' biases."""
    if grad_rows.slopes_G is not None:
        back = _back(static, places, i, j, grad_logits)
        slopes_G = grad_rows.slopes_G - jnp.sum(grad_logits * back, (1, 2))
        grad_rows = grad_rows._replace(slopes_G=slopes_G)
    if grad_rows.key_bias_GS is not None:
        bias_GS = _add(static, grad_rows.key_bias_GS, jnp.sum(grad_scores, 1), j, 1)
        grad_rows = grad_rows._replace(key_bias_GS=bias_GS)
    return grad_rows


_tiled.defvjp(_forward, _backward)
