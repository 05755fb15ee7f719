"""Base of losses, losses of logits, cross-entropy, and terms that layers add to the objective."""

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.facts import accept_any, row_decorator
from modules.kernels.cross_entropy.base import loss_terms
from modules.options import Option
from modules.parallel.axes import count_axis_shards, shard_activation
from modules.statistics import at_least_float32

FINITE = sys.float_info.max
Sums = dict[str, jax.Array]
Loss = Callable[..., Sums]


def check_no_softcap(recipe: Any, part: Any) -> None:
    """Raises ValueError for a softcap on the logits of a loss that uses sums of logits."""
    if recipe.model.logit_softcap and part.row.linear_readout:
        raise ValueError(
            f'{part} is computed from sums of logits, which a softcap would change. It needs '
            f'model.logit_softcap=0; got {recipe.model.logit_softcap}.'
        )


# linear_readout: uses sums of logits, which a softcap would bend. by_rows: needs whole rows of
# tokens. convex: in the logits. has_kernels: rows of CROSS_ENTROPY_KERNELS also compute it.
loss_row = row_decorator(
    linear_readout=False, by_rows=False, convex=False, has_kernels=False, check=check_no_softcap
)
auxiliary_row = row_decorator(check=accept_any)


def logits_loss(per_token: Callable[..., Sums]) -> Loss:
    """Makes a loss from a function of logits. The loss computes the logits of all tokens at once.

    Args:
      per_token: maps `(logits [M, V], labels [M], **numbers)` to {term: [M]}.

    Returns:
      `loss(x [..., D], readout, labels [...], weights [...], **numbers)` -> {term: sum over tokens
      of weight * term}.
    """

    @loss_row()
    @functools.wraps(per_token)
    def loss(x, readout: Callable[[Any], jax.Array], labels, weights, **numbers) -> Sums:
        logits = shard_activation(readout(x), {1: 'MV', 2: 'BTV'}[labels.ndim])
        compute = functools.partial(per_token, **numbers)
        if count_axis_shards('T') > 1 and labels.ndim == 2:  # XLA cannot shard B and T as one axis
            return sum_weighted(jax.vmap(compute)(logits, labels), weights)
        flat = compute(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        return sum_weighted(flat, weights)

    return loss


def sum_weighted(terms: Sums, weights: jax.Array) -> Sums:
    """Sums weight * term over tokens, for each term by name."""
    return {name: jnp.sum(weights * term.reshape(weights.shape)) for name, term in terms.items()}


def add_error_probability(loss: Loss) -> Loss:
    """Adds the sum `error_probability` of 1 - p, p the label's probability, without a gradient.

    It recomputes the logits of the loss; XLA computes equal products once.

    Args:
      loss: a row of `LOSSES`.

    Returns:
      A loss of the same arguments, with one more sum.
    """

    @functools.wraps(loss)
    def loss_with_error(x, readout, labels, weights, **numbers) -> Sums:
        constant_x, constant_readout = jax.lax.stop_gradient((x, readout))
        logits = constant_readout(constant_x)
        ce_M = cross_entropies(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        sums = loss(x, readout, labels, weights, **numbers)
        return sums | {'error_probability': -jnp.sum(weights.reshape(-1) * jnp.expm1(-ce_M))}

    return loss_with_error


def label_logits(logits_MV: jax.Array, labels_M: jax.Array) -> jax.Array:
    """Returns the logit of each label, [M].

    It is selected by comparison, not by indexing: its gradient then fuses with the gradient of a
    softmax instead of scattering into an [M, V] array.
    """
    is_label_MV = jnp.arange(logits_MV.shape[-1])[None] == labels_M[:, None]
    return jnp.sum(jnp.where(is_label_MV, logits_MV, 0.0), axis=-1)


def cross_entropies(logits_MV: jax.Array, labels_M: jax.Array) -> jax.Array:
    """Returns -log softmax(z)_label in nats, [M], float32 at least."""
    logits_MV = at_least_float32(logits_MV)
    return jax.nn.logsumexp(logits_MV, axis=-1) - label_logits(logits_MV, labels_M)


@loss_row(convex=True, has_kernels=True)
@logits_loss
def cross_entropy(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    *,
    z_loss: Annotated[
        float, Option('weight of log_z^2 in the loss of a token', 0, FINITE, traced=True)
    ] = 1e-4,
    label_smoothing: Annotated[
        float, Option('share of the target spread evenly over the vocabulary', 0, 1, traced=True)
    ] = 0.0,
) -> dict[str, jax.Array]:
    """Cross-entropy, label smoothing, z-loss: `objective = (1 - s) ce + s mean_v(log Z - z_v) + c
    (log Z)^2`.

    `ce = log Z - z_label with Z = sum_v exp(z_v)`

    `s` is `label_smoothing` (arXiv:1512.00567, section 7). `c` is `z_loss`, which holds the
    normaliser `Z` near 1 (arXiv:2204.02311, section 5). Computed in float32 or wider.
    """
    logits_MV = at_least_float32(logits_MV)
    log_z_M = jax.nn.logsumexp(logits_MV, axis=-1)
    statistics = log_z_M, label_logits(logits_MV, labels_M), jnp.mean(logits_MV, axis=-1)
    return loss_terms(statistics, z_loss, label_smoothing)


@auxiliary_row()
def balance_loss(
    sown: jax.Array,
    *,
    balance_loss: Annotated[
        float, Option('weight of the loss that balances experts', 0, FINITE, traced=True)
    ] = 0.01,
) -> jax.Array:
    """balance_loss * sown: how unevenly experts are chosen, summed over layers
    (`modules.experts.MoE`; arXiv:2101.03961, equation 4).
    """
    return balance_loss * sown


@auxiliary_row()
def router_z_loss(
    sown: jax.Array,
    *,
    router_z_loss: Annotated[
        float, Option('weight of the loss on the logits of routers', 0, FINITE, traced=True)
    ] = 0.001,
) -> jax.Array:
    """router_z_loss * sown: mean squares of log sum_e exp(logit_e), summed over layers
    (`modules.experts.MoE`; arXiv:2202.08906, equation 5).
    """
    return router_z_loss * sown
