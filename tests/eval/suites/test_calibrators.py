"""Calibrators. Reference: an error in NumPy, logits with known truth, closed forms."""

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


def draw_events(size, n=4000, seed=0):
    """Returns (log p [M, E], likeliest first, place [M]): events are drawn by p."""
    rng = np.random.default_rng(seed)
    log_p = -np.sort(-log_softmax(1.5 * rng.standard_normal((n, size))), 1)
    return log_p, np.argmax(log_p + rng.gumbel(size=log_p.shape), 1)


def test_h_loss_matches_h_error(monkeypatch):
    """Reference in NumPy, with as many rounds of k-means: the last round there assigns, and here
    moves centres.
    """
    monkeypatch.setattr(calibration_errors, 'ROUNDS', MEANS_ROUNDS + 1)
    log_p, place = draw_events(4, n=700)
    p = np.exp(log_softmax(2.5 * log_p)).astype(np.float32)
    expected = h_error(p.ravel(), (place[:, None] == np.arange(4)).ravel())
    assert expected > 0.03
    assert float(jax.jit(h_loss)(p, place)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.full
def test_h_undoes_overconfidence():
    """Logits are three times too large: a single temperature is the right map."""
    log_p, place = draw_events(3, n=1000)
    overconfident = log_softmax(3 * log_p)
    calibrated = fit_h(overconfident, place, steps=250)(overconfident)
    np.testing.assert_allclose(calibrated.sum(1), 1, rtol=1e-5)
    assert (np.diff(calibrated, axis=1) <= 1e-6).all()  # the order of events stays
    before = np.abs(np.exp(overconfident) - np.exp(log_p)).mean()
    assert np.abs(calibrated - np.exp(log_p)).mean() < 0.25 * before


@pytest.mark.full
@pytest.mark.parametrize(('balanced', 'expected'), [(False, 0.8), (True, 0.5)])
def test_correctness_without_information(balanced, expected):
    """All positions look the same: the optimum is the share of right places, 4 of 5, and with the
    weights of the published code 1/2.
    """
    log_p = np.tile(log_softmax(np.array([[3.0, 0.0, -1.0]])), (1000, 1))
    place = np.where(np.arange(1000) % 5 > 0, 0, 1)
    confidence = fit_correctness(log_p, place, balanced, steps=1200)(log_p)[:, 0]
    np.testing.assert_allclose(confidence, expected, atol=0.02)


@pytest.mark.full
def test_correctness_reads_probabilities():
    """Two kinds of places that are equally confident, and right 9 in 10 and 1 in 2 times."""
    two = log_softmax(np.array([[3.0, 0.0, -4.0, -4.0], [3.0, -1.1, -1.1, -1.1]]))
    kind, turn = np.arange(2000) % 2, np.arange(2000) // 2 % 10
    place = np.where(turn < np.where(kind == 0, 9, 5), 0, 1)
    confidence = fit_correctness(two[kind], place, False)(two)[:, 0]
    np.testing.assert_allclose(confidence, [0.9, 0.5], atol=0.06)


def test_events_join_unlikely_tokens():
    top, is_next = np.array([[0.5, 0.3], [0.6, 0.4]]), np.array([[False, True], [False, False]])
    log_p, place = make_events(top, is_next)
    np.testing.assert_allclose(np.exp(log_p), [[0.5, 0.3, 0.2], [0.6, 0.4, 0]], atol=1e-9)
    np.testing.assert_array_equal(place, [1, 2])


def test_calibrator_is_held_out(monkeypatch):
    def fit(log_p, place):
        assert len(log_p) == 2 and place.tolist() == [0, 2]
        return lambda log_p: np.exp(log_p) / 2

    row = CALIBRATORS['h']._replace(fit=fit)
    monkeypatch.setitem(CALIBRATORS, 'h', row)
    scores = {
        'top': np.array([[0.5, 0.3], [0.6, 0.2], [0.7, 0.1], [0.8, 0.1]]),
        'is_next': np.array([[1, 0], [0, 1], [0, 0], [1, 0]], bool),
        'correct': np.array([1, 0, 0, 1], bool),
    }
    is_fitted = np.array([True, False, True, False])
    events = calibrate_events('h', scores, np.arange(4), is_fitted)
    np.testing.assert_allclose(events.p, [0.3, 0.4])
    assert events.o.tolist() == [False, True] and events.unit.tolist() == [1, 3]
