"""Reference: judges and objectives by hand in numpy. Property: pass@N grows with N."""

import numpy as np
import pytest
from scipy import special

from eval.claims.measures import classifiers

RNG = np.random.default_rng(0)


def test_f1_is_that_of_the_best_threshold_of_the_other_half():
    logits, labels = RNG.normal(size=(80, 2)), RNG.integers(0, 2, 80)
    leads = logits[:, 1] - logits[:, 0]

    def f1(threshold, half):
        taken, wanted = leads[half] >= threshold, labels[half] == 1
        return 2 * np.sum(taken & wanted) / (np.sum(taken) + np.sum(wanted))

    first, second = slice(None, 40), slice(40, None)
    best = max(leads[first], key=lambda threshold: f1(threshold, first))
    found = classifiers._f1_scores(logits, labels)
    np.testing.assert_allclose(found, [f1(best, second), f1(0.0, second)], rtol=1e-6)
    assert best != 0 and found[0] != found[1]


def test_ranks_count_those_before():
    logits, labels = RNG.normal(size=(200, 30)), RNG.integers(0, 30, 200)
    order = np.argsort(-logits, -1)
    wanted = np.mean([y in row[:10] for y, row in zip(labels, order, strict=True)])
    np.testing.assert_allclose(classifiers._top_accuracy(logits, labels), wanted, rtol=1e-6)


def test_tries_pass_where_one_of_them_does():
    logits, labels = RNG.normal(size=(50, 6)), RNG.integers(0, 6, 50)
    p = special.softmax(logits, -1)[np.arange(50), labels]
    found = classifiers._pass_rates(logits, labels)
    np.testing.assert_allclose(found, [np.mean(1 - (1 - p) ** n) for n in (1, 16)], rtol=1e-5)
    assert np.all(np.diff(found) > 0)


@pytest.mark.parametrize('name', ['comp_sum', 'dco'])
def test_objectives_are_means_over_rows(name):
    """Catches a row of all inputs, and sums for means."""
    sizes = (4, 8), (8, 8), (8, 5)
    params = [np.float32(RNG.normal(0, 0.3, size)) for size in sizes]
    x, labels = np.float32(RNG.normal(size=(7, 4))), RNG.integers(0, 5, 7)
    hidden = np.maximum(np.maximum(x @ params[0], 0) @ params[1], 0)
    ce = -special.log_softmax(hidden @ params[2], -1)[np.arange(7), labels]
    p, n = np.exp(-np.float64(ce)), 4
    factor = n * (1 - p) ** (n - 1) * p / (1 - (1 - p) ** n)
    numbers, wanted = {'comp_sum': ({'tau': 1.0}, ce), 'dco': ({'dco_tries': n}, factor * ce)}[name]
    found = classifiers._mean_objective(name, numbers, params, x, labels)
    np.testing.assert_allclose(found, np.mean(wanted), rtol=1e-4)


def test_dice_of_a_batch_is_its_fraction():
    logits, labels = RNG.normal(size=(30, 2)), np.float64(RNG.integers(0, 2, 30))
    p = special.softmax(logits, -1)[:, 1]
    q = (1 - p) ** 0.6 * p
    wanted = 1 - (2 * np.sum(q * labels) + 0.5) / (np.sum(q**2) + np.sum(labels) + 0.5)
    found = classifiers.batch_dice(logits, labels, 0.6, 0.5)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    sure = 40 * np.stack([1 - labels, labels], -1)
    np.testing.assert_allclose(classifiers.batch_dice(sure, labels, 0.0, 1e-4), 0, atol=1e-6)
