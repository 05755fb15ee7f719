"""Calibrators on random logits with known true probabilities."""

import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims.lab import measure, train
from eval.suites.calibration import BETAS, compute_slopes
from eval.suites.calibration_errors import (
    bin_events,
    equal_width,
    expected_error,
    solve_temperature,
)
from eval.suites.calibrators import (
    C_BATCH,
    C_RATE,
    C_STEPS,
    CALIBRATORS,
    H_BATCH,
    H_RATE,
    H_SCALE,
    HIDDEN,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    TEMPERATURES,
    TINY,
    ProbabilityMap,
    h_loss,
)

EVENTS, SPREAD = 5, 1.5  # of a place; the deviation of true logits
N_FIT, N_TEST, SEEDS, BINS = 20_000, 50_000, 5, 15
STEPS = 1000  # of the mixtures, which are compared after every epoch
SHARPNESS, WRONG_SHARE = 3, 0.9  # factor of scaled logits; of the temperature in a control
ACCURACY, SEEDS_OF_CORRECTNESS = 0.8, 10  # if logits carry no information
# Maps from true logits to an overconfident model's.
LINKS = {
    'scaled': lambda z, rng: SHARPNESS * z,
    'squared': lambda z, rng: z * np.abs(z),
    'unevenly_scaled': lambda z, rng: z * np.where(rng.random((len(z), 1)) < 0.5, 4, 1),
}
MISFITS = ('squared', 'unevenly_scaled')  # links that no temperature undoes
WEIGHTS = {'even': 'correctness', 'balanced': 'correctness_balanced'}  # calibrators, by weights

Events = tuple[np.ndarray, np.ndarray]  # (log p [M, E], the event that happened [M])
Params = dict[str, jax.Array]


@measure(
    *(f'ece_of_h_less_likelihood_{link}' for link in LINKS),
    *(f'ece_of_h_less_temperature_{link}' for link in MISFITS),
    'ece_of_wrong_less_right_temperature',
    *(f'ece_of_absolute_less_likelihood_{link}' for link in MISFITS),
)
def overconfident_logits() -> Iterator[list[float]]:
    """Yields the ECE of the likeliest event after h-calibration minus that of rivals, by link.

    Events are drawn from softmax(z) with normal z, and the logits of the model are LINKS of z. A
    mixture of temperatures is fitted on N_FIT places to the error of h-calibration, and by maximum
    likelihood. Both keep the parameters of the lowest ECE on these places, as the code of
    arXiv:2506.17968 does, and are evaluated on N_TEST other places. Then the same minus a
    temperature of maximum likelihood, as in the suite `calibration`. Then a control: the ECE with
    WRONG_SHARE of the right temperature minus that with the right one, for scaled logits. Then a
    twin of the first values, a mixture fitted to the absolute errors of single events.
    """
    eces = {link: [_mixture_eces(link, seed) for seed in range(SEEDS)] for link in LINKS}
    yield from (_subtract(eces[link], 'h', 'likelihood') for link in LINKS)
    yield from (_subtract(eces[link], 'h', 'temperature') for link in MISFITS)
    yield _subtract(eces['scaled'], 'wrong_temperature', 'right_temperature')
    yield from (_subtract(eces[link], 'absolute', 'likelihood') for link in MISFITS)


@measure(
    *(f'ece_of_{weights}_less_cross_entropy_{link}' for weights in WEIGHTS for link in MISFITS),
    *(f'ece_of_{weights}_less_cross_entropy_blind' for weights in WEIGHTS),
    'ece_of_uncalibrated_less_cross_entropy_squared',
    *(f'ece_of_true_event_less_cross_entropy_{link}' for link in MISFITS),
)
def trained_on_correctness() -> Iterator[list[float]]:
    """Yields the ECE of the likeliest event after `correctness` minus that after cross-entropy.

    Both fit a temperature of each place from its probabilities, by the same network. `even`: all
    places have the same weight; `balanced`: weights as in the code of arXiv:2404.13016. Logits are
    as in `overconfident_logits`, or blind: the likeliest event happens with probability ACCURACY,
    whatever the logits. Then a control, logits that are not calibrated, and a twin, which fits the
    probability of the event that happened in place of that of the likeliest event. Evaluated on
    places that were not fitted.
    """
    eces = {
        link: [_network_eces(link, seed) for seed in range(SEEDS_OF_CORRECTNESS)]
        for link in (*MISFITS, 'blind')
    }
    for weights in WEIGHTS:
        yield from (_subtract(eces[link], weights, 'cross_entropy') for link in MISFITS)
    yield from (_subtract(eces['blind'], weights, 'cross_entropy') for weights in WEIGHTS)
    yield _subtract(eces['squared'], 'uncalibrated', 'cross_entropy')
    yield from (_subtract(eces[link], 'true_event', 'cross_entropy') for link in MISFITS)


def _subtract(eces: list[dict[str, float]], arm: str, rival: str) -> list[float]:
    return [of_seed[arm] - of_seed[rival] for of_seed in eces]


def _draw_logits(link: str, places: int, rng: np.random.Generator) -> Events:
    z_ME = SPREAD * rng.standard_normal((places, EVENTS))
    place_M = np.argmax(z_ME + rng.gumbel(size=z_ME.shape), 1)
    return _log_softmax(LINKS[link](z_ME, rng)), place_M


def _draw_sorted(link: str, places: int, rng: np.random.Generator) -> Events:
    """Returns events with the likeliest first, as `correctness` takes them; link may be blind."""
    log_p_ME, place_M = _draw_logits('scaled' if link == 'blind' else link, places, rng)
    order_ME = np.argsort(-log_p_ME, 1)
    rank_M = np.argmax(order_ME == place_M[:, None], 1)
    if link == 'blind':
        rank_M = np.where(rng.random(places) < ACCURACY, 0, rng.integers(1, EVENTS, places))
    return np.take_along_axis(log_p_ME, order_ME, 1), rank_M


def _log_softmax(z_ME: np.ndarray) -> np.ndarray:
    return z_ME - np.log(np.sum(np.exp(z_ME), 1, keepdims=True))


def _mixture_eces(link: str, seed: int) -> dict[str, float]:
    """Returns the ECE of each way to fit a mixture of temperatures, and of single temperatures."""
    rng = np.random.default_rng(seed)
    fitted, tested = _draw_logits(link, N_FIT, rng), _draw_logits(link, N_TEST, rng)
    bound = TEMPERATURES**-0.5  # as `fit_h` starts
    start = {name: rng.uniform(-bound, bound, TEMPERATURES) for name in ('inverse', 'weight')}
    # Each step of h leaves out the places of a class, all classes in turn.
    places = [np.flatnonzero(fitted[1] != event) for event in range(EVENTS)]
    size = H_BATCH * (EVENTS - 1) // EVENTS
    left_out = np.stack([rng.choice(places[step % EVENTS], size) for step in range(STEPS)])
    of_all = rng.integers(N_FIT, size=(STEPS, H_BATCH))
    batches = {_scaled_h_loss: left_out, _absolute_loss: left_out, _likelihood_loss: of_all}
    stages = STEPS * H_BATCH // N_FIT
    h, absolute, likelihood = (
        _fit(mix_temperatures, loss, start, fitted, batches[loss], H_RATE, stages)
        for loss in batches
    )
    maps = {
        'h': h,
        'absolute': absolute,
        'likelihood': likelihood,
        'temperature': _fit_temperature(*fitted),
        'right_temperature': _divide_by(SHARPNESS),
        'wrong_temperature': _divide_by(WRONG_SHARE * SHARPNESS),
    }
    return _evaluate(maps, *tested)


def _network_eces(link: str, seed: int) -> dict[str, float]:
    """Returns the ECE of each way to fit a network for the temperature of a place, and of none."""
    rng = np.random.default_rng(seed)
    fitted, tested = _draw_sorted(link, N_FIT, rng), _draw_sorted(link, N_TEST, rng)
    batches = rng.integers(N_FIT, size=(C_STEPS, C_BATCH))
    cross_entropy, true_event = (
        _fit(apply_temperatures, loss, start_network(), fitted, batches, C_RATE)
        for loss in (_likelihood_loss, _true_event_loss)
    )
    maps = {weights: CALIBRATORS[name].fit(*fitted) for weights, name in WEIGHTS.items()}
    maps |= {'cross_entropy': cross_entropy, 'true_event': true_event, 'uncalibrated': np.exp}
    return _evaluate(maps, *tested)


def _evaluate(
    maps: Mapping[str, ProbabilityMap], log_p_ME: np.ndarray, place_M: np.ndarray
) -> dict[str, float]:
    p_of_maps = {name: to_p(log_p_ME) for name, to_p in maps.items()}
    return {
        name: _ece(np.max(p_ME, 1), np.argmax(p_ME, 1) == place_M)
        for name, p_ME in p_of_maps.items()
    }


def _ece(confidence_M: np.ndarray, is_right_M: np.ndarray) -> float:
    one_group = np.zeros(len(is_right_M), int)
    bins = bin_events(confidence_M, is_right_M, one_group, equal_width(BINS))
    return float(expected_error(bins.total))


def _fit(
    to_p: Callable[[Params, jax.Array], jax.Array],
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    start: Mapping[str, np.ndarray],
    fitted: Events,
    batches: np.ndarray,
    rate: float,
    stages: int = 1,
) -> ProbabilityMap:
    """Returns the map after the stage with the lowest ECE on the fitted places.

    Args:
      to_p: (params, log p) -> probabilities.
      loss: (probabilities, event that happened) -> loss.
      start: initial parameters.
      fitted: all places.
      batches: indices of the places of each step.
      rate: of Adam.
      stages: number of equal stages; 1 returns the map after the last step.
    """
    arrays = jnp.float32(fitted[0]), jnp.int32(fitted[1]), jnp.int32(batches)
    start = jax.tree.map(jnp.float32, dict(start))
    params, confidences, rights = jax.device_get(_descend(to_p, loss, start, *arrays, rate, stages))
    best = int(np.argmin([_ece(*tops) for tops in zip(confidences, rights, strict=True)]))
    params = jax.tree.map(lambda x: x[best], params)
    return lambda log_p_ME: np.asarray(to_p(params, jnp.float32(log_p_ME)))


@functools.partial(jax.jit, static_argnames=('to_p', 'loss', 'rate', 'stages'))
def _descend(to_p, loss, start, log_p_ME, place_M, batches, rate, stages):
    def observe(params):
        p_ME = to_p(params, log_p_ME)
        return params, jnp.max(p_ME, 1), jnp.argmax(p_ME, 1) == place_M

    def batch_loss(params, chosen):
        return loss(to_p(params, log_p_ME[chosen]), place_M[chosen])

    return train(batch_loss, start, optax.adam(rate), batches, None, observe, stages).history


def mix_temperatures(params: Params, log_p_ME: jax.Array) -> jax.Array:
    """Returns the map of `fit_h`, sum_j w_j softmax(b_j log p)."""
    inverse_T, weight_T = (jnp.abs(params[name]) for name in ('inverse', 'weight'))
    p_MET = jax.nn.softmax(log_p_ME[..., None] * inverse_T[None, None], 1)
    return p_MET @ (weight_T / jnp.sum(weight_T))


def start_network() -> dict[str, np.ndarray]:
    """Returns the initial parameters of `fit_correctness`."""
    rng = np.random.default_rng(0)
    return {
        'up': rng.uniform(-1, 1, (EVENTS, HIDDEN)) / EVENTS**0.5,
        'up_bias': rng.uniform(-1, 1, HIDDEN) / EVENTS**0.5,
        'down': rng.uniform(-1, 1, HIDDEN) / HIDDEN**0.5,
        'bias': np.zeros(()),
    }


def apply_temperatures(params: Params, log_p_ME: jax.Array) -> jax.Array:
    """Returns the map of `fit_correctness`, softmax(log p / T) with T from a network."""
    hidden_MU = jax.nn.relu(jnp.exp(log_p_ME) @ params['up'] + params['up_bias'][None])
    temperature_M = 1 + hidden_MU @ params['down'] + params['bias']
    temperature_M = jnp.clip(temperature_M, MIN_TEMPERATURE, MAX_TEMPERATURE)
    return jax.nn.softmax(log_p_ME / temperature_M[:, None], 1)


def _scaled_h_loss(p_ME: jax.Array, place_M: jax.Array) -> jax.Array:
    return H_SCALE * h_loss(p_ME, place_M)


def _absolute_loss(p_ME: jax.Array, place_M: jax.Array) -> jax.Array:
    """Returns the mean of |p - o|: absolute values of events, not of their means over a window."""
    return jnp.mean(jnp.abs(p_ME - jax.nn.one_hot(place_M, EVENTS)))


def _likelihood_loss(p_ME: jax.Array, place_M: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.log(_select_events(p_ME, place_M) + TINY))


def _true_event_loss(p_ME: jax.Array, place_M: jax.Array) -> jax.Array:
    return jnp.mean((1 - _select_events(p_ME, place_M)) ** 2)


def _select_events(p_ME: jax.Array, place_M: jax.Array) -> jax.Array:
    return jnp.take_along_axis(p_ME, place_M[:, None], 1)[:, 0]


def _fit_temperature(log_p_ME: np.ndarray, place_M: np.ndarray) -> ProbabilityMap:
    log_p_1ME, place_1M = jnp.float32(log_p_ME)[None], jnp.int32(place_M)[None]
    statistics = compute_slopes(BETAS, log_p_1ME, place_1M)
    slopes, curvatures = (np.mean(np.float64(statistics[k][0]), 0) for k in ('slope', 'curvature'))
    return _divide_by(solve_temperature(BETAS, slopes, curvatures))


def _divide_by(temperature: float) -> ProbabilityMap:
    return lambda log_p_ME: np.exp(_log_softmax(log_p_ME / temperature))
