"""Reference: losses of unlearning against numpy float64, by formulas of the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from modules.losses.unlearning import DIVERGENCES, flat_loss, mean_probabilities, npo_loss

PREFERRED, FORGOTTEN = np.array([0.0, 0.2, 0.9]), np.array([1.0, 0.5, 0.1])
PUBLISHED = {  # -activation(P) + conjugate(P'), as get_contrastive_loss has them
    'total_variation': lambda p, q: -np.tanh(p) / 2 + np.tanh(q) / 2,
    'kl': lambda p, q: -p + np.exp(q - 1),
    'pearson': lambda p, q: -p + q * q / 4 + q,
    'jensen_shannon': lambda p, q: (
        np.log(1 + np.exp(-p)) - np.log(2) + q + np.log(1 + np.exp(-q)) - np.log(2)
    ),
}
SLOPES = {  # in both probabilities
    'total_variation': (lambda p: -1 / np.cosh(p) ** 2 / 2, lambda q: 1 / np.cosh(q) ** 2 / 2),
    'kl': (lambda p: -1 + 0 * p, lambda q: np.exp(q - 1)),
    'pearson': (lambda p: -1 + 0 * p, lambda q: 1 + q / 2),
    'jensen_shannon': (lambda p: -special.expit(-p), special.expit),
}


@pytest.mark.parametrize('name', DIVERGENCES)
def test_flat_is_the_published_loss(name):
    """Values, and slopes in both probabilities."""
    preferred, forgotten = jnp.float32(PREFERRED), jnp.float32(FORGOTTEN)
    expected = PUBLISHED[name](PREFERRED, FORGOTTEN)
    np.testing.assert_allclose(
        flat_loss(preferred, forgotten, name), expected, rtol=1e-5, atol=1e-6
    )
    slopes = jax.grad(lambda p, q: jnp.sum(flat_loss(p, q, name)), argnums=(0, 1))(
        preferred, forgotten
    )
    for actual, slope, at in zip(slopes, SLOPES[name], (PREFERRED, FORGOTTEN), strict=True):
        np.testing.assert_allclose(actual, slope(at), rtol=1e-5)


def test_unknown_divergence_is_refused():
    with pytest.raises(ValueError, match=r"'pearsen'.*'pearson'"):
        flat_loss(jnp.ones(()), jnp.ones(()), 'pearsen')


def test_mean_probabilities_use_weights():
    """Catches a mean of logs, and a mean over all tokens."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(0, 2, (3, 5, 7)), rng.integers(0, 7, (3, 5))
    weights = np.float32([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]])
    p = np.take_along_axis(special.softmax(logits, -1), labels[..., None], -1)[..., 0]
    actual = mean_probabilities(jnp.float32(logits), jnp.int32(labels), jnp.float32(weights))
    np.testing.assert_allclose(actual, (p * weights).sum(-1) / weights.sum(-1), rtol=1e-5)


def test_npo_is_published_and_tends_to_ascent():
    losses, before = np.array([0.1, 3.0, 40.0]), np.array([0.1, 0.2, 0.3])
    actual = npo_loss(jnp.float32(losses), jnp.float32(before), 0.5)
    expected = -2 / 0.5 * special.log_expit(0.5 * (losses - before))
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    slope = jax.grad(lambda x: jnp.sum(npo_loss(x, jnp.float32(before), 1e-4)))(jnp.float32(losses))
    np.testing.assert_allclose(slope, -1, atol=2e-3)
