"""Weight compander."""

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.options import Option
from modules.params import ParamSpec, as_matrices
from modules.reparam.base import LEAST_NORM, Reparam, reparam_row
from modules.reparam.matrices import Roles, known_roles, on_matrices, per_matrix

NEAR_BOUND = 0.99  # of the bound: the largest weight that the inverse is asked for


@reparam_row(least_init_scale=LEAST_NORM, check=known_roles)
def weight_compander(
    specs: Any,
    shapes: Any,
    *,
    roles: Roles = 'hidden',
    compander_width: Annotated[
        float, Option('a, in root mean squares of the matrix at the start', 1e-3, 1e6)
    ] = 4.0,
    compander_slope: Annotated[float, Option('a / b, the slope at 0', 1e-3, 1e3)] = 2.0,
) -> Reparam:
    """W_used = a arctan(V / b), element by element: steep at 0, and bounded by a pi / 2.

    Stores V, which starts as b tan(W / a), so that nothing changes at the start; a matrix that is
    taken over from elsewhere is cut at NEAR_BOUND of the bound. Carries a of every matrix:
    `compander_width` times the root mean square of W at the start; b = a / `compander_slope`.

    The arctan is our reading of arXiv:2306.16993, whose formula we could not see, and so are a and
    b, which are not learned here.
    """
    del shapes

    def init(spec, weight):
        squares = jnp.square(as_matrices(spec, weight))
        a = compander_width * jnp.sqrt(jnp.mean(squares, (-2, -1)))
        angle = weight / per_matrix(a, spec)
        bound = NEAR_BOUND * math.pi / 2
        return jnp.tan(jnp.clip(angle, -bound, bound)) * width_of_stored(spec, a), a

    def width_of_stored(spec: ParamSpec, a: jax.Array) -> jax.Array:
        return per_matrix(a / compander_slope, spec)

    def apply(spec, stored, a):
        return per_matrix(a, spec) * jnp.arctan(stored / width_of_stored(spec, a)), a

    return on_matrices(roles, specs, init, apply)
