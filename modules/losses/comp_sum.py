"""Losses of single probabilities: the comp-sum family, the focal loss, the dice loss."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.losses.base import cross_entropies, logits_loss
from modules.options import Option
from modules.statistics import at_least_float32

Tau = Annotated[
    float,
    Option(
        '1: cross-entropy; 2: mean absolute error; below 1: hard tokens count more',
        0,
        10,
        traced=True,
    ),
]


@logits_loss
def comp_sum(logits_MV: jax.Array, labels_M: jax.Array, *, tau: Tau = 1.0) -> dict[str, jax.Array]:
    """objective = (1 - p^(tau - 1)) / (tau - 1), ce where tau = 1; p is the label's probability.

    Its gradient is p^(tau - 1) times that of the cross-entropy. tau = 0 is 1 / p - 1 (the sum of
    exponentials), 1 < tau < 2 the generalised cross-entropy of arXiv:1805.07836 with q = tau - 1,
    and tau = 2 half of the mean absolute error, 1 - p, which hardly trains from a start where p is
    1 / V. Below 1 a token of which (1 - tau) ce is beyond 88 nats is beyond float32, and its run
    then diverges. Source: arXiv:2304.07288, equation 2.
    """
    ce_M = cross_entropies(logits_MV, labels_M)
    return {'objective': of_cross_entropy(ce_M, tau), 'ce': ce_M}


def of_cross_entropy(ce_M: jax.Array, tau: Any) -> jax.Array:
    """(1 - p^(tau - 1)) / (tau - 1) of ce = -log p, exact near tau = 1 too."""
    power_M = (1 - tau) * ce_M  # of e: p^(tau - 1)
    some_M = power_M != 0
    safe_M = jnp.where(some_M, power_M, 1.0)
    return ce_M * jnp.where(some_M, jnp.expm1(safe_M) / safe_M, 1.0)


@logits_loss
def focal(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    *,
    gamma: Annotated[float, Option('how much less sure tokens count', 0, 100, traced=True)] = 2.0,
) -> dict[str, jax.Array]:
    """objective = (1 - p)^gamma ce, with p the label's probability (arXiv:1708.02002, equation 4).

    Without that paper's weights of classes.
    """
    ce_M = cross_entropies(logits_MV, labels_M)
    wrong_M = -jnp.expm1(-ce_M)  # 1 - p
    some_M = wrong_M > 0
    share_M = jnp.where(some_M, jnp.exp(gamma * jnp.log(jnp.where(some_M, wrong_M, 1.0))), 0.0)
    return {'objective': share_M * ce_M, 'ce': ce_M}


@logits_loss
def dice(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    *,
    dice_alpha: Annotated[
        float, Option('how much less sure tokens count; 0: not', 0, 10, traced=True)
    ] = 0.0,
    dice_smooth: Annotated[
        float, Option('added above and below the fraction', 1e-6, 1e6, traced=True)
    ] = 1.0,
) -> dict[str, jax.Array]:
    """objective = sum_v 1 - (2 q_v y_v + g) / (q_v + y_v + g) with q = (1 - p)^alpha p.

    y is 1 for the label and 0 for the other words, g = dice_smooth: of each token on its own, as
    the paper has it. The authors' code sums the fraction's two sides over a batch instead, with g =
    1e-4, which summed over a vocabulary token by token would be mostly of words that are not meant:
    g = 1 is our choice. With alpha above 0 the least is where p is below 1, about 1/2 at alpha = 1.
    Source: arXiv:1911.02855, equation 11.
    """
    log_p_MV = jax.nn.log_softmax(at_least_float32(logits_MV))
    p_MV = jnp.exp(log_p_MV)
    wrong_MV = jnp.maximum(1 - p_MV, 1e-7)
    q_MV = jnp.exp(dice_alpha * jnp.log(wrong_MV)) * p_MV
    y_MV = (jnp.arange(q_MV.shape[-1])[None] == labels_M[:, None]).astype(q_MV.dtype)
    share_MV = (2 * q_MV * y_MV + dice_smooth) / (q_MV + y_MV + dice_smooth)
    return {'objective': jnp.sum(1 - share_MV, -1), 'ce': cross_entropies(logits_MV, labels_M)}
