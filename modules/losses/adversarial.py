"""Comp-sum losses with a term for how far the margins of a token can be moved."""

import sys
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.losses.base import Sums, cross_entropies, loss_row
from modules.losses.comp_sum import Tau, of_cross_entropy
from modules.options import Option
from modules.statistics import at_least_float32

TINY = 1e-30  # added to squares, so that lengths of 0 have a gradient


@loss_row(linear_readout=True)
def adversarial_comp_sum(
    x: jax.Array,
    readout: Any,
    labels: jax.Array,
    weights: jax.Array,
    *,
    tau: Tau = 1.0,
    comp_sum_rho: Annotated[
        float, Option('what margins are divided by', 1e-3, 1e3, traced=True)
    ] = 1.0,
    adversarial_weight: Annotated[
        float, Option('nu gamma, of the term', 0, sys.float_info.max, traced=True)
    ] = 0.01,
    adversarial_steps: Annotated[int, Option('of ascent, towards the worst shift', 1, 1000)] = 10,
) -> Sums:
    """objective = Phi_tau(sum_v exp((z_v - z_label) / rho)) + nu sup |Delta(x') - Delta(x)|_2.

    The sum is over v other than the label, and Phi_tau makes `comp_sum` of it, of logits / rho.
    Delta(x) has the margins z_label - z_v of all words; the sup is over |x' - x|_2 <= gamma.

    x is the last activations, which the readout sees, and not the input: that is our reading, with
    which the term needs no further pass of the model. Logits are linear in x, so that the sup is
    gamma sigma, with sigma the largest singular value of the differences W_label - W_v of the
    readout's columns; nu and gamma are one number, adversarial_weight. It depends on the readout
    and on the label, not on x, and has a gradient in the readout alone. sigma^2 is that of
    C + V u u^T, where C is the scatter of the V columns about their mean and u is how far the
    label's is from it. Gradient ascent from u, projected to the ball, is power iteration here;
    sigma is approached from below, with `adversarial_steps` of them (D^2 operations each and token,
    where the logits take D V). `adversarial` is sigma. Logits must not be softcapped
    (`linear_readout`). The numbers are ours. Source: arXiv:2304.07288, whose formula for the second
    term we could not see.
    """
    logits_MV = at_least_float32(readout(x).reshape(-1, readout.weight_DV.shape[-1]))
    labels_M, weights_M = labels.reshape(-1), weights.reshape(-1)
    sigma_M = worst_shift(readout, labels_M, adversarial_steps)
    smooth_M = of_cross_entropy(cross_entropies(logits_MV / comp_sum_rho, labels_M), tau)
    terms = {
        'objective': smooth_M + adversarial_weight * sigma_M,
        'ce': cross_entropies(logits_MV, labels_M),
        'adversarial': sigma_M,
    }
    return {name: jnp.sum(weights_M * term_M) for name, term_M in terms.items()}


def worst_shift(readout: Any, labels_M: jax.Array, steps: int) -> jax.Array:
    """sigma [M] of `adversarial_comp_sum`: |A v| with v [D] of length 1, found by power iteration
    and fixed, so that the gradient is that of a largest singular value.
    """
    weight_DV = at_least_float32(readout.weight_DV.astype(readout.dtype))
    weight_DV = weight_DV - jnp.mean(weight_DV, 1, keepdims=True)
    scatter_DD = _product(weight_DV, weight_DV.T)
    from_mean_MD = weight_DV.T[labels_M]
    vocab = weight_DV.shape[-1]

    def times(scatter_DD, u_MD, v_MD):
        along_M1 = jnp.sum(u_MD * v_MD, -1, keepdims=True)
        return _product(v_MD, scatter_DD) + vocab * along_M1 * u_MD

    fixed = jax.lax.stop_gradient((scatter_DD, from_mean_MD))
    v_MD = jax.lax.fori_loop(0, steps, lambda _, v_MD: _unit(times(*fixed, v_MD)), _unit(fixed[1]))
    squares_M = jnp.sum(times(scatter_DD, from_mean_MD, v_MD) * v_MD, -1)
    return jnp.sqrt(squares_M + TINY)


def _unit(x_MD: jax.Array) -> jax.Array:
    return x_MD * jax.lax.rsqrt(jnp.sum(jnp.square(x_MD), -1, keepdims=True) + TINY)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
