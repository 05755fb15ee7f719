"""Reference: what measures of optimizers compute, against closed forms."""

import math

import numpy as np
import pytest

from eval.claims.measures import perceptron
from eval.claims.measures.perceptron import one_disagrees, separated


class TestStepsToSeparate:
    @pytest.mark.parametrize('n', [30, 60, 120])
    def test_where_one_point_disagrees(self, n):
        """With a large rate plain descent is a perceptron: behind the first step each adds lr / n
        of the last point, whose margin is lr (m^2 - s^2 (n - 2) / n) / 2 before. Normalized descent
        is through after one such step of lr. Catches a quotient that is left out or upside down.
        """
        m = perceptron.MARGIN**2
        behind_first = n * ((1 - m) * (n - 2) / n - m) / 2
        assert separated(one_disagrees(n), 'plain', 1e6).steps == 2 + math.floor(behind_first)
        assert separated(one_disagrees(n), 'normalized', 1e6).steps == 2

    def test_the_largest_loss_is_of_the_path(self):
        """That behind the first step, of the last point alone. Catches the last loss, a sum."""
        m, n = perceptron.MARGIN**2, 30
        wrong = 100 * ((1 - m) * (n - 2) / n - m)
        found = separated(one_disagrees(n), 'normalized', 100.0).largest_loss
        np.testing.assert_allclose(found, wrong / n, rtol=1e-12)
        assert separated(one_disagrees(n), 'plain', 1.0).largest_loss == pytest.approx(np.log(2))

    def test_points_are_separable_with_as_many_positives_as_asked(self):
        for positives in perceptron.POSITIVES.values():
            points = perceptron.drawn(positives, 100)
            assert len(points) == perceptron.POINTS and np.sum(points[:, -1] > 0) == positives
            separated(points, 'plain', 100.0)

    def test_no_end_is_an_error(self, monkeypatch):
        monkeypatch.setattr(perceptron, 'MOST_STEPS', 20)
        with pytest.raises(ValueError, match=r'plain descent at 1\.0 did not separate 30 points'):
            separated(one_disagrees(30), 'plain', 1.0)
