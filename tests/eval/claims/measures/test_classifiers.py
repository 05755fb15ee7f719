"""Reference: scores and objectives by hand in numpy. Property: pass@N grows with N."""

import numpy as np
import pytest
from scipy import special

from eval.claims.measures import classifiers

RNG = np.random.default_rng(0)


def test_f1_threshold_comes_from_other_half():
    logits, labels = RNG.normal(size=(80, 2)), RNG.integers(0, 2, 80)
    margins = logits[:, 1] - logits[:, 0]

    def f1(threshold, half):
        predicted, positive = margins[half] >= threshold, labels[half] == 1
        return 2 * np.sum(predicted & positive) / (np.sum(predicted) + np.sum(positive))

    first, second = slice(None, 40), slice(40, None)
    best = max(margins[first], key=lambda threshold: f1(threshold, first))
    scores = classifiers._f1_scores(logits, labels)
    np.testing.assert_allclose(scores, [f1(best, second), f1(0.0, second)], rtol=1e-6)
    assert best != 0 and scores[0] != scores[1]


def test_top_accuracy_counts_larger_logits():
    logits, labels = RNG.normal(size=(200, 30)), RNG.integers(0, 30, 200)
    order = np.argsort(-logits, -1)
    expected = np.mean([y in row[:10] for y, row in zip(labels, order, strict=True)])
    np.testing.assert_allclose(classifiers._top_accuracy(logits, labels), expected, rtol=1e-6)
    assert classifiers._top_accuracy(0 * logits, labels) == 0  # a network that died is not perfect


def test_pass_rates_count_any_success():
    logits, labels = RNG.normal(size=(50, 6)), RNG.integers(0, 6, 50)
    p = special.softmax(logits, -1)[np.arange(50), labels]
    pass_rates = classifiers._pass_rates(logits, labels)
    np.testing.assert_allclose(pass_rates, [np.mean(1 - (1 - p) ** n) for n in (1, 16)], rtol=1e-5)
    assert np.all(np.diff(pass_rates) > 0)


@pytest.mark.parametrize('name', ['comp_sum', 'dco'])
def test_objectives_are_means_over_rows(name):
    """Catches a single row of all inputs, and sums in place of means."""
    sizes = (4, 8), (8, 8), (8, 5)
    params = [np.float32(RNG.normal(0, 0.3, size)) for size in sizes]
    x, labels = np.float32(RNG.normal(size=(7, 4))), RNG.integers(0, 5, 7)
    hidden = np.maximum(np.maximum(x @ params[0], 0) @ params[1], 0)
    ce = -special.log_softmax(hidden @ params[2], -1)[np.arange(7), labels]
    p, n = np.exp(-np.float64(ce)), 4
    factor = n * (1 - p) ** (n - 1) * p / (1 - (1 - p) ** n)
    options, expected = {'comp_sum': ({'tau': 1.0}, ce), 'dco': ({'dco_tries': n}, factor * ce)}[
        name
    ]
    objective = classifiers._mean_objective((name, options), params, x, labels)
    np.testing.assert_allclose(objective, np.mean(expected), rtol=1e-4)


def test_batch_dice_matches_formula():
    logits, labels = RNG.normal(size=(30, 2)), np.float64(RNG.integers(0, 2, 30))
    p = special.softmax(logits, -1)[:, 1]
    q = (1 - p) ** 0.6 * p
    expected = 1 - (2 * np.sum(q * labels) + 0.5) / (np.sum(q**2) + np.sum(labels) + 0.5)
    dice = classifiers.batch_dice(logits, labels, 0.6, 0.5)
    np.testing.assert_allclose(dice, expected, rtol=1e-6)
    sure = 40 * np.stack([1 - labels, labels], -1)
    np.testing.assert_allclose(classifiers.batch_dice(sure, labels, 0.0, 1e-4), 0, atol=1e-6)
