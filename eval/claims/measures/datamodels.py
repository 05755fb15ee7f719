"""Unlearning against retrained models: KLoM of matching a datamodel, and of gradient ascent."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate
from eval.claims.lab import KeyedRng, Task, Tuned, measure
from eval.suites.datamodels import (
    descend,
    fit_datamodel,
    klom,
    margins,
    match_targets,
    predict_without,
)
from modules.losses.base import cross_entropies

TASK = Task(4, 12, 1.5, n_train=96, n_held_out=96, inputs=12)
FORGOTTEN = 8  # points, as many as a cluster has
WIDTH, STEPS, RATE = 24, 200, 0.01  # of a network of one hidden layer, by Adam on all its points
HALVES, MODELS, AT_ONCE = 1600, 100, 50  # models of a datamodel, of a KLoM, and of one product
RETAINED, MATCHING_STEPS, ASCENT_STEPS = 24, 100, 10  # RETAINED: others that models are matched on
RATES = {
    'ascent': (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.16),
    'matching': (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03),
}
# Share of the sum of effects that targets leave out.
EFFECTS = {'matching': 1.0, 'matching_mean_of_effects': 1 / FORGOTTEN}
SEEDS = lab.TUNING_SEEDS + 6
SETS = ('scattered_points', 'a_cluster')  # what is forgotten
POINTS = ('forgotten', 'retained')
RATIOS = (
    ('forgotten', 'matching', 'ascent'),
    ('forgotten', 'matching', 'nothing'),
    ('retained', 'matching', 'nothing'),
    ('forgotten', 'retraining', 'nothing'),
    ('retained', 'retraining', 'nothing'),
    ('forgotten', 'matching_mean_of_effects', 'nothing'),
)


@measure(
    *(
        f'klom_of_{points}_points_by_{method}_over_{baseline}_without_{set_name}'
        for set_name in SETS
        for points, method, baseline in RATIOS
    )
)
def unlearned_points() -> Iterator[Estimate]:
    """Yields ratios of the median KLoM of points after unlearning, against MODELS retrained models.

    Networks of WIDTH units are trained on the same clustered points and unlearn FORGOTTEN of them:
    random points, or the points of one cluster. nothing: the models unchanged. ascent: gradient
    ascent on the cross-entropy of these points, ASCENT_STEPS steps. matching: the models are
    fine-tuned to the outputs that a datamodel predicts without the points, on these points and
    RETAINED others; the datamodel is fitted to HALVES models, each trained on a random half of the
    points. retraining: MODELS other models that never saw the points. matching_mean_of_effects:
    matching to outputs without the mean of the points' effects in place of their sum. Ascent and
    matching have the rate of RATES with the least mean on the forgotten points over the tuning
    seeds. Each ratio is a method over another, on the other seeds of SEEDS (arXiv:2410.23232).
    """
    by_seed = [_unlearn_seed(seed) for seed in range(SEEDS)]
    for set_name in SETS:
        scores = {
            method: _tune_method(
                np.stack([medians_of_seed[set_name][method] for medians_of_seed in by_seed])
            )
            for method in by_seed[0][set_name]
        }
        for points, method, baseline in RATIOS:
            yield lab.estimate_ratio(scores[method][points], scores[baseline][points])


def _tune_method(medians_SRP: np.ndarray) -> Mapping[str, Tuned]:
    """Returns the medians of each of POINTS, at the rate with the least on forgotten points."""
    tuned = lab.tune(medians_SRP[:, :, 0], lowest=True)
    is_at_end = tuned.is_at_end and medians_SRP.shape[1] > 1  # one column: nothing to tune
    return {
        points: dataclasses.replace(
            tuned, scores=tuned.select(medians_SRP[..., column]), is_at_end=is_at_end
        )
        for column, points in enumerate(POINTS)
    }


def _unlearn_seed(seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Returns the medians [rate, POINTS] by set of forgotten points and by method."""
    rng = np.random.default_rng(seed)
    x, labels = _draw_points(rng)
    forgotten = {
        'scattered_points': rng.choice(TASK.n_train, FORGOTTEN, replace=False),
        'a_cluster': np.arange(0, TASK.n_train, TASK.clusters),
    }
    masks = [~np.isin(np.arange(TASK.n_train), forgotten[set_name]) for set_name in SETS]
    mask_RN = np.concatenate(
        [
            rng.random((HALVES, TASK.n_train)) < 0.5,
            np.ones((MODELS, TASK.n_train), bool),
            *(np.broadcast_to(mask_N, (2 * MODELS, TASK.n_train)) for mask_N in masks),
        ]
    )
    keys = jax.random.split(jax.random.key(seed), len(mask_RN))
    params = _train(keys, mask_RN, x, labels)
    logits = np.float64(_logits_per_model(params, x))
    halves, full, *retrained = np.split(logits, np.cumsum([HALVES, *[MODELS] * 4]))
    datamodel = fit_datamodel(mask_RN[:HALVES], halves)
    ours = jax.tree.map(lambda leaf: leaf[HALVES : HALVES + MODELS], params)
    medians = {}
    for i, set_name in enumerate(SETS):
        rows = forgotten[set_name]
        retained = rng.choice(np.flatnonzero(masks[i]), RETAINED, replace=False)
        matched_rows = np.concatenate([rows, retained])
        without = predict_without(full, datamodel, rows)
        targets = {
            method: (full + share * (without - full))[:, matched_rows]
            for method, share in EFFECTS.items()
        }
        unlearned = jax.device_get(_unlearn(ours, targets, x, labels, matched_rows))
        reference, retrained_again = retrained[2 * i : 2 * i + 2]
        methods = {'nothing': [full], 'retraining': [retrained_again], **unlearned}
        medians[set_name] = {
            method: np.stack(
                [_median_kloms(logits_RNK, reference, labels, rows) for logits_RNK in by_rate]
            )
            for method, by_rate in methods.items()
        }
    return medians


def _draw_points(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws inputs and classes; point n is of cluster n % clusters, training points first."""
    x, cluster_N = lab.draw_clusters(rng, TASK, lambda rng, rows: np.arange(rows) % TASK.clusters)
    return np.asarray(x, np.float32), np.asarray(cluster_N % TASK.classes, np.int32)


def _median_kloms(
    logits_RNK: np.ndarray, retrained_RNK: np.ndarray, labels: np.ndarray, forgotten: np.ndarray
) -> list[float]:
    """Returns the median KLoM of each of POINTS."""
    klom_N = klom(*(np.asarray(_margins(z, labels)) for z in (logits_RNK, retrained_RNK)))
    is_trained = np.arange(len(klom_N)) < TASK.n_train
    is_forgotten = np.isin(np.arange(len(klom_N)), forgotten)
    groups = (is_forgotten, is_trained & ~is_forgotten)
    return [float(np.median(klom_N[is_in_group])) for is_in_group in groups]


def _init_params(key: jax.Array) -> dict[str, jax.Array]:
    rng = KeyedRng(jax.random.split(key))
    return {
        'first': lab.he_matrix(rng, (TASK.inputs, WIDTH)),
        'bias': jnp.zeros((1, WIDTH)),
        'second': lab.he_matrix(rng, (WIDTH, TASK.classes), gain=1.0),
    }


def _logits(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params['first'] + params['bias']) @ params['second']


_logits_per_model = jax.jit(jax.vmap(_logits, (0, None)))
_margins = jax.jit(margins)


@jax.jit
def _train(keys_R: jax.Array, mask_RN: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
    """Returns the stacked parameters of a model for each key, trained on the points of its mask."""

    def train_model(key_and_mask):
        key, mask_N = key_and_mask

        def loss(params):
            loss_N = cross_entropies(_logits(params, x[: TASK.n_train]), labels[: TASK.n_train])
            return jnp.sum(jnp.where(mask_N, loss_N, 0.0)) / jnp.sum(mask_N)

        transform = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))
        return descend(loss, _init_params(key), transform, STEPS)

    return jax.lax.map(train_model, (keys_R, mask_RN), batch_size=AT_ONCE)


@jax.jit
def _unlearn(
    params: Any,
    targets: Mapping[str, jax.Array],
    x: jax.Array,
    labels: jax.Array,
    rows_M: jax.Array,
) -> dict[str, jax.Array]:
    """Returns logits [rate, model, point, class] after ascent and after matching each of `targets`.

    rows_M: the points to match on; the first FORGOTTEN of them are forgotten.
    """
    forgotten = rows_M[:FORGOTTEN]

    def unlearn_model(start_and_targets):
        start, targets = start_and_targets

        def ascend(rate):
            def loss(params):
                return -jnp.mean(cross_entropies(_logits(params, x[forgotten]), labels[forgotten]))

            return _logits(descend(loss, start, optax.sgd(rate), ASCENT_STEPS), x)

        def fine_tune(rate, targets_MK):
            transform = optax.adam(optax.cosine_decay_schedule(rate, MATCHING_STEPS))

            def predict(params):
                return _logits(params, x[rows_M])

            return _logits(match_targets(predict, start, targets_MK, transform, MATCHING_STEPS), x)

        fine_tune_rates = jax.vmap(fine_tune, (0, None))
        return {
            'ascent': jax.vmap(ascend)(jnp.float32(RATES['ascent'])),
            **{
                method: fine_tune_rates(jnp.float32(RATES['matching']), targets_MK)
                for method, targets_MK in targets.items()
            },
        }

    logits_MRNK = jax.lax.map(unlearn_model, (params, targets), batch_size=AT_ONCE)
    return jax.tree.map(lambda x_R: jnp.swapaxes(x_R, 0, 1), logits_MRNK)
