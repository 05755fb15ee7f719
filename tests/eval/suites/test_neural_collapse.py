"""Neural collapse. Reference: loops over features. Property: only a simplex is collapsed."""

import functools
import importlib
import types

import jax
import numpy as np
import pytest

from lm.training.step import target_weights
from modules.readouts import normalize
from tests.eval.suites.checkpoints import make_checkpoint
from tests.helpers import packed_batch

suite = importlib.import_module('eval.suites.neural_collapse')  # the package has the function so

BATCH = packed_batch(rows=24)


class TestFrames:
    def simplex(self, n=5):
        return 3.0 * (np.eye(n) - 1 / n)

    def test_simplex_has_zero_nc2(self):
        numbers = suite.measure_frame(self.simplex())
        assert max(numbers.values()) < 1e-9
        assert numbers.keys() == {'nc2_norms', 'nc2_cosines', 'nc2_distances'}

    def test_lengths_and_angles_are_distinguished(self):
        longer, nearer = self.simplex(), self.simplex()
        longer[0] *= 2
        numbers = suite.measure_frame(longer)
        assert numbers['nc2_norms'] == pytest.approx(0.4 / 1.2) and numbers['nc2_cosines'] < 1e-9
        nearer[0] = 0.7 * nearer[0] + 0.6 * nearer[1]
        nearer[0] *= np.linalg.norm(nearer[1]) / np.linalg.norm(nearer[0])
        numbers = suite.measure_frame(nearer)
        assert numbers['nc2_norms'] < 1e-9 < 0.1 < numbers['nc2_cosines']
        assert numbers['nc2_distances'] > 0.1

    def test_variability_is_a_mean_over_pairs(self):
        means, variances = np.random.default_rng(0).normal(size=(4, 3)), np.arange(1.0, 5.0)
        pairs = [
            (variances[i] + variances[j]) / (2 * np.sum((means[i] - means[j]) ** 2))
            for i in range(4)
            for j in range(i)
        ]
        assert suite.compute_variability(means, variances) == pytest.approx(np.mean(pairs))


class TestClasses:
    def test_frequent_tokens_are_sorted(self):
        counts = np.array([3.0, 9.0, 0.0, 5.0, 9.0, 1.0])
        np.testing.assert_array_equal(suite.frequent_tokens(counts, 3, 2), [1, 4, 3])
        np.testing.assert_array_equal(suite.frequent_tokens(counts, 9, 3), [1, 4, 3, 0])

    def test_too_few_are_refused(self):
        with pytest.raises(
            ValueError, match='three classes, next tokens that occur 9 times or more; got'
        ):
            suite.frequent_tokens(np.array([9.0, 9.0, 8.0]), 9, 9)


def read_all_features(learner, weights):
    inputs = {name: x[:, :-1] for name, x in BATCH.items()}
    x, readout = learner.model.apply(
        learner.variables(weights),
        inputs['tokens'],
        None,
        inputs['segments'] > 0,
        method='activations',
    )
    return x, readout(x)


@pytest.mark.full
@pytest.mark.parametrize('kind', ['biased', 'cosines'])
def test_numbers_match_loops_over_features(monkeypatch, kind):
    """With padding, a bias of logits, and two batches of rows, the last with padding rows."""
    changes = {'biased': {'model.readout_bias': True}, 'cosines': {'model.readout': 'cosines'}}
    checkpoint = make_checkpoint(changes[kind] | {'data.batch_size': 16})
    learner, params = checkpoint.learner, dict(checkpoint.weights.params)
    if kind == 'biased':
        bias = np.random.default_rng(0).normal(size=learner.model.vocab_size).astype(np.float32)
        params['readout_bias'] = bias
        object.__setattr__(checkpoint, 'weights', checkpoint.weights.replace(params=params))
    rows = [{name: x[i] for name, x in BATCH.items()} for i in range(len(BATCH['tokens']))]
    monkeypatch.setattr(suite, 'open_data', lambda c: types.SimpleNamespace(validation=rows))
    suite_result = suite.neural_collapse(checkpoint, tokens=0, classes=8, least=4)

    x, logits = jax.jit(functools.partial(read_all_features, learner))(checkpoint.weights)
    is_target = np.asarray(target_weights(BATCH, learner.bos_id)) > 0
    h, labels = np.float64(x)[is_target], BATCH['tokens'][:, 1:][is_target]
    logits = np.float64(logits)[is_target]
    counts = np.bincount(labels)
    chosen = [int(c) for c in np.argsort(-counts, kind='stable')[:8]]
    assert counts[chosen].min() >= 4 and len(labels) < BATCH['tokens'][:, 1:].size
    means = np.array([h[labels == c].mean(0) for c in chosen])
    variances = [((h[labels == c] - means[i]) ** 2).sum(1).mean() for i, c in enumerate(chosen)]
    is_chosen = np.isin(labels, chosen)
    nearest = np.argmin(np.linalg.norm(h[is_chosen][:, None] - means, axis=2), 1)
    w = np.float64(normalize(params['readout'], 0)).T[chosen]
    centred = means - means.mean(0)
    cosines = np.sum(w * centred, 1) / np.linalg.norm(centred, axis=1)
    expected = {
        'tokens': is_chosen.sum(),
        'classes': 8,
        'nc1': suite.compute_variability(means, np.array(variances)),
        **suite.measure_frame(centred),
        'nc3': cosines.mean(),
        'nc3_spread': cosines.std() / cosines.mean(),
        'nc4': np.mean(np.argmax(logits[is_chosen][:, chosen], 1) == nearest),
    }
    assert suite_result.numbers == pytest.approx(expected, rel=1e-3)
    columns = suite_result.tables['Classes'].columns
    np.testing.assert_allclose(columns['variance'], variances, rtol=1e-4)
    assert columns['tokens'] == counts[chosen].tolist()
