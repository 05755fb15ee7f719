"""Losses of the label's probability: the comp-sum family, focal, dice, direct coverage."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.losses.base import Sums, cross_entropies, logits_loss, loss_row
from modules.options import Option
from modules.statistics import at_least_float32

TAU_DESCRIPTION = '1: cross-entropy; 2: mean absolute error; below 1: more weight on hard tokens'
Tau = Annotated[float, Option(TAU_DESCRIPTION, 0, 10, traced=True)]
# Bound on the log of a token's factor p^(tau - 1). A gradient norm squares the factor: a sum of a
# thousand squares of e^40 stays below the largest float32, e^88.
MAX_POWER = 40.0


@logits_loss
def comp_sum(logits_MV: jax.Array, labels_M: jax.Array, *, tau: Tau = 1.0) -> dict[str, jax.Array]:
    """Comp-sum loss (arXiv:2304.07288): `objective = (1 - p^(tau - 1)) / (tau - 1)`.

    At `tau = 1` this is the cross-entropy. The gradient is `p^(tau - 1)` times the gradient of the
    cross-entropy. Special cases:

    - `tau = 0`: `1 / p - 1`, the sum of exponentials.
    - `1 < tau < 2`: the generalised cross-entropy of arXiv:1805.07836 with `q = tau - 1`.
    - `tau = 2`: `1 - p`, half of the mean absolute error. It hardly trains from a start where
      `p = 1 / V`.

    For `tau < 1` the objective continues along its tangent from the point at which `(1 - tau) ce`
    is MAX_POWER, so that no token alone overflows float32. Source: equation 2.
    """
    ce_M = cross_entropies(logits_MV, labels_M)
    return {'objective': comp_sum_from_ce(ce_M, tau), 'ce': ce_M}


def comp_sum_from_ce(ce_M: jax.Array, tau: Any) -> jax.Array:
    """Returns (1 - p^(tau - 1)) / (tau - 1) for ce = -log p, exact near tau = 1, to MAX_POWER."""
    capped_M = jnp.minimum(ce_M, MAX_POWER / jnp.maximum(1 - tau, 1e-6))
    power_M = (1 - tau) * capped_M  # exp(power) = p^(tau - 1)
    is_nonzero_M = power_M != 0
    safe_M = jnp.where(is_nonzero_M, power_M, 1.0)
    value_M = capped_M * jnp.where(is_nonzero_M, jnp.expm1(safe_M) / safe_M, 1.0)
    return value_M + jnp.exp(power_M) * (ce_M - capped_M)  # the tangent


@logits_loss
def focal(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    *,
    gamma: Annotated[
        float,
        Option(
            'exponent that lowers the weight of confident tokens; 0: cross-entropy',
            0,
            100,
            traced=True,
        ),
    ] = 2.0,
) -> dict[str, jax.Array]:
    """Focal loss (arXiv:1708.02002): `objective = (1 - p)^gamma ce`.

    Tokens of which the model is sure count less. All classes have weight 1. Source: equation 4.
    """
    ce_M = cross_entropies(logits_MV, labels_M)
    wrong_M = -jnp.expm1(-ce_M)  # 1 - p
    is_positive_M = wrong_M > 0
    share_M = jnp.where(
        is_positive_M, jnp.exp(gamma * jnp.log(jnp.where(is_positive_M, wrong_M, 1.0))), 0.0
    )
    return {'objective': share_M * ce_M, 'ce': ce_M}


@logits_loss
def dice(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    *,
    dice_alpha: Annotated[
        float,
        Option(
            'exponent that lowers the weight of confident tokens; 0: equal weights',
            0,
            10,
            traced=True,
        ),
    ] = 0.0,
    dice_smooth: Annotated[
        float, Option('added to numerator and denominator', 1e-6, 1e6, traced=True)
    ] = 1.0,
) -> dict[str, jax.Array]:
    """Dice loss (arXiv:1911.02855): `objective = sum_v (1 - (2 q_v y_v + c) / (q_v + y_v + c))`.

    `q_v = (1 - p_v)^alpha p_v`

    `p_v` is the probability of token `v`, and `y_v` is 1 for the label and 0 for all others. `c` is
    `dice_smooth`, and ``alpha`` is `dice_alpha`. Each token has a separate fraction, as in the
    paper, whose equation has one class only; the sum over tokens is ours. With two tokens and
    `alpha = 1` both have the same `q`, and the sum does not depend on the label. The authors' code
    sums numerator and denominator over a batch, with `c = 1e-4` by default and `c = 1` in its
    scripts; for single tokens, a small `c` would leave mostly the terms of other words than the
    label, so `c = 1` is our choice. If ``alpha`` is above 0, the minimum is at a `p` below 1, about
    1/2 at `alpha = 1`. Source: equation 11.
    """
    log_p_MV = jax.nn.log_softmax(at_least_float32(logits_MV))
    p_MV = jnp.exp(log_p_MV)
    wrong_MV = jnp.maximum(1 - p_MV, 1e-7)
    q_MV = jnp.exp(dice_alpha * jnp.log(wrong_MV)) * p_MV
    y_MV = (jnp.arange(q_MV.shape[-1])[None] == labels_M[:, None]).astype(q_MV.dtype)
    share_MV = (2 * q_MV * y_MV + dice_smooth) / (q_MV + y_MV + dice_smooth)
    return {'objective': jnp.sum(1 - share_MV, -1), 'ce': cross_entropies(logits_MV, labels_M)}


@loss_row(by_rows=True)
def dco(
    x: jax.Array,
    readout: Any,
    labels: jax.Array,
    weights: jax.Array,
    *,
    dco_tries: Annotated[float, Option('N in pass@N; 1: cross-entropy', 1, 1e6, traced=True)] = 1.0,
) -> Sums:
    """Direct coverage optimization (arXiv:2502.07154): `objective = sum_rows F(p) (-log(p))`.

    `F(p) = N (1 - p)^(N - 1) p / (1 - (1 - p)^N)`

    Here `p` is the probability of all weighted tokens of a row together, and `N` is `dco_tries`.
    `1 - (1 - p)^N` is the chance that one of `N` tries is right. `F`, which has no gradient itself,
    is the ratio of the gradient of `-log(1 - (1 - p)^N)` to the gradient of `-log(p)`: 1 for rows
    with `p` near 0, and 0 for learnt rows. The loss is meant for rows with one short answer each;
    in long rows `p` is 0 and nothing changes. The sum over rows is divided by the number of
    weighted tokens, while the authors divide by the number of rows. The metric `dco_factor` is `F`.
    Rows are not split (`by_rows`). Source: section 4, and https://github.com/allanraventos/refine.
    """
    ce_M = cross_entropies(readout(x).reshape(-1, readout.weight_DV.shape[-1]), labels.reshape(-1))
    ce_RT = weights * ce_M.reshape(labels.shape)
    log_p_R = -jnp.sum(ce_RT, -1)
    factor_R = _dco_factor(jax.lax.stop_gradient(jnp.exp(log_p_R)), dco_tries)
    return {
        'objective': jnp.sum(factor_R * -log_p_R),
        'ce': jnp.sum(ce_RT),
        'dco_factor': jnp.sum(factor_R * jnp.sum(weights, -1)),
    }


def _dco_factor(p: jax.Array, tries: Any) -> jax.Array:
    """Returns F of `dco`, exact for all p; F(0) = 1, where the fraction is 0 / 0."""
    n = jnp.asarray(tries, p.dtype)
    safe_p = jnp.where(p > 0, p, 0.5)
    log_wrong = jnp.log1p(-jnp.minimum(safe_p, 1 - 1e-7))
    factor = n * safe_p * jnp.exp((n - 1) * log_wrong) / -jnp.expm1(n * log_wrong)
    return jnp.where(p > 0, factor, 1.0)
