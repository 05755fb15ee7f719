"""Softmax whose exponential is its Taylor polynomial."""

import jax
import jax.numpy as jnp

from modules.losses.base import cross_entropies, label_logits, logits_loss
from modules.statistics import at_least_float32


@logits_loss
def taylor_softmax(logits_MV: jax.Array, labels_M: jax.Array) -> dict[str, jax.Array]:
    """objective = -log (t(z_label) / sum_v t(z_v)) with t(z) = 1 + z + z^2 / 2, never below 1/2.

    A member of the spherical family, whose losses depend on sum_v z_v, sum_v z_v^2 and z_label
    alone. `ce` is that of the usual softmax of the same logits, which generation draws from; it is
    not what is trained. Source: arXiv:1511.05042, section 3.
    """
    logits_MV = at_least_float32(logits_MV)

    def polynomial(z):
        return 0.5 * (jnp.square(z + 1) + 1)

    total_M = jnp.sum(polynomial(logits_MV), -1)
    objective_M = jnp.log(total_M) - jnp.log(polynomial(label_logits(logits_MV, labels_M)))
    return {'objective': objective_M, 'ce': cross_entropies(logits_MV, labels_M)}
