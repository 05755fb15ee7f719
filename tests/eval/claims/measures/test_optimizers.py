"""Reference: what measures of optimizers compute, against closed forms."""

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
    def test_where_one_point_disagrees(self, n):
        """With a large rate plain descent is a perceptron: behind the first step each adds lr / n
        of the last point, whose margin is lr (m^2 - s^2 (n - 2) / n) / 2 before. Normalized descent
        is through after one such step of lr. Catches a quotient that is left out or upside down.
        """
        m = perceptron.MARGIN**2
        behind_first = n * ((1 - m) * (n - 2) / n - m) / 2
        assert descend_until_separated(
            build_disagreeing_points(n), 'plain', 1e6
        ).steps == 2 + math.floor(behind_first)
        assert descend_until_separated(build_disagreeing_points(n), 'normalized', 1e6).steps == 2

    def test_the_largest_loss_is_of_the_path(self):
        """The loss behind the first step, of the last point alone. Catches the last loss, a sum."""
        m, n = perceptron.MARGIN**2, 30
        wrong = 100 * ((1 - m) * (n - 2) / n - m)
        found = descend_until_separated(
            build_disagreeing_points(n), 'normalized', 100.0
        ).largest_loss
        np.testing.assert_allclose(found, wrong / n, rtol=1e-12)
        assert descend_until_separated(
            build_disagreeing_points(n), 'plain', 1.0
        ).largest_loss == pytest.approx(np.log(2))

    def test_points_are_separable_with_as_many_positives_as_asked(self):
        for positives in perceptron.POSITIVES.values():
            points = perceptron.draw_points(positives, 100)
            assert len(points) == perceptron.POINTS and np.sum(points[:, -1] > 0) == positives
            descend_until_separated(points, 'plain', 100.0)

    def test_no_end_is_an_error(self, monkeypatch):
        monkeypatch.setattr(perceptron, 'MOST_STEPS', 20)
        with pytest.raises(ValueError, match=r'plain descent at 1\.0 did not separate 30 points'):
            descend_until_separated(build_disagreeing_points(30), 'plain', 1.0)


class TestStepsAroundTheRadius:
    def test_numbers_of_curves(self):
        """Two curves that fall by 10% from r = 2 and r = 8 on, at steps of 1 and 4 in length.
        Catches a loss that is not of the accuracy before, and lengths of the whole step.
        """
        rs = np.array(ghosts.LENGTHS_R)
        after = np.stack([np.where(rs < 2, 0.5, 0.45), np.where(rs < 8, 0.8, 0.72)])
        after[1, rs == 0.5] = 0.784
        found = ghosts.describe_curves(np.array([0.5, 0.8]), after, np.array([1.0, 4.0]))
        assert found == pytest.approx((0.02, 5.0, 0.5))

    def test_a_curve_that_never_falls_ends_with_the_longest_step(self):
        after = np.full((2, len(ghosts.LENGTHS_R)), 0.5)
        found = ghosts.describe_curves(np.array([0.5, 0.5]), after, np.array([1.0, 2.0]))
        assert found[1] == ghosts.LENGTHS_R[-1]

    def test_text_has_one_likely_successor(self):
        """80% of 512 tokens follow, to three deviations. Catches rows and columns changed over."""
        successors_V = np.roll(np.arange(ghosts.VOCAB), 1).clip(1)
        batch = ghosts.draw_text(jax.random.key(0), successors_V)
        tokens = np.asarray(batch['tokens'])
        assert tokens.shape == (ghosts.ROWS, ghosts.LENGTH + 1) and tokens.min() > ghosts.BOS
        share = np.mean(successors_V[tokens[:, :-1]] == tokens[:, 1:])
        assert abs(share - ghosts.LIKELY - 0.2 / 63) < 3 * 0.4 / math.sqrt(512)


class TestMemory:
    def test_is_that_of_the_arrays(self, monkeypatch):
        """The model of 130 million parameters by hand, in float32. Catches a state that is counted
        with the weights, momentum of embeddings in SCALE, and moments of all in Muon.
        """
        monkeypatch.chdir(ROOT)
        size, width, layers = memory.PAPERS['130m'], 768, 12
        embedding, vectors = 32_000 * width, (2 * layers + 1) * width
        hidden = layers * (4 * width**2 + 3 * width * 2048)
        every = 2 * embedding + hidden + vectors
        asked = {
            'adam': (memory.ADAM, 2 * every, 2 * hidden),
            'lion': (memory.LION, every, hidden),
            'scale': (memory.SCALE, embedding + 2 * vectors, 0),
            'muon': (memory.MUON, 2 * every - hidden, hidden),
        }
        for optimizers, state, of_hidden in asked.values():
            found = memory.optimizer_memory(size, optimizers)
            assert (found.weights, found.hidden_state) == (4 * every, 4 * of_hidden)
            assert 0 <= found.state - 4 * state < 64  # counts of steps


class TestSingularValuesOfUpdates:
    SHAPE = (12, 20)

    def test_gradients_have_the_spectrum_that_is_asked_for(self, monkeypatch):
        monkeypatch.setattr(updates, 'CONDITION', 100.0)
        for grad in updates.ill_conditioned_gradients(self.SHAPE, 0):
            values = np.linalg.svd(grad, compute_uv=False)
            assert 50 < values[0] / values[-1] < 200

    @pytest.mark.parametrize('name', ['momentum', 'auon', 'muon'])
    def test_the_last_update_is_of_all_gradients(self, name):
        """Equations in numpy. Catches the first update, and momentum without Nesterov's."""
        grads, mean = updates.random_gradients(self.SHAPE, 1), 0.0
        for grad in grads:
            mean = 0.95 * mean + 0.05 * grad
        wanted = 0.95 * mean + 0.05 * grads[-1]
        if name == 'momentum':
            wanted = wanted / 0.05
        if name == 'auon':
            wanted = wanted / np.sqrt(np.mean(np.cosh(1.5 * wanted / np.linalg.norm(wanted)) ** 2))
        if name == 'muon':
            left, s, right = np.linalg.svd(wanted / np.linalg.norm(wanted), full_matrices=False)
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            wanted = (left * s) @ right
        found = updates.last_update(name, grads)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


def test_a_relative_change_is_that_of_each_hidden_matrix():
    """Two layers of a matrix with heads, one of which turns by 10% of its length and one by 30%,
    beside an embedding that moves far. Catches a norm of all layers, and roles that do not count.
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
    found = effective_rates.relative_change(learner, before, after)
    np.testing.assert_allclose(found, 0.2, rtol=1e-5)
