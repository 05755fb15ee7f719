"""Errors of probabilities. Reference: by hand and by slow loops. Property: true probabilities have
none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.suites.calibration import (
    BETAS,
    Events,
    bin_classes,
    compute_slopes,
    frequent_tokens,
    reliability_table,
    row_items,
    token_statistics,
)
from eval.suites.calibration_errors import (
    bin_events,
    bootstrap_interval,
    cluster_ends,
    correctness_losses,
    debiased_square,
    equal_mass,
    equal_width,
    expected_error,
    h_error,
    solve_temperature,
)
from eval.suites.reading import TargetRow

P = np.array([0.6] * 5 + [0.9] * 5)
HAPPENED = np.array([1, 1, 1, 0, 0, 1, 1, 0, 0, 0], bool)  # 3 of 5 at 0.6, 2 of 5 at 0.9
ONE = np.zeros(10, int)


def draw_tokens(scale=1.0, n=40_000, size=8, seed=0):
    """Returns (logits [1, n, V], next [1, n]): tokens drawn from softmax(logits), which are then
    scaled.
    """
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((n, size))
    labels = np.argmax(logits + rng.gumbel(size=logits.shape), -1)
    return jnp.asarray(scale * logits, jnp.float32)[None], jnp.asarray(labels)[None]


def make_likeliest_events(logits, labels):
    statistics = token_statistics(np.arange(2), 3, 1.0, logits, labels)
    return np.asarray(statistics['confidence'])[0], np.asarray(statistics['correct'])[0]


def test_two_levels_match_hand_computation():
    """|0.6 - 3/5| over half of the events, and |0.9 - 2/5| over the other half."""
    assert expected_error(bin_events(P, HAPPENED, ONE, equal_width(10)).total) == pytest.approx(
        0.25
    )
    assert expected_error(bin_events(P, HAPPENED, ONE, equal_width(1)).total) == pytest.approx(0.25)
    signed = HAPPENED.copy()
    signed[:5] = [1, 1, 1, 1, 1]  # 0.4 too low at 0.6, 0.5 too high at 0.9: one bin hides it
    assert expected_error(bin_events(P, signed, ONE, equal_width(10)).total) == pytest.approx(0.45)
    assert expected_error(bin_events(P, signed, ONE, equal_width(1)).total) == pytest.approx(0.05)
    squares = 0.5 * (0.0 - 0.6 * 0.4 / 4) + 0.5 * (0.5**2 - 0.4 * 0.6 / 4)
    assert debiased_square(bin_events(P, HAPPENED, ONE, equal_width(10)).total) == pytest.approx(
        squares
    )


def test_joined_classes_average_errors():
    following = np.where(HAPPENED, 7, 9)
    scores = {'of_classes': np.stack([P, P, P], 1), 'next': following}
    classes = bin_classes(scores, np.array([7, 9, 8]), ONE, equal_width(10))
    class_bins = [bin_events(P, following == token, ONE, equal_width(10)) for token in (7, 9, 8)]
    mean = np.mean([expected_error(bins.total) for bins in class_bins])
    assert expected_error(classes.total) == pytest.approx(mean)


def test_equal_mass_bins_have_equal_counts():
    p = np.random.default_rng(0).beta(5, 1, 3000)
    counts = bin_events(p, p > 0.5, np.zeros(3000, int), equal_mass(p, 15)).total.count
    np.testing.assert_array_equal(counts, 200)


def test_true_probabilities_have_chance_errors():
    p, o = make_likeliest_events(*draw_tokens())
    for edges in (equal_width(15), equal_mass(p, 15)):
        bins = bin_events(p, o, np.zeros(len(p), int), edges).total
        chance = (bins.count / len(p) * 3 * np.sqrt(0.25 / np.maximum(bins.count, 1))).sum()
        assert expected_error(bins) < chance < 0.05
    p, o = make_likeliest_events(*draw_tokens(scale=2.0))
    assert expected_error(bin_events(p, o, np.zeros(len(p), int), equal_width(15)).total) > 0.1


def test_debiased_square_is_unbiased():
    """True probabilities, 20 events: plain squares are p (1 - p) / n on average, above 0."""
    o = np.random.default_rng(0).random((4000, 20)) < 0.7
    groups = np.repeat(np.arange(4000), 20)
    bins = bin_events(np.full(80_000, 0.7), o.ravel(), groups, np.zeros(0))
    squares = debiased_square(bins)
    assert abs(squares.mean()) < 4 * squares.std() / np.sqrt(4000) < 0.001
    assert (((bins.o - bins.p) / 20) ** 2).mean() == pytest.approx(0.7 * 0.3 / 20, rel=0.1)


@pytest.mark.parametrize('temperature', [0.6, 1.0, 2.0])
def test_temperature_undoes_scaling(temperature):
    logits, labels = draw_tokens(scale=temperature)
    derivatives = compute_slopes(BETAS, logits, labels)
    means = (
        np.asarray(derivatives[name])[0].mean(0, np.float64) for name in ('slope', 'curvature')
    )
    fitted = solve_temperature(BETAS, *means)
    assert fitted == pytest.approx(temperature, rel=0.03)

    def slope(temperature):
        def loss(beta):
            log_p = jax.nn.log_softmax(beta * logits)
            return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], -1))

        return jax.grad(loss)(1 / temperature)

    assert abs(slope(fitted)) < 1e-4 < 0.01 < abs(slope(1.1 * fitted))


def test_temperature_is_clipped_to_range():
    always = np.ones(len(BETAS))
    assert solve_temperature(BETAS, always, always) == pytest.approx(4.0)
    assert solve_temperature(BETAS, -always, always) == pytest.approx(0.25)


def test_h_error_matches_slow_loop():
    rng = np.random.default_rng(0)
    p = np.concatenate([rng.random(60) * 0.1, 0.5 + 0.1 * rng.random(30)])
    o = rng.random(90) < 0.2
    order = np.argsort(p)
    off = [p[i] - o[i] for i in order]
    errors = [
        abs(sum(off[j] for j in range(i - 3, i + 4) if 0 <= j < len(off)) / 7)
        for i in range(len(off))
    ]
    expected = (np.mean(errors[:60]) + np.mean(errors[60:])) / 2
    assert h_error(p, o, window=7, clusters=2) == pytest.approx(expected)


def test_separate_clusters_are_found():
    rng = np.random.default_rng(0)
    p = np.sort(
        np.concatenate([c + 0.02 * rng.random(n) for c, n in ((0.1, 50), (0.5, 8), (0.8, 20))])
    )
    np.testing.assert_array_equal(cluster_ends(p, 3), [50, 58, 78])


def test_correctness_loss_balances_sides():
    """Weights of the authors' code: 1 - accuracy of the correct, accuracy of the wrong."""
    confidence = np.array([0.9, 0.8, 0.7, 0.4])
    correct = np.array([True, True, False, True])
    squares = np.array([0.01, 0.04, 0.49, 0.36])
    weights = np.array([0.25, 0.25, 0.75, 0.25])
    plain, balanced = correctness_losses(confidence, correct)
    assert plain == pytest.approx(squares.mean())
    assert balanced == pytest.approx((weights * squares).sum() / weights.sum())
    assert np.isnan(correctness_losses(confidence, np.ones(4, bool))[1])


def test_interval_resamples_groups():
    """Ten copies of each event form one group; the interval is as wide as for the events alone."""
    rng = np.random.default_rng(0)
    p = rng.uniform(0.5, 1, 400)
    o = rng.random(400) < p - 0.2
    group = np.arange(400)
    grouped = bootstrap_interval(expected_error, bin_events(p, o, group, equal_width(10)), 500)
    ten = bootstrap_interval(
        expected_error, bin_events(*(np.repeat(x, 10) for x in (p, o, group)), equal_width(10)), 500
    )
    np.testing.assert_allclose(grouped, ten, rtol=1e-9)
    apart = bootstrap_interval(
        expected_error,
        bin_events(np.repeat(p, 10), np.repeat(o, 10), np.arange(4000), equal_width(10)),
        500,
    )
    assert grouped[1] < 0.2 < grouped[2]
    assert apart[2] - apart[1] < 0.5 * (grouped[2] - grouped[1])


def test_token_statistics_match_distribution():
    logits = 2 * np.random.default_rng(0).standard_normal((1, 6, 7))
    labels = np.array([[0, 1, 2, 3, 4, 5]])
    statistics = jax.jit(functools.partial(token_statistics, np.array([3, 5]), 2, 0.5))
    scores = statistics(jnp.asarray(logits), jnp.asarray(labels))
    for prefix, beta in (('', 1.0), ('scaled_', 0.5)):
        p = np.exp(beta * logits[0]) / np.exp(beta * logits[0]).sum(-1, keepdims=True)
        hot = np.eye(7)[labels[0]]
        np.testing.assert_allclose(scores[f'{prefix}nll'][0], -np.log((p * hot).sum(-1)), rtol=1e-4)
        np.testing.assert_allclose(scores[f'{prefix}brier'][0], ((p - hot) ** 2).sum(-1), rtol=1e-4)
        np.testing.assert_allclose(scores[f'{prefix}confidence'][0], p.max(-1), rtol=1e-5)
    p = np.exp(logits[0]) / np.exp(logits[0]).sum(-1, keepdims=True)
    np.testing.assert_allclose(scores['top'][0], -np.sort(-p, -1)[:, :2], rtol=1e-5)
    second = np.argsort(-p, -1)[:, :2] == labels[0][:, None]
    np.testing.assert_array_equal(scores['is_next'][0], second)
    np.testing.assert_array_equal(scores['correct'][0], second[:, 0])
    np.testing.assert_allclose(scores['of_classes'][0], p[:, [3, 5]], rtol=1e-5)


def test_tables_by_hand():
    """Rows of two targets, of none and of one; the last token is the most frequent class."""
    masks = [np.array(mask, bool) for mask in ([1, 1, 0], [0, 0, 0], [0, 0, 1])]
    rows = [TargetRow(np.array([9, 4, 4, 7]), mask, np.zeros(3, int)) for mask in masks]
    columns = {name: np.array([0.5, 1.0, 2.0]) for name in ('nll', 'correct', 'confidence')}
    sums = {name: [1.5, 2.0] for name in columns}
    assert row_items(rows, columns) == {'item': ['row 0', 'row 2'], 'tokens': [2, 1]} | sums
    assert frequent_tokens(rows, 1).tolist() == [4] and frequent_tokens(rows, 9).tolist() == [4, 7]

    table = reliability_table({'all': Events(P, HAPPENED, ONE)}, equal_width(10)).columns
    assert table == {
        'tokens of': ['all'] * 2,
        'confidence': pytest.approx([0.6, 0.9]),
        'accuracy': pytest.approx([0.6, 0.4]),
        'tokens': [5, 5],
    }
    class_scores = {'of_classes': np.stack([P, 1 - P], -1), 'next': np.where(HAPPENED, 4, 7)}
    error = expected_error(bin_classes(class_scores, np.array([4, 7]), ONE, equal_width(10)).total)
    assert error == pytest.approx(0.25)  # of either class, as 1 - p of the second is off as p is
