"""Eigenvalues from products. Reference: dense matrices; closed forms for two tokens."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.curvature import (
    jacobian_gains,
    lanczos,
    logit_curvature,
    logit_sharpness,
    ritz_values,
)

VALUES = np.array([9.0, 4.0, 3.9, 1.0, 0.5, 0.1, -0.2, -2.0])


def symmetric_matrix(values, size=24, seed=0):
    """Returns a matrix with these eigenvalues, and 0 otherwise."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))
    return q[:, : len(values)] @ np.diag(values) @ q[:, : len(values)].T


def tree_product(matrix):
    """Returns v -> A v for vectors split into two arrays, and a start vector."""
    matrix = jnp.asarray(matrix, jnp.float32)

    def product(v):
        whole = matrix @ jnp.concatenate([v['a'].ravel(), v['b']])
        return {'a': whole[:6].reshape(2, 3), 'b': whole[6:]}

    start = np.random.default_rng(1).standard_normal(len(matrix)).astype(np.float32)
    return product, {'a': jnp.asarray(start[:6].reshape(2, 3)), 'b': jnp.asarray(start[6:])}


def test_lanczos_stops_at_full_krylov_space():
    """A map of rank 8 has a Krylov space of dimension 9: more steps find no eigenvalue twice."""
    product, start = tree_product(symmetric_matrix(VALUES))
    values, bounds = ritz_values(*jax.jit(lambda v: lanczos(product, v, 20))(start))
    assert len(values) in (9, 10)
    nearest = np.abs(values[:, None] - np.append(VALUES, 0.0)).min(1)
    assert nearest.max() < 1e-4 and bounds.max() < 1e-3
    np.testing.assert_allclose(values[:4], VALUES[:4], rtol=1e-5)
    np.testing.assert_allclose(values[-1], VALUES[-1], rtol=1e-5)


def test_lanczos_finds_eigenvalues_once():
    """Without orthogonalisation against the whole basis the largest recurs within 30 steps."""
    eigenvalues = np.concatenate([[50.0], np.linspace(1, 2, 59)])
    matrix = symmetric_matrix(eigenvalues, 60)
    product, start = tree_product(matrix)
    values, _ = ritz_values(*jax.jit(lambda v: lanczos(product, v, 40))(start))
    assert (values > 10).sum() == 1
    np.testing.assert_allclose(values[0], 50.0, rtol=1e-5)


def test_bounds_equal_residuals():
    """|A y - x y| in the Krylov space of 4 powers, which bounds the distance to an eigenvalue."""
    eigenvalues = np.linspace(-1, 1, 24)
    matrix = symmetric_matrix(eigenvalues)
    product, start = tree_product(matrix)
    values, bounds = ritz_values(*lanczos(product, start, 4))
    v = np.concatenate([np.ravel(start['a']), start['b']])
    powers = [np.linalg.matrix_power(matrix, i) @ v for i in range(4)]
    basis, _ = np.linalg.qr(np.stack(powers, -1))
    ritz, vectors = np.linalg.eigh(basis.T @ matrix @ basis)
    residuals = np.linalg.norm(matrix @ basis @ vectors - basis @ vectors * ritz, axis=0)
    np.testing.assert_allclose(values, ritz[::-1], rtol=1e-4)
    np.testing.assert_allclose(bounds, residuals[::-1], rtol=1e-4)
    assert np.all(np.abs(values[:, None] - eigenvalues).min(1) <= bounds)


@pytest.mark.full
def test_jacobian_gains_match_singular_values():
    matrices = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)
    at = jnp.ones((3, 7))

    def function(x_BI):
        return jnp.tanh(jnp.einsum('boi,bi->bo', matrices, x_BI - 1) * 2)

    start = jax.random.normal(jax.random.key(0), at.shape)
    gains = jacobian_gains(function, at, start, 200)
    expected = [2 * np.linalg.svd(m, compute_uv=False)[0] for m in matrices]
    np.testing.assert_allclose(gains, expected, rtol=1e-4)
    early = jacobian_gains(function, at, start, 1)
    assert np.all(early < np.array(expected) * (1 - 1e-3))


@pytest.mark.parametrize('scale', [0.1, 1.0, 5.0])
def test_logit_curvature_matches_matrix(scale):
    logits = scale * np.random.default_rng(0).standard_normal((4, 9))
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    expected = [np.linalg.eigvalsh(np.diag(row) - np.outer(row, row))[-1] for row in p]
    np.testing.assert_allclose(logit_curvature(jnp.asarray(logits)), expected, rtol=1e-4)


def test_logit_curvature_closed_forms():
    p = 0.8
    two = jnp.log(jnp.array([[p, 1 - p], [0.5, 0.5]]))
    np.testing.assert_allclose(logit_curvature(two), [2 * p * (1 - p), 0.5], rtol=1e-5)
    np.testing.assert_allclose(logit_curvature(jnp.zeros((1, 10))), [0.1], rtol=1e-5)


def test_logit_sharpness_is_worst_corner():
    logits, label, eps = np.array([1.5, -0.3, 0.2, -2.0]), 2, 0.1

    def loss(z):
        return np.log(np.exp(z).sum()) - z[label]

    signs = np.array(list(itertools.product([-1, 1], repeat=4)))
    worst = max(loss(logits + sign * eps * (np.abs(logits) + 1)) for sign in signs)
    expected = 100 * (worst - loss(logits)) / (1 + loss(logits))
    actual = logit_sharpness(jnp.asarray(logits), jnp.asarray(label), eps)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
