"""Losses of the label's probability alone: the comp-sum family, and the focal loss."""

from typing import Annotated

import jax
import jax.numpy as jnp

from modules.losses.base import cross_entropies, logits_loss
from modules.options import Option


@logits_loss
def comp_sum(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    *,
    tau: Annotated[
        float,
        Option(
            '1: cross-entropy; 2: mean absolute error; below 1: hard tokens count more',
            0,
            10,
            traced=True,
        ),
    ] = 1.0,
) -> dict[str, jax.Array]:
    """objective = (1 - p^(tau - 1)) / (tau - 1), ce where tau = 1; p is the label's probability.

    Its gradient is p^(tau - 1) times that of the cross-entropy. tau = 0 is 1 / p - 1 (the sum of
    exponentials), 1 < tau < 2 the generalised cross-entropy of arXiv:1805.07836 with q = tau - 1,
    and tau = 2 half of the mean absolute error, 1 - p, which hardly trains from a start where p is
    1 / V. Source: arXiv:2304.07288, equation 2.
    """
    ce_M = cross_entropies(logits_MV, labels_M)
    power_M = (1 - tau) * ce_M  # of e: p^(tau - 1)
    some_M = power_M != 0
    safe_M = jnp.where(some_M, power_M, 1.0)
    return {'objective': ce_M * jnp.where(some_M, jnp.expm1(safe_M) / safe_M, 1.0), 'ce': ce_M}


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
