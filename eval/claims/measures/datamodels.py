"""Unlearning against retrained models: KLoM of matching a datamodel, and of gradient ascent."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.lab import KeyedRng, Task, measure
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
RATES = {'ascent': (0.01, 0.02, 0.03, 0.04, 0.06, 0.08), 'matching': (0.001, 0.003, 0.01)}
SEEDS = 6
SETS = ('scattered_points', 'a_cluster')  # what is forgotten
POINTS = ('forgotten', 'retained')
RATIOS = (('forgotten', 'ascent'), ('forgotten', 'nothing'), ('retained', 'nothing'))


@measure(
    *(
        f'klom_of_{points}_points_by_matching_over_{baseline}_without_{set_name}'
        for set_name in SETS
        for points, baseline in RATIOS
    )
)
def unlearned_points() -> Iterator[np.ndarray]:
    """Yields ratios of the median KLoM of points after unlearning, against MODELS retrained models.

    Networks of WIDTH units are trained on the same clustered points and unlearn FORGOTTEN of them:
    random points, or the points of one cluster. nothing: the models unchanged. ascent: gradient
    ascent on the cross-entropy of these points, ASCENT_STEPS steps. matching: the models are
    fine-tuned to the outputs that a datamodel predicts without the points, on these points and
    RETAINED others; the datamodel is fitted to HALVES models, each trained on a random half of the
    points. Ascent and matching have the rate of RATES with the least mean over SEEDS on the
    forgotten points. Each ratio is matching over another method, by seed (arXiv:2410.23232).
    """
    by_seed = [_unlearn_seed(seed) for seed in range(SEEDS)]
    for set_name in SETS:
        medians = {
            method: _select_best_rate(
                np.stack([medians_of_seed[set_name][method] for medians_of_seed in by_seed])
            )
            for method in by_seed[0][set_name]
        }
        for points, baseline in RATIOS:
            column = POINTS.index(points)
            yield medians['matching'][:, column] / medians[baseline][:, column]


def _select_best_rate(medians_SRP: np.ndarray) -> np.ndarray:
    """Returns the medians [seed, POINTS] at the rate with the least mean on forgotten points."""
    return medians_SRP[:, lab.best_rate_index(medians_SRP[:, :, 0], lowest=True)]


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
        targets = predict_without(full, datamodel, rows)[:, matched_rows]
        unlearned = jax.device_get(_unlearn(ours, targets, x, labels, matched_rows))
        medians[set_name] = {
            method: np.stack(
                [
                    _median_kloms(logits_RNK, retrained[2 * i], labels, rows)
                    for logits_RNK in by_rate
                ]
            )
            for method, by_rate in {'nothing': [full], **unlearned}.items()
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
    params: Any, targets_RMK: jax.Array, x: jax.Array, labels: jax.Array, rows_M: jax.Array
) -> dict[str, jax.Array]:
    """Returns logits [rate, model, point, class] after ascent and after matching.

    rows_M: the points to match on; the first FORGOTTEN of them are forgotten.
    """
    forgotten = rows_M[:FORGOTTEN]

    def unlearn_model(start_and_targets):
        start, targets_MK = start_and_targets

        def ascend(rate):
            def loss(params):
                return -jnp.mean(cross_entropies(_logits(params, x[forgotten]), labels[forgotten]))

            return _logits(descend(loss, start, optax.sgd(rate), ASCENT_STEPS), x)

        def fine_tune(rate):
            transform = optax.adam(optax.cosine_decay_schedule(rate, MATCHING_STEPS))

            def predict(params):
                return _logits(params, x[rows_M])

            return _logits(match_targets(predict, start, targets_MK, transform, MATCHING_STEPS), x)

        methods = {'ascent': ascend, 'matching': fine_tune}
        return {name: jax.vmap(methods[name])(jnp.float32(RATES[name])) for name in methods}

    logits_MRNK = jax.lax.map(unlearn_model, (params, targets_RMK), batch_size=AT_ONCE)
    return jax.tree.map(lambda x_R: jnp.swapaxes(x_R, 0, 1), logits_MRNK)
