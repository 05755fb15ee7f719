"""Softmax cross-entropy as Pallas kernels, and the table of its kernels.

Least bytes for M rows of V logits of b bytes: MVb forward and 2MVb backward, plus some numbers per
row. The kernels compute three statistics per row. A loss is plain operations on these, so its
weights are not part of a kernel.
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from modules.kernels.common.exponentials import ONLINE
from modules.kernels.common.rows import PALLAS, Kernel, check_types, merge_runs
from modules.kernels.cross_entropy import base
from modules.kernels.cross_entropy.base import COEFFICIENTS, NAME, STATE, Statistics
from modules.parallel.kernel_calls import map_shards


def kernels_on(platform: str) -> ModuleType:
    """Imports `forward_rows` and, on TPUs, `backward_rows`, for rows on a single device."""
    if platform == 'tpu':
        from modules.kernels.cross_entropy import tpu as kernels
    else:
        from modules.kernels.cross_entropy import gpu as kernels
    return kernels


def statistics(logits_MV: jax.Array, labels_M: jax.Array, *, platform: str) -> Statistics:
    """Returns (log_z, label_logit, mean_logit), [M] float32, as `base.statistics` does.

    The forward pass reads the logits once. The backward pass reads them once more and writes their
    gradient once: in a kernel on TPUs, as compiled by XLA on GPUs.

    Args:
      logits_MV: logits of each row.
      labels_M: the column of each row's label.
      platform: 'tpu' or 'gpu'.

    Raises:
      ValueError: for types other than bfloat16 and float32.
    """
    # Labels that are no column become -1, which matches no column of a block, padding included.
    is_column_M = (labels_M >= 0) & (labels_M < logits_MV.shape[-1])
    return _statistics(logits_MV, jnp.where(is_column_M, labels_M, -1), platform)


def cross_entropy(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    z_loss: jax.Array | float,
    label_smoothing: jax.Array | float,
    *,
    platform: str,
) -> dict[str, jax.Array]:
    """Cross-entropy by Pallas kernels, which read the logits once forward and once backward.

    Computes the same as `reference`. On TPUs the gradient overwrites the logits if nothing else
    reads them.

    Args:
      logits_MV: logits of each row.
      labels_M: the column of each row's label.
      z_loss: the weight of `(log Z)^2`.
      label_smoothing: the weight of the uniform distribution.
      platform: 'tpu' or 'gpu'.

    Returns:
      {'objective', 'ce', 'z_loss'}, [M] each, in nats per token.
    """
    row_statistics = statistics(logits_MV, labels_M, platform=platform)
    return base.loss_terms(row_statistics, z_loss, label_smoothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _statistics(logits_MV, labels_M, platform):
    return _forward(logits_MV, labels_M, platform)[0]


def _forward(logits_MV, labels_M, platform):
    check_types(NAME, logits_MV)
    compute = merge_runs(kernels_on(platform).forward_rows)
    state = map_shards(compute, (logits_MV, labels_M), 'MM', tuple('M' * STATE))
    exponent_M, mantissa_M, label_logit_M, total_M, count_M = state
    high_M, low_M = ONLINE.log((exponent_M, mantissa_M))
    has_logits_M = count_M > 0
    count_M = jnp.maximum(count_M, 1.0)
    log_z_M, label_logit_M = (
        jnp.where(has_logits_M, value_M, 0.0) for value_M in (high_M + low_M, label_logit_M)
    )
    # log_z in two parts: for logits near 10^4, a single float32 would be off by 10^-3, and the
    # probabilities with it.
    saved = logits_MV, labels_M, high_M, low_M, count_M
    return (log_z_M, label_logit_M, total_M / count_M), saved


def _backward(platform, residuals, cotangents):
    logits_MV, labels_M, high_M, low_M, count_M = residuals
    grad_log_z_M, grad_label_M, grad_mean_M = cotangents
    numbers = (labels_M, grad_log_z_M, grad_label_M, grad_mean_M / count_M, high_M, low_M)
    if platform != 'tpu':
        column_1V = jnp.arange(logits_MV.shape[1])[None]
        numbers = (number_M[:, None] for number_M in numbers)
        return base.logit_gradient(logits_MV, column_1V, *numbers), None
    compute = merge_runs(kernels_on(platform).backward_rows)
    return map_shards(compute, (logits_MV, *numbers), 'M' * (1 + COEFFICIENTS), 'M'), None


_statistics.defvjp(_forward, _backward)


# (logits [M, V], labels [M], z_loss, label_smoothing) -> {'objective', 'ce', 'z_loss'}, [M] each
CROSS_ENTROPY_KERNELS = {
    'reference': Kernel(base.cross_entropy, is_plain=True),
    'pallas': Kernel(cross_entropy, PALLAS, is_forward_mode=False, default_platforms=('gpu',)),
}
