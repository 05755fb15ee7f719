"""Direct coverage optimization: what is right in one of N tries."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.losses.base import Sums, cross_entropies, loss_row
from modules.options import Option


@loss_row(by_rows=True)
def dco(
    x: jax.Array,
    readout: Any,
    labels: jax.Array,
    weights: jax.Array,
    *,
    dco_tries: Annotated[float, Option('N of pass@N; 1: cross-entropy', 1, 1e6, traced=True)] = 1.0,
) -> Sums:
    """objective = sum over rows of F(p) (-log p), with p the probability of all of a row.

    Of those that count; F has no gradient:

        F(p) = N (1 - p)^(N - 1) p / (1 - (1 - p)^N)

    is the factor by which the gradient of -log(1 - (1 - p)^N), one of N tries being right, differs
    from that of -log p: 1 for rows that are far from it, 0 for those that are learnt. For rows with
    a short answer each, then: in long rows p is 0 and nothing changes. The sum over rows is divided
    by the tokens that count, where the authors divide by rows. `dco_factor` is F. A row is not cut
    (`by_rows`). Source: arXiv:2502.07154, section 4, and https://github.com/allanraventos/refine.
    """
    ce_M = cross_entropies(readout(x).reshape(-1, readout.weight_DV.shape[-1]), labels.reshape(-1))
    ce_RT = weights * ce_M.reshape(labels.shape)
    log_p_R = -jnp.sum(ce_RT, -1)
    factor_R = _factor(jax.lax.stop_gradient(jnp.exp(log_p_R)), dco_tries)
    return {
        'objective': jnp.sum(factor_R * -log_p_R),
        'ce': jnp.sum(ce_RT),
        'dco_factor': jnp.sum(factor_R * jnp.sum(weights, -1)),
    }


def _factor(p: jax.Array, tries: Any) -> jax.Array:
    """F, which is 1 at p = 0, where its fraction is 0 / 0, and exact at any p beyond."""
    n = jnp.asarray(tries, p.dtype)
    some = jnp.where(p > 0, p, 0.5)
    log_wrong = jnp.log1p(-jnp.minimum(some, 1 - 1e-7))
    factor = n * some * jnp.exp((n - 1) * log_wrong) / -jnp.expm1(n * log_wrong)
    return jnp.where(p > 0, factor, 1.0)
