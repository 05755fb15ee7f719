"""Calibrators. Reference: an error in NumPy, logits whose truth is known, closed forms."""

import jax
import numpy as np
import pytest

from eval.suites import calibration_errors
from eval.suites.calibration import calibrate_events
from eval.suites.calibration_errors import h_error
from eval.suites.calibrators import (
    CALIBRATORS,
    MEANS_ROUNDS,
    fit_correctness,
    fit_h,
    h_loss,
    make_events,
)


def log_softmax(z):
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def drawn(size, n=4000, seed=0):
    """(log p [M, E], likeliest first, place [M]): events are drawn by p."""
    rng = np.random.default_rng(seed)
    log_p = -np.sort(-log_softmax(1.5 * rng.standard_normal((n, size))), 1)
    return log_p, np.argmax(log_p + rng.gumbel(size=log_p.shape), 1)


def test_the_loss_of_h_is_the_error_that_the_suite_measures(monkeypatch):
    """In NumPy, with as many rounds of k-means: the last one there assigns, and here moves."""
    monkeypatch.setattr(calibration_errors, 'ROUNDS', MEANS_ROUNDS + 1)
    log_p, place = drawn(4, n=700)
    p = np.exp(log_softmax(2.5 * log_p)).astype(np.float32)
    wanted = h_error(p.ravel(), (place[:, None] == np.arange(4)).ravel())
    assert wanted > 0.03
    assert float(jax.jit(h_loss)(p, place)) == pytest.approx(wanted, rel=1e-3)


def test_h_undoes_overconfidence():
    """Logits are three times too large: one temperature alone is the right map."""
    log_p, place = drawn(3, n=1000)
    given = log_softmax(3 * log_p)
    found = fit_h(given, place, steps=250)(given)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    assert (np.diff(found, axis=1) <= 1e-6).all()  # the order of events stays
    before = np.abs(np.exp(given) - np.exp(log_p)).mean()
    assert np.abs(found - np.exp(log_p)).mean() < 0.25 * before


@pytest.mark.full
@pytest.mark.parametrize(('balanced', 'wanted'), [(False, 0.8), (True, 0.5)])
def test_correctness_without_information_is_the_accuracy_or_one_half(balanced, wanted):
    """All places look the same: the mean of squares is least at the share of the right ones, 4 of
    5, and with the weights of the published code at 1/2.
    """
    log_p = np.tile(log_softmax(np.array([[3.0, 0.0, -1.0]])), (1000, 1))
    place = np.where(np.arange(1000) % 5 > 0, 0, 1)
    confidence = fit_correctness(log_p, place, balanced, steps=1200)(log_p)[:, 0]
    np.testing.assert_allclose(confidence, wanted, atol=0.02)


@pytest.mark.full
def test_correctness_reads_the_probabilities_of_the_place():
    """Two kinds of place, which are right 9 in 10 and 1 in 2 times though as sure."""
    two = log_softmax(np.array([[3.0, 0.0, -4.0, -4.0], [3.0, -1.1, -1.1, -1.1]]))
    kind, turn = np.arange(2000) % 2, np.arange(2000) // 2 % 10
    place = np.where(turn < np.where(kind == 0, 9, 5), 0, 1)
    confidence = fit_correctness(two[kind], place, False)(two)[:, 0]
    np.testing.assert_allclose(confidence, [0.9, 0.5], atol=0.06)


def test_events_are_the_likeliest_tokens_and_the_rest_as_one():
    top, is_next = np.array([[0.5, 0.3], [0.6, 0.4]]), np.array([[False, True], [False, False]])
    log_p, place = make_events(top, is_next)
    np.testing.assert_allclose(np.exp(log_p), [[0.5, 0.3, 0.2], [0.6, 0.4, 0]], atol=1e-9)
    np.testing.assert_array_equal(place, [1, 2])


def test_a_calibrator_is_fitted_on_one_half_and_judged_on_the_other(monkeypatch):
    def fit(log_p, place):
        assert len(log_p) == 2 and place.tolist() == [0, 2]
        return lambda log_p: np.exp(log_p) / 2

    row = CALIBRATORS['h']._replace(fit=fit)
    monkeypatch.setitem(CALIBRATORS, 'h', row)
    found = {
        'top': np.array([[0.5, 0.3], [0.6, 0.2], [0.7, 0.1], [0.8, 0.1]]),
        'is_next': np.array([[1, 0], [0, 1], [0, 0], [1, 0]], bool),
        'correct': np.array([1, 0, 0, 1], bool),
    }
    is_fitted = np.array([True, False, True, False])
    events = calibrate_events('h', found, np.arange(4), is_fitted)
    np.testing.assert_allclose(events.p, [0.3, 0.4])
    assert events.o.tolist() == [False, True] and events.unit.tolist() == [1, 3]
