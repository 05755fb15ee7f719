"""Softmax in plain operations, the specification, and what its kernels share."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from modules.kernels.common.exponentials import ONLINE, TWO_PASS
from modules.statistics import at_least_float32

NAME = 'kernels.softmax=pallas'
FORMS = {'online': ONLINE, 'two_pass': TWO_PASS}  # of sums over a row
SUMS = ('exponent', 'mantissa')  # of rows, that the forward pass saves


@dataclasses.dataclass(frozen=True)
class SoftmaxOptions:
    """Static options of a call."""

    softcap: float
    form: str
    platform: str


def capped_logits(
    x: jax.Array, masks: Sequence[jax.Array | None], softcap: float, tanh: Callable
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (z, dz / dx) of entries in a kernel; None for a slope of 1.

    z = softcap tanh(x / softcap) where softcap is not 0, else x; -inf where one of `seen` is False.
    """
    masks, slope = [part for part in masks if part is not None], None
    masks = functools.reduce(jnp.logical_and, masks) if masks else None
    if masks is not None:
        x = jnp.where(masks, x, 0.0)
    if softcap:
        bounded = tanh(x, softcap)
        x, slope = softcap * bounded, 1 - bounded * bounded
    return x if masks is None else jnp.where(masks, x, -jnp.inf), slope


def reference(
    x: jax.Array,
    mask: jax.Array | None = None,
    sink: jax.Array | None = None,
    *,
    softcap: float = 0.0,
) -> jax.Array:
    """Returns p = exp(z) / (sum exp(z) + exp(sink)) over the last axis, computed in at least
    float32.

    z = softcap tanh(x / softcap) where softcap is not 0, else x. mask: a boolean array that
    broadcasts to x, True where it may be seen; the sums are over that, and p is 0 elsewhere, and in
    all of a row of which nothing is seen. sink broadcasts to x.shape[:-1]: one more logit, for
    which nothing is written. Sources: softcap arXiv:2408.00118, section 2; sinks arXiv:2508.10925.
    """
    z, seen = at_least_float32(x), None if mask is None else jnp.broadcast_to(mask, x.shape)
    if seen is not None:
        z = jnp.where(seen, z, 0.0)  # hidden entries may be anything, and have no gradient
    if softcap:
        z = softcap * jnp.tanh(z / softcap)
    if seen is not None:
        z = jnp.where(seen, z, -jnp.inf)
    top = jnp.max(z, -1, keepdims=True)
    if sink is not None:
        sink = jnp.broadcast_to(sink, x.shape[:-1])[..., None].astype(z.dtype)
        top = jnp.maximum(top, sink)
    top = jax.lax.stop_gradient(top)
    top = jnp.where(top == -jnp.inf, 0.0, top)  # -inf less itself is NaN
    terms = jnp.exp(z - top)
    total = jnp.sum(terms, -1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    return (terms / jnp.where(total == 0, 1.0, total)).astype(x.dtype)
