"""Reference: the variance of an estimate by chances, against drawing rows many times."""

import numpy as np
import pytest

from eval.claims.measures.row_sampling import _variance_ratio


def test_the_variance_by_chances_is_that_of_rows_drawn_by_them():
    """200,000 rows of each kind are drawn; the mean of what they estimate is that of all rows."""
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((6, 3)) * np.array([[1], [1], [2], [4], [8], [0.5]])
    norms, chances = np.linalg.norm(gradients, axis=1), np.array([1.0, 2, 2, 3, 6, 1])
    whole = gradients.mean(0)

    def drawn(p):
        places = rng.choice(6, 200_000, p=p)
        estimates = gradients[places] / (6 * p[places])[:, None]
        np.testing.assert_allclose(estimates.mean(0), whole, atol=0.05)
        return np.mean(np.sum((estimates - whole) ** 2, 1))

    wanted = drawn(chances / chances.sum()) / drawn(np.full(6, 1 / 6))
    assert _variance_ratio(norms, chances, whole @ whole) == pytest.approx(wanted, rel=0.02)


def test_no_chances_are_better_than_those_by_norm():
    rng = np.random.default_rng(1)
    gradients = np.exp(rng.standard_normal((20, 1))) * rng.standard_normal((20, 4))
    norms, mean_square = np.linalg.norm(gradients, axis=1), np.sum(gradients.mean(0) ** 2)
    least = _variance_ratio(norms, norms, mean_square)
    for _ in range(20):
        assert (
            _variance_ratio(norms, norms * np.exp(0.3 * rng.standard_normal(20)), mean_square)
            > least
        )
    assert _variance_ratio(norms, np.ones(20), mean_square) == pytest.approx(1) and least < 1
