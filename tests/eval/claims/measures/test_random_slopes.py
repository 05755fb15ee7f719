"""Reference: slopes of margin losses by derivatives, and by the authors' steps in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims.measures import random_slopes as measured

MARGINS = np.float32([0.5, -3.0, 2.0, 0.0, 8.0, -0.5, 1.0, 0.7])


def test_logistic_slopes_match_gradient():
    slopes = jax.grad(lambda s: jnp.sum(jax.nn.softplus(-s)))(jnp.float32(MARGINS))
    expected = measured.logistic_slopes(None, jnp.float32(MARGINS), None)
    np.testing.assert_allclose(expected, slopes, rtol=1e-6)


@pytest.mark.parametrize('power', [0.0, 0.7, -0.9])
def test_random_slopes_match_authors(power):
    """Slopes are assigned to margins in order, as in their code, with sizes from the same z."""
    key = jax.random.key(3)
    z = np.float64(jax.random.normal(key, MARGINS.shape))
    base = np.maximum(1 + power * z, 0)
    with np.errstate(divide='ignore'):
        sizes = np.exp(z) if power == 0 else base ** (1 / power)
    expected = np.empty(len(MARGINS))
    expected[np.argsort(MARGINS)] = np.maximum(np.sort(-sizes), -1)
    beyond = MARGINS > 1
    expected[beyond] *= 1 / MARGINS[beyond]
    slopes = measured.random_slopes(key, jnp.float32(MARGINS), jnp.float32(power))
    np.testing.assert_allclose(slopes, expected - 1e-6, rtol=1e-4)
    in_order = np.asarray(slopes)[np.argsort(MARGINS)]
    assert (in_order < 0).all() and (np.diff(in_order) >= 0).all()  # falling and convex
