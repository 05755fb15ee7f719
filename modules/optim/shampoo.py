"""Shampoo."""

import functools
from typing import Annotated, Any

import jax.numpy as jnp
import optax

from modules.optim.adamw import ABOVE_0, B1, B2, Eps
from modules.optim.base import boxed, of_family, per_parameter, when
from modules.optim.rotations import SIDES, of_side, outer, product, turned
from modules.optim.whole import kept_whole, updated_whole
from modules.options import Option
from modules.params import as_matrices
from modules.statistics import at_least_float32

LEAST_EIGENVALUE = 1e-32  # where all gradients were zero


@of_family('adam', roles=('hidden',), other_sizes={'shampoo_graft': False})
def shampoo(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-8,
    shampoo_every: Annotated[
        int, Option('steps from one pair of roots to the next', 1, counted_in='steps')
    ] = 1,
    shampoo_eps: Annotated[
        float, Option('share of the largest eigenvalue added to all', ABOVE_0, 1, traced=True)
    ] = 1e-6,
    shampoo_graft: Annotated[
        bool, Option("whether each matrix is given the norm of Adam's direction")
    ] = True,
) -> optax.GradientTransformation:
    """L^(-1/4) m R^(-1/4) (arXiv:1802.09568, algorithm 1), with the norm of Adam's direction.

    m = b1 m + (1 - b1) g, L = b2 L + (1 - b2) g g^T and R the same of g^T g, each corrected for
    its start, as in github.com/facebookresearch/optimizers, whose b1, b2 and eps for a run that had
    AdamW these are; the paper sums g g^T and takes g itself. To the eigenvalues is added a share of
    the largest one (arXiv:2002.09018 and its code): less than float32's rounding, as 1e-12 there,
    makes the directions that no gradient had the longest ones. Roots are taken at every
    `shampoo_every`-th update; before the first ones the direction is Adam's, or m without
    grafting. Grafting (arXiv:2002.11803) gives each matrix the Frobenius norm of Adam's direction;
    without it the size is that of an orthogonal matrix.
    """

    def init(spec, weight):
        matrices = at_least_float32(as_matrices(spec, weight))
        zeros = jnp.zeros_like(weight)
        kept = {'momentum': zeros}
        if shampoo_graft:
            kept['second'] = zeros
        for side in SIDES:
            kept[f'{side}_products'] = boxed(spec, of_side(matrices, side, 0.0), 'basis', 'basis')
            kept[f'{side}_root'] = boxed(spec, of_side(matrices, side, 1.0), 'basis', 'basis')
        return kept_whole(spec, kept)

    def update(spec, grad, kept, weight, count):
        del weight
        of_matrices = functools.partial(_updated, every=shampoo_every)
        return updated_whole(spec, of_matrices, grad, kept, (count, b1, b2, eps, shampoo_eps))

    return per_parameter(specs, init, update)


def _updated(given, count, b1, b2, eps, root_eps, every):
    """(directions, what is kept next) of (gradients, what is kept) [..., I, O]; grafted where a
    second moment is kept.
    """
    grads, kept = given
    g = at_least_float32(grads)
    moved = b1 * kept['momentum'] + (1 - b1) * grads
    m = moved * (1 / (1 - b1**count))
    correction = 1 / (1 - b2**count)
    products = {side: b2 * kept[f'{side}_products'] + (1 - b2) * outer(g, side) for side in SIDES}
    roots = when(
        count % every == 0,
        lambda: {side: _root(p * correction, root_eps) for side, p in products.items()},
        {side: kept[f'{side}_root'] for side in SIDES},
    )
    directions = turned(m, roots)  # the roots are symmetric
    later = {'momentum': moved}
    for side in SIDES:
        later |= {f'{side}_products': products[side], f'{side}_root': roots[side]}
    if 'second' in kept:
        second = b2 * kept['second'] + (1 - b2) * jnp.square(grads)
        adam = m / (jnp.sqrt(second * correction) + eps)
        directions = jnp.where(count < every, adam, _of_norm(directions, adam))
        later['second'] = second
    return directions, later


def _root(square, eps):
    """(P + eps |P| I)^(-1/4) of P [..., n, n], its eigenvalues below 0 taken as 0."""
    values, vectors = jnp.linalg.eigh(square)
    values = jnp.maximum(values, 0.0) + eps * values[..., -1:]
    values = jnp.maximum(values, LEAST_EIGENVALUE)
    scaled = vectors / jnp.sqrt(jnp.sqrt(values))[..., None, :]
    return product('...ik,...jk->...ij', scaled, vectors)


def _of_norm(matrices, others):
    """The matrices with the Frobenius norms of others."""
    norm, wanted = (
        jnp.linalg.norm(one, axis=(-2, -1), keepdims=True) for one in (matrices, others)
    )
    return matrices * jnp.where(norm > 0, wanted / jnp.where(norm > 0, norm, 1.0), 0.0)
