"""Softmax in plain operations: what the kernels are held against."""

import jax
import jax.numpy as jnp

from modules.statistics import at_least_float32


def seen_of(
    shape: tuple[int, ...],
    mask: jax.Array | None = None,
    causal: bool = False,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array | None:
    """Which of the entries [..., T, S] may be seen, broadcastable to `shape`; None: all of them.

    mask: a boolean array that broadcasts to them. causal: query t sees keys s <= t + S - T.
    segments: ids of queries [..., T] and of keys [..., S], of which equal ones see each other.
    """
    parts = [] if mask is None else [mask]
    if causal:
        ones_TS = jnp.ones(shape[-2:], bool)
        parts.append(jnp.tril(ones_TS, shape[-1] - shape[-2]))
    if segments is not None:
        queries, keys = segments
        whole = jnp.broadcast_shapes((*queries.shape, 1), (*keys.shape[:-1], 1, keys.shape[-1]))
        parts.append(
            jnp.broadcast_to(queries[..., None], whole)
            == jnp.broadcast_to(keys[..., None, :], whole)
        )
    if not parts:
        return None
    seen = jnp.broadcast_to(parts[0], shape)
    for part in parts[1:]:
        seen = seen & jnp.broadcast_to(part, shape)
    return seen


def reference(
    x: jax.Array,
    mask: jax.Array | None = None,
    sink: jax.Array | None = None,
    *,
    causal: bool = False,
    segments: tuple[jax.Array, jax.Array] | None = None,
    softcap: float = 0.0,
) -> jax.Array:
    """p = exp(z) / (sum exp(z) + exp(sink)) over the last axis, float32 at least up to p.

    z = softcap tanh(x / softcap) where softcap is not 0, else x. The sums are over what `seen_of`
    says is seen; p is 0 elsewhere, and in all of a row of which nothing is seen. sink broadcasts to
    x.shape[:-1]: one more logit, for which nothing is written. Sources: softcap arXiv:2408.00118,
    section 2; sinks arXiv:2508.10925.
    """
    z, seen = at_least_float32(x), seen_of(x.shape, mask, causal, segments)
    if seen is not None:
        z = jnp.where(seen, z, 0.0)  # what is hidden may be anything, and has no gradient
    if softcap:
        z = softcap * jnp.tanh(z / softcap)
    if seen is not None:
        z = jnp.where(seen, z, -jnp.inf)
    top = jnp.max(z, -1, keepdims=True)
    if sink is not None:
        sink = jnp.broadcast_to(sink, x.shape[:-1])[..., None].astype(z.dtype)
        top = jnp.maximum(top, sink)
    top = _finite(jax.lax.stop_gradient(top))
    terms = jnp.exp(z - top)
    total = jnp.sum(terms, -1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    return (terms / jnp.where(total == 0, 1.0, total)).astype(x.dtype)


def logsumexp(x: jax.Array) -> jax.Array:
    """log sum exp(x) over the last axis, float32 at least; -inf, and no gradient, where all of a
    row is.
    """
    x = at_least_float32(x)
    top = _finite(jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True)))
    total = jnp.sum(jnp.exp(x - top), -1)
    log = jnp.log(jnp.where(total == 0, 1.0, total)) + top[..., 0]
    return jnp.where(total == 0, -jnp.inf, log)


def _finite(top: jax.Array) -> jax.Array:
    """0 where nothing was seen: -inf less itself is NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)
