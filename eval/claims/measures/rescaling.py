"""Small classifiers of noisy labels, whose rows a rescaler weighs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims.estimates import Estimate, over_seeds
from modules.losses.base import cross_entropies
from modules.losses.rescaling import (
    FORMS,
    Rescaler,
    init_rescaler,
    rescaled_step,
    row_features,
    trimmed_weights,
)

CLASSES, CLUSTERS, INPUTS, SPREAD = 10, 3, 16, 0.7  # each class is some Gaussians around N(0, 1)
TRAINED, HELD_OUT, CORRUPTED = 1024, 4096, 0.3  # the share of labels that are those of others
WIDTH, DROPOUT, PASSES = 64, 0.1, 3  # passes: one with a gradient, two more as published
BATCH, STEPS = 32, 1000
RATES = (5e-4, 1e-3, 2e-3)  # of Adam
ROOT = 1e-10  # added to squared gradients, so that the step can be differentiated
RESCALER_LR = 0.01  # of the authors' code
SEEDS = 10
METHODS = ('ce', 'trimmed', *FORMS)

RESCALERS = optax.adam(RESCALER_LR)
Params = list[jax.Array]
Batch = tuple[jax.Array, jax.Array, jax.Array]  # inputs, labels, masks of dropout of each pass


class Noisy(NamedTuple):
    """Inputs whose labels are noisy, those that are wrong, held-out inputs with their right labels,
    and the rows of the two batches of every step.
    """

    x: jax.Array
    labels: jax.Array
    is_wrong: jax.Array
    held_out: jax.Array
    held_out_labels: jax.Array
    rows_T2B: jax.Array


def rescaled_rows() -> dict[str, Estimate]:
    """Returns the clean accuracy of classifiers with rescaled rows less that by cross-entropy.

    A share CORRUPTED of the labels is that of another class; accuracies are shares of held-out
    inputs whose labels are right, of networks of two hidden layers of WIDTH after STEPS of Adam,
    with one start and order of batches, each method at the rate of RATES at which its mean over the
    SEEDS is best. `trimmed` leaves out the share CORRUPTED of each batch whose losses are largest;
    the others are FORMS of weights by a rescaler (arXiv:2412.12955). weight: the mean of corrupted
    rows over that of the others, in the last quarter of the steps.
    """
    seeds = [_drawn(seed) for seed in range(SEEDS)]
    given = jax.tree.map(lambda *leaves: np.stack(leaves), *seeds)
    right, weights = {}, {}
    for method in METHODS:
        each = _over_rates(_one_step(method), given)
        right_SA, weight_SA = (np.float64(found) for found in each)
        best = np.argmax(right_SA.mean(0))
        right[method], weights[method] = right_SA[:, best], weight_SA[:, best]
    found = {f'accuracy_by_{name}': over_seeds(values) for name, values in right.items()}
    for name in METHODS[1:]:
        found[f'gain_of_{name}'] = over_seeds(right[name] - right['ce'])
        found[f'weight_of_corrupted_over_clean_by_{name}'] = over_seeds(weights[name])
    return found


def _over_rates(one_step: Callable, given: Any) -> tuple[jax.Array, jax.Array]:
    """The results of every seed and rate in one program, each [seed, rate]."""

    def trained(given, rate):
        return _trained(one_step, optax.adam(rate, eps_root=ROOT), *given)

    every = jax.vmap(jax.vmap(trained, (None, 0)), (0, None))
    return jax.jit(every)(given, jnp.float32(RATES))


def _trained(
    one_step: Callable,
    transform: optax.GradientTransformation,
    data: Noisy,
    params: Params,
    rescaler: Rescaler,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The clean accuracy, and the weight of corrupted rows over that of the others."""

    def step(carry, given):
        rows_2B, key = given
        keep = 1 - DROPOUT
        masks = jax.random.bernoulli(key, keep, (2, PASSES, len(params) - 1, BATCH, WIDTH)) / keep
        batches = [(data.x[b], data.labels[b], m) for b, m in zip(rows_2B, masks, strict=True)]
        carry, weights_B = one_step(transform, carry, tuple(batches))
        wrong_B = data.is_wrong[rows_2B[0]]
        sums = (jnp.sum(weights_B * own_B) for own_B in (wrong_B, 1 - wrong_B))
        return carry, jnp.stack([*sums, jnp.sum(wrong_B)])

    start = (params, transform.init(params)), (rescaler, RESCALERS.init(rescaler))
    given = data.rows_T2B, jax.random.split(jax.random.wrap_key_data(key), STEPS)
    ((params, _), _), seen = jax.lax.scan(step, start, given)
    of_wrong, of_clean, count = jnp.sum(seen[-(STEPS // 4) :], 0)
    others = BATCH * (STEPS // 4) - count
    right_H = jnp.argmax(_logits(params, data.held_out), -1) == data.held_out_labels
    return jnp.mean(right_H), (of_wrong / count) / (of_clean / others)


def _one_step(method: str) -> Callable:
    """The step of a method: (transform, carry, batches) -> carry, weights_B."""

    def plain(transform, carry, batches):
        (params, state), kept = carry
        share = CORRUPTED if method == 'trimmed' else 0.0
        x, labels, masks = batches[0]

        def loss(params):
            losses_B = cross_entropies(_logits(params, x, masks[0]), labels)
            weights_B = trimmed_weights(losses_B, share)
            return jnp.mean(weights_B * losses_B), weights_B

        grads, weights_B = jax.grad(loss, has_aux=True)(params)
        updates, state = transform.update(grads, state)
        return ((optax.apply_updates(params, updates), state), kept), weights_B

    def rescaled(transform, carry, batches):
        (params, state), (rescaler, kept) = carry
        found = rescaled_step(_rows, transform, rescaler, params, state, batches, method)
        updates, kept = RESCALERS.update(found.gradient, kept)
        rescaler = optax.apply_updates(rescaler, updates)
        return ((found.params, found.state), (rescaler, kept)), found.weights_R

    return rescaled if method in FORMS else plain


def _rows(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
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


def _drawn(seed: int) -> tuple[Noisy, Params, Rescaler, jax.Array]:
    """Data, a start of both networks, and a key for dropout."""
    rng = np.random.default_rng(seed)
    sizes = (INPUTS, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES)
    params = [np.float32(rng.normal(0, (2 / size[0]) ** 0.5, size)) for size in sizes]
    of_rescaler, of_dropout = jax.random.split(jax.random.key(seed))
    return _data(rng), params, init_rescaler(of_rescaler), jax.random.key_data(of_dropout)


def _data(rng: np.random.Generator) -> Noisy:
    centres = rng.standard_normal((CLASSES * CLUSTERS, INPUTS))
    clusters = rng.integers(CLASSES * CLUSTERS, size=TRAINED + HELD_OUT)
    x = np.float32(centres[clusters] + SPREAD * rng.standard_normal((len(clusters), INPUTS)))
    labels = np.int32(clusters % CLASSES)
    is_wrong = np.arange(TRAINED) < round(CORRUPTED * TRAINED)
    noisy = (labels[:TRAINED] + is_wrong * rng.integers(1, CLASSES, TRAINED)) % CLASSES
    rows_T2B = np.int32(rng.integers(TRAINED, size=(STEPS, 2, BATCH)))
    wrong = np.float32(is_wrong)
    return Noisy(x[:TRAINED], np.int32(noisy), wrong, x[TRAINED:], labels[TRAINED:], rows_T2B)
