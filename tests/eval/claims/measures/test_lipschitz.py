"""Reference: exact Lipschitz constants of small networks; closed forms of attention's inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims.measures import lipschitz


def block(columns, biases):
    up = np.array(columns, float).T
    return {
        'up': up,
        'up_bias': np.array(biases, float),
        'down': np.eye(len(biases), 3),
        'down_bias': np.zeros(3),
    }


def regions(*blocks):
    found = lipschitz._region_jacobians(blocks, np.eye(3), np.zeros(3), [], np.zeros(3))
    return sorted(lipschitz._spectral_norm(one) for one in found)


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
def test_each_linear_region_of_the_box_is_found_once(columns, biases, norms):
    np.testing.assert_allclose(regions(block(columns, biases)), norms)


def test_regions_of_two_blocks_are_those_that_points_are_in():
    """A grid of points meets no region that is not listed, and the steepest is among them."""
    rng = np.random.default_rng(0)
    blocks = [lipschitz._draw_block(rng, units)[1] for units in (5, 5)]
    grid = np.stack(np.meshgrid(*[np.linspace(-0.49, 0.49, 8)] * 3), -1).reshape(-1, 3)
    seen = np.array([lipschitz._spectral_norm(lipschitz._jacobian_at(blocks, x)) for x in grid])
    listed = np.array(regions(*blocks))
    assert np.abs(seen[:, None] - listed).min(1).max() < 1e-9
    assert len({*seen.round(6)}) > 5 and seen.max() == pytest.approx(listed.max())


def test_the_derivative_at_a_point_is_that_of_the_model():
    """The matrices read from the parameters are in the place where the MLP has them."""
    rng = np.random.default_rng(1)
    params, matrices = lipschitz._draw_block(rng, 5)
    x = jnp.float32(rng.standard_normal(3))
    own = jax.jacobian(
        lambda x: lipschitz._build_mlp(5).apply({'params': params}, x[None, None])[0, 0]
    )
    found = lipschitz._jacobian_at([matrices], np.float64(x))
    np.testing.assert_allclose(own(x), found.T, rtol=1e-5, atol=1e-6)


def test_keys_are_as_far_from_the_last_query_as_its_own_key():
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 8, 8))
    (x_TD,) = lipschitz._equidistant(rng, q, k)
    distances = np.linalg.norm(x_TD[-1] @ q - x_TD @ k, axis=1)
    np.testing.assert_allclose(distances, distances[-1])
    (same_TD,) = lipschitz._equidistant(rng, q, q)  # one matrix: all are where the query is
    np.testing.assert_allclose(same_TD, np.tile(same_TD[-1], (8, 1)), atol=1e-9)


@pytest.mark.full
def test_a_token_at_zero_stretches_as_the_covariance_of_the_others():
    """The derivative of the last output in the last token: W_q cov(k, v) W_o / sqrt(H) + W_v / T.

    The Jacobian's largest singular value is at least that of this block of it, and grows with the
    square of the scale for products; with distances the token sees itself alone.
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
    least = np.linalg.norm(q @ q.T @ covariance @ v / 8**0.5 + v / 8, 2)
    (found,) = lipschitz._measure_attention_stretches(
        'softmax', params, jnp.float32(x_TD)[None], start
    )
    assert least * 0.999 < found < 3 * least
    (near,) = lipschitz._measure_attention_stretches('l2', params, jnp.float32(x_TD)[None], start)
    assert near < 10 < least
