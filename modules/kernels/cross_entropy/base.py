"""Softmax cross-entropy in plain operations, the specification, and what its kernels share.

The state of some columns of a row is (exponent, mantissa, label's logit, sum, count), with
sum_v exp(z_v) = mantissa * e^exponent. States of blocks add up by one rule.
"""

import jax
import jax.numpy as jnp

from modules.statistics import at_least_float32

NAME = 'kernels.cross_entropy=pallas'
STATE = 5  # numbers a row
COEFFICIENTS = 6  # numbers a row that the backward pass is given

Statistics = tuple[jax.Array, jax.Array, jax.Array]


def statistics(logits_MV: jax.Array, labels_M: jax.Array) -> Statistics:
    """Returns (log_z, label_logit, mean_logit), [M] each, in float32 at least.

    log_z = log sum_v exp(z_v), label_logit = z_label, and mean_logit = mean_v z_v.

    A logit of -inf is not part of its row: it has no gradient, and the mean is over the others, so
    that labels are smoothed over what the model may choose. A row of nothing else has statistics
    and a gradient of zero. A label that is no column has a label_logit of 0.
    """
    logits_MV = at_least_float32(logits_MV)
    present_MV = logits_MV != -jnp.inf  # a NaN is
    some_M = jnp.any(present_MV, -1)
    most_M = jnp.max(logits_MV, -1, initial=jnp.finfo(logits_MV.dtype).min)
    most_M = jax.lax.stop_gradient(most_M)
    sum_M = jnp.sum(jnp.exp(logits_MV - most_M[:, None]), -1)
    log_z_M = most_M + jnp.log(jnp.where(some_M, sum_M, 1.0))  # the gradient of log(0) is NaN
    is_label_MV = jnp.arange(logits_MV.shape[-1])[None] == labels_M[:, None]
    picked_MV = jnp.where(is_label_MV, jnp.where(present_MV, logits_MV, -jnp.inf), 0.0)
    label_logit_M = jnp.sum(picked_MV, -1)
    total_M = jnp.sum(jnp.where(present_MV, logits_MV, 0.0), -1)
    mean_logit_M = total_M / jnp.maximum(jnp.sum(present_MV, -1), 1)
    return jnp.where(some_M, log_z_M, 0.0), jnp.where(some_M, label_logit_M, 0.0), mean_logit_M


def loss_terms(
    row_statistics: Statistics, z_loss: jax.Array | float, label_smoothing: jax.Array | float
) -> dict[str, jax.Array]:
    """Returns {'objective', 'ce', 'z_loss'} [M] of the statistics, in nats a token.

    objective = (1 - s) ce + s (log_z - mean_logit) + z_loss log_z^2, with ce = log_z - label_logit
    and s = label_smoothing.
    """
    log_z_M, label_logit_M, mean_logit_M = row_statistics
    ce_M = log_z_M - label_logit_M
    uniform_M = log_z_M - mean_logit_M
    z_M = jnp.square(log_z_M)
    objective_M = (1 - label_smoothing) * ce_M + label_smoothing * uniform_M + z_loss * z_M
    return {'objective': objective_M, 'ce': ce_M, 'z_loss': z_M}


def cross_entropy(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    z_loss: jax.Array | float,
    label_smoothing: jax.Array | float,
) -> dict[str, jax.Array]:
    """Returns `terms` of `statistics`."""
    return loss_terms(statistics(logits_MV, labels_M), z_loss, label_smoothing)


def logit_gradient(x, column, label, grad_log_z, grad_label, grad_entry, high, low):
    """Returns of_log_z p_v + of_label [v = label] + of_each, with p_v = exp(x_v - high - low)."""
    x32 = x.astype(jnp.float32)
    gradient = grad_log_z * jnp.exp((x32 - high) - low) + grad_entry
    gradient = gradient + jnp.where(column == label, grad_label, 0.0)
    return jnp.where(x32 != -jnp.inf, gradient, 0.0).astype(x.dtype)
