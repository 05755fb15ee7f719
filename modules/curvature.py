"""Eigenvalues of a symmetric map and singular values of a derivative, by products with vectors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import eigh_tridiagonal

BREAKDOWN = 1e-6  # of the largest entry so far: what is left of a product that the basis spans
BISECTIONS = 24  # as float32 has bits
MIN_LENGTH = 1e-30  # the least length that a vector is divided by
HIGHEST = jax.lax.Precision.HIGHEST

Tree = Any  # of arrays


def lanczos(
    product: Callable[[Tree], Tree], start: Tree, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the diagonal [steps] and what stands beside it [steps] of the tridiagonal matrix that
    a symmetric map has in the basis of its Krylov space, as `ritz_values` reads them.

    Each product is made orthogonal to the whole basis, twice, so that no eigenvalue is found again
    because of rounding. The basis is `steps` times as large as `start`; all is float32 at least.

    Args:
      product: v -> A v on trees like `start`.
      start: where the Krylov space begins; any tree of arrays that is not 0.
      steps: products, at most as many as `start` has numbers.
    """
    first = scale_tree(start, 1 / norm(start))
    basis = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype).at[0].set(x), first)

    def step(i, carry):
        basis, diagonal, beside = carry
        v = jax.tree.map(lambda b: b[i], basis)
        w = product(v)
        diagonal = diagonal.at[i].set(dot(v, w))
        for _ in range(2):
            w = jax.tree.map(jnp.subtract, w, combine_basis(basis, coefficients(basis, w)))
        length = norm(w)
        largest = jnp.maximum(jnp.max(jnp.abs(diagonal)), jnp.max(beside))
        factor = jnp.where(length > BREAKDOWN * largest, 1 / jnp.maximum(length, MIN_LENGTH), 0.0)
        following = scale_tree(w, factor)
        basis = jax.tree.map(lambda b, x: b.at[i + 1].set(x, mode='drop'), basis, following)
        return basis, diagonal, beside.at[i].set(length)

    empty = jnp.zeros(steps, jnp.float32)
    return jax.lax.fori_loop(0, steps, step, (basis, empty, empty))[1:]


def ritz_values(diagonal: np.ndarray, off_diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (Ritz values, descending, and for each a bound on its distance to an eigenvalue).

    Args:
      diagonal: [m], of `lanczos`.
      beside: [m], of `lanczos`; the space is whole where an entry is 0 to rounding.
    """
    diagonal, off_diagonal = np.asarray(diagonal, np.float64), np.asarray(off_diagonal, np.float64)
    largest = np.maximum.accumulate(np.maximum(np.abs(diagonal), off_diagonal))
    whole = np.flatnonzero(off_diagonal <= BREAKDOWN * largest)
    m = int(whole[0]) + 1 if len(whole) else len(diagonal)
    values, vectors = eigh_tridiagonal(diagonal[:m], off_diagonal[: m - 1])
    return values[::-1], np.abs(off_diagonal[m - 1] * vectors[-1])[::-1]


def jacobian_gains(
    function: Callable[[Tree], Tree], point: Tree, start: Tree, rounds: int
) -> jax.Array:
    """Returns |J u| of each row, [B], after `rounds` rounds u <- J^T J u / |J^T J u|.

    J is the derivative of a function of trees of arrays [B, ...] whose rows do not see each other.
    |J u| is at most the largest singular value of J, which is the least Lipschitz constant that the
    function can have near `at`, and grows towards it with each round.

    Args:
      function: differentiable forwards and backwards.
      at: where J is taken.
      start: the first u, like `at` and in no row 0.
      rounds: of a product with J and one with its transpose.
    """
    _, backward = jax.vjp(function, point)

    def forward(u):
        return jax.jvp(function, (point,), (u,))[1]

    def unit(u):
        lengths_B = jnp.maximum(row_norms(u), MIN_LENGTH)
        return jax.tree.map(lambda x: x / jnp.expand_dims(lengths_B, range(1, x.ndim)), u)

    u = jax.lax.fori_loop(0, rounds, lambda _, u: unit(backward(forward(u))[0]), unit(start))
    return row_norms(forward(u))


def row_norms(a: Tree) -> jax.Array:
    """Returns the lengths [B] of the rows of arrays [B, ...], all arrays together."""
    squares = jax.tree.map(lambda x: jnp.sum(x**2, range(1, x.ndim)), a)
    return jnp.sqrt(sum(jax.tree.leaves(squares)))


def dot(a: Tree, b: Tree) -> jax.Array:
    parts = jax.tree.map(lambda x, y: jnp.tensordot(x, y, axes=x.ndim, precision=HIGHEST), a, b)
    return sum(jax.tree.leaves(parts))


def norm(a: Tree) -> jax.Array:
    return jnp.sqrt(dot(a, a))


def scale_tree(a: Tree, factor: jax.Array) -> Tree:
    return jax.tree.map(lambda x: (factor * x).astype(x.dtype), a)


def coefficients(basis: Tree, w: Tree) -> jax.Array:
    """Returns the product [steps] of each vector of the basis with w."""
    parts = jax.tree.map(lambda b, x: jnp.tensordot(b, x, axes=x.ndim, precision=HIGHEST), basis, w)
    return sum(jax.tree.leaves(parts))


def combine_basis(basis: Tree, weights: jax.Array) -> Tree:
    return jax.tree.map(lambda b: jnp.tensordot(weights, b, axes=1, precision=HIGHEST), basis)


def logit_curvature(logits: jax.Array) -> jax.Array:
    """Returns the largest eigenvalue of diag(p) - p p^T, p = softmax(logits) over the last axis.

    That matrix is the Hessian of a token's cross-entropy in its logits, whichever token comes next.
    The eigenvalue is at most 1/2, and is the root x of sum_i p_i^2 / (p_i - x) = 1 between the two
    largest p, found by bisection.
    """
    p = jax.nn.softmax(logits.astype(jnp.float32))
    largest, second = jnp.moveaxis(jax.lax.top_k(p, 2)[0], -1, 0)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        is_above = jnp.sum(p**2 / (p - middle[..., None]), -1) > 1
        return jnp.where(is_above, low, middle), jnp.where(is_above, middle, high)

    low, high = jax.lax.fori_loop(0, BISECTIONS, halve, (second, largest))
    return (low + high) / 2


def logit_sharpness(logits: jax.Array, labels: jax.Array, eps: float) -> jax.Array:
    """Returns 100 (max f(z + d) - f(z)) / (1 + f(z)) over |d_i| <= eps (|z_i| + 1), where f is the
    cross-entropy of the label.

    f grows with every logit but the label's, with which it falls, so that the largest value is at
    a corner of the box: no search is needed. Source: arXiv:2405.18710, which has it of
    the last token's logits, and arXiv:1609.04836 for the measure.
    """
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    reach = eps * (jnp.abs(logits) + 1)
    before, after = (
        jax.nn.logsumexp(z, -1) - jnp.sum(jnp.where(is_label, z, 0.0), -1)
        for z in (logits, logits + jnp.where(is_label, -reach, reach))
    )
    return 100 * (after - before) / (1 + before)
