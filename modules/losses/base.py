"""What a loss is, and losses on logits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from modules.devices import parts_of, sharded
from modules.facts import demands_nothing, marks
from modules.statistics import at_least_float32

Sums = dict[str, jax.Array]
Loss = Callable[..., Sums]

# linear_readout: it is computed from sums of logits, which a softcap would bend. by_rows: a row of
# tokens is not cut. convex: in the logits. has_kernels: rows of CROSS_ENTROPY_KERNELS compute it
# too.
loss_row = marks(
    linear_readout=False, by_rows=False, convex=False, has_kernels=False, check=demands_nothing
)


def logits_loss(per_token: Callable[..., Sums]) -> Loss:
    """A loss from one on logits: per_token(logits [M, V], labels [M], **numbers) -> {term: [M]}.

    The result is loss(x [..., D], readout, labels [...], weights [...], **numbers) -> {term: sum
    over tokens of weight * term}. The whole array of logits is made.
    """

    @loss_row()
    @functools.wraps(per_token)
    def loss(x, readout: Callable[[Any], jax.Array], labels, weights, **numbers) -> Sums:
        logits = sharded(readout(x), {1: 'MV', 2: 'BTV'}[labels.ndim])
        compute = functools.partial(per_token, **numbers)
        if parts_of('T') > 1 and labels.ndim == 2:  # B and T could not be cut as one axis
            terms = jax.vmap(compute)(logits, labels)
        else:
            terms = compute(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        return {
            name: jnp.sum(weights * term.reshape(weights.shape)) for name, term in terms.items()
        }

    return loss


def with_error_probability(loss: Loss) -> Loss:
    """The same sums, and `error_probability`: of 1 - p, p the label's probability, which has no
    gradient. The logits are those that the loss makes: XLA computes equal products once.
    """

    @functools.wraps(loss)
    def both(x, readout, labels, weights, **numbers) -> Sums:
        fixed_x, fixed = jax.lax.stop_gradient((x, readout))
        logits = fixed(fixed_x)
        ce_M = cross_entropies(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        sums = loss(x, readout, labels, weights, **numbers)
        return sums | {'error_probability': -jnp.sum(weights.reshape(-1) * jnp.expm1(-ce_M))}

    return both


def label_logits(logits_MV: jax.Array, labels_M: jax.Array) -> jax.Array:
    """[M]: the logit of each label.

    Picked by comparison, not by indexing: its gradient then fuses with that of a softmax instead of
    scattering into an [M, V] array.
    """
    is_label_MV = jnp.arange(logits_MV.shape[-1])[None] == labels_M[:, None]
    return jnp.sum(jnp.where(is_label_MV, logits_MV, 0.0), axis=-1)


def cross_entropies(logits_MV: jax.Array, labels_M: jax.Array) -> jax.Array:
    """[M], float32 at least: -log softmax(z)_label, in nats."""
    logits_MV = at_least_float32(logits_MV)
    return jax.nn.logsumexp(logits_MV, axis=-1) - label_logits(logits_MV, labels_M)
