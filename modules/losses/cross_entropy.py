"""Softmax cross-entropy, with what the z-loss and label smoothing need."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenLoss(NamedTuple):
    """Per token, [M] float32, in nats. objective: what is minimised (before the z-loss term);
    ce: -log p(label), what is reported; log_z: log-sum-exp of the logits.
    """

    objective: jax.Array
    ce: jax.Array
    log_z: jax.Array


def cross_entropy(
    logits_MV: jax.Array, labels_M: jax.Array, label_smoothing: jax.Array | float
) -> TokenLoss:
    """ce = log sum_v exp(z_v) - z_label; objective = (1 - s) ce + s mean_v(log_z - z_v).

    The label's logit is picked by comparison, not by indexing: its gradient then fuses with the
    softmax's instead of scattering into an [M, V] array. `label_smoothing` s may be a tracer.
    Sources: label smoothing arXiv:1512.00567, section 7; z-loss arXiv:2204.02311, section 5.
    """
    logits_MV = logits_MV.astype(jnp.float32)
    log_z_M = jax.nn.logsumexp(logits_MV, axis=-1)
    is_label_MV = jnp.arange(logits_MV.shape[-1])[None] == labels_M[:, None]
    label_logit_M = jnp.sum(jnp.where(is_label_MV, logits_MV, 0.0), axis=-1)
    ce_M = log_z_M - label_logit_M
    uniform_M = log_z_M - jnp.mean(logits_MV, axis=-1)
    return TokenLoss((1 - label_smoothing) * ce_M + label_smoothing * uniform_M, ce_M, log_z_M)


def z_loss(log_z_M: jax.Array) -> jax.Array:
    """log_z^2 per token: holds the softmax's normaliser near 1 (arXiv:2204.02311, section 5)."""
    return jnp.square(log_z_M)
