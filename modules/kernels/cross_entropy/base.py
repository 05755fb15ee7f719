"""Softmax cross-entropy in plain operations, the reference, and helpers that its kernels share.

The state of some columns of a row is (exponent, mantissa, label's logit, sum, count), with sum_v
exp(z_v) = mantissa * e^exponent. The states of disjoint columns are added.
"""

import jax
import jax.numpy as jnp

from modules.statistics import at_least_float32

NAME = 'kernels.cross_entropy=pallas'
STATE = 5  # numbers per row
COEFFICIENTS = 6  # numbers per row that the backward pass receives

Statistics = tuple[jax.Array, jax.Array, jax.Array]


def statistics(logits_MV: jax.Array, labels_M: jax.Array) -> Statistics:
    """Returns (log_z, label_logit, mean_logit), [M] each, in float32 at least.

    log_z = log sum_v exp(z_v), label_logit = z_label, and mean_logit = mean_v z_v.

    A logit of -inf is not part of its row: it has no gradient, and the mean excludes it, so that
    labels are smoothed over the columns that the model may choose. A row of only -inf has zero
    statistics and a zero gradient. A label that is no column has a label_logit of 0.
    """
    logits_MV = at_least_float32(logits_MV)
    present_MV = logits_MV != -jnp.inf  # True for NaN, which must reach the loss
    has_logits_M = jnp.any(present_MV, -1)
    # `initial` keeps the maximum finite in a row of only -inf: -inf minus -inf is NaN.
    max_M = jnp.max(logits_MV, -1, initial=jnp.finfo(logits_MV.dtype).min)
    # The maximum cancels in log_z, so that its gradient is 0 and need not be computed.
    max_M = jax.lax.stop_gradient(max_M)
    sum_M = jnp.sum(jnp.exp(logits_MV - max_M[:, None]), -1)
    log_z_M = max_M + jnp.log(jnp.where(has_logits_M, sum_M, 1.0))  # the gradient of log(0) is NaN
    # Compared rather than indexed: a label that is no column then matches none.
    is_label_MV = jnp.arange(logits_MV.shape[-1])[None] == labels_M[:, None]
    label_logits_MV = jnp.where(is_label_MV, jnp.where(present_MV, logits_MV, -jnp.inf), 0.0)
    label_logit_M = jnp.sum(label_logits_MV, -1)
    total_M = jnp.sum(jnp.where(present_MV, logits_MV, 0.0), -1)
    mean_logit_M = total_M / jnp.maximum(jnp.sum(present_MV, -1), 1)
    return (
        jnp.where(has_logits_M, log_z_M, 0.0),
        jnp.where(has_logits_M, label_logit_M, 0.0),
        mean_logit_M,
    )


def loss_terms(
    row_statistics: Statistics, z_loss: jax.Array | float, label_smoothing: jax.Array | float
) -> dict[str, jax.Array]:
    """Returns {'objective', 'ce', 'z_loss'}, [M] each, in nats per token.

    objective = (1 - s) ce + s (log_z - mean_logit) + z_loss log_z^2, with ce = log_z - label_logit
    and s = label_smoothing.

    Args:
      row_statistics: (log_z, label_logit, mean_logit), [M] each.
      z_loss: the weight of log_z^2.
      label_smoothing: the weight of the uniform distribution.
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
    """Cross-entropy in plain operations; `loss.name=cross_entropy` has the equation.

    Args:
      logits_MV: logits of each row; -inf: not part of the row.
      labels_M: the column of each row's label.
      z_loss: the weight of `(log Z)^2`.
      label_smoothing: the weight of the uniform distribution.

    Returns:
      {'objective', 'ce', 'z_loss'}, [M] each, in nats per token.
    """
    return loss_terms(statistics(logits_MV, labels_M), z_loss, label_smoothing)


def logit_gradient(
    x: jax.Array,
    column: jax.Array,
    label: jax.Array,
    grad_log_z: jax.Array,
    grad_label: jax.Array,
    grad_entry: jax.Array,
    high: jax.Array,
    low: jax.Array,
) -> jax.Array:
    """Returns grad_log_z p_v + grad_label [v = label] + grad_entry, with p_v = exp(x_v - log_z).

    Args:
      x: logits.
      column: the column of each entry.
      label: the column of each row's label.
      grad_log_z: the gradient by log_z of each row.
      grad_label: the gradient by the label's logit of each row.
      grad_entry: a gradient that all present entries of a row share.
      high: the large part of log_z.
      low: the small part of log_z.

    Returns:
      The gradient in the type of x, 0 where x is -inf.
    """
    x32 = x.astype(jnp.float32)
    # In this order: high + low would round to one float32, with an error of 10^-3 near 10^4.
    gradient = grad_log_z * jnp.exp((x32 - high) - low) + grad_entry
    gradient = gradient + jnp.where(column == label, grad_label, 0.0)
    return jnp.where(x32 != -jnp.inf, gradient, 0.0).astype(x.dtype)
