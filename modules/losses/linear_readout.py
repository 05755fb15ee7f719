"""Losses that use the linearity of logits in the readout's matrix: spherical and adversarial.

Logits must not be softcapped (`linear_readout`).
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.losses.base import FINITE, Loss, Sums, cross_entropies, loss_row, sum_weighted
from modules.losses.label_probability import Tau, comp_sum_from_ce
from modules.options import Option
from modules.statistics import at_least_float32

MIN_VARIANCE = 1e-12  # logits may all be 0 at the start
TINY = 1e-30  # added to squares, so that lengths of 0 have a gradient


def spherical_loss(statistics_fn: Callable[..., jax.Array]) -> Loss:
    """Makes a loss from sums of logits over the vocabulary.

    The logits are z = x W + b. Their sum is x w + sum b and the sum of squares x Q x + 2 x W b +
    |b|^2, where w = W 1 and Q = W W^T. Given Q [D, D], a token costs D^2 operations forward and
    backward, whatever the vocabulary. Q costs as much as the logits of D tokens, once, or once per
    chunk (loss.chunk). The gradient in W is exact, for any optimizer; the paper's update of a
    factored W, for plain SGD alone, is not implemented. `ce` of the softmax of these logits is
    computed too, without a gradient. Source: arXiv:1412.7091, section 4.

    Args:
      statistics_fn: maps (sum, sum of squares, label's logit, vocabulary, **numbers) to the
        objective.

    Returns:
      A loss.
    """

    @loss_row(linear_readout=True)
    @functools.wraps(statistics_fn)
    def loss(x, readout: Any, labels, weights, **numbers) -> Sums:
        vocab = readout.weight_DV.shape[-1]
        x_MD = at_least_float32(x.reshape(-1, x.shape[-1]).astype(readout.dtype))
        labels_M, weights_M = labels.reshape(-1), weights.reshape(-1)
        weight_DV = at_least_float32(readout.weight_DV.astype(readout.dtype))
        square_DD = _precise_matmul(weight_DV, weight_DV.T)
        sum_M = _precise_matmul(x_MD, jnp.sum(weight_DV, 1))
        squares_M = jnp.sum(_precise_matmul(x_MD, square_DD) * x_MD, -1)
        label_M = jnp.sum(x_MD * weight_DV.T[labels_M], -1)
        if readout.bias_V is not None:
            bias_V = at_least_float32(readout.bias_V)
            sum_M = sum_M + jnp.sum(bias_V)
            squares_M = squares_M + jnp.sum(jnp.square(bias_V))
            squares_M = squares_M + 2 * _precise_matmul(x_MD, _precise_matmul(weight_DV, bias_V))
            label_M = label_M + bias_V[labels_M]
        objective_M = statistics_fn(sum_M, squares_M, label_M, vocab, **numbers)
        constant_x, constant_readout = jax.lax.stop_gradient((x.reshape(-1, x.shape[-1]), readout))
        ce_M = cross_entropies(constant_readout(constant_x), labels_M)
        return sum_weighted({'objective': objective_M, 'ce': ce_M}, weights_M)

    return loss


def _precise_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@spherical_loss
def spherical_z(
    sum_M: jax.Array,
    squares_M: jax.Array,
    label_M: jax.Array,
    vocab: int,
    *,
    spherical_a: Annotated[
        float, Option('sharpness of the softplus', 1e-3, 1e3, traced=True)
    ] = 0.1,
    spherical_b: Annotated[
        float,
        Option(
            'target lead of the label over the mean logit, in standard deviations',
            0,
            FINITE,
            traced=True,
        ),
    ] = 10.0,
) -> jax.Array:
    """Spherical Z-loss (arXiv:1604.08859): `objective = softplus(a (b - s)) / a`.

    `s = (z_label - mean(z)) / std(z)`

    `a` is `spherical_a`, and `b` is `spherical_b`. Shifting the logits or multiplying them by a
    positive factor does not change the loss. Logits are therefore not log probabilities, and `ce`
    means little: compare ranks. The sources tune `a` and `b` to the task; our defaults are our
    choice. This is not the z-loss of `cross_entropy`. Source: section 3.
    """
    mean_M = sum_M / vocab
    variance_M = jnp.maximum(squares_M / vocab - jnp.square(mean_M), MIN_VARIANCE)
    lead_M = (label_M - mean_M) * jax.lax.rsqrt(variance_M)
    return jax.nn.softplus(spherical_a * (spherical_b - lead_M)) / spherical_a


@spherical_loss
def taylor_softmax(
    sum_M: jax.Array, squares_M: jax.Array, label_M: jax.Array, vocab: int
) -> jax.Array:
    """Taylor softmax (arXiv:1511.05042): `objective = -log(q(z_label) / (sum_v q(z_v)))`.

    `q(z) = 1 + z + z^2 / 2`

    `q` is never below 1/2. `ce` is the cross-entropy of the usual softmax, from which generation
    samples; it is not trained. Source: section 3.
    """
    total_M = vocab + sum_M + 0.5 * squares_M
    return jnp.log(total_M) - jnp.log(0.5 * (jnp.square(label_M + 1) + 1))


@loss_row(linear_readout=True)
def adversarial_comp_sum(
    x: jax.Array,
    readout: Any,
    labels: jax.Array,
    weights: jax.Array,
    *,
    tau: Tau = 1.0,
    comp_sum_rho: Annotated[
        float, Option('temperature that divides the margins', 1e-3, 1e3, traced=True)
    ] = 1.0,
    adversarial_weight: Annotated[
        float, Option('weight nu gamma of the adversarial term', 0, FINITE, traced=True)
    ] = 0.01,
    adversarial_steps: Annotated[
        int, Option('iterations of gradient ascent towards the worst shift', 1, 1000)
    ] = 10,
) -> Sums:
    """Comp-sum loss with adversarial margins (arXiv:2304.07288): `objective = Phi_tau(S) + nu A`.

    `S = sum_(v != label) exp((z_v - z_label) / rho)`
    `A = sup_(|x' - x| <= gamma) |Delta(x') - Delta(x)|`

    `Phi_tau(S)` is `comp_sum` of the logits over `rho`, the option `comp_sum_rho`. `Delta(x)` is
    the vector of margins `z_label - z_v` of all words; norms are Euclidean.

    Our reading is that `x` is the last activation, which the readout sees, and not the input, so
    that the term needs no further pass of the model. As logits are linear in `x`, the supremum is
    `A = gamma sigma`, with `sigma` the largest singular value of the differences `W_label - W_v` of
    the readout's columns. `nu` and `gamma` are one number, `adversarial_weight`. `sigma` depends on
    the readout and the label, but not on `x`, and has a gradient only in the readout.

    `sigma^2` is the largest eigenvalue of `C + V u u^T`, where `C` is the scatter of the `V`
    columns about their mean and `u` is the label's column minus that mean. Gradient ascent from
    `u`, projected to the ball, is power iteration here. It approaches `sigma` from below in
    `adversarial_steps` steps, with `D^2` operations per step and token, against `D V` for the
    logits.

    The metric `adversarial` is `sigma`. The default numbers are ours, and we could not see the
    paper's formula for the second term.
    """
    logits_MV = at_least_float32(readout(x).reshape(-1, readout.weight_DV.shape[-1]))
    labels_M, weights_M = labels.reshape(-1), weights.reshape(-1)
    sigma_M = worst_shift(readout, labels_M, adversarial_steps)
    smooth_M = comp_sum_from_ce(cross_entropies(logits_MV / comp_sum_rho, labels_M), tau)
    objective_M = smooth_M + adversarial_weight * sigma_M
    ce_M = cross_entropies(logits_MV, labels_M)
    return sum_weighted({'objective': objective_M, 'ce': ce_M, 'adversarial': sigma_M}, weights_M)


def worst_shift(readout: Any, labels_M: jax.Array, steps: int) -> jax.Array:
    """Returns sigma [M] of `adversarial_comp_sum`: |A v| with v [D] of length 1.

    v comes from power iteration and has no gradient, so that |A v| has the gradient of the largest
    singular value.

    Args:
      readout: the readout of the model.
      labels_M: the labels.
      steps: of power iteration.

    Returns:
      sigma of each token.
    """
    weight_DV = at_least_float32(readout.weight_DV.astype(readout.dtype))
    weight_DV = weight_DV - jnp.mean(weight_DV, 1, keepdims=True)
    scatter_DD = _precise_matmul(weight_DV, weight_DV.T)
    from_mean_MD = weight_DV.T[labels_M]
    vocab = weight_DV.shape[-1]

    def multiply(scatter_DD, u_MD, v_MD):
        dot_M1 = jnp.sum(u_MD * v_MD, -1, keepdims=True)
        return _precise_matmul(v_MD, scatter_DD) + vocab * dot_M1 * u_MD

    def normalize(x_MD):
        return x_MD * jax.lax.rsqrt(jnp.sum(jnp.square(x_MD), -1, keepdims=True) + TINY)

    constants = jax.lax.stop_gradient((scatter_DD, from_mean_MD))
    v_MD = jax.lax.fori_loop(
        0, steps, lambda _, v_MD: normalize(multiply(*constants, v_MD)), normalize(constants[1])
    )
    squares_M = jnp.sum(multiply(scatter_DD, from_mean_MD, v_MD) * v_MD, -1)
    return jnp.sqrt(squares_M + TINY)
