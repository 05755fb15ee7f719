"""ARO: normalised gradients in a rotation that is chosen for the normalisation."""

import functools
import math
import sys
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.base import boxed, of_family, per_parameter, when
from modules.optim.rotations import of_side, outer, product, turned, turned_back
from modules.optim.sgd import Momentum
from modules.options import Option
from modules.params import as_matrices, from_matrices, matrix_axes
from modules.statistics import at_least_float32

STREAM = 'embed'  # the axis of the residual stream
SHIFT = 1e-7  # of the Gram matrix, in the square of the Frobenius norm
LEAST_NORM = 1e-8


@of_family('adam', roles=('hidden',))
def aro(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    aro_map: Annotated[
        str,
        Option('what is done to the rotated momentum', choices=('sink', 'row', 'sign')),
    ] = 'sink',
    aro_steps: Annotated[int, Option('rounds of the map sink', 1, 100)] = 5,
    aro_scale: Annotated[
        float, Option('root mean square of the direction', 0, sys.float_info.max, traced=True)
    ] = 0.2,
) -> optax.GradientTransformation:
    """scale R f(R^T m), with R = QR(m f(R'^T m)^T) and R' the last rotation (arXiv:2602.09006).

    m = momentum m + (1 - momentum) g, with the residual stream along its rows, which R turns; in
    matrices without it, the side that is summed over. R is the identity at first. f gives entries
    of mean square 1: `sink`, in turns rows, then columns, to it (arXiv:2502.06742); `row`, rows
    once; `sign`, each entry. With `row` and a gradient that stays, R f(R^T m) becomes the
    orthogonal factor of m.

    The QR decomposition is that of the authors' code (github.com/microsoft/dion, dion/aro.py at
    d5a31dd3): by Cholesky's of a Gram matrix shifted by 1e-7, and by reflections where that fails.
    Their code turns the side of outputs, and multiplies by 0.2 sqrt(max(I, O)), as for orthogonal
    updates; here are the paper's side and its root mean square, 0.2.
    """
    f = {'sink': functools.partial(_sink, steps=aro_steps), 'row': _rows, 'sign': jnp.sign}[aro_map]

    def init(spec, weight):
        matrices = _stream_in_rows(spec, at_least_float32(as_matrices(spec, weight)))
        rotation = boxed(spec, of_side(matrices, 'left', 1.0), 'basis', 'basis')
        return {'momentum': jnp.zeros_like(weight), 'rotation': rotation}

    def update(spec, grad, kept, weight, count):
        del weight, count
        moved = momentum * kept['momentum'] + (1 - momentum) * grad
        m = _stream_in_rows(spec, at_least_float32(as_matrices(spec, moved)))
        aligned = product('...io,...jo->...ij', m, f(turned(m, {'left': kept['rotation']})))
        rotation = {'left': _orthogonal(aligned)}
        direction = aro_scale * turned_back(f(turned(m, rotation)), rotation)
        direction = from_matrices(spec, _stream_in_rows(spec, direction), grad.shape)
        return direction, {'momentum': moved, 'rotation': rotation['left']}

    return per_parameter(specs, init, update)


def _stream_in_rows(spec, matrices):
    """Transposed where the residual stream is what a matrix gives; its own inverse."""
    _, rows, columns = matrix_axes(spec)
    in_rows, in_columns = (any(spec.axes[i] == STREAM for i in axes) for axes in (rows, columns))
    return jnp.swapaxes(matrices, -2, -1) if in_columns and not in_rows else matrices


def _rows(matrices):
    norms = jnp.linalg.norm(matrices, axis=-1, keepdims=True)
    return math.sqrt(matrices.shape[-1]) * matrices / jnp.maximum(norms, LEAST_NORM)


def _sink(matrices, steps):
    def both(matrices, _):
        of_rows = _rows(matrices)
        return jnp.swapaxes(_rows(jnp.swapaxes(of_rows, -2, -1)), -2, -1), None

    return jax.lax.scan(both, matrices, None, length=steps)[0]


def _orthogonal(square):
    """Q of the QR decomposition of matrices [..., n, n], the diagonal of whose R is positive."""
    size = jnp.sum(jnp.square(square), (-2, -1), keepdims=True)
    gram = outer(square, 'right') + SHIFT * size * of_side(square, 'right', 1.0)
    lower = jnp.linalg.cholesky(gram)
    found = jax.lax.linalg.triangular_solve(lower, square, lower=True, transpose_a=True)
    failed = ~jnp.all(jnp.isfinite(found), (-2, -1), keepdims=True)
    return when(jnp.any(failed), lambda: jnp.where(failed, jnp.linalg.qr(square)[0], found), found)
