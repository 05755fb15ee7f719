"""`reference` by blocks of queries that skip the keys after them; serves `scale` alone."""

import functools

import jax
import jax.numpy as jnp

from modules.kernels.attention.scores import MASKED, Scores, exact, share_heads
from modules.statistics import at_least_float32


def blocked(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """softmax(scale q k^T) v, of which the backward pass keeps what grows with T alone.

    Only the output and the log-sum-exp of each row are kept; the probabilities are computed again
    (FlashAttention, arXiv:2205.14135, without its tiling of keys). The custom backward pass rules
    out forward-mode differentiation; `reference` has that.
    """
    batch, n_heads, length, head_dim = q_BNTH.shape
    flat = (batch * n_heads, length, head_dim)  # XLA:CPU likes one batch axis
    q_GTH = (q_BNTH * scores.scale_of(head_dim)).reshape(flat)
    k_GSH = share_heads(k_BKSH, n_heads).reshape(flat)
    v_GSH = share_heads(v_BKSH, n_heads).reshape(flat)
    segments_GT = None if segments_BT is None else jnp.repeat(segments_BT, n_heads, axis=0)
    return _blocked(q_GTH, k_GSH, v_GSH, segments_GT).reshape(q_BNTH.shape)


def _block_size(length: int) -> int:
    """Two to four blocks a sequence; a smaller one than 128 costs more in calls than it saves."""
    for blocks in (4, 3, 2):
        if length % blocks == 0 and length // blocks >= 128:
            return length // blocks
    return length


def _logits(q_GTH, k_GSH, segments_GT, start, stop):
    """Logits, float32 at least, of queries start:stop to keys :stop."""
    q, k = q_GTH[:, start:stop], k_GSH[:, :stop]
    logits = _dot(q, k, 2, 2, exact(q))
    seen = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)[None]
    seen = jnp.broadcast_to(seen[None], logits.shape)
    if segments_GT is not None:
        seen = seen & (segments_GT[:, start:stop, None] == segments_GT[:, None, :stop])
    return jnp.where(seen, logits, MASKED)


def _dot(a, b, contract_a, contract_b, dtype=None):
    """Batched over axis 0."""
    dimensions = (((contract_a,), (contract_b,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp)
def _blocked(q_GTH, k_GSH, v_GSH, segments_GT):
    return _blocked_fwd(q_GTH, k_GSH, v_GSH, segments_GT)[0]


def _blocked_fwd(q_GTH, k_GSH, v_GSH, segments_GT):
    length = q_GTH.shape[1]
    step = _block_size(length)
    outputs, log_sums = [], []
    for start in range(0, length, step):
        stop = start + step
        logits = _logits(q_GTH, k_GSH, segments_GT, start, stop)
        largest = logits.max(-1, keepdims=True)
        weights = jnp.exp(logits - largest)
        total = weights.sum(-1, keepdims=True)
        mixed = _dot(weights.astype(v_GSH.dtype), v_GSH[:, :stop], 2, 1, exact(v_GSH))
        outputs.append(mixed / total)
        log_sums.append(largest + jnp.log(total))
    out_GTH = jnp.concatenate(outputs, axis=1).astype(v_GSH.dtype)
    return out_GTH, (q_GTH, k_GSH, v_GSH, segments_GT, out_GTH, jnp.concatenate(log_sums, axis=1))


def _blocked_bwd(residuals, grad_GTH):
    """dS = P * (dP - rowsum(dO * O)); each block adds to the keys and values it saw."""
    q_GTH, k_GSH, v_GSH, segments_GT, out_GTH, log_sum_GT1 = residuals
    length, dtype = q_GTH.shape[1], q_GTH.dtype
    step = _block_size(length)
    correction = jnp.sum(at_least_float32(grad_GTH * out_GTH), -1, keepdims=True)
    grad_q, grads_k, grads_v = [], [], []
    for start in range(0, length, step):
        stop = start + step
        rows = slice(start, stop)
        logits = _logits(q_GTH, k_GSH, segments_GT, start, stop)
        probs = jnp.exp(logits - log_sum_GT1[:, rows])
        grad_probs = _dot(grad_GTH[:, rows], v_GSH[:, :stop], 2, 2, exact(v_GSH))
        grad_logits = (probs * (grad_probs - correction[:, rows])).astype(dtype)
        grad_q.append(_dot(grad_logits, k_GSH[:, :stop], 2, 1, dtype))
        grads_k.append(_sum_over_rows(grad_logits, q_GTH[:, rows]))
        grads_v.append(_sum_over_rows(probs.astype(dtype), grad_GTH[:, rows]))
    grad_k, grad_v = _add_prefixes(grads_k, step), _add_prefixes(grads_v, step)
    return jnp.concatenate(grad_q, axis=1), grad_k, grad_v, None


_blocked.defvjp(_blocked_fwd, _blocked_bwd)


def _sum_over_rows(a_GTS, b_GTH):
    """einsum('gts,gth->gsh'), written as a row-major product of a transposed b.

    XLA:CPU runs the direct form, whose left side is transposed, at a quarter of its matmul rate;
    the barriers keep it from folding the transpositions, of the small operands, back into the
    product.
    """
    keep = jax.lax.optimization_barrier
    b_GHT = keep(jnp.swapaxes(b_GTH, 1, 2))
    return jnp.swapaxes(keep(_dot(b_GHT, a_GTS, 2, 1, b_GTH.dtype)), 1, 2)


def _add_prefixes(parts, step):
    """The sum of arrays that cover the first step, 2 * step, ... rows, without padding any."""
    rows = []
    for block in range(len(parts)):
        own = slice(block * step, (block + 1) * step)
        rows.append(sum(part[:, own] for part in parts[block:]))
    return jnp.concatenate(rows, axis=1)
