"""Softmax in plain operations, the reference, and helpers that its kernels share."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from modules.kernels.common.exponentials import ONLINE, TWO_PASS
from modules.statistics import at_least_float32

NAME = 'kernels.softmax=pallas'
FORMS = {'online': ONLINE, 'two_pass': TWO_PASS}  # of sums over a row
SUMS = ('exponent', 'mantissa')  # of each row, which the forward pass saves


@dataclasses.dataclass(frozen=True)
class SoftmaxOptions:
    """Static options of a call."""

    softcap: float
    form: str
    platform: str


def capped_logits(
    x: jax.Array, masks: Sequence[jax.Array | None], softcap: float, tanh: Callable
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (z, dz / dx) of entries in a kernel; dz / dx is None if it is 1.

    z = softcap tanh(x / softcap) if softcap is not 0, else x; -inf where any of `masks` is False.

    Args:
      x: entries.
      masks: boolean arrays like x; None: all True.
      softcap: the bound of the logits; 0: none.
      tanh: computes tanh(x / softcap) from x and softcap.
    """
    present, slope = [mask for mask in masks if mask is not None], None
    visible = functools.reduce(jnp.logical_and, present) if present else None
    if visible is not None:
        x = jnp.where(visible, x, 0.0)
    if softcap:
        bounded = tanh(x, softcap)
        x, slope = softcap * bounded, 1 - bounded * bounded
    return x if visible is None else jnp.where(visible, x, -jnp.inf), slope


def reference(
    x: jax.Array,
    mask: jax.Array | None = None,
    sink: jax.Array | None = None,
    *,
    softcap: float = 0.0,
) -> jax.Array:
    """Softmax in plain operations, over the last axis: `p_v = exp(z_v) / (sum_v exp(z_v) +
    exp(sink))`.

    With a softcap `c`, `z = c tanh(x / c)`; without, `z = x`. Without a sink, its term is left out.
    Computed in float32 or wider. The sums are over visible entries. `p` is 0 for hidden entries,
    and in all of a row without visible entries. Sources: softcap arXiv:2408.00118, section 2; sinks
    arXiv:2508.10925.

    Args:
      x: [..., V].
      mask: True where x is visible; broadcasts to x. None: everywhere.
      sink: a logit per row without an output; broadcasts to x.shape[:-1].
      softcap: the bound of the logits; 0: none.
    """
    z, visible = at_least_float32(x), None if mask is None else jnp.broadcast_to(mask, x.shape)
    if visible is not None:
        z = jnp.where(visible, z, 0.0)  # hidden entries may be anything, and have no gradient
    if softcap:
        z = softcap * jnp.tanh(z / softcap)
    if visible is not None:
        z = jnp.where(visible, z, -jnp.inf)
    max_logit = jnp.max(z, -1, keepdims=True)
    if sink is not None:
        sink = jnp.broadcast_to(sink, x.shape[:-1])[..., None].astype(z.dtype)
        max_logit = jnp.maximum(max_logit, sink)
    max_logit = jax.lax.stop_gradient(max_logit)
    max_logit = jnp.where(max_logit == -jnp.inf, 0.0, max_logit)  # -inf minus -inf is NaN
    terms = jnp.exp(z - max_logit)
    total = jnp.sum(terms, -1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - max_logit)
    return (terms / jnp.where(total == 0, 1.0, total)).astype(x.dtype)
