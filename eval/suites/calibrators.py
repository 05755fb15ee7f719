"""Calibrators beside a temperature: maps from a model's probabilities to other probabilities.

Each is fitted as fit(log_p [M, E], place [M]) -> map. E are the events of a place, likeliest first,
such as its likeliest tokens and the event of all other tokens; `place` is the event that happened.
map(log_p) returns probabilities [M, E]. To add a calibrator, write a function here and add a row to
CALIBRATORS.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.suites.calibration_errors import CLUSTERS, WINDOW

TINY = 1e-20  # lower bound of probabilities before a logarithm
TEMPERATURES = 16  # in the mixture of h
H_BATCH, H_RATE, H_STEPS = 5000, 5e-3, 2000
H_SCALE = 1e5  # of the loss, so that Adam's epsilon is negligible
MEANS_ROUNDS = 20  # of k-means in a step

FEATURES, HIDDEN = 10, 5  # likeliest events that a temperature is computed from; units
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.1, 10.0  # temperatures
C_BATCH, C_RATE, C_STEPS = 1000, 1e-2, 2000

ProbabilityMap = Callable[[np.ndarray], np.ndarray]


def fit_h(log_p_ME: np.ndarray, place_M: np.ndarray, steps: int = H_STEPS) -> ProbabilityMap:
    """Returns sum_j w_j softmax(b_j log_p), with weights and b_j > 0 that minimise `h_loss`.

    h-calibration (arXiv:2506.17968) with the map, initialisation, batches and Adam of its code, for
    a fixed number of steps. All places count at once: its code leaves out the places of each class
    in turn, which has no meaning if an event is a rank. The order of events does not change.

    Args:
      log_p_ME: log probabilities of events.
      place_M: the event that happened.
      steps: of Adam.
    """
    bound = TEMPERATURES**-0.5  # PyTorch's default initialisation
    keys = jax.random.split(jax.random.key(0))
    draw = functools.partial(jax.random.uniform, shape=(TEMPERATURES,), minval=-bound, maxval=bound)
    start = {'inverse': draw(keys[0]), 'weight': draw(keys[1])}
    params = _minimise(_h_objective, start, log_p_ME, place_M, H_BATCH, H_RATE, steps)
    return _as_map(_mix_temperatures, params)


def _h_objective(params: dict, log_p_ME: jax.Array, place_M: jax.Array) -> jax.Array:
    return H_SCALE * h_loss(_mix_temperatures(params, log_p_ME), place_M)


def h_loss(p_ME: jax.Array, place_M: jax.Array) -> jax.Array:
    """Returns `calibration_errors.h_error` of all events, with a gradient in p but not in clusters.

    A cluster without events counts 0, as in the code of arXiv:2506.17968.
    """
    o = jax.nn.one_hot(place_M, p_ME.shape[1]).ravel()
    order = jnp.argsort(p_ME.ravel())
    p, off = p_ME.ravel()[order], (p_ME.ravel() - o)[order]
    half = WINDOW // 2
    sums = jnp.cumsum(jnp.pad(off, (half + 1, half)))  # places beyond the ends count 0
    error = jnp.abs(sums[WINDOW:] - sums[: len(p)]) / WINDOW
    cluster = jnp.searchsorted(_midpoints(_cluster_means(jax.lax.stop_gradient(p))), p)
    totals, counts = (jax.ops.segment_sum(x, cluster, CLUSTERS) for x in (error, jnp.ones_like(p)))
    return jnp.mean(totals / jnp.maximum(counts, 1))


def _cluster_means(p: jax.Array) -> jax.Array:
    """Returns the k-means centres of sorted p, as in `calibration_errors.cluster_ends`."""
    sums = jnp.pad(jnp.cumsum(p), (1, 0))
    start = p[0] + (p[-1] - p[0]) * (jnp.arange(CLUSTERS) + 0.5) / CLUSTERS

    def lloyd_round(_, centres):
        inner = jnp.searchsorted(p, _midpoints(centres))
        edges = jnp.concatenate([jnp.zeros(1, int), inner, jnp.full(1, len(p))])
        count = jnp.diff(edges)
        return jnp.where(count > 0, jnp.diff(sums[edges]) / jnp.maximum(count, 1), centres)

    return jax.lax.fori_loop(0, MEANS_ROUNDS, lloyd_round, start)


def _midpoints(centres: jax.Array) -> jax.Array:
    return (centres[1:] + centres[:-1]) / 2


def _mix_temperatures(params: dict, log_p_ME: jax.Array) -> jax.Array:
    inverse, weight = (jnp.abs(params[name]) for name in ('inverse', 'weight'))
    p_MET = jax.nn.softmax(log_p_ME[..., None] * inverse[None, None], 1)
    return p_MET @ (weight / jnp.sum(weight))


def fit_correctness(
    log_p_ME: np.ndarray, place_M: np.ndarray, balanced: bool, steps: int = C_STEPS
) -> ProbabilityMap:
    """Returns softmax(log_p / T(u)), with T from a small network.

    T is from MIN_TEMPERATURE to MAX_TEMPERATURE. The network minimises the squared distance of the
    first event's probability from whether it happened. u are the FEATURES largest probabilities of
    the place. In arXiv:2404.13016 they come from transformed images, and its code trains by Adam at
    1e-4 for ten epochs from a random T; here T starts at 1, and learns faster.

    Args:
      log_p_ME: log probabilities of events.
      place_M: the event that happened.
      balanced: whether to weight a place by 1 - accuracy if it is right and by accuracy if it is
        wrong, as that code does. Confidence then tends to 1/2 if u carries no information.
      steps: of Adam.
    """
    rng = np.random.default_rng(0)
    features = min(FEATURES, log_p_ME.shape[1])
    start = {
        'up': rng.uniform(-1, 1, (features, HIDDEN)) / features**0.5,
        'up_bias': rng.uniform(-1, 1, HIDDEN) / features**0.5,
        'down': rng.uniform(-1, 1, HIDDEN) / HIDDEN**0.5,
        'bias': np.zeros(()),
    }

    start, loss = jax.tree.map(jnp.float32, start), _balanced_loss if balanced else _squared_loss
    params = _minimise(loss, start, log_p_ME, place_M, C_BATCH, C_RATE, steps)
    return _as_map(_apply_temperature, params)


def _squared_loss(params: dict, log_p_ME: jax.Array, place_M: jax.Array) -> jax.Array:
    return jnp.mean((_apply_temperature(params, log_p_ME)[:, 0] - (place_M == 0)) ** 2)


def _balanced_loss(params: dict, log_p_ME: jax.Array, place_M: jax.Array) -> jax.Array:
    is_right = place_M == 0
    accuracy = jnp.mean(is_right)
    weight_M = jnp.where(is_right, 1 - accuracy, accuracy)
    squares_M = (_apply_temperature(params, log_p_ME)[:, 0] - is_right) ** 2
    return jnp.sum(weight_M * squares_M) / jnp.maximum(jnp.sum(weight_M), TINY)


def _apply_temperature(params: dict, log_p_ME: jax.Array) -> jax.Array:
    u_MF = jnp.exp(log_p_ME[:, : len(params['up'])])
    hidden = jax.nn.relu(u_MF @ params['up'] + params['up_bias'][None])
    temperature_M = jnp.clip(
        1 + hidden @ params['down'] + params['bias'], MIN_TEMPERATURE, MAX_TEMPERATURE
    )
    return jax.nn.softmax(log_p_ME / temperature_M[:, None], 1)


def _minimise(
    loss: Callable[..., jax.Array],
    start: Any,
    log_p_ME: np.ndarray,
    place_M: np.ndarray,
    batch: int,
    rate: float,
    steps: int,
) -> Any:
    """Returns parameters after some steps of Adam, each on a random batch of places."""
    arrays = jnp.asarray(log_p_ME, jnp.float32), jnp.asarray(place_M, jnp.int32)
    return _run_adam(loss, start, *arrays, min(batch, len(place_M)), rate, steps)


@functools.partial(jax.jit, static_argnames=('loss', 'size', 'rate', 'steps'))
def _run_adam(loss, start, log_p_ME, place_M, size, rate, steps):
    adam = optax.adam(rate)

    def step(carry, key):
        params, state = carry
        chosen = jax.random.randint(key, (size,), 0, len(place_M))
        grads = jax.grad(loss)(params, log_p_ME[chosen], place_M[chosen])
        updates, state = adam.update(grads, state)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(1), steps)
    return jax.lax.scan(step, (start, adam.init(start)), keys)[0][0]


def _as_map(function: Callable[[Any, jax.Array], jax.Array], params: Any) -> ProbabilityMap:
    return lambda log_p_ME: np.asarray(function(params, jnp.asarray(log_p_ME, jnp.float32)))


class Calibrator(NamedTuple):
    """A row of CALIBRATORS. description: in a line."""

    fit: Callable[[np.ndarray, np.ndarray], ProbabilityMap]
    words: str


CALIBRATORS = {
    'correctness': Calibrator(
        functools.partial(fit_correctness, balanced=False),
        'a temperature per position, fitted to whether its most likely token is correct',
    ),
    'correctness_balanced': Calibrator(
        functools.partial(fit_correctness, balanced=True),
        'the same, with correct and wrong tokens weighted equally',
    ),
    'h': Calibrator(fit_h, 'a mixture of temperatures, fitted to the error of h-calibration'),
}


def make_events(top_MK: np.ndarray, is_next_MK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (log_p [M, K + 1], place [M]) of the likeliest tokens, and all others as an event."""
    rest_M1 = 1 - top_MK.sum(1, keepdims=True)
    log_p_ME = np.log(np.maximum(np.concatenate([top_MK, rest_M1], 1), TINY))
    place_M = np.where(is_next_MK.any(1), is_next_MK.argmax(1), top_MK.shape[1])
    return log_p_ME, place_M
