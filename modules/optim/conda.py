"""Conda: Adam in the singular vectors of the first moment."""

import sys
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.adamw import B1, B2, Eps
from modules.optim.base import boxed, of_family, per_parameter, when
from modules.optim.rotations import of_side, smaller_side, turned, turned_back
from modules.options import Option
from modules.params import as_matrices, from_matrices
from modules.statistics import at_least_float32


@of_family('adam', roles=('hidden',))
def conda(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.99,
    eps: Eps = 1e-8,
    conda_every: Annotated[
        int, Option('steps from one decomposition to the next', 1, counted_in='steps')
    ] = 2000,
    conda_scale: Annotated[
        float, Option('factor of the direction', 0, sys.float_info.max, traced=True)
    ] = 0.25,
) -> optax.GradientTransformation:
    """Adam of the smaller side's coordinates in the singular vectors of m (arXiv:2509.24218).

    With m = b1 m + (1 - b1) g, and Q its singular vectors of that side at updates 1, 1 + every,
    1 + 2 every and so on: v = b2 v + (1 - b2) (Q^T g)^2, and the direction is
    scale sqrt(1 - b2^t) / (1 - b1^t) Q (Q^T m / (sqrt(v) + eps)); the code has eps there, outside
    the correction. v stays as it is when Q changes. The numbers are those of the authors' scripts
    (github.com/jie040109/Conda); their class has b2 0.999, every 2000 and scale 1.
    """

    def init(spec, weight):
        matrices = at_least_float32(as_matrices(spec, weight))
        zeros = jnp.zeros_like(weight)
        basis = of_side(matrices, smaller_side(matrices), 1.0)
        return {'momentum': zeros, 'second': zeros, 'basis': boxed(spec, basis, 'basis', 'basis')}

    def update(spec, grad, kept, weight, count):
        del weight
        m = b1 * kept['momentum'] + (1 - b1) * grad
        matrices = at_least_float32(as_matrices(spec, m))
        side = smaller_side(matrices)
        due = (count - 1) % conda_every == 0
        basis = when(due, lambda: _singular_vectors(matrices, side), kept['basis'])
        g_turned = turned(at_least_float32(as_matrices(spec, grad)), {side: basis})
        second = b2 * as_matrices(spec, kept['second']) + (1 - b2) * jnp.square(g_turned)
        adam = turned(matrices, {side: basis}) / (jnp.sqrt(second) + eps)
        factor = conda_scale * jnp.sqrt(1 - b2**count) / (1 - b1**count)
        direction = factor * turned_back(adam, {side: basis})
        later = {'momentum': m, 'second': from_matrices(spec, second, grad.shape), 'basis': basis}
        return from_matrices(spec, direction, grad.shape), later

    return per_parameter(specs, init, update)


def _singular_vectors(matrices: jax.Array, side: str) -> jax.Array:
    """Of the smaller side, in columns: the larger one has more than there are singular values."""
    left, _, right = jnp.linalg.svd(matrices, full_matrices=False)
    return left if side == 'left' else jnp.swapaxes(right, -2, -1)
