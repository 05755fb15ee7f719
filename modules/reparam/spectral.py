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
    """sigmaReparam: W_used = gamma W / sigma(W) with sigma(W) the largest singular value.

    Stores `matrix` W, initialised as without this, and `gain` gamma, a number for each matrix: a
    vector, so no weight decay. Each layer, and each of queries, keys and values, is a separate
    matrix. Stores u of every matrix in its state, which starts as its first right singular vector.
    With `gamma_start` = sigma nothing changes at the start, as in the published code for vision and
    language; `one` follows the code for speech. Source: arXiv:2303.06296 and its code.
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
    """W_used = W / sigma(W): `sigma` without its gain, so that every matrix has spectral norm 1.

    This changes matrices at the start. Source: arXiv:1802.05957, equation 8.
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
    """W_used = W min(1, bound / sigma(W)): no singular value above `spectral_bound`.

    That holds up to the error of the power iteration. Matrices below the bound are unchanged. A
    square matrix whose elements have standard deviation 1 / sqrt(fan_in) has a largest singular
    value near 2. The projection of arXiv:1804.04368 as a map through which the gradient flows.
    """
    # Not min(1, bound / largest): its gradient is not finite where the largest is 0.
    return _scale_by_sigma(
        roles, specs, lambda largest: spectral_bound / jnp.maximum(largest, spectral_bound)
    )
