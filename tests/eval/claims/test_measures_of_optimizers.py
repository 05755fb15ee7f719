"""Reference: what measures of optimizers compute, against closed forms."""

import math

import jax
import numpy as np
import pytest

from eval.claims.measures import ghosts, perceptron
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


class TestStepsAroundTheRadius:
    def test_numbers_of_curves(self):
        """Two curves that fall by 10% from r = 2 and r = 8 on, at steps of 1 and 4 in length.
        Catches a loss that is not of the accuracy before, and lengths of the whole step.
        """
        rs = np.array(ghosts.LENGTHS_R)
        after = np.stack([np.where(rs < 2, 0.5, 0.45), np.where(rs < 8, 0.8, 0.72)])
        after[1, rs == 0.5] = 0.784
        found = ghosts.of_curves(np.array([0.5, 0.8]), after, np.array([1.0, 4.0]))
        assert found['largest_share_of_accuracy_lost_below_1'] == pytest.approx(0.02)
        assert found['median_r_at_which_accuracy_falls'] == pytest.approx(5.0)
        assert found['deviation_of_log_r_over_that_of_log_length'] == pytest.approx(0.5)

    def test_a_curve_that_never_falls_ends_with_the_longest_step(self):
        after = np.full((2, len(ghosts.LENGTHS_R)), 0.5)
        found = ghosts.of_curves(np.array([0.5, 0.5]), after, np.array([1.0, 2.0]))
        assert found['median_r_at_which_accuracy_falls'] == ghosts.LENGTHS_R[-1]

    def test_text_has_one_likely_successor(self):
        """Of 512 tokens 80% follow, to three deviations. Catches rows and columns changed over."""
        successors_V = np.roll(np.arange(ghosts.VOCAB), 1).clip(1)
        batch = ghosts.text_of(jax.random.key(0), successors_V)
        tokens = np.asarray(batch['tokens'])
        assert tokens.shape == (ghosts.ROWS, ghosts.LENGTH + 1) and tokens.min() > ghosts.BOS
        share = np.mean(successors_V[tokens[:, :-1]] == tokens[:, 1:])
        assert abs(share - ghosts.LIKELY - 0.2 / 63) < 3 * 0.4 / math.sqrt(512)
