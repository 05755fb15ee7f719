"""AuON and its hybrid with Newton-Schulz iterations: a brake by a root mean square of cosh."""

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.adamw import Eps
from modules.optim.base import of_family
from modules.optim.muon import MuonSteps, newton_schulz, on_average
from modules.optim.sgd import Momentum, Nesterov
from modules.options import Option

LEAST = 1e-7  # added to the norm

Gamma = Annotated[float, Option('length of each matrix inside of cosh', 0, 10, traced=True)]


def cosh_rms(matrices: jax.Array, gamma: Any) -> tuple[jax.Array, jax.Array]:
    """(R [..., 1, 1], X [..., I, O]): X = M / (|M| + LEAST), R = sqrt(mean(cosh(gamma X)^2)).

    1 <= R <= 1 + sinh(gamma)^2 / (2 I O), which a matrix of a single entry comes close to; others
    are near 1 + gamma^2 / (2 I O): 1.004 for 16 x 16 and 1.00002 for 256 x 256 at gamma 1.5.
    """
    x = matrices / (jnp.linalg.norm(matrices, axis=(-2, -1), keepdims=True) + LEAST)
    squares = jnp.square(jnp.cosh(gamma * x))
    return jnp.sqrt(jnp.mean(squares, (-2, -1), keepdims=True)), x


@of_family('sgd', roles=('hidden',), other_sizes={'auon_form': 'paper'})
def auon(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    nesterov: Nesterov = True,
    auon_gamma: Gamma = 1.5,
    auon_form: Annotated[
        str,
        Option(
            'code: as large as the gradients; paper: of length 1, times the factor of muon',
            choices=('code', 'paper'),
        ),
    ] = 'code',
) -> optax.GradientTransformation:
    """n / R, n = momentum m + (1 - momentum) g with m the average of gradients (`cosh_rms`).

    With R this near 1 it is momentum alone, and in the form of the paper that of length 1: it
    changes no ratio of singular values. auon_form: `code` as published; `paper`
    sqrt(max(1, fan_out / fan_in)) n / (|n| R), which has auon_gamma=1. The family is that of
    `code`. Sources: arXiv:2509.24320, section 3.1; its code as of January 2026 and, for `paper`,
    that of its first experiments, which also has the factor of the shape.
    """

    def direction(matrices):
        brake, unit = cosh_rms(matrices, auon_gamma)
        if auon_form == 'code':
            return matrices / brake
        rows, columns = matrices.shape[-2:]
        return math.sqrt(max(1.0, columns / rows)) * unit / brake

    return on_average(specs, momentum, nesterov, direction)


@of_family('spectral', roles=('hidden',))
def hybrid_auon(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    nesterov: Nesterov = True,
    eps: Eps = 1e-7,
    auon_gamma: Gamma = 1.5,
    muon_steps: MuonSteps = 5,
) -> optax.GradientTransformation:
    """X / R(X), X = NS(n) with n as `auon`: `muon` without its factor, up to R.

    muon_steps: 5 as its code; the paper has one, and cosh of X as it is.
    Sources: arXiv:2509.24320, section 3.2, and its code, which is followed.
    """

    def direction(matrices):
        x = newton_schulz(matrices, muon_steps, eps)
        return x / cosh_rms(x, auon_gamma)[0]

    return on_average(specs, momentum, nesterov, direction)
