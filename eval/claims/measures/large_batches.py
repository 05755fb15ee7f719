"""Networks that are trained by small batches, and by large ones for as many passes or steps."""

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
    """Rows of a batch, and steps."""

    batch: int
    steps: int


REGIMES = {
    'small': Regime(SMALL, PASSES * TASK.n_train // SMALL),
    'large': Regime(LARGE, PASSES * TASK.n_train // LARGE),
    'adapted': Regime(LARGE, PASSES * TASK.n_train // SMALL),
}


@measure('lost_by_large', 'lost_by_adapted', 'unexplained_by_log_less_root')
def large_batches() -> Iterator[np.ndarray]:
    """Returns what batches of LARGE rows lose against SMALL ones, and how far weights go.

    `lost_by_large` is the accuracy by small batches less that by large ones of as many passes over
    the rows, `lost_by_adapted` that of large ones of as many steps (regime adaptation). Networks of
    two hidden layers of WIDTH have one start, and each regime the rate of RATES at which its mean
    over the SEEDS is best. Distances |w_t - w_0| of `adapted` at its first rate are fitted by a + b
    log t and by a + b sqrt t; `unexplained` is the variance that is left, over that of the
    distances (arXiv:1705.08741).
    """
    right, distances = {}, {}
    for name, regime in REGIMES.items():
        right_SR, distances_SRT = train_regime(regime)
        best = lab.best_rate_index(right_SR)
        right[name], distances[name] = right_SR[:, best], distances_SRT[:, best]
    yield right['small'] - right['large']
    yield right['small'] - right['adapted']
    steps_T = np.arange(1, distances['adapted'].shape[1] + 1)
    by_log_S, by_root_S = (
        np.array([unexplained_variance(one_T, line_T) for one_T in distances['adapted']])
        for line_T in (np.log(steps_T), np.sqrt(steps_T))
    )
    yield by_log_S - by_root_S


def unexplained_variance(y_T: np.ndarray, x_T: np.ndarray) -> float:
    """Returns the share of the variance of y that no line in x explains."""
    return float(1 - np.corrcoef(y_T, x_T)[0, 1] ** 2)


def train_regime(regime: Regime) -> tuple[np.ndarray, np.ndarray]:
    """Returns (accuracy [seed, rate], distances [seed, rate, step])."""

    def prepare(seed):
        of_data, of_start, of_rows = jax.random.split(jax.random.key(seed), 3)
        start = lab.he_matrices(of_start, (TASK.inputs, WIDTH, WIDTH, TASK.classes))
        rows = lab.draw_rows(of_data, TASK)
        return lambda rate: train_once(regime, rows, start, of_rows, rate)

    return lab.map_rates(prepare, jnp.arange(SEEDS), RATES)


def train_once(
    regime: Regime, rows: LabeledSplit, start: list[jax.Array], key: jax.Array, rate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the accuracy, and distances from the start after each step of the first rate."""
    factors_T = jnp.float32(FACTORS)[len(FACTORS) * jnp.arange(regime.steps) // regime.steps]
    optimizer = optax.chain(
        optax.trace(MOMENTUM), optax.scale_by_schedule(lambda step: -rate * factors_T[step])
    )

    def loss(params, key):
        at_B = jax.random.randint(key, (regime.batch,), 0, TASK.n_train)
        return jnp.mean(cross_entropies(lab.logits(params, rows.x[at_B]), rows.labels[at_B]))

    def distance(params):
        squares = [jnp.sum(jnp.square(w - w0)) for w, w0 in zip(params, start, strict=True)]
        return jnp.sqrt(sum(squares))

    trained = lab.train(
        loss, start, optimizer, jax.random.split(key, regime.steps), observe=distance
    )
    right = lab.accuracy(lab.logits(trained.params, rows.held_out), rows.held_out_labels)
    return right, trained.history[: FACTORS.count(1.0) * regime.steps // len(FACTORS)]
