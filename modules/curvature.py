"""Eigenvalues of a symmetric map and singular values of a derivative, by products with vectors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import eigh_tridiagonal

# A residual below this share of the largest entry so far is rounding: the basis spans the product.
BREAKDOWN = 1e-6
BISECTIONS = 24  # the bits of a float32 mantissa: more halvings change nothing
MIN_LENGTH = 1e-30  # vectors are divided by at least this, so that a zero vector stays zero
HIGHEST = jax.lax.Precision.HIGHEST

Tree = Any  # of arrays


def lanczos(
    product: Callable[[Tree], Tree], start: Tree, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Computes the tridiagonal matrix of a symmetric map in the basis of its Krylov space.

    Each product is made orthogonal to the whole basis, twice, so that rounding produces no
    eigenvalue a second time. The basis is `steps` times as large as `start`; everything is float32
    at least.

    Args:
      product: v -> A v on trees like `start`.
      start: the first vector of the Krylov space; any tree of arrays that is not 0.
      steps: the number of products, at most the number of entries of `start`.

    Returns:
      The diagonal [steps] and the off-diagonal [steps], as `ritz_values` reads them.
    """
    first = scale_tree(start, 1 / norm(start))
    basis = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype).at[0].set(x), first)

    def step(i, carry):
        basis, diagonal, off_diagonal = carry
        v = jax.tree.map(lambda b: b[i], basis)
        w = product(v)
        diagonal = diagonal.at[i].set(dot(v, w))
        for _ in range(2):
            w = jax.tree.map(jnp.subtract, w, combine_basis(basis, coefficients(basis, w)))
        length = norm(w)
        largest = jnp.maximum(jnp.max(jnp.abs(diagonal)), jnp.max(off_diagonal))
        factor = jnp.where(length > BREAKDOWN * largest, 1 / jnp.maximum(length, MIN_LENGTH), 0.0)
        next_vector = scale_tree(w, factor)
        basis = jax.tree.map(lambda b, x: b.at[i + 1].set(x, mode='drop'), basis, next_vector)
        return basis, diagonal, off_diagonal.at[i].set(length)

    empty = jnp.zeros(steps, jnp.float32)
    return jax.lax.fori_loop(0, steps, step, (basis, empty, empty))[1:]


def ritz_values(diagonal: np.ndarray, off_diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (Ritz values, descending; for each a bound on its distance to an eigenvalue).

    Args:
      diagonal: [m], from `lanczos`.
      off_diagonal: [m], from `lanczos`; the Krylov space is complete at an entry that is 0 to
        rounding.
    """
    diagonal, off_diagonal = np.asarray(diagonal, np.float64), np.asarray(off_diagonal, np.float64)
    largest = np.maximum.accumulate(np.maximum(np.abs(diagonal), off_diagonal))
    breakdowns = np.flatnonzero(off_diagonal <= BREAKDOWN * largest)
    m = int(breakdowns[0]) + 1 if len(breakdowns) else len(diagonal)
    values, vectors = eigh_tridiagonal(diagonal[:m], off_diagonal[: m - 1])
    return values[::-1], np.abs(off_diagonal[m - 1] * vectors[-1])[::-1]


def jacobian_gains(
    function: Callable[[Tree], Tree], point: Tree, start: Tree, rounds: int
) -> jax.Array:
    """Returns |J u| of each row, [B], after `rounds` rounds u <- J^T J u / |J^T J u|.

    J is the derivative of a function of trees of arrays [B, ...] that maps each row alone. |J u| is
    at most the largest singular value of J, which is a lower bound on the Lipschitz constant of the
    function near `point`. It grows towards that value with each round.

    Args:
      function: differentiable forwards and backwards.
      point: where J is taken.
      start: the first u, like `point`; no row of it is 0.
      rounds: products with J, each followed by a product with its transpose.

    Returns:
      The lengths |J u|.
    """
    _, backward = jax.vjp(function, point)

    def forward(u):
        return jax.jvp(function, (point,), (u,))[1]

    def normalize(u):
        lengths_B = jnp.maximum(row_norms(u), MIN_LENGTH)
        return jax.tree.map(lambda x: x / jnp.expand_dims(lengths_B, range(1, x.ndim)), u)

    u = jax.lax.fori_loop(
        0, rounds, lambda _, u: normalize(backward(forward(u))[0]), normalize(start)
    )
    return row_norms(forward(u))


def row_norms(a: Tree) -> jax.Array:
    """Returns the lengths [B] of the rows of a tree of arrays [B, ...], over all of its arrays."""
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
    """Returns the inner product [steps] of each vector of the basis with w."""
    parts = jax.tree.map(lambda b, x: jnp.tensordot(b, x, axes=x.ndim, precision=HIGHEST), basis, w)
    return sum(jax.tree.leaves(parts))


def combine_basis(basis: Tree, weights: jax.Array) -> Tree:
    return jax.tree.map(lambda b: jnp.tensordot(weights, b, axes=1, precision=HIGHEST), basis)


def logit_curvature(logits: jax.Array) -> jax.Array:
    """Returns the largest eigenvalue of diag(p) - p p^T, p = softmax(logits) over the last axis.

    That matrix is the Hessian of a token's cross-entropy in its logits, and does not depend on the
    label. The eigenvalue is at most 1/2. It is the root x of sum_i p_i^2 / (p_i - x) = 1 between
    the two largest p, found by bisection.
    """
    p = jax.nn.softmax(logits.astype(jnp.float32))
    largest, second = jnp.moveaxis(jax.lax.top_k(p, 2)[0], -1, 0)

    def bisect(_, ends):
        low, high = ends
        middle = (low + high) / 2
        is_above = jnp.sum(p**2 / (p - middle[..., None]), -1) > 1
        return jnp.where(is_above, low, middle), jnp.where(is_above, middle, high)

    low, high = jax.lax.fori_loop(0, BISECTIONS, bisect, (second, largest))
    return (low + high) / 2


def logit_sharpness(logits: jax.Array, labels: jax.Array, eps: float) -> jax.Array:
    """Computes the sharpness of the cross-entropy f of a label in a box around its logits.

        100 (max f(z + d) - f(z)) / (1 + f(z))  over |d_i| <= eps (|z_i| + 1)

    f grows with every logit except the label's, and falls with the label's. The largest value is
    therefore at a corner of the box, and no search is needed. Source: arXiv:2405.18710, which
    applies it to the logits of the last token, and arXiv:1609.04836 for the measure.

    Args:
      logits: z, [..., V].
      labels: [...].
      eps: the relative size of the box.

    Returns:
      The sharpness in percent, [...].
    """
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    reach = eps * (jnp.abs(logits) + 1)
    before, after = (
        jax.nn.logsumexp(z, -1) - jnp.sum(jnp.where(is_label, z, 0.0), -1)
        for z in (logits, logits + jnp.where(is_label, -reach, reach))
    )
    return 100 * (after - before) / (1 + before)
