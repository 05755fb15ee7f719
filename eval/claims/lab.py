"""The laboratory of the board: data, starts, training over seeds and rates, and estimates.

A measure is a function without arguments that returns numbers; `measure` names them:

    @measure('gain_of_norms_over_weights')
    def norms_alone():
        right = {part: ... for part in PARTS}  # of each seed
        yield right['norms'] - right['weights']
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
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


@dataclasses.dataclass(frozen=True)
class Measure:
    """A function that computes values of claims, and what `measure` says of it."""

    function: Callable[[], Iterable[Any]]
    values: tuple[str, ...]
    trains: bool

    def compute(self) -> dict[str, Estimate]:
        """Returns the values by name: those of seeds with their interval, single ones as exact.

        Raises ValueError where the function gives more values, or fewer, than it names.
        """
        found = list(self.function())
        if len(found) != len(self.values):
            raise ValueError(
                f'{self.function.__name__} names {len(self.values)} values and gives {len(found)}'
            )
        return {name: _as_estimate(one) for name, one in zip(self.values, found, strict=True)}


def measure(*values: str, trains: bool = True) -> Callable[[Callable], Measure]:
    """Makes a measure of a function.

    Args:
      values: the names by which claims ask for what the function gives, in its order.
      trains: whether it fits weights; others are closed forms, and numbers of drawn matrices or of
        models at their start.
    """
    return lambda function: Measure(function, values, trains)


def _as_estimate(value: Any) -> Estimate:
    if isinstance(value, Estimate):
        return value
    return mean_over_seeds(value) if np.ndim(value) else exact_estimate(float(value))


class KeyedRng:
    """Draws of jax.random by methods of numpy's Generator, each with the next of some keys."""

    def __init__(self, keys: Iterable[jax.Array]):
        self._keys = iter(keys)

    def standard_normal(self, size: Any) -> jax.Array:
        return jax.random.normal(next(self._keys), size)

    def integers(self, high: int, size: Any) -> jax.Array:
        return jax.random.randint(next(self._keys), size, 0, high)


Rng = KeyedRng | np.random.Generator


@dataclasses.dataclass(frozen=True)
class Task:
    """Inputs in Gaussians of deviation `spread`, whose centres are from N(0, 1) and of one class:
    cluster n is of class n % classes.

    rare: the share of class 1 of two; 0: classes are equally frequent. wrong: the share of labels
    to train on that are those of another class.
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
    """Inputs to train on and their labels, and those that are held out, whose labels are right."""

    x: jax.Array
    labels: jax.Array
    held_out: jax.Array
    held_out_labels: jax.Array


def draw_clusters(
    rng: Rng, task: Task, assign_clusters: Callable[[Rng, int], Any] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draws (inputs [M, I], the cluster of each [M]) of a task, those to train on first.

    draw_places: (rng, M) -> clusters, behind the centres and before the noise; without it all are
    as likely.
    """
    rows = task.n_train + task.n_held_out
    assign_clusters = assign_clusters or (
        lambda rng, rows: rng.integers(task.clusters, size=(rows,))
    )
    centres = rng.standard_normal((task.clusters, task.inputs))
    cluster_M = assign_clusters(rng, rows)
    noise = rng.standard_normal((rows, task.inputs))
    return centres[cluster_M] + task.spread * noise, cluster_M


def split_rows(task: Task, x: jax.Array, labels: jax.Array) -> LabeledSplit:
    """Splits rows into those to train on, which come first, and the others."""
    count = task.n_train
    return LabeledSplit(x[:count], labels[:count], x[count:], labels[count:])


def draw_rows(key: jax.Array, task: Task) -> LabeledSplit:
    """Draws the rows of a task, with its share of a rare class and its wrong labels."""
    of_centres, of_clusters, of_rare, of_noise, of_wrong, of_others = jax.random.split(key, 6)

    def assign_clusters(rng, rows):
        cluster_M = rng.integers(task.clusters, size=(rows,))
        if task.rare:
            is_rare_M = jax.random.bernoulli(of_rare, task.rare, (rows,))
            cluster_M = cluster_M - cluster_M % task.classes + is_rare_M
        return cluster_M

    x, cluster_M = draw_clusters(
        KeyedRng([of_centres, of_clusters, of_noise]), task, assign_clusters
    )
    rows = split_rows(task, x, cluster_M % task.classes)
    is_wrong = jax.random.bernoulli(of_wrong, task.wrong, (task.n_train,))
    others = jax.random.randint(of_others, (task.n_train,), 1, task.classes)
    return rows._replace(labels=(rows.labels + is_wrong * others) % task.classes)


def he_matrix(rng: Rng, shape: tuple[int, int], gain: float = 2.0) -> jax.Array:
    """Draws a matrix [I, O] of variance gain / I; 2 keeps sizes behind ReLUs (arXiv:1502.01852)."""
    return rng.standard_normal(shape) * (gain / shape[0]) ** 0.5


def he_matrices(key: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Draws `he_matrix` of [sizes[i], sizes[i + 1]], each with a key of its own."""
    rng = KeyedRng(jax.random.split(key, len(sizes) - 1))
    return [he_matrix(rng, shape) for shape in pairwise(sizes)]


def features(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Returns what the last hidden layer gives, matrices and ReLUs one after the other."""
    for matrix in params[:-1]:
        x = jax.nn.relu(x @ matrix)
    return x


def logits(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Returns the product of `features` and the last matrix."""
    return features(params, x) @ params[-1]


def accuracy(logits_BV: jax.Array, labels_B: jax.Array) -> jax.Array:
    """Returns the share of rows whose label has the largest logit."""
    return jnp.mean(jnp.argmax(logits_BV, -1) == labels_B)


class TrainOutput(NamedTuple):
    """Parameters after training, what the loss has kept, and what was seen on the way."""

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
    """Trains parameters, a step for each batch, in one loop that is traced once.

    Args:
      loss: (params, batch) -> loss; with `kept`, (params, batch, kept) -> (loss, kept).
      params: the start.
      optimizer: what makes updates of gradients, the learning rate among it.
      batches: a tree of arrays [steps, ...], whose rows are the batches.
      kept: what the loss hands on from step to step.
      see: what is returned of the parameters after each stage, stacked.
      stages: into how many stages of as many steps training is cut; every step is one by default.
    """

    def step(carry, batch):
        params, state, kept = carry
        if kept is None:
            grads = jax.grad(loss)(params, batch)
        else:
            grads, kept = jax.grad(loss, has_aux=True)(params, batch, kept)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state, kept), None if stages else observe(params)

    def stage(carry, batches):
        carry, _ = jax.lax.scan(step, carry, batches)
        return carry, observe(carry[0])

    if stages:
        batches = jax.tree.map(lambda x: x.reshape(stages, -1, *x.shape[1:]), batches)
    carry = params, optimizer.init(params), loss_state
    (params, _, loss_state), seen = jax.lax.scan(stage if stages else step, carry, batches)
    return TrainOutput(params, loss_state, seen)


def cosine_adam(rate: jax.Array | float, steps: int) -> optax.GradientTransformation:
    """Returns Adam at a rate, which may be a tracer, that falls to 0 as a cosine."""
    return optax.chain(optax.adam(optax.cosine_decay_schedule(1.0, steps)), optax.scale(rate))


def draw_batches(key: jax.Array, steps: int, batch: int, rows: int) -> jax.Array:
    """Draws the rows of all batches, [steps, batch]."""
    return jax.random.randint(key, (steps, batch), 0, rows)


def map_seeds(run_seed: Callable, seeds: Any) -> Any:
    """Returns of_seed(seed) of all seeds, or keys, one after the other in one program."""
    return jax.device_get(jax.jit(lambda seeds: jax.lax.map(run_seed, seeds))(seeds))


def map_rates(prepare: Callable, seeds: Any, rates: Sequence[float]) -> Any:
    """Returns prepare(seed)(rate) of all seeds and rates in one program, [seed, rate, ...] in
    float64. prepare: makes data and start once for all rates.
    """

    def run_seed(seed):
        return jax.lax.map(prepare(seed), jnp.float32(rates))

    return jax.tree.map(np.float64, map_seeds(run_seed, seeds))


def best_rate_index(values_SR: np.ndarray, lowest: bool = False) -> int:
    """Returns the place of the rate whose mean over seeds is largest; with `least`, least."""
    return int((np.argmin if lowest else np.argmax)(values_SR.mean(0)))


@functools.cache
def _read_base(config: str) -> Recipe:
    base, *_ = split_sweep(ConfigParser('config').parse(config))
    return resolve(base)


def read_recipe(changes: dict, config: str = SMALL) -> Recipe:
    """Returns the recipe of a config, that of the studies' model, with changes."""
    return update_recipe(_read_base(config), changes)


def train_model(learner: Learner, hyper: Hyper, state: State, batches: Any) -> State:
    """Returns the state after the model's own train step on each batch, [steps, ...]."""
    step = make_train_step(learner)

    def update(state, batch):
        return step(state, batch, hyper)[0], None

    return jax.lax.scan(update, state, batches)[0]


def build_small_learner(changes: dict, vocab: int, bos: int = 0) -> tuple[Learner, Hyper]:
    """Returns the learner of the studies' model with changes, and its numbers."""
    recipe = read_recipe(changes)
    return build_learner(recipe, vocab, bos, jax.default_backend()), make_hyper(recipe)
