"""Small classifiers with noisy labels and a rescaler that weighs their rows."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import LabeledSplit, Task, measure
from modules.losses.base import cross_entropies
from modules.losses.rescaling import (
    Rescaler,
    init_rescaler,
    rescaled_step,
    row_features,
    row_weights,
)

TASK = Task(10, 30, 0.7, n_train=1024, n_held_out=4096)
CORRUPTED = 0.3  # the share of labels that are those of others
WIDTH, DROPOUT, PASSES = 64, 0.1, 3  # passes: one with a gradient, two more as published
BATCH, STEPS = 32, 1000
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)  # of Adam
ROOT = 1e-10  # added to squared gradients, so that the step can be differentiated
RESCALER_LR = 0.01  # of the authors' code
SEEDS = 13
FORM = 'published'
# Gradients of the rescaler, from all of it and from the part through the weights of the next batch.
GRADIENTS = {
    FORM: lambda gradient, direct: gradient,
    'direct_gradient': lambda gradient, direct: direct,
    'gradient_through_step': lambda gradient, direct: jax.tree.map(jnp.subtract, gradient, direct),
}

RESCALERS = optax.adam(RESCALER_LR)
Params = list[Any]  # arrays of NumPy or JAX
Batch = tuple[jax.Array, jax.Array, jax.Array]  # inputs, labels, masks of dropout of each pass


class NoisyData(NamedTuple):
    """Rows with noisy labels, 1 where a label is wrong, and the row ids of two batches a step."""

    rows: LabeledSplit
    is_wrong: np.ndarray
    rows_T2B: np.ndarray


@measure(
    *(f'gain_of_{FORM}', f'weight_of_corrupted_over_clean_by_{FORM}', 'gain_of_clean_rows'),
    *('gain_of_direct_gradient', 'weight_of_corrupted_over_clean_by_direct_gradient'),
    *('gain_of_gradient_through_step', 'weight_of_corrupted_over_clean_by_gradient_through_step'),
)
def rescaled_rows() -> Iterator[Estimate]:
    """Yields gains in clean accuracy over cross-entropy, and ratios of weights.

    A share CORRUPTED of the labels is replaced by another class. Accuracies are shares of held-out
    inputs with correct labels, for networks of two hidden layers of WIDTH after STEPS of Adam, with
    the same initial weights and order of batches, each method at its best rate of RATES
    (arXiv:2412.12955). weight: the mean weight of corrupted rows over the mean of the others, in
    the last quarter of the steps.

    Rescaled rows come first, then rows with weights that leave out all wrong labels, and last
    rescalers of which a part of the gradient is missing: `direct_gradient` is that through the
    weights of the next batch, without the step, and `gradient_through_step` is the rest.
    """
    seeds = jax.tree.map(lambda *leaves: np.stack(leaves), *map(_draw_data, range(SEEDS)))
    train_all = jax.jit(
        jax.vmap(jax.vmap(_train, (None, 0, None)), (0, None, None)), static_argnums=2
    )

    def tune_step(one_step):
        trained = train_all(seeds, jnp.float32(RATES), one_step)
        accuracy_SR, weight_SR = (np.asarray(x, np.float64) for x in trained)
        tuned = lab.tune(accuracy_SR)
        return tuned, mean_over_seeds(tuned.select(weight_SR), 'log')

    plain, _ = tune_step(partial(_weighted_step, lambda wrong_B: jnp.ones(BATCH)))
    clean, _ = tune_step(partial(_weighted_step, lambda wrong_B: 1 - wrong_B))
    by_gradient = {name: tune_step(partial(_rescaled_step, name)) for name in GRADIENTS}
    for name, (rescaled, weight) in by_gradient.items():
        yield lab.estimate_difference(rescaled, plain)
        yield weight
        if name == FORM:
            yield lab.estimate_difference(clean, plain)


def _train(inputs_and_start: Any, rate: jax.Array, one_step: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the clean accuracy, and the ratio of weights of corrupted rows to the others."""
    noisy, params, rescaler, key = inputs_and_start
    transform, keep = optax.adam(rate, eps_root=ROOT), 1 - DROPOUT
    x, labels, held_out, held_out_labels = noisy.rows

    def step(carry, rows_and_key):
        rows_2B, key = rows_and_key
        masks = jax.random.bernoulli(key, keep, (2, PASSES, len(params) - 1, BATCH, WIDTH)) / keep
        batches = [
            (x[index_B], labels[index_B], masks_of_batch)
            for index_B, masks_of_batch in zip(rows_2B, masks, strict=True)
        ]
        wrong_B = noisy.is_wrong[rows_2B[0]]
        carry, weights_B = one_step(transform, carry, tuple(batches), wrong_B)
        sums = (jnp.sum(weights_B * is_counted_B) for is_counted_B in (wrong_B, 1 - wrong_B))
        return carry, jnp.stack([*sums, jnp.sum(wrong_B)])

    start = (params, transform.init(params)), (rescaler, RESCALERS.init(rescaler))
    rows_and_keys = noisy.rows_T2B, jax.random.split(jax.random.wrap_key_data(key), STEPS)
    ((params, _), _), history = jax.lax.scan(step, start, rows_and_keys)
    weight_wrong, weight_clean, n_wrong = jnp.sum(history[-(STEPS // 4) :], 0)
    n_clean = BATCH * (STEPS // 4) - n_wrong
    accuracy = lab.accuracy(_logits(params, held_out), held_out_labels)
    return accuracy, (weight_wrong / n_wrong) / (weight_clean / n_clean)


def _weighted_step(weigh, transform, carry, batches, wrong_B):
    (params, state), rescaler_carry = carry
    x, labels, masks = batches[0]
    weights_B = weigh(wrong_B)

    def loss(params):
        return jnp.mean(weights_B * cross_entropies(_logits(params, x, masks[0]), labels))

    updates, state = transform.update(jax.grad(loss)(params), state)
    return ((optax.apply_updates(params, updates), state), rescaler_carry), weights_B


def _rescaled_step(gradient_name, transform, carry, batches, wrong_B):
    del wrong_B  # not known to the method
    (params, state), (rescaler, rescaler_state) = carry
    outcome = rescaled_step(_row_losses, transform, rescaler, params, state, batches, FORM)
    losses_B, features_BF = _row_losses(outcome.params, batches[1])

    def next_loss(rescaler):
        return jnp.mean(row_weights(rescaler, features_BF, FORM) * losses_B)

    gradient = GRADIENTS[gradient_name](outcome.gradient, jax.grad(next_loss)(rescaler))
    updates, rescaler_state = RESCALERS.update(gradient, rescaler_state)
    rescaler = optax.apply_updates(rescaler, updates)
    return ((outcome.params, outcome.state), (rescaler, rescaler_state)), outcome.weights_R


def _row_losses(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the losses of a batch's rows in its first pass, and their features in all passes."""
    x, labels, masks = batch
    fixed = [jax.lax.stop_gradient(params)] * (PASSES - 1)
    passes = zip((params, *fixed), masks, strict=True)
    logits_GBV = jnp.stack([_logits(params_of_pass, x, mask) for params_of_pass, mask in passes])
    losses_GB = jnp.stack([cross_entropies(logits_BV, labels) for logits_BV in logits_GBV])
    return losses_GB[0], row_features(losses_GB, logits_GBV, labels)


def _logits(params: Params, x: jax.Array, masks: Any = (1.0, 1.0)) -> jax.Array:
    *hidden, last = params
    for matrix, mask in zip(hidden, masks, strict=True):
        x = mask * jax.nn.relu(x @ matrix)
    return x @ last


def _draw_data(seed: int) -> tuple[NoisyData, Params, Rescaler, jax.Array]:
    """Draws data, initial weights of both networks, and a key for dropout."""
    rng = np.random.default_rng(seed)
    sizes = (TASK.inputs, WIDTH, WIDTH, TASK.classes)
    params = [np.asarray(lab.he_matrix(rng, shape), np.float32) for shape in pairwise(sizes)]
    rescaler_key, dropout_key = jax.random.split(jax.random.key(seed))
    return _draw_noisy(rng), params, init_rescaler(rescaler_key), jax.random.key_data(dropout_key)


def _draw_noisy(rng: np.random.Generator) -> NoisyData:
    x, cluster_M = lab.draw_clusters(rng, TASK)
    labels = np.asarray(cluster_M % TASK.classes, np.int32)
    rows = lab.split_rows(TASK, np.asarray(x, np.float32), labels)
    is_wrong = np.arange(TASK.n_train) < round(CORRUPTED * TASK.n_train)
    shifts = rng.integers(1, TASK.classes, TASK.n_train)
    noisy = np.asarray((rows.labels + is_wrong * shifts) % TASK.classes, np.int32)
    rows_T2B = np.asarray(rng.integers(TASK.n_train, size=(STEPS, 2, BATCH)), np.int32)
    return NoisyData(rows._replace(labels=noisy), np.asarray(is_wrong, np.float32), rows_T2B)
