"""Paired comparison. Statistical: coverage and level on simulated pairs; reference: by hand."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from eval.evaluation import paired
from eval.evaluation.paired import Difference, Pairs, compute_difference, pair_items
from eval.suites.base import Suite, SuiteResult

SUITE = Suite(
    lambda checkpoint: SuiteResult({}), score='nats', weight='bytes', item_noun='documents'
)
RESAMPLES = 600
TRIALS = 300


def simulate_pairs(rng, n: int, apart: float) -> Pairs:
    """Documents of very different sizes and difficulty, which affect both models."""
    n_bytes = np.ceil(rng.lognormal(5, 0.8, n))
    hard = rng.normal(0.7, 0.15, n)
    first, second = (hard + rng.normal(0, 0.05, n) for _ in range(2))
    return Pairs((n_bytes * first, n_bytes * (second + apart)), (n_bytes, n_bytes), 0, 0)


def test_interval_coverage_and_test_level():
    """Catches items resampled separately for each model, which makes intervals three times as wide
    and finds nothing, and the same resamples for both statistics.
    """
    rng = np.random.default_rng(2406)
    n_covered, n_found, n_false = 0, 0, 0
    widths = []
    for _ in range(TRIALS):
        difference = compute_difference(simulate_pairs(rng, 80, 0.02), resamples=RESAMPLES)
        n_covered += difference.low <= 0.02 <= difference.high
        n_found += difference.p < 0.05
        widths.append(difference.high - difference.low)
        n_false += compute_difference(simulate_pairs(rng, 80, 0.0), resamples=RESAMPLES).p < 0.05
    assert n_covered / TRIALS >= 0.93
    assert n_false / TRIALS <= 0.08  # 0.05 and 2.4 standard deviations of the count
    assert n_found / TRIALS > 0.4 and np.mean(widths) < 0.05


def mean_pairs(differences) -> Pairs:
    n = len(differences)
    return Pairs((np.zeros(n), np.asarray(differences)), (np.ones(n),) * 2, 0, 0)


@pytest.mark.parametrize('kind', ['normal', 'lognormal', 'hits'])
def test_ten_items_give_intervals_that_cover(kind):
    """Percentiles of resampled differences cover 90, 79 and 93% here, for 95% claimed."""
    rng = np.random.default_rng(7)
    draw, mean = {
        'normal': (lambda: rng.normal(size=10), 0.0),
        'lognormal': (lambda: rng.lognormal(size=10), math.exp(0.5)),
        'hits': (lambda: rng.choice([-1.0, 0.0, 1.0], 10, p=[0.2, 0.5, 0.3]), 0.1),
    }[kind]
    n_covered, widths = 0, []
    for _ in range(3 * TRIALS):
        difference = compute_difference(mean_pairs(draw()), resamples=RESAMPLES)
        n_covered += difference.low <= mean <= difference.high
        widths.append(difference.high - difference.low)
    assert n_covered / (3 * TRIALS) >= {'lognormal': 0.87}.get(kind, 0.94)
    assert np.median(widths) < {'lognormal': 4.0}.get(kind, 2.0)


@pytest.mark.parametrize(('n', 'n_differing'), [(2, 1), (3, 1), (30, 1), (100, 1), (100, 2)])
def test_resamples_without_spread_are_left_out(n, n_differing):
    """Few items differ, so that many resamples have no difference but the rounding of their sums.

    Catches intervals of a million, from differences divided by that rounding.
    """
    first = np.random.default_rng(0).integers(0, 2, n) * 1.0
    second = first.copy()
    second[:n_differing] = 1 - second[:n_differing]
    pairs = Pairs((first, second), (np.ones(n),) * 2, 0, 0)
    difference = compute_difference(pairs, resamples=RESAMPLES)
    half = stats.t.ppf(0.975, n - 1) * stats.sem(second - first)
    for end in (difference.value - difference.low, difference.high - difference.value):
        assert half * (1 - 1e-9) <= end < 5 * half


def test_standard_error_for_equal_weights_is_exact():
    """Weights of 1 give the error of a mean; a common factor of weights changes nothing."""
    values = np.random.default_rng(1).normal(5, 1, 12)
    for factor in (1.0, 3.0):
        table = np.stack([np.zeros(12), factor * values, *np.full((2, 12), factor)], 1)
        error = paired._standard_error(table.sum(0), table.T @ table, 12)
        assert error == pytest.approx(stats.sem(values))


def test_p_matches_all_swaps():
    """Four items: 16 swaps, counted one by one. Weights are swapped with their scores."""
    scores = np.array([[3.0, 4.0], [5.0, 7.0], [2.0, 2.5], [6.0, 5.5]])
    weights = np.array([[2.0, 3.0], [4.0, 4.0], [1.0, 1.0], [5.0, 5.0]])

    def ratio(swaps):
        first = [(s[swap], w[swap]) for s, w, swap in zip(scores, weights, swaps, strict=True)]
        second = [(s[1 - i], w[1 - i]) for s, w, i in zip(scores, weights, swaps, strict=True)]
        (a, b), (c, d) = (map(sum, zip(*pairs, strict=True)) for pairs in (first, second))
        return c / d - a / b

    value = ratio((0, 0, 0, 0))
    all_differences = [
        abs(ratio(swaps)) >= abs(value) - 1e-12 for swaps in itertools.product((0, 1), repeat=4)
    ]
    difference = compute_difference(
        Pairs(tuple(scores.T), tuple(weights.T), 0, 0), scale=2.0, resamples=20_000
    )
    assert difference.value == pytest.approx(2 * value)
    assert difference.p == pytest.approx(np.mean(all_differences), abs=0.015)


def test_equal_models_and_too_few_items():
    pairs = simulate_pairs(np.random.default_rng(3), 20, 0.01)
    assert compute_difference(pairs, resamples=99) == compute_difference(pairs, resamples=99)
    equal = Pairs((pairs.scores[0],) * 2, pairs.weights, 0, 0)
    assert compute_difference(equal, resamples=99) == Difference(0.0, 0.0, 0.0, 1.0)
    single_pair = Pairs((np.ones(1), np.ones(1)), (np.ones(1), np.full(1, 2.0)), 0, 0)
    assert compute_difference(single_pair).value == -0.5 and math.isnan(
        compute_difference(single_pair).p
    )
    lost = Pairs((np.array([1.0, math.nan]), np.ones(2)), (np.ones(2),) * 2, 0, 0)
    assert math.isnan(compute_difference(lost).p)


def items(names: str, nats) -> SuiteResult:
    return SuiteResult({}, {'item': list(names), 'nats': nats, 'bytes': [10.0] * len(names)})


def test_items_are_paired_by_name():
    pairs = pair_items(items('abc', [1.0, 2.0, 3.0]), items('dcb', [7.0, 8.0, 9.0]), SUITE)
    assert [scores.tolist() for scores in pairs.scores] == [[2.0, 3.0], [9.0, 8.0]]
    assert (len(pairs), pairs.only_first, pairs.only_second) == (2, 1, 1)
    with pytest.raises(ValueError, match=r'share no documents \(1 and 2\)'):
        pair_items(items('a', [1.0]), items('bc', [1.0, 2.0]), SUITE)
    with pytest.raises(ValueError, match='2 documents have only 1 names'):
        pair_items(items('aa', [1.0, 2.0]), items('a', [1.0]), SUITE)
    alike = Suite(SUITE.function, score='nats')
    assert pair_items(items('a', [1.0]), items('a', [2.0]), alike).weights[0].tolist() == [1]
