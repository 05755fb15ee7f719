"""Reference: the variance of an estimate with given chances, against many random draws."""

import numpy as np
import pytest

from eval.claims.measures.row_sampling import _variance_ratio


def test_variance_matches_sampling():
    """Draws 200,000 rows with each set of chances. The mean of the estimates equals the mean of all
    rows.
    """
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((6, 3)) * np.array([[1], [1], [2], [4], [8], [0.5]])
    norms, chances = np.linalg.norm(gradients, axis=1), np.array([1.0, 2, 2, 3, 6, 1])
    mean_gradient = gradients.mean(0)

    def sample_variance(p):
        row_ids = rng.choice(6, 200_000, p=p)
        estimates = gradients[row_ids] / (6 * p[row_ids])[:, None]
        np.testing.assert_allclose(estimates.mean(0), mean_gradient, atol=0.05)
        return np.mean(np.sum((estimates - mean_gradient) ** 2, 1))

    expected = sample_variance(chances / chances.sum()) / sample_variance(np.full(6, 1 / 6))
    assert _variance_ratio(norms, chances, mean_gradient @ mean_gradient) == pytest.approx(
        expected, rel=0.02
    )


def test_norm_probabilities_minimize_variance():
    rng = np.random.default_rng(1)
    gradients = np.exp(rng.standard_normal((20, 1))) * rng.standard_normal((20, 4))
    norms, mean_square = np.linalg.norm(gradients, axis=1), np.sum(gradients.mean(0) ** 2)
    by_norm = _variance_ratio(norms, norms, mean_square)
    for _ in range(20):
        assert (
            _variance_ratio(norms, norms * np.exp(0.3 * rng.standard_normal(20)), mean_square)
            > by_norm
        )
    assert _variance_ratio(norms, np.ones(20), mean_square) == pytest.approx(1) and by_norm < 1
