"""SOAP: Adam in the eigenbases of Shampoo's preconditioner."""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.adamw import B1, B2, Eps
from modules.optim.base import boxed, of_family, per_parameter, when
from modules.optim.rotations import (
    SIDES,
    of_side,
    outer,
    product,
    smaller_side,
    turned,
    turned_back,
)
from modules.optim.whole import kept_whole, updated_whole
from modules.options import Option
from modules.params import as_matrices
from modules.statistics import at_least_float32


@of_family('adam', roles=('hidden',))
def soap(
    specs: Any,
    *,
    b1: B1 = 0.95,
    b2: B2 = 0.95,
    eps: Eps = 1e-8,
    soap_every: Annotated[
        int, Option('steps from one refresh of the bases to the next', 1, counted_in='steps')
    ] = 10,
    soap_max_dim: Annotated[int, Option('largest side that is rotated', 0)] = 10000,
    soap_sides: Annotated[
        str, Option('which sides of a matrix are rotated', choices=('both', 'smaller'))
    ] = 'both',
) -> optax.GradientTransformation:
    """Adam of the coordinates in the eigenvectors of L and R (arXiv:2409.11321, algorithm 3).

    L = b2 L + (1 - b2) g g^T, R the same of g^T g, and Q their eigenvectors: those of the first
    gradient, then refreshed by one power iteration and a QR decomposition. With g' = Q_L^T g Q_R
    and m' so of m, v = b2 v + (1 - b2) g'^2, and the direction is
    sqrt(1 - b2^t) / (1 - b1^t) Q_L (m' / (sqrt(v) + eps)) Q_R^T.

    As in the authors' code (github.com/nikhilvyas/SOAP): an update uses the bases of before its
    gradient, so that the first one is zero and only finds them, and t counts from the second; v is
    put in the order of the eigenvalues before a refresh; a side above soap_max_dim keeps its own
    basis. There the first step leaves out weight decay too; here that is not the optimizer's.
    'smaller' is the one-sided version of the paper's section 7.
    """

    def init(spec, weight):
        matrices = at_least_float32(as_matrices(spec, weight))
        zeros = jnp.zeros_like(weight)
        kept = {'momentum': zeros, 'second': zeros}
        for side in SIDES if soap_sides == 'both' else (smaller_side(matrices),):
            if matrices.shape[SIDES[side]] <= soap_max_dim:
                products, basis = (of_side(matrices, side, diagonal) for diagonal in (0.0, 1.0))
                kept[f'{side}_products'] = boxed(spec, products, 'basis', 'basis')
                kept[f'{side}_basis'] = boxed(spec, basis, 'basis', 'basis')
        return kept_whole(spec, kept)

    def update(spec, grad, kept, weight, count):
        del weight
        of_matrices = functools.partial(_updated, every=soap_every)
        return updated_whole(spec, of_matrices, grad, kept, (count, b1, b2, eps))

    return per_parameter(specs, init, update)


def _updated(given, count, b1, b2, eps, every):
    """(directions, what is kept next) of (gradients, what is kept) [..., I, O]."""
    grads, kept = given
    g = at_least_float32(grads)
    bases = {side: kept[f'{side}_basis'] for side in SIDES if f'{side}_basis' in kept}
    products = {side: b2 * kept[f'{side}_products'] + (1 - b2) * outer(g, side) for side in bases}
    # The first gradient is only for the bases; 0 times a correction without meaning is 0.
    t = jnp.maximum(count - 1, 1)
    used = jnp.where(count == 1, 0.0, 1.0)
    m = used * (b1 * kept['momentum'] + (1 - b1) * grads)
    second = used * (b2 * kept['second'] + (1 - b2) * jnp.square(turned(g, bases)))
    adam = turned(m, bases) / (jnp.sqrt(second) + eps)
    factor = jnp.sqrt(1 - b2**t) / (1 - b1**t)
    directions = factor * turned_back(adam, bases)
    second, bases = _refresh(count, every, second, products, bases)
    later = {'momentum': m, 'second': second}
    for side in bases:
        later |= {f'{side}_products': products[side], f'{side}_basis': bases[side]}
    return directions, later


def _refresh(count, every, second, products, bases):
    """(second, bases) after update `count`."""

    def first():
        return second, {side: _eigenvectors(square) for side, square in products.items()}

    def iterated():
        ordered, found = second, {}
        for side, square in products.items():
            basis = bases[side]
            values = jnp.sum(basis * product('...ij,...jk->...ik', square, basis), axis=-2)
            order = jnp.argsort(-values, axis=-1)
            by_column = order[..., None, :]
            basis = jnp.take_along_axis(basis, by_column, axis=-1)
            along = order[..., :, None] if side == 'left' else by_column
            ordered = jnp.take_along_axis(ordered, along, axis=SIDES[side])
            found[side], _ = jnp.linalg.qr(product('...ij,...jk->...ik', square, basis))
        return ordered, found

    due = (count > 1) & ((count - 1) % every == 0)
    later = when(due, iterated, (second, bases))
    return when(count == 1, first, later)


def _eigenvectors(square: jax.Array) -> jax.Array:
    """That of the largest eigenvalue first."""
    return jnp.flip(jnp.linalg.eigh(square)[1], axis=-1)
