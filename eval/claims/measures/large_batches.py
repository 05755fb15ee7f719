"""Networks trained with small batches, and with large batches for equal passes or steps."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.lab import LabeledSplit, Task, measure
from modules.losses.base import cross_entropies

TASK, PASSES = Task(10, 30, 0.7, n_train=2048, n_held_out=8192), 20
WIDTH, MOMENTUM = 128, 0.9
SMALL, LARGE = 16, 256  # rows of a batch
FACTORS = (1.0, 1.0, 0.1, 0.01)  # of the rate, in each quarter of the steps
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)  # of SGD
SEEDS = 10


class Regime(NamedTuple):
    """Rows of a batch, and number of steps."""

    batch: int
    steps: int


REGIMES = {
    'small': Regime(SMALL, PASSES * TASK.n_train // SMALL),
    'large': Regime(LARGE, PASSES * TASK.n_train // LARGE),
    'adapted': Regime(LARGE, PASSES * TASK.n_train // SMALL),
}


@measure('lost_by_large', 'lost_by_adapted', 'unexplained_by_log_less_root')
def large_batches() -> Iterator[np.ndarray]:
    """Yields the accuracy lost with batches of LARGE rows, not SMALL, and fits of distances.

    `lost_by_large`: accuracy with small batches minus accuracy with large batches after equal
    passes. `lost_by_adapted`: the same after equal steps (regime adaptation).
    Networks have two hidden layers of WIDTH and the same initial weights; each regime has the rate
    of RATES with the best mean over SEEDS. Distances |w_t - w_0| of `adapted` at its first rate are
    fitted by a + b log t and by a + b sqrt t; `unexplained` is the share of their variance that is
    left (arXiv:1705.08741).
    """
    accuracy, distances = {}, {}
    for name, regime in REGIMES.items():
        accuracy_SR, distances_SRT = train_regime(regime)
        best = lab.best_rate_index(accuracy_SR)
        accuracy[name], distances[name] = accuracy_SR[:, best], distances_SRT[:, best]
    yield accuracy['small'] - accuracy['large']
    yield accuracy['small'] - accuracy['adapted']
    steps_T = np.arange(1, distances['adapted'].shape[1] + 1)
    by_log_S, by_root_S = (
        np.array([unexplained_variance(distance_T, line_T) for distance_T in distances['adapted']])
        for line_T in (np.log(steps_T), np.sqrt(steps_T))
    )
    yield by_log_S - by_root_S


def unexplained_variance(y_T: np.ndarray, x_T: np.ndarray) -> float:
    """Returns the share of the variance of y that no line in x explains."""
    return float(1 - np.corrcoef(y_T, x_T)[0, 1] ** 2)


def train_regime(regime: Regime) -> tuple[np.ndarray, np.ndarray]:
    """Returns (accuracy [seed, rate], distances [seed, rate, step])."""

    def prepare(seed):
        data_key, start_key, row_key = jax.random.split(jax.random.key(seed), 3)
        start = lab.he_matrices(start_key, (TASK.inputs, WIDTH, WIDTH, TASK.classes))
        rows = lab.draw_rows(data_key, TASK)
        return lambda rate: train_once(regime, rows, start, row_key, rate)

    return lab.map_rates(prepare, jnp.arange(SEEDS), RATES)


def train_once(
    regime: Regime, rows: LabeledSplit, start: list[jax.Array], key: jax.Array, rate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Trains one network.

    Args:
      regime: batch size and steps.
      rows: the data.
      start: initial weights.
      key: key of the batches.
      rate: learning rate of the first quarter of the steps.

    Returns:
      The accuracy, and the distance from the start after each step at the first rate.
    """
    factors_T = jnp.float32(FACTORS)[len(FACTORS) * jnp.arange(regime.steps) // regime.steps]
    optimizer = optax.chain(
        optax.trace(MOMENTUM), optax.scale_by_schedule(lambda step: -rate * factors_T[step])
    )

    def loss(params, key):
        index_B = jax.random.randint(key, (regime.batch,), 0, TASK.n_train)
        return jnp.mean(cross_entropies(lab.logits(params, rows.x[index_B]), rows.labels[index_B]))

    def distance(params):
        squares = [jnp.sum(jnp.square(w - w0)) for w, w0 in zip(params, start, strict=True)]
        return jnp.sqrt(sum(squares))

    training = lab.train(
        loss, start, optimizer, jax.random.split(key, regime.steps), observe=distance
    )
    accuracy = lab.accuracy(lab.logits(training.params, rows.held_out), rows.held_out_labels)
    return accuracy, training.history[: FACTORS.count(1.0) * regime.steps // len(FACTORS)]
