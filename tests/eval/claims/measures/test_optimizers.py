"""Reference: measures of optimizers against closed forms."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from eval.claims.measures import effective_rates, ghosts, memory, perceptron, updates
from eval.claims.measures.perceptron import build_disagreeing_points, descend_until_separated
from modules.params import ParamSpec
from tests import ROOT


class TestStepsToSeparate:
    @pytest.mark.parametrize('n', [30, 60, 120])
    def test_perceptron_steps_match_hand_count(self, n):
        """With a large rate plain descent is a perceptron: after the first step each step adds lr /
        n of the last point, with a margin of lr (m^2 - s^2 (n - 2) / n) / 2 before. Normalized
        descent takes a single such step. Catches a missing or inverted quotient.
        """
        m = perceptron.MARGIN**2
        perceptron_steps = n * ((1 - m) * (n - 2) / n - m) / 2
        assert descend_until_separated(
            build_disagreeing_points(n), 'plain', 1e6
        ).steps == 2 + math.floor(perceptron_steps)
        assert descend_until_separated(build_disagreeing_points(n), 'normalized', 1e6).steps == 2

    def test_largest_loss_along_path(self):
        """The loss after the first step comes from the last point alone. Catches the last loss, and
        a sum.
        """
        m, n = perceptron.MARGIN**2, 30
        wrong = 100 * ((1 - m) * (n - 2) / n - m)
        largest_loss = descend_until_separated(
            build_disagreeing_points(n), 'normalized', 100.0
        ).largest_loss
        np.testing.assert_allclose(largest_loss, wrong / n, rtol=1e-12)
        assert descend_until_separated(
            build_disagreeing_points(n), 'plain', 1.0
        ).largest_loss == pytest.approx(np.log(2))

    def test_points_are_separable(self):
        for positives in perceptron.POSITIVES.values():
            points = perceptron.draw_points(positives, 100)
            assert len(points) == perceptron.POINTS and np.sum(points[:, -1] > 0) == positives
            descend_until_separated(points, 'plain', 100.0)

    def test_step_limit_raises(self, monkeypatch):
        monkeypatch.setattr(perceptron, 'MOST_STEPS', 20)
        with pytest.raises(ValueError, match=r'plain descent at 1\.0 did not separate 30 points'):
            descend_until_separated(build_disagreeing_points(30), 'plain', 1.0)


class TestStepsAroundTheRadius:
    def test_describes_curves(self):
        """Two curves fall by 10% from r = 2 and r = 8 on, with steps of length 1 and 4. Catches a
        loss that is not relative to the accuracy before, and lengths of the whole step.
        """
        radii = np.array(ghosts.LENGTHS_R)
        after = np.stack([np.where(radii < 2, 0.5, 0.45), np.where(radii < 8, 0.8, 0.72)])
        after[1, radii == 0.5] = 0.784
        values = ghosts.describe_curves(np.array([0.5, 0.8]), after, np.array([1.0, 4.0]))
        assert values == pytest.approx((0.02, 5.0, 0.5))

    def test_flat_curve_gets_longest_step(self):
        after = np.full((2, len(ghosts.LENGTHS_R)), 0.5)
        values = ghosts.describe_curves(np.array([0.5, 0.5]), after, np.array([1.0, 2.0]))
        assert values[1] == ghosts.LENGTHS_R[-1]

    def test_text_has_one_likely_successor(self):
        """80% of 512 tokens follow, within three deviations. Catches swapped rows and columns."""
        successors_V = np.roll(np.arange(ghosts.VOCAB), 1).clip(1)
        batch = ghosts.draw_text(jax.random.key(0), successors_V)
        tokens = np.asarray(batch['tokens'])
        assert tokens.shape == (ghosts.ROWS, ghosts.LENGTH + 1) and tokens.min() > ghosts.BOS
        share = np.mean(successors_V[tokens[:, :-1]] == tokens[:, 1:])
        assert abs(share - ghosts.LIKELY - 0.2 / 63) < 3 * 0.4 / math.sqrt(512)


class TestMemory:
    def test_matches_array_sizes(self, monkeypatch):
        """The model of 130 million parameters by hand, in float32. Catches a state counted with the
        weights, momentum of embeddings in SCALE, and moments of all parameters in Muon.
        """
        monkeypatch.chdir(ROOT)
        size, width, layers = memory.PAPERS['130m'], 768, 12
        embedding, vectors = 32_000 * width, (2 * layers + 1) * width
        hidden = layers * (4 * width**2 + 3 * width * 2048)
        n_parameters = 2 * embedding + hidden + vectors
        cases = {
            'adam': (memory.ADAM, 2 * n_parameters, 2 * hidden),
            'lion': (memory.LION, n_parameters, hidden),
            'scale': (memory.SCALE, embedding + 2 * vectors, 0),
            'muon': (memory.MUON, 2 * n_parameters - hidden, hidden),
        }
        for optimizers, state, hidden_state in cases.values():
            estimates = memory.optimizer_memory(size, optimizers)
            assert (estimates.weights, estimates.hidden_state) == (
                4 * n_parameters,
                4 * hidden_state,
            )
            assert 0 <= estimates.state - 4 * state < 64  # counts of steps


class TestSingularValuesOfUpdates:
    SHAPE = (12, 20)

    def test_gradients_have_requested_spectrum(self, monkeypatch):
        monkeypatch.setattr(updates, 'CONDITION', 100.0)
        for grad in updates.ill_conditioned_gradients(self.SHAPE, 0):
            values = np.linalg.svd(grad, compute_uv=False)
            assert 50 < values[0] / values[-1] < 200

    @pytest.mark.parametrize('name', ['momentum', 'auon', 'muon'])
    def test_last_update_uses_all_gradients(self, name):
        """Equations in numpy. Catches the first update, and momentum without Nesterov's."""
        grads, mean = updates.random_gradients(self.SHAPE, 1), 0.0
        for grad in grads:
            mean = 0.95 * mean + 0.05 * grad
        expected = 0.95 * mean + 0.05 * grads[-1]
        if name == 'momentum':
            expected = expected / 0.05
        if name == 'auon':
            expected = expected / np.sqrt(
                np.mean(np.cosh(1.5 * expected / np.linalg.norm(expected)) ** 2)
            )
        if name == 'muon':
            u, s, v = np.linalg.svd(expected / np.linalg.norm(expected), full_matrices=False)
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            expected = (u * s) @ v
        direction = updates.last_update(name, grads)
        np.testing.assert_allclose(
            direction, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max()
        )

    def test_auon_directions_match_optimizer(self):
        """Catches a broken method that differs from AuON by more than its norms."""
        grads = updates.random_gradients(self.SHAPE, 1)
        average = (1 - updates.MOMENTUM) * updates.last_update('momentum', grads)
        for name, direction in zip(
            ('auon', 'auon_of_paper'), updates.auon_directions(average, axis=None), strict=True
        ):
            np.testing.assert_allclose(updates.last_update(name, grads), direction, rtol=1e-6)


def test_relative_change_averages_hidden_matrices():
    """Two layers of a matrix with heads change by 10% and 30% of their norm, beside an embedding
    that moves far. Catches a norm over all layers, and other roles.
    """
    rng = np.random.default_rng(0)
    hidden = ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',))
    specs = {'q': hidden, 'table': ParamSpec('embedding', ('vocab', 'embed'))}
    w, change = rng.standard_normal((2, 2, 4, 2, 3))
    shares = np.array([0.1, 0.3]) * [np.linalg.norm(x) for x in w]
    change *= (shares / [np.linalg.norm(x) for x in change])[:, None, None, None]
    before = SimpleNamespace(params={'q': w, 'table': np.ones((3, 4))})
    after = SimpleNamespace(params={'q': w + change, 'table': np.zeros((3, 4))})
    learner = SimpleNamespace(description=SimpleNamespace(specs=specs))
    relative_change, _ = effective_rates.measure_step(learner, before, after)
    np.testing.assert_allclose(relative_change, 0.2, rtol=1e-5)
