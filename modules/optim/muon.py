"""Muon: momentum with its singular values brought near 1, and its form of a bounded spectral norm.

Each layer, and each of queries, keys and values, is a matrix of its own with all heads merged: a
query [D, N H], the output of attention [N H, D]; each expert too. Meant for hidden matrices alone.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.adamw import Eps
from modules.optim.base import of_family, per_parameter
from modules.optim.sgd import Momentum, Nesterov
from modules.optim.whole import as_it_lies, whole_matrices
from modules.options import Option
from modules.params import Described, ParamSpec, matrix_axes
from modules.spectrum import power_iteration
from modules.statistics import at_least_float32

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5
ADAMW_RMS = 0.2  # of AdamW's updates, arXiv:2502.16982, section 2.2

MuonSteps = Annotated[int, Option('Newton-Schulz iterations', 1, 100)]


def newton_schulz(matrices: jax.Array, steps: int, eps: Any) -> jax.Array:
    """U f(S) V^T of matrices U S V^T [..., I, O]: all singular values near 1.

    X = M / (|M| + eps) by its Frobenius norm, then `steps` times X = a X + b (X X^T) X
    + c (X X^T)^2 X. With 5 steps a singular value of at least 0.0015 of |M| ends between 0.68 and
    1.203, a smaller one below; none is larger. Computed in float32 or more, products as the device
    has them; the published code has bfloat16. A matrix of zeros stays. Source:
    https://kellerjordan.github.io/posts/muon/ and its code.
    """
    a, b, c = COEFFICIENTS
    x = at_least_float32(matrices)
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.matrix_transpose(x) if tall else x  # the smaller of the two products with itself
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + eps)

    def iterate(_, x):
        gram = x @ jnp.matrix_transpose(x)
        return a * x + (b * gram + c * gram @ gram) @ x

    x = jax.lax.fori_loop(0, steps, iterate, x)
    return jnp.matrix_transpose(x) if tall else x


def averaged(
    mean: jax.Array, grad: jax.Array, momentum: Any, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """(what is followed, m): m = momentum m + (1 - momentum) g, moved so again with Nesterov."""
    mean = momentum * mean + (1 - momentum) * grad
    return (momentum * mean + (1 - momentum) * grad if nesterov else mean), mean


def on_average(
    specs: Any, momentum: Any, nesterov: bool, map_matrices: Callable[[jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """map_matrices(averaged gradients [..., I, O]), for each parameter."""

    def init(spec, weight):
        del spec
        return {'momentum': jnp.zeros_like(weight)}

    def update(spec, grad, kept, weight, count):
        del weight, count
        followed, mean = averaged(kept['momentum'], grad, momentum, nesterov)
        direction = map_matrices(whole_matrices(spec, followed))
        return as_it_lies(spec, direction, grad), {'momentum': mean}

    return per_parameter(specs, init, update)


SCALES = {  # (fan_in, fan_out) -> factor
    'none': lambda fan_in, fan_out: 1.0,
    'original': lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    'rms': lambda fan_in, fan_out: ADAMW_RMS * math.sqrt(max(fan_in, fan_out)),
}


@of_family('spectral', roles=('hidden',), other_sizes={'muon_scale': 'rms'})
def muon(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    nesterov: Nesterov = True,
    eps: Eps = 1e-7,
    muon_steps: MuonSteps = 5,
    muon_scale: Annotated[
        str,
        Option(
            'factor: sqrt(max(1, fan_out / fan_in)), 0.2 sqrt(max(fan_in, fan_out)) or 1',
            choices=('original', 'rms', 'none'),
        ),
    ] = 'original',
) -> optax.GradientTransformation:
    """s NS(n), n = momentum m + (1 - momentum) g with m the average of gradients (`newton_schulz`).

    muon_scale: `original` as the author's code; `rms` gives updates the root mean square of AdamW's
    (arXiv:2502.16982), so that its learning rate can be kept; `none` singular values near 1.
    Sources: https://kellerjordan.github.io/posts/muon/ and its code, whose averages are without the
    bias correction that optax has, and in which eps is added to the norm; torch.optim.Muon has it
    as the least norm.
    """

    def direction(matrices):
        factor = SCALES[muon_scale](*matrices.shape[-2:])
        return factor * newton_schulz(matrices, muon_steps, eps)

    return on_average(specs, momentum, nesterov, direction)


@of_family('spectral', roles=('hidden',))
def muon_spectral(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    nesterov: Nesterov = True,
    eps: Eps = 1e-7,
    muon_steps: MuonSteps = 5,
    muon_power_steps: Annotated[int, Option('power iterations for the spectral norm', 1, 100)] = 8,
) -> optax.GradientTransformation:
    """sqrt(fan_out / fan_in) X / max(1, sigma(X)), X = NS(n) as `muon`.

    A usable approximation of the spectral condition on updates, |dW| <= lr sqrt(fan_out / fan_in)
    (arXiv:2310.17813), which arXiv:2601.01306 asks for through all of training; it is not that
    paper's algorithm. sigma is from muon_power_steps power iterations from the vector of the step
    before, hence from below: with 8, the norm of random updates of width 64 is up to 8% beyond the
    bound, as all singular values of X are near the largest, and with any number at most 20.3%.
    Weight decay and the initial matrices are not part of the bound.
    """

    def init(spec, weight):
        batch, _, columns = matrix_axes(spec)
        axes = (*batch, *columns)
        # Drawn: the gradient behind a layer norm is orthogonal to a vector of ones.
        u = jax.random.normal(jax.random.key(0), [weight.shape[i] for i in axes], weight.dtype)
        described = Described(u, ParamSpec('vector', tuple(spec.axes[i] for i in axes)))
        return {'momentum': jnp.zeros_like(weight), 'right': described}

    def update(spec, grad, kept, weight, count):
        del weight, count
        followed, mean = averaged(kept['momentum'], grad, momentum, nesterov)
        x = newton_schulz(whole_matrices(spec, followed), muon_steps, eps)
        u = kept['right']
        largest, later = power_iteration(
            x, u.reshape(*x.shape[:-2], x.shape[-1]).astype(x.dtype), muon_power_steps
        )
        factor = math.sqrt(x.shape[-1] / x.shape[-2]) / jnp.maximum(largest, 1.0)
        direction = as_it_lies(spec, x * factor[..., None, None], grad)
        later = later.reshape(u.shape).astype(u.dtype)
        return direction, {'momentum': mean, 'right': later}

    return per_parameter(specs, init, update)
