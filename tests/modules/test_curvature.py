"""Eigenvalues by products. Reference: dense matrices; closed forms of two tokens."""

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


def symmetric(values, size=24, seed=0):
    """A matrix with these eigenvalues, and 0 otherwise."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))
    return q[:, : len(values)] @ np.diag(values) @ q[:, : len(values)].T


def on_trees(matrix):
    """v -> A v of vectors that are cut into two arrays, and a start."""
    matrix = jnp.asarray(matrix, jnp.float32)

    def product(v):
        whole = matrix @ jnp.concatenate([v['a'].ravel(), v['b']])
        return {'a': whole[:6].reshape(2, 3), 'b': whole[6:]}

    start = np.random.default_rng(1).standard_normal(len(matrix)).astype(np.float32)
    return product, {'a': jnp.asarray(start[:6].reshape(2, 3)), 'b': jnp.asarray(start[6:])}


def test_eigenvalues_of_a_quadratic_are_found_and_the_space_ends_where_it_is_whole():
    """A map of rank 8 has a Krylov space of 9: more steps find no eigenvalue twice."""
    product, start = on_trees(symmetric(VALUES))
    values, bounds = ritz_values(*jax.jit(lambda v: lanczos(product, v, 20))(start))
    assert len(values) in (9, 10)
    nearest = np.abs(values[:, None] - np.append(VALUES, 0.0)).min(1)
    assert nearest.max() < 1e-4 and bounds.max() < 1e-3
    np.testing.assert_allclose(values[:4], VALUES[:4], rtol=1e-5)
    np.testing.assert_allclose(values[-1], VALUES[-1], rtol=1e-5)


def test_many_steps_do_not_find_an_eigenvalue_again():
    """Without orthogonalisation against the whole basis the largest comes back within 30 steps."""
    wanted = np.concatenate([[50.0], np.linspace(1, 2, 59)])
    matrix = symmetric(wanted, 60)
    product, start = on_trees(matrix)
    values, _ = ritz_values(*jax.jit(lambda v: lanczos(product, v, 40))(start))
    assert (values > 10).sum() == 1
    np.testing.assert_allclose(values[0], 50.0, rtol=1e-5)


def test_values_that_have_not_converged_have_the_residual_of_their_vectors():
    """|A y - x y| in the Krylov space of 4 powers, which bounds the distance to an eigenvalue."""
    wanted = np.linspace(-1, 1, 24)
    matrix = symmetric(wanted)
    product, start = on_trees(matrix)
    values, bounds = ritz_values(*lanczos(product, start, 4))
    v = np.concatenate([np.ravel(start['a']), start['b']])
    powers = [np.linalg.matrix_power(matrix, i) @ v for i in range(4)]
    basis, _ = np.linalg.qr(np.stack(powers, -1))
    found, vectors = np.linalg.eigh(basis.T @ matrix @ basis)
    residuals = np.linalg.norm(matrix @ basis @ vectors - basis @ vectors * found, axis=0)
    np.testing.assert_allclose(values, found[::-1], rtol=1e-4)
    np.testing.assert_allclose(bounds, residuals[::-1], rtol=1e-4)
    assert np.all(np.abs(values[:, None] - wanted).min(1) <= bounds)


@pytest.mark.full
def test_each_row_is_stretched_as_far_as_its_own_matrix_allows():
    matrices = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)
    at = jnp.ones((3, 7))

    def function(x_BI):
        return jnp.tanh(jnp.einsum('boi,bi->bo', matrices, x_BI - 1) * 2)

    start = jax.random.normal(jax.random.key(0), at.shape)
    found = jacobian_gains(function, at, start, 200)
    wanted = [2 * np.linalg.svd(m, compute_uv=False)[0] for m in matrices]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    early = jacobian_gains(function, at, start, 1)
    assert np.all(early < np.array(wanted) * (1 - 1e-3))


@pytest.mark.parametrize('scale', [0.1, 1.0, 5.0])
def test_the_curvature_in_logits_is_that_of_the_matrix(scale):
    logits = scale * np.random.default_rng(0).standard_normal((4, 9))
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    wanted = [np.linalg.eigvalsh(np.diag(one) - np.outer(one, one))[-1] for one in p]
    np.testing.assert_allclose(logit_curvature(jnp.asarray(logits)), wanted, rtol=1e-4)


def test_the_curvature_of_two_tokens_and_of_equal_ones():
    p = 0.8
    two = jnp.log(jnp.array([[p, 1 - p], [0.5, 0.5]]))
    np.testing.assert_allclose(logit_curvature(two), [2 * p * (1 - p), 0.5], rtol=1e-5)
    np.testing.assert_allclose(logit_curvature(jnp.zeros((1, 10))), [0.1], rtol=1e-5)


def test_the_sharpness_of_logits_is_of_the_worst_corner_of_the_box():
    logits, label, eps = np.array([1.5, -0.3, 0.2, -2.0]), 2, 0.1

    def loss(z):
        return np.log(np.exp(z).sum()) - z[label]

    signs = np.array(list(itertools.product([-1, 1], repeat=4)))
    worst = max(loss(logits + sign * eps * (np.abs(logits) + 1)) for sign in signs)
    wanted = 100 * (worst - loss(logits)) / (1 + loss(logits))
    found = logit_sharpness(jnp.asarray(logits), jnp.asarray(label), eps)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
