"""Softmax cross-entropy, with z-loss and label smoothing."""

import sys
from typing import Annotated

import jax
import jax.numpy as jnp

from modules.kernels.cross_entropy.reference import terms
from modules.losses.base import label_logits, logits_loss, loss_row
from modules.options import Option
from modules.statistics import at_least_float32


@loss_row(convex=True, has_kernels=True)
@logits_loss
def cross_entropy(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    *,
    z_loss: Annotated[
        float, Option('weight of log_z^2, per token', 0, sys.float_info.max, traced=True)
    ] = 1e-4,
    label_smoothing: Annotated[
        float, Option('share of the target that is uniform', 0, 1, traced=True)
    ] = 0.0,
) -> dict[str, jax.Array]:
    """objective = (1 - s) ce + s mean_v(log_z - z_v) + z_loss log_z^2, with ce = log_z - z_label.

    s is label_smoothing and log_z = log sum_v exp(z_v), in float32 at least; the terms are nats a
    token. Sources: label smoothing arXiv:1512.00567, section 7; z-loss, which holds the normaliser
    near 1, arXiv:2204.02311, section 5.
    """
    logits_MV = at_least_float32(logits_MV)
    log_z_M = jax.nn.logsumexp(logits_MV, axis=-1)
    statistics = log_z_M, label_logits(logits_MV, labels_M), jnp.mean(logits_MV, axis=-1)
    return terms(statistics, z_loss, label_smoothing)
