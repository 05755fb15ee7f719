"""Calibrators on random logits with known true probabilities."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from eval.claims.lab import measure
from eval.suites.calibration import BETAS, compute_slopes
from eval.suites.calibration_errors import (
    bin_events,
    equal_width,
    expected_error,
    solve_temperature,
)
from eval.suites.calibrators import CALIBRATORS, ProbabilityMap, fit_h

EVENTS, SPREAD = 5, 1.5  # of a place; the deviation of true logits
N_FIT, N_TEST, SEEDS, BINS = 20_000, 50_000, 5, 15
STEPS = 500  # of h, whose default takes minutes here
ACCURACY, BLIND_SEEDS = 0.8, 10  # if logits carry no information
# Maps from true logits to an overconfident model's.
LINKS = {
    'scaled': lambda z, rng: 3 * z,
    'squared': lambda z, rng: z * np.abs(z),
    'unevenly_scaled': lambda z, rng: z * np.where(rng.random((len(z), 1)) < 0.5, 4, 1),
}


@measure(*(f'ece_of_h_less_temperature_{link}' for link in LINKS))
def overconfident_logits() -> Iterator[list[float]]:
    """Yields the ECE of the likeliest event after `h` minus the ECE after a temperature, by link.

    Events are drawn from softmax(z) with normal z, and the logits of the model are LINKS of z. Both
    calibrators are fitted on N_FIT places, the temperature by the loss as in the suite
    `calibration`, and evaluated on N_TEST other places (arXiv:2506.17968).
    """
    for link in LINKS:
        yield [_ece_difference(link, seed) for seed in range(SEEDS)]


def _draw_logits(link: str, places: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns (log p of the model [M, E], likeliest first; index of the event that happens [M])."""
    z_ME = SPREAD * rng.standard_normal((places, EVENTS))
    z_ME = -np.sort(-z_ME, 1)  # the links keep the order
    place_M = np.argmax(z_ME + rng.gumbel(size=z_ME.shape), 1)
    return _log_softmax(LINKS[link](z_ME, rng)), place_M


def _log_softmax(z_ME: np.ndarray) -> np.ndarray:
    return z_ME - np.log(np.sum(np.exp(z_ME), 1, keepdims=True))


def _ece_difference(link: str, seed: int) -> float:
    rng = np.random.default_rng(seed)
    fit_data, (log_p_ME, place_M) = _draw_logits(link, N_FIT, rng), _draw_logits(link, N_TEST, rng)
    maps = fit_h(*fit_data, STEPS), _fit_temperature(*fit_data)
    ece_h, ece_temperature = (_ece(to_p(log_p_ME), place_M) for to_p in maps)
    return ece_h - ece_temperature


def _fit_temperature(log_p_ME: np.ndarray, place_M: np.ndarray) -> ProbabilityMap:
    log_p_1ME, place_1M = jnp.float32(log_p_ME)[None], jnp.int32(place_M)[None]
    statistics = compute_slopes(BETAS, log_p_1ME, place_1M)
    slopes, curvatures = (np.mean(statistics[k][0], 0, np.float64) for k in ('slope', 'curvature'))
    temperature = solve_temperature(BETAS, slopes, curvatures)
    return lambda log_p_ME: np.exp(_log_softmax(log_p_ME / temperature))


def _ece(p_ME: np.ndarray, place_M: np.ndarray) -> float:
    one_group = np.zeros(len(place_M), int)
    return float(
        expected_error(bin_events(p_ME[:, 0], place_M == 0, one_group, equal_width(BINS)).total)
    )


@measure('confidence_less_accuracy_even', 'confidence_less_accuracy_balanced')
def blind_correctness() -> Iterator[list[float]]:
    """Yields mean confidence minus accuracy after `correctness`, for logits without information.

    The likeliest event comes true with probability ACCURACY whatever the logits. `even`: all places
    have the same weight; `balanced`: weights as in the code of arXiv:2404.13016. Evaluated on
    places that were not fitted; both variants share places and initial weights.
    """
    for name in ('correctness', 'correctness_balanced'):
        yield [_confidence_gap(name, seed) for seed in range(BLIND_SEEDS)]


def _confidence_gap(name: str, seed: int) -> float:
    rng = np.random.default_rng(seed)

    def draw(places):
        log_p_ME, _ = _draw_logits('scaled', places, rng)
        others_M = rng.integers(1, EVENTS, places)
        return log_p_ME, np.where(rng.random(places) < ACCURACY, 0, others_M)

    to_p = CALIBRATORS[name].fit(*draw(N_FIT))
    log_p_ME, place_M = draw(N_TEST)
    return float(np.mean(to_p(log_p_ME)[:, 0]) - np.mean(place_M == 0))
