"""Networks trained with small batches, and with large batches for equal passes or steps."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import LabeledSplit, Task, measure
from modules.losses.base import cross_entropies

TASK, PASSES = Task(10, 30, 0.7, n_train=2048, n_held_out=8192), 20
WIDTH, MOMENTUM = 128, 0.9
SMALL, LARGE = 16, 256  # rows of a batch
FACTORS = (1.0, 1.0, 0.1, 0.01)  # of the rate, in each quarter of the steps
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)  # of SGD
SEEDS = 13
WALK = 1000  # coordinates of a random walk


class Regime(NamedTuple):
    """Rows of a batch, number of steps, the steps of the schedule, and the rates tried."""

    batch: int
    steps: int
    schedule: int
    rates: Sequence[float]


MANY, FEW = (PASSES * TASK.n_train // batch for batch in (SMALL, LARGE))
REGIMES = {
    'small': Regime(SMALL, MANY, MANY, RATES[:3]),
    'large': Regime(LARGE, FEW, FEW, RATES),
    'adapted': Regime(LARGE, MANY, MANY, RATES[2:]),
    'early_drops': Regime(LARGE, MANY, FEW, RATES[2:]),
}


@measure(
    *('lost_by_large', 'lost_by_adapted_less_half_of_large', 'unexplained_by_log'),
    *('lost_by_large_at_rate_of_small', 'unexplained_by_log_of_random_walk'),
    'lost_by_early_drops_less_half_of_large',
)
def large_batches() -> Iterator[Estimate | np.ndarray]:
    """Yields the accuracy lost with batches of LARGE rows, not SMALL, and a fit of distances.

    `lost_by_large`: accuracy with small batches minus accuracy with large batches after equal
    passes. `lost_by_adapted_less_half_of_large`: the same after equal steps (regime adaptation),
    minus half of the former. Networks have two hidden layers of WIDTH and the same initial weights;
    each regime has its best rate. `unexplained_by_log`: the share of the variance of distances
    |w_t - w_0| of `adapted`, at its first rate, that a + b log t leaves (arXiv:1705.08741).

    `at_rate_of_small`: large batches have the best rate of small ones. `of_random_walk`: the
    distances of a random walk, which grow with the root of t; log t leaves a ninth of their
    variance. `lost_by_early_drops`: equal steps, but the rate drops after as few steps as with
    equal passes.
    """
    accuracy_SR, distances_SRT = {}, {}
    for name, regime in REGIMES.items():
        accuracy_SR[name], distances_SRT[name] = train_regime(regime)
    tuned = {name: lab.tune(scores_SR) for name, scores_SR in accuracy_SR.items()}
    small, large = tuned['small'], tuned['large']
    distances_ST = tuned['adapted'].select(distances_SRT['adapted'])
    half_lost_S = (small.scores + large.scores) / 2  # the accuracy if half is lost
    yield lab.estimate_difference(small, large)
    yield half_lost_S - tuned['adapted'].scores
    yield mean_unexplained(distances_ST)
    # The rates of small batches are the first of RATES.
    yield small.scores - accuracy_SR['large'][lab.TUNING_SEEDS :, small.index]
    n_seeds, n_steps = distances_ST.shape
    yield mean_unexplained([walk_distances(seed, n_steps) for seed in range(n_seeds)])
    yield half_lost_S - tuned['early_drops'].scores


def mean_unexplained(distances_ST: Iterable[np.ndarray]) -> Estimate:
    """Returns the mean share of the variance of distances that the log of the steps leaves."""
    shares = (
        unexplained_variance(distance_T, np.log(np.arange(1, len(distance_T) + 1)))
        for distance_T in distances_ST
    )
    return mean_over_seeds(shares, 'logit')


def walk_distances(seed: int, steps: int) -> np.ndarray:
    """Returns the distance of a random walk from its start after each step."""
    steps_TD = np.random.default_rng(seed).standard_normal((steps, WALK))
    return np.linalg.norm(np.cumsum(steps_TD, 0), axis=1)


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

    return lab.map_rates(prepare, jnp.arange(SEEDS), regime.rates)


def train_once(
    regime: Regime, rows: LabeledSplit, start: list[jax.Array], key: jax.Array, rate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Trains one network.

    Args:
      regime: batch size, steps and schedule.
      rows: the data.
      start: initial weights.
      key: key of the batches.
      rate: learning rate of the first quarter of the schedule.

    Returns:
      The accuracy, and the distance from the start after each step at the first rate.
    """
    quarters_T = len(FACTORS) * jnp.arange(regime.steps) // regime.schedule
    factors_T = jnp.float32(FACTORS)[jnp.minimum(quarters_T, len(FACTORS) - 1)]
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
    return accuracy, training.history[: FACTORS.count(1.0) * regime.schedule // len(FACTORS)]
