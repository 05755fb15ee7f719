"""Reference: exact Lipschitz constants of small networks; closed forms for inputs of attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims.measures import lipschitz


def make_block(columns, biases):
    up = np.array(columns, float).T
    return {
        'up': up,
        'up_bias': np.array(biases, float),
        'down': np.eye(len(biases), 3),
        'down_bias': np.zeros(3),
    }


def region_norms(*blocks):
    jacobians = lipschitz._region_jacobians(blocks, np.eye(3), np.zeros(3), [], np.zeros(3))
    return sorted(lipschitz._spectral_norm(jacobian) for jacobian in jacobians)


@pytest.mark.parametrize(
    ('columns', 'biases', 'norms'),
    [
        ([[3.0, 0, 0]], [0.0], [0, 3]),  # a wall through the middle of the box, which reaches 0.5
        ([[3.0, 0, 0]], [1.6], [3]),  # walls beyond it: on everywhere, off everywhere
        ([[3.0, 0, 0]], [-1.6], [0]),
        ([[3.0, 0, 0], [0, 2.0, 0]], [0.0, 0.0], [0, 2, 3, 3]),
        ([[3.0, 0, 0], [2.0, 0, 0]], [-0.3, 0.2], [0, 2, 13**0.5]),  # no first without the second
    ],
)
def test_lists_each_linear_region_once(columns, biases, norms):
    np.testing.assert_allclose(region_norms(make_block(columns, biases)), norms)


def test_regions_cover_points():
    """A grid of points meets only listed regions, and the steepest of them."""
    rng = np.random.default_rng(0)
    blocks = [lipschitz._draw_block(rng, units)[1] for units in (5, 5)]
    grid = np.stack(np.meshgrid(*[np.linspace(-0.49, 0.49, 8)] * 3), -1).reshape(-1, 3)
    norms_at_points = np.array(
        [lipschitz._spectral_norm(lipschitz._jacobian_at(blocks, x)) for x in grid]
    )
    norms_of_regions = np.array(region_norms(*blocks))
    assert np.abs(norms_at_points[:, None] - norms_of_regions).min(1).max() < 1e-9
    assert len({*norms_at_points.round(6)}) > 5 and norms_at_points.max() == pytest.approx(
        norms_of_regions.max()
    )


def test_jacobian_matches_model():
    """The matrices read from the parameters are where the MLP has them."""
    rng = np.random.default_rng(1)
    params, matrices = lipschitz._draw_block(rng, 5)
    x = jnp.float32(rng.standard_normal(3))
    model_jacobian = jax.jacobian(
        lambda x: lipschitz._build_mlp(5).apply({'params': params}, x[None, None])[0, 0]
    )
    jacobian = lipschitz._jacobian_at([matrices], np.float64(x))
    np.testing.assert_allclose(model_jacobian(x), jacobian.T, rtol=1e-5, atol=1e-6)


def test_keys_are_equidistant_from_query():
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 8, 8))
    (x_TD,) = lipschitz._equidistant(rng, q, k)
    distances = np.linalg.norm(x_TD[-1] @ q - x_TD @ k, axis=1)
    np.testing.assert_allclose(distances, distances[-1])
    (same_TD,) = lipschitz._equidistant(rng, q, q)  # one matrix: all are where the query is
    np.testing.assert_allclose(same_TD, np.tile(same_TD[-1], (8, 1)), atol=1e-9)


@pytest.mark.full
def test_token_at_zero_is_stretched_by_covariance():
    """The Jacobian of the last output in the last token is W_q cov(k, v) W_o / sqrt(H) + W_v / T.

    The largest singular value of the whole Jacobian is at least that of this block, and grows with
    the square of the scale for products; with distances the token sees only itself.
    """
    rng = np.random.default_rng(3)
    q, v = rng.standard_normal((2, 8, 8)) / 8**0.5
    x_TD = 20 * rng.standard_normal((8, 8))
    x_TD[-1] = 0
    params = {
        'query': q[:, None],
        'key': q[:, None],
        'value': v[:, None],
        'out': np.eye(8)[None],
    }
    start = jnp.float32(rng.standard_normal((1, 8, 8)))
    covariance = np.cov(x_TD.T, bias=True)
    lower_bound = np.linalg.norm(q @ q.T @ covariance @ v / 8**0.5 + v / 8, 2)
    by_products, by_distances = (
        lipschitz._measure_attention_stretches(
            lipschitz._build_attention(name, {}), params, jnp.float32(x_TD)[None], start
        ).item()
        for name in ('softmax', 'l2')
    )
    assert lower_bound * 0.999 < by_products < 3 * lower_bound
    assert by_distances < 10 < lower_bound
