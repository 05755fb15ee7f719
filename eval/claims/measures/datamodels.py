"""Unlearning against models that are trained anew: KLoM of matching a datamodel, and of ascent."""

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
        f'klom_of_{points}_points_by_matching_over_{other}_without_{which}'
        for which in SETS
        for points, other in RATIOS
    )
)
def unlearned_points() -> Iterator[np.ndarray]:
    """Returns the median KLoM of points after unlearning some, against MODELS trained anew.

    Networks of WIDTH units are trained on the same points of clusters, and unlearn FORGOTTEN of
    them: drawn ones, or those of one cluster. nothing: the models as they are. ascent: gradient
    ascent on the cross-entropy of these points, ASCENT_STEPS. matching: the models fine-tuned to
    what each would give without them by a datamodel of HALVES models, each of a random half of the
    points, on these points and RETAINED others. Ascent and matching have the rate of RATES at which
    the mean over SEEDS of what is forgotten is least. The ratios, of each seed, are those of
    matching (arXiv:2410.23232).
    """
    each = [_unlearn_seed(seed) for seed in range(SEEDS)]
    for which in SETS:
        medians = {
            method: _select_best_rate(np.stack([one[which][method] for one in each]))
            for method in each[0][which]
        }
        for points, other in RATIOS:
            at = POINTS.index(points)
            yield medians['matching'][:, at] / medians[other][:, at]


def _select_best_rate(medians_SRP: np.ndarray) -> np.ndarray:
    """The medians [seed, POINTS] at the rate of the least mean over seeds of forgotten points."""
    return medians_SRP[:, lab.best_rate_index(medians_SRP[:, :, 0], lowest=True)]


def _unlearn_seed(seed: int) -> dict[str, dict[str, np.ndarray]]:
    """The medians [rate, POINTS] by what is forgotten and by method."""
    rng = np.random.default_rng(seed)
    x, labels = _draw_points(rng)
    forgotten = {
        'scattered_points': rng.choice(TASK.n_train, FORGOTTEN, replace=False),
        'a_cluster': np.arange(0, TASK.n_train, TASK.clusters),
    }
    all_but = [~np.isin(np.arange(TASK.n_train), forgotten[which]) for which in SETS]
    kept_RN = np.concatenate(
        [
            rng.random((HALVES, TASK.n_train)) < 0.5,
            np.ones((MODELS, TASK.n_train), bool),
            *(np.broadcast_to(kept_N, (2 * MODELS, TASK.n_train)) for kept_N in all_but),
        ]
    )
    keys = jax.random.split(jax.random.key(seed), len(kept_RN))
    params = _train(keys, kept_RN, x, labels)
    logits = np.float64(_logits_per_model(params, x))
    halves, full, *anew = np.split(logits, np.cumsum([HALVES, *[MODELS] * 4]))
    datamodel = fit_datamodel(kept_RN[:HALVES], halves)
    ours = jax.tree.map(lambda leaf: leaf[HALVES : HALVES + MODELS], params)
    found = {}
    for i, which in enumerate(SETS):
        rows = forgotten[which]
        others = rng.choice(np.flatnonzero(all_but[i]), RETAINED, replace=False)
        matched_on = np.concatenate([rows, others])
        targets = predict_without(full, datamodel, rows)[:, matched_on]
        after = jax.device_get(_unlearn(ours, targets, x, labels, matched_on))
        found[which] = {
            method: np.stack([_median_kloms(one, anew[2 * i], labels, rows) for one in of_rates])
            for method, of_rates in {'nothing': [full], **after}.items()
        }
    return found


def _draw_points(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes: point n is of cluster n % clusters; those to train on come first."""
    x, cluster_N = lab.draw_clusters(rng, TASK, lambda rng, rows: np.arange(rows) % TASK.clusters)
    return np.float32(x), np.int32(cluster_N % TASK.classes)


def _median_kloms(
    logits_RNK: np.ndarray, anew_RNK: np.ndarray, labels: np.ndarray, forgotten: np.ndarray
) -> list[float]:
    """The median KLoM of POINTS."""
    of_N = klom(*(np.asarray(_margins(z, labels)) for z in (logits_RNK, anew_RNK)))
    is_trained = np.arange(len(of_N)) < TASK.n_train
    is_forgotten = np.isin(np.arange(len(of_N)), forgotten)
    of_points = (is_forgotten, is_trained & ~is_forgotten)
    return [float(np.median(of_N[where])) for where in of_points]


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
def _train(keys_R: jax.Array, kept_RN: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
    """The parameters of a model for each key, on the points that it keeps; stacked."""

    def train_model(key_and_mask):
        key, kept_N = key_and_mask

        def loss(params):
            each_N = cross_entropies(_logits(params, x[: TASK.n_train]), labels[: TASK.n_train])
            return jnp.sum(jnp.where(kept_N, each_N, 0.0)) / jnp.sum(kept_N)

        transform = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))
        return descend(loss, _init_params(key), transform, STEPS)

    return jax.lax.map(train_model, (keys_R, kept_RN), batch_size=AT_ONCE)


@jax.jit
def _unlearn(
    params: Any, targets_RMK: jax.Array, x: jax.Array, labels: jax.Array, rows_M: jax.Array
) -> dict[str, jax.Array]:
    """Logits [rate, model, point, class] after ascent and after matching. rows_M: the points to
    match on, of which the first FORGOTTEN are forgotten.
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

        by = {'ascent': ascend, 'matching': fine_tune}
        return {name: jax.vmap(by[name])(jnp.float32(RATES[name])) for name in by}

    found = jax.lax.map(unlearn_model, (params, targets_RMK), batch_size=AT_ONCE)
    return jax.tree.map(lambda x_R: jnp.swapaxes(x_R, 0, 1), found)
