"""Small classifiers of noisy labels, whose rows a rescaler weighs."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.lab import LabeledSplit, Task, measure
from modules.losses.base import cross_entropies
from modules.losses.rescaling import Rescaler, init_rescaler, rescaled_step, row_features

TASK = Task(10, 30, 0.7, n_train=1024, n_held_out=4096)
CORRUPTED = 0.3  # the share of labels that are those of others
WIDTH, DROPOUT, PASSES = 64, 0.1, 3  # passes: one with a gradient, two more as published
BATCH, STEPS = 32, 1000
RATES = (5e-4, 1e-3, 2e-3)  # of Adam
ROOT = 1e-10  # added to squared gradients, so that the step can be differentiated
RESCALER_LR = 0.01  # of the authors' code
SEEDS = 10
FORM = 'published'

RESCALERS = optax.adam(RESCALER_LR)
Params = list[jax.Array]
Batch = tuple[jax.Array, jax.Array, jax.Array]  # inputs, labels, masks of dropout of each pass


class NoisyData(NamedTuple):
    """Rows whose labels are noisy, which are wrong, and the rows of two batches of every step."""

    rows: LabeledSplit
    is_wrong: jax.Array
    rows_T2B: jax.Array


@measure(f'gain_of_{FORM}', f'weight_of_corrupted_over_clean_by_{FORM}')
def rescaled_rows() -> Iterator[np.ndarray]:
    """Returns the clean accuracy of classifiers with rescaled rows less that by cross-entropy.

    A share CORRUPTED of the labels is that of another class; accuracies are shares of held-out
    inputs whose labels are right, of networks of two hidden layers of WIDTH after STEPS of Adam,
    with one start and order of batches, each method at the rate of RATES at which its mean over the
    SEEDS is best (arXiv:2412.12955). weight: the mean of corrupted rows over that of the others, in
    the last quarter of the steps.
    """
    seeds = jax.tree.map(lambda *leaves: np.stack(leaves), *map(_draw_data, range(SEEDS)))
    each = jax.jit(jax.vmap(jax.vmap(_train, (None, 0, None)), (0, None, None)), static_argnums=2)
    plain_SR, _ = map(np.float64, each(seeds, jnp.float32(RATES), _plain_step))
    right_SR, weight_SR = map(np.float64, each(seeds, jnp.float32(RATES), _rescaled_step))
    best = lab.best_rate_index(right_SR)
    yield right_SR[:, best] - plain_SR[:, lab.best_rate_index(plain_SR)]
    yield weight_SR[:, best]


def _train(inputs_and_start: Any, rate: jax.Array, one_step: Any) -> tuple[jax.Array, jax.Array]:
    """The clean accuracy, and the weight of corrupted rows over that of the others."""
    data, params, rescaler, key = inputs_and_start
    transform, keep = optax.adam(rate, eps_root=ROOT), 1 - DROPOUT
    x, labels, held_out, held_out_labels = data.rows

    def step(carry, given):
        rows_2B, key = given
        masks = jax.random.bernoulli(key, keep, (2, PASSES, len(params) - 1, BATCH, WIDTH)) / keep
        batches = [(x[b], labels[b], m) for b, m in zip(rows_2B, masks, strict=True)]
        carry, weights_B = one_step(transform, carry, tuple(batches))
        wrong_B = data.is_wrong[rows_2B[0]]
        sums = (jnp.sum(weights_B * own_B) for own_B in (wrong_B, 1 - wrong_B))
        return carry, jnp.stack([*sums, jnp.sum(wrong_B)])

    start = (params, transform.init(params)), (rescaler, RESCALERS.init(rescaler))
    inputs_and_start = data.rows_T2B, jax.random.split(jax.random.wrap_key_data(key), STEPS)
    ((params, _), _), seen = jax.lax.scan(step, start, inputs_and_start)
    of_wrong, of_clean, count = jnp.sum(seen[-(STEPS // 4) :], 0)
    others = BATCH * (STEPS // 4) - count
    right = lab.accuracy(_logits(params, held_out), held_out_labels)
    return right, (of_wrong / count) / (of_clean / others)


def _plain_step(transform, carry, batches):
    (params, state), kept = carry
    x, labels, masks = batches[0]

    def loss(params):
        return jnp.mean(cross_entropies(_logits(params, x, masks[0]), labels))

    updates, state = transform.update(jax.grad(loss)(params), state)
    return ((optax.apply_updates(params, updates), state), kept), jnp.ones(BATCH)


def _rescaled_step(transform, carry, batches):
    (params, state), (rescaler, kept) = carry
    found = rescaled_step(_row_losses, transform, rescaler, params, state, batches, FORM)
    updates, kept = RESCALERS.update(found.gradient, kept)
    rescaler = optax.apply_updates(rescaler, updates)
    return ((found.params, found.state), (rescaler, kept)), found.weights_R


def _row_losses(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Losses of the rows of a batch in its first pass, and their features over all."""
    x, labels, masks = batch
    fixed = [jax.lax.stop_gradient(params)] * (PASSES - 1)
    each = zip((params, *fixed), masks, strict=True)
    logits_GBV = jnp.stack([_logits(own, x, mask) for own, mask in each])
    losses_GB = jnp.stack([cross_entropies(logits_BV, labels) for logits_BV in logits_GBV])
    return losses_GB[0], row_features(losses_GB, logits_GBV, labels)


def _logits(params: Params, x: jax.Array, masks: Any = (1.0, 1.0)) -> jax.Array:
    *hidden, last = params
    for matrix, mask in zip(hidden, masks, strict=True):
        x = mask * jax.nn.relu(x @ matrix)
    return x @ last


def _draw_data(seed: int) -> tuple[NoisyData, Params, Rescaler, jax.Array]:
    """Data, a start of both networks, and a key for dropout."""
    rng = np.random.default_rng(seed)
    sizes = (TASK.inputs, WIDTH, WIDTH, TASK.classes)
    params = [np.float32(lab.he_matrix(rng, shape)) for shape in pairwise(sizes)]
    of_rescaler, of_dropout = jax.random.split(jax.random.key(seed))
    return _draw_noisy(rng), params, init_rescaler(of_rescaler), jax.random.key_data(of_dropout)


def _draw_noisy(rng: np.random.Generator) -> NoisyData:
    x, cluster_M = lab.draw_clusters(rng, TASK)
    rows = lab.split_rows(TASK, np.float32(x), np.int32(cluster_M % TASK.classes))
    is_wrong = np.arange(TASK.n_train) < round(CORRUPTED * TASK.n_train)
    others = rng.integers(1, TASK.classes, TASK.n_train)
    noisy = np.int32((rows.labels + is_wrong * others) % TASK.classes)
    rows_T2B = np.int32(rng.integers(TASK.n_train, size=(STEPS, 2, BATCH)))
    return NoisyData(rows._replace(labels=noisy), np.float32(is_wrong), rows_T2B)
