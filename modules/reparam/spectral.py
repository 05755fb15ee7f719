"""Reparametrisations by the largest singular value of each matrix, from power iteration.

The published code iterates once in each forward pass of training; here it is once in each optimizer
step, for any number of microbatches. Evaluation iterates once from the stored vectors and does not
store the result, as published.
"""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.options import Option
from modules.params import ParamSpec, as_matrices
from modules.reparam.base import Reparam
from modules.reparam.matrices import Roles, batch_spec, expand_per_matrix, map_matrices, matrix_row
from modules.spectrum import first_right_vector, power_iteration

MIN_INIT_SCALE = 1e-9  # keeps products with unit vectors well above spectrum.EPS


def _power_iterate(spec: ParamSpec, weight: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    return power_iteration(as_matrices(spec, weight), u)


def _scale_by_sigma(roles: str, specs: Any, factor: Callable[[jax.Array], jax.Array]) -> Reparam:
    """W_used = factor(sigma(W)) W."""

    def init(spec, weight):
        return weight, first_right_vector(as_matrices(spec, weight))

    def apply(spec, weight, u):
        largest, u = _power_iterate(spec, weight, u)
        return weight * expand_per_matrix(factor(largest), spec), u

    def measure(spec, weight, u):
        return {'sigma': _power_iterate(spec, weight, u)[0]}

    return map_matrices(roles, specs, init, apply, measure=measure)


@matrix_row(least_init_scale=MIN_INIT_SCALE)
def sigma(
    specs: Any,
    shapes: Any,
    *,
    roles: Roles = 'hidden',
    gamma_start: Annotated[
        str, Option('initial gamma: 1, or the sigma of each matrix', choices=('one', 'sigma'))
    ] = 'sigma',
) -> Reparam:
    """sigmaReparam (arXiv:2303.06296): `W_used = gamma W / sigma(W)`.

    `sigma(W)` is the largest singular value. `W` is stored as `matrix`, initialised as without this
    reparametrisation, and ``gamma`` as `gain`, one number per matrix. The gain counts as a vector,
    so that weight decay does not apply to it. Each layer, and each of queries, keys and values, is
    a separate matrix. The state stores a vector `u` per matrix for the power iteration, which
    starts as the first right singular vector.

    With `gamma_start=sigma` the weights are unchanged at the start, as in the published code for
    vision and language; `gamma_start=one` follows the code for speech. Source: the paper and its
    code.
    """

    def init(spec, weight):
        u = first_right_vector(as_matrices(spec, weight))
        largest, _ = _power_iterate(spec, weight, u)
        gain = jnp.ones_like(largest) if gamma_start == 'one' else largest
        return {'matrix': weight, 'gain': gain}, u

    def apply(spec, stored, u):
        largest, u = _power_iterate(spec, stored['matrix'], u)
        return stored['matrix'] * expand_per_matrix(stored['gain'] / largest, spec), u

    def describe(spec):
        return {'matrix': spec, 'gain': batch_spec(spec)}

    def measure(spec, stored, u):
        return {'sigma': _power_iterate(spec, stored['matrix'], u)[0], 'gamma': stored['gain']}

    return map_matrices(roles, specs, init, apply, describe, measure=measure)


@matrix_row(least_init_scale=MIN_INIT_SCALE)
def spectral_norm(specs: Any, shapes: Any, *, roles: Roles = 'hidden') -> Reparam:
    """Spectral normalization (arXiv:1802.05957): `W_used = W / sigma(W)`.

    This is `sigma` without its gain: every matrix has a largest singular value `sigma(W)` of 1. It
    changes the matrices at the start. Source: equation 8.
    """
    return _scale_by_sigma(roles, specs, lambda largest: 1 / largest)


@matrix_row()
def spectral_cap(
    specs: Any,
    shapes: Any,
    *,
    roles: Roles = 'hidden',
    spectral_bound: Annotated[float, Option('largest singular value of a matrix', 1e-6, 1e6)] = 1.0,
) -> Reparam:
    """A bound on singular values (arXiv:1804.04368): `W_used = W min(1, c / sigma(W))`.

    No singular value exceeds `c`, the option `spectral_bound`, up to the error of the power
    iteration. Matrices below the bound are unchanged. A square matrix whose elements have standard
    deviation `1 / sqrt(fan_in)` has a largest singular value near 2. This is the projection of the
    paper, as a map through which the gradient flows.
    """
    # Not min(1, bound / largest): its gradient is not finite where the largest is 0.
    return _scale_by_sigma(
        roles, specs, lambda largest: spectral_bound / jnp.maximum(largest, spectral_bound)
    )
