"""The spherical family: losses of sum_v z_v, sum_v z_v^2 and the label's logit alone."""

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.losses.base import Loss, Sums, cross_entropies, loss_row
from modules.options import Option
from modules.statistics import at_least_float32

LEAST_VARIANCE = 1e-12  # of the logits, which may all be 0 at the start


def spherical(of_statistics: Callable[..., jax.Array]) -> Loss:
    """A loss from of_statistics(sum, sum of squares, label's logit, vocabulary, **numbers).

    With logits z = x W + b the sums are x w + sum b and x Q x + 2 x W b + |b|^2, where w = W 1 and
    Q = W W^T: once Q [D, D] is there, a token costs D^2 operations forward and backward, whatever
    the vocabulary, and Q itself as much as the logits of D tokens: once, and where tokens are taken
    by chunks (loss.chunk) once a chunk. Its gradient in W is exact, for any optimizer; the papers'
    update of a factored W, for plain SGD alone, is not made. `ce`, that of the softmax of these
    logits, is computed beside it without a gradient. Logits must not be softcapped
    (`linear_readout`). Source: arXiv:1412.7091, section 4.
    """

    @loss_row(linear_readout=True)
    @functools.wraps(of_statistics)
    def loss(x, readout: Any, labels, weights, **numbers) -> Sums:
        vocab = readout.weight_DV.shape[-1]
        x_MD = at_least_float32(x.reshape(-1, x.shape[-1]).astype(readout.dtype))
        labels_M, weights_M = labels.reshape(-1), weights.reshape(-1)
        weight_DV = at_least_float32(readout.weight_DV.astype(readout.dtype))
        square_DD = _product(weight_DV, weight_DV.T)
        sum_M = _product(x_MD, jnp.sum(weight_DV, 1))
        squares_M = jnp.sum(_product(x_MD, square_DD) * x_MD, -1)
        label_M = jnp.sum(x_MD * weight_DV.T[labels_M], -1)
        if readout.bias_V is not None:
            bias_V = at_least_float32(readout.bias_V)
            sum_M = sum_M + jnp.sum(bias_V)
            squares_M = squares_M + jnp.sum(jnp.square(bias_V))
            squares_M = squares_M + 2 * _product(x_MD, _product(weight_DV, bias_V))
            label_M = label_M + bias_V[labels_M]
        objective_M = of_statistics(sum_M, squares_M, label_M, vocab, **numbers)
        fixed_x, fixed = jax.lax.stop_gradient((x.reshape(-1, x.shape[-1]), readout))
        ce_M = cross_entropies(fixed(fixed_x), labels_M)
        return {'objective': jnp.sum(weights_M * objective_M), 'ce': jnp.sum(weights_M * ce_M)}

    return loss


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@spherical
def spherical_z(
    sum_M: jax.Array,
    squares_M: jax.Array,
    label_M: jax.Array,
    vocab: int,
    *,
    spherical_a: Annotated[
        float, Option('how sharply the target is bounded', 1e-3, 1e3, traced=True)
    ] = 0.1,
    spherical_b: Annotated[
        float,
        Option(
            'standard deviations that the label shall lead by', 0, sys.float_info.max, traced=True
        ),
    ] = 10.0,
) -> jax.Array:
    """objective = softplus(a (b - s)) / a with s = (z_label - mean z) / std z.

    It does not change where logits are shifted or multiplied by a positive number, so that they
    are no log probabilities, and `ce` says little: compare ranks. Sources tune a and b to the task;
    these are ours. Not the z-loss of `cross_entropy`. Source: arXiv:1604.08859, section 3.
    """
    mean_M = sum_M / vocab
    variance_M = jnp.maximum(squares_M / vocab - jnp.square(mean_M), LEAST_VARIANCE)
    lead_M = (label_M - mean_M) * jax.lax.rsqrt(variance_M)
    return jax.nn.softplus(spherical_a * (spherical_b - lead_M)) / spherical_a


@spherical
def taylor_softmax(
    sum_M: jax.Array, squares_M: jax.Array, label_M: jax.Array, vocab: int
) -> jax.Array:
    """objective = -log (t(z_label) / sum_v t(z_v)) with t(z) = 1 + z + z^2 / 2, never below 1/2.

    `ce` is that of the usual softmax, which generation draws from; it is not what is trained.
    Source: arXiv:1511.05042, section 3.
    """
    total_M = vocab + sum_M + 0.5 * squares_M
    return jnp.log(total_M) - jnp.log(0.5 * (jnp.square(label_M + 1) + 1))
