"""Shared code of measures: random tasks, initial weights, training over seeds and rates, estimates.

A measure is a function without arguments that returns or yields numbers; `measure` names them:

    @measure('gain_of_norms_over_weights')
    def norms_alone():
        right = {part: ... for part in PARTS}  # of each seed
        yield right['norms'] - right['weights']
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims.estimates import Estimate, exact_estimate, mean_over_seeds
from lm.config.recipe import Recipe
from lm.config.resolve import resolve, update_recipe
from lm.launch.command import ConfigParser
from lm.study.plan.cells import split_sweep
from lm.training.state import Hyper, Learner, State, build_learner, make_hyper
from lm.training.step import make_train_step

SMALL = 'configs/studies/small.py'
TUNING_SEEDS = 3  # seeds that choose a rate, and count for nothing else


@dataclasses.dataclass(frozen=True)
class Measure:
    """A function that computes values of claims, with their names and whether it trains."""

    function: FunctionType
    values: tuple[str, ...]
    trains: bool

    def compute(self) -> dict[str, Estimate]:
        """Returns the values by name, with intervals over seeds; single numbers are exact.

        Raises:
          ValueError: if the function returns more or fewer values than it names.
        """
        numbers = list(self.function())
        if len(numbers) != len(self.values):
            raise ValueError(
                f'{self.function.__name__} must return the {len(self.values)} values that '
                f'@measure names, but returned {len(numbers)}'
            )
        return {
            name: _as_estimate(number) for name, number in zip(self.values, numbers, strict=True)
        }


def measure(*values: str, trains: bool = True) -> Callable[[FunctionType], Measure]:
    """Makes a measure of a function.

    Args:
      values: names of the function's values, in order; claims refer to these.
      trains: whether it fits weights. Other measures are closed forms, or numbers of random
        matrices or untrained models.
    """
    return lambda function: Measure(function, values, trains)


def _as_estimate(value: Any) -> Estimate:
    if isinstance(value, Estimate):
        return value
    return mean_over_seeds(value) if np.ndim(value) else exact_estimate(float(value))


class KeyedRng:
    """A generator with methods of numpy's Generator; each draw uses a key of jax.random."""

    def __init__(self, keys: Iterable[jax.Array]):
        self._keys = iter(keys)

    def standard_normal(self, size: Any) -> jax.Array:
        return jax.random.normal(next(self._keys), size)

    def integers(self, high: int, size: Any) -> jax.Array:
        return jax.random.randint(next(self._keys), size, 0, high)


Rng = KeyedRng | np.random.Generator
Array = Any  # jax.Array drawn by a KeyedRng, np.ndarray drawn by a Generator


@dataclasses.dataclass(frozen=True)
class Task:
    """A classification task with Gaussian clusters around random centres.

    Clusters have the deviation `spread`, centres are from N(0, 1).
    Cluster n is of class n % classes. rare: the share of class 1 in a task of two classes; 0 makes
    classes equally frequent. wrong: the share of training labels that are replaced by another
    class.
    """

    classes: int
    clusters: int
    spread: float
    n_train: int
    n_held_out: int
    inputs: int = 16
    rare: float = 0.0
    wrong: float = 0.0


class LabeledSplit(NamedTuple):
    """Training inputs with their labels, and held-out inputs with correct labels."""

    x: Array
    labels: Array
    held_out: Array
    held_out_labels: Array


def draw_clusters(
    rng: Rng, task: Task, assign_clusters: Callable[[Rng, int], Any] | None = None
) -> tuple[Array, Array]:
    """Draws the inputs of a task and their clusters, training rows first.

    Args:
      rng: generator; draws the centres, the clusters and the noise in this order.
      task: the task; M = n_train + n_held_out rows.
      assign_clusters: (rng, M) -> clusters [M]; uniform by default.

    Returns:
      (inputs [M, I], clusters [M]).
    """
    # The order of the draws is part of a measure: another order gives other numbers on record.
    rows = task.n_train + task.n_held_out
    assign_clusters = assign_clusters or (
        lambda rng, rows: rng.integers(task.clusters, size=(rows,))
    )
    centres = rng.standard_normal((task.clusters, task.inputs))
    cluster_M = assign_clusters(rng, rows)
    noise = rng.standard_normal((rows, task.inputs))
    return centres[cluster_M] + task.spread * noise, cluster_M


def split_rows(task: Task, x: Array, labels: Array) -> LabeledSplit:
    """Splits rows into training rows, which come first, and held-out rows.

    Args:
      task: has the number of training rows.
      x: inputs [M, I].
      labels: classes [M].
    """
    count = task.n_train
    return LabeledSplit(x[:count], labels[:count], x[count:], labels[count:])


def draw_rows(key: jax.Array, task: Task) -> LabeledSplit:
    """Draws the rows of a task, including its rare class and its wrong labels."""
    centre_key, cluster_key, rare_key, noise_key, wrong_key, other_key = jax.random.split(key, 6)

    def assign_clusters(rng, rows):
        cluster_M = rng.integers(task.clusters, size=(rows,))
        if task.rare:
            is_rare_M = jax.random.bernoulli(rare_key, task.rare, (rows,))
            cluster_M = cluster_M - cluster_M % task.classes + is_rare_M
        return cluster_M

    x, cluster_M = draw_clusters(
        KeyedRng([centre_key, cluster_key, noise_key]), task, assign_clusters
    )
    rows = split_rows(task, x, cluster_M % task.classes)
    is_wrong = jax.random.bernoulli(wrong_key, task.wrong, (task.n_train,))
    shifts = jax.random.randint(other_key, (task.n_train,), 1, task.classes)
    return rows._replace(labels=(rows.labels + is_wrong * shifts) % task.classes)


def he_matrix(rng: Rng, shape: tuple[int, int], gain: float = 2.0) -> Array:
    """Draws a matrix [I, O] of variance gain / I.

    Args:
      rng: generator.
      shape: (I, O).
      gain: 2 preserves the scale of activations behind ReLUs (arXiv:1502.01852).
    """
    return rng.standard_normal(shape) * (gain / shape[0]) ** 0.5


def he_matrices(key: jax.Array, sizes: Sequence[int]) -> list[Array]:
    """Draws a `he_matrix` of [sizes[i], sizes[i + 1]] for each layer, each from its own key."""
    rng = KeyedRng(jax.random.split(key, len(sizes) - 1))
    return [he_matrix(rng, shape) for shape in pairwise(sizes)]


def features(params: Sequence[Array], x: Array) -> Array:
    """Returns the activations of the last hidden layer of an MLP with ReLUs."""
    for matrix in params[:-1]:
        x = jax.nn.relu(x @ matrix)
    return x


def logits(params: Sequence[Array], x: Array) -> Array:
    """Returns the product of `features` and the last matrix."""
    return features(params, x) @ params[-1]


def accuracy(logits_BV: Array, labels_B: Array) -> jax.Array:
    """Returns the share of rows with the largest logit at the label."""
    return jnp.mean(jnp.argmax(logits_BV, -1) == labels_B)


class TrainOutput(NamedTuple):
    """Parameters after training, the final state of the loss, and the stacked observations."""

    params: Any
    loss_state: Any
    history: Any


def train(
    loss: Callable,
    params: Any,
    optimizer: optax.GradientTransformation,
    batches: Any,
    loss_state: Any = None,
    observe: Callable[[Any], Any] = lambda params: None,
    stages: int | None = None,
) -> TrainOutput:
    """Trains parameters, with a step for each batch, in a single traced loop.

    Args:
      loss: (params, batch) -> loss; with a loss_state, (params, batch, loss_state) -> (loss,
        loss_state).
      params: initial parameters.
      optimizer: the transformation of gradients, including the learning rate.
      batches: a tree of arrays [steps, ...] with one row for each step.
      loss_state: initial value of a state that the loss carries from step to step.
      observe: params -> observation, stacked over stages.
      stages: the number of equal stages; by default every step is a stage.
    """

    def step(carry, batch):
        params, state, loss_state = carry
        if loss_state is None:
            grads = jax.grad(loss)(params, batch)
        else:
            grads, loss_state = jax.grad(loss, has_aux=True)(params, batch, loss_state)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state, loss_state), None if stages else observe(params)

    def stage(carry, batches):
        carry, _ = jax.lax.scan(step, carry, batches)
        return carry, observe(carry[0])

    if stages:
        batches = jax.tree.map(lambda x: x.reshape(stages, -1, *x.shape[1:]), batches)
    carry = params, optimizer.init(params), loss_state
    (params, _, loss_state), history = jax.lax.scan(stage if stages else step, carry, batches)
    return TrainOutput(params, loss_state, history)


def cosine_adam(rate: jax.Array | float, steps: int) -> optax.GradientTransformation:
    """Returns Adam with a cosine schedule to 0. The peak rate may be a tracer."""
    # The rate is applied after the schedule, so that it may be a tracer.
    return optax.chain(optax.adam(optax.cosine_decay_schedule(1.0, steps)), optax.scale(rate))


def draw_batches(key: jax.Array, steps: int, batch: int, rows: int) -> jax.Array:
    """Draws the row indices of all batches, [steps, batch].

    Args:
      key: random key.
      steps: number of batches.
      batch: rows of a batch.
      rows: number of rows to draw from, with replacement.
    """
    return jax.random.randint(key, (steps, batch), 0, rows)


def map_seeds(run_seed: Callable, seeds: Any) -> Any:
    """Returns run_seed(seed) for all seeds, or keys, in sequence in a single program."""
    return jax.device_get(jax.jit(lambda seeds: jax.lax.map(run_seed, seeds))(seeds))


def map_rates(prepare: Callable, seeds: Any, rates: Sequence[float]) -> Any:
    """Returns prepare(seed)(rate) for all seeds and rates, computed in a single program.

    Args:
      prepare: seed -> (rate -> values); makes data and initial weights once for all rates.
      seeds: seeds or keys, stacked.
      rates: learning rates.

    Returns:
      A tree of float64 arrays [seed, rate, ...].
    """

    def run_seed(seed):
        return jax.lax.map(prepare(seed), jnp.float32(rates))

    # float64, as means and intervals over seeds are computed in NumPy.
    return jax.tree.map(np.float64, map_seeds(run_seed, seeds))


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The scores of an arm on fresh seeds, at the rate that other seeds chose.

    scores: [fresh seeds]. index: of the rate. is_at_end: whether it is the first or the last rate
    tried, so that one beyond might be better.
    """

    scores: np.ndarray
    index: int
    is_at_end: bool

    def select(self, values_SR: np.ndarray) -> np.ndarray:
        """Returns other values [seeds, rates, ...] at the chosen rate, of the fresh seeds."""
        return values_SR[TUNING_SEEDS:, self.index]


def tune(scores_SR: np.ndarray, lowest: bool = False) -> Tuned:
    """Chooses the rate with the best mean score of the first TUNING_SEEDS seeds.

    The seeds that choose do not count afterwards: a rate that was best by luck on them has no luck
    on the others.

    Args:
      scores_SR: scores [seeds, rates], rates in order.
      lowest: whether the lowest score is the best, as for losses.
    """
    choose = np.argmin if lowest else np.argmax
    index = int(choose(scores_SR[:TUNING_SEEDS].mean(0)))
    is_at_end = index in (0, scores_SR.shape[1] - 1)
    return Tuned(scores_SR[TUNING_SEEDS:, index], index, is_at_end)


def estimate_difference(arm: Tuned, rival: Tuned, lowest: bool = False) -> Estimate:
    """Estimates the difference of scores, arm minus rival, over fresh seeds.

    An end of the interval is infinite if an arm has its best rate at an end of those tried: the
    difference could then be larger on that side.

    Args:
      arm: scores of the arm.
      rival: scores of the other, on the same seeds.
      lowest: whether the lowest score is the best, as for losses.
    """
    estimate = mean_over_seeds(arm.scores - rival.scores)
    above, below = (rival, arm) if lowest else (arm, rival)  # who could still raise or lower it
    return dataclasses.replace(
        estimate,
        low=-math.inf if below.is_at_end else estimate.low,
        high=math.inf if above.is_at_end else estimate.high,
    )


def estimate_ratio(arm: Tuned, rival: Tuned) -> Estimate:
    """Estimates the ratio of scores of which the lowest are best, arm over rival, on fresh seeds.

    An end of the interval is 0 or infinite if an arm has its best rate at an end of those tried:
    the ratio could then be smaller or larger.
    """
    estimate = mean_over_seeds(arm.scores / rival.scores, 'log')
    return dataclasses.replace(
        estimate,
        low=0.0 if arm.is_at_end else estimate.low,
        high=math.inf if rival.is_at_end else estimate.high,
    )


@functools.cache
def _read_base(config: str) -> Recipe:
    base, *_ = split_sweep(ConfigParser('config').parse(config))
    return resolve(base)


def read_recipe(changes: dict, config: str = SMALL) -> Recipe:
    """Returns the recipe of a config, by default of the studies' small model, with changes."""
    return update_recipe(_read_base(config), changes)


def train_model(learner: Learner, hyper: Hyper, state: State, batches: Any) -> State:
    """Returns the state after one train step of the model on each batch.

    Args:
      learner: the model and its loss.
      hyper: traced options.
      state: initial state.
      batches: a tree of arrays [steps, ...].
    """
    step = make_train_step(learner)

    def update(state, batch):
        return step(state, batch, hyper)[0], None

    return jax.lax.scan(update, state, batches)[0]


def build_small_learner(changes: dict, vocab: int, bos: int = 0) -> tuple[Learner, Hyper]:
    """Returns the learner of the studies' small model and its traced options.

    Args:
      changes: changes of the config, by path.
      vocab: size of the vocabulary.
      bos: token id of the beginning of a row.
    """
    recipe = read_recipe(changes)
    return build_learner(recipe, vocab, bos, jax.default_backend()), make_hyper(recipe)
