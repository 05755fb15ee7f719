"""Unlearning against models that are trained anew: KLoM of matching a datamodel, and of ascent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims.estimates import Estimate, over_seeds
from eval.suites.datamodels import descend, fit_datamodel, klom, margins, match, without
from modules.losses.base import cross_entropies

CLUSTERS, CLASSES, INPUTS, SPREAD = 12, 4, 12, 1.5  # Gaussians around N(0, 1), each of a class
TRAINED, HELD_OUT, FORGOTTEN = 96, 96, 8  # points; a cluster has as many as are forgotten
WIDTH, STEPS, RATE = 24, 200, 0.01  # of a network of one hidden layer, by Adam on all its points
HALVES, MODELS, AT_ONCE = 1600, 100, 50  # models of a datamodel, of a KLoM, and of one product
RETAINED, MATCHING_STEPS, ASCENT_STEPS = 24, 100, 10  # RETAINED: others that models are matched on
RATES = {'ascent': (0.01, 0.02, 0.03, 0.04, 0.06, 0.08), 'matching': (0.001, 0.003, 0.01)}
SEEDS = 6
METHODS = ('nothing', 'ascent', 'prediction', 'matching', 'retraining')
SETS = ('scattered_points', 'a_cluster')  # what is forgotten
POINTS = ('forgotten', 'retained', 'held_out')
RATIOS = (('forgotten', 'ascent'), ('forgotten', 'nothing'), ('retained', 'nothing'))


def unlearned_points() -> dict[str, Estimate]:
    """Returns the median KLoM of points after unlearning some, against MODELS trained anew.

    Networks of WIDTH units are trained on the same points of CLUSTERS, and unlearn FORGOTTEN of
    them: drawn ones, or those of one cluster. nothing: the models as they are. ascent: gradient
    ascent on the cross-entropy of these points, ASCENT_STEPS. prediction: what each model would
    give without them by a datamodel of HALVES models, each of a random half of the points.
    matching: the models fine-tuned to that, on these points and RETAINED others. retraining: other
    models that are trained anew, at which KLoM is what chance makes of it. Ascent and matching have
    the rate of RATES at which the mean over SEEDS of what is forgotten is least. The ratios, of
    each seed, are those of matching (arXiv:2410.23232).
    """
    each = [_of_a_seed(seed) for seed in range(SEEDS)]
    found = {}
    for which in SETS:
        medians = {
            method: _at_the_best_rate(np.stack([one[which, method] for one in each]))
            for method in METHODS
        }
        for method in METHODS:
            for points, of_seeds in zip(POINTS, medians[method].T, strict=True):
                name = f'klom_of_{points}_points_by_{method}_without_{which}'
                found[name] = over_seeds(of_seeds)
        for points, other in RATIOS:
            at = POINTS.index(points)
            name = f'klom_of_{points}_points_by_matching_over_{other}_without_{which}'
            found[name] = over_seeds(medians['matching'][:, at] / medians[other][:, at])
    return found


def _at_the_best_rate(medians_SRP: np.ndarray) -> np.ndarray:
    """The medians [seed, POINTS] at the rate of the least mean over seeds of forgotten points."""
    return medians_SRP[:, np.argmin(medians_SRP[:, :, 0].mean(0))]


def _of_a_seed(seed: int) -> dict[tuple[str, str], np.ndarray]:
    """The medians [rate, POINTS] by what is forgotten and by method."""
    rng = np.random.default_rng(seed)
    x, labels = _data(rng)
    forgotten = {
        'scattered_points': rng.choice(TRAINED, FORGOTTEN, replace=False),
        'a_cluster': np.arange(0, TRAINED, CLUSTERS),
    }
    all_but = [~np.isin(np.arange(TRAINED), forgotten[which]) for which in SETS]
    kept_RN = np.concatenate(
        [
            rng.random((HALVES, TRAINED)) < 0.5,
            np.ones((MODELS, TRAINED), bool),
            *(np.broadcast_to(kept_N, (2 * MODELS, TRAINED)) for kept_N in all_but),
        ]
    )
    keys = jax.random.split(jax.random.key(seed), len(kept_RN))
    params = _trained(keys, kept_RN, x, labels)
    logits = np.float64(_logits_of_all(params, x))
    halves, full, *anew = np.split(logits, np.cumsum([HALVES, *[MODELS] * 4]))
    datamodel = fit_datamodel(kept_RN[:HALVES], halves)
    ours = jax.tree.map(lambda leaf: leaf[HALVES : HALVES + MODELS], params)
    found = {}
    for i, which in enumerate(SETS):
        rows = forgotten[which]
        others = rng.choice(np.flatnonzero(all_but[i]), RETAINED, replace=False)
        matched_on = np.concatenate([rows, others])
        predicted = without(full, datamodel, rows)
        after = _unlearned(ours, predicted[:, matched_on], x, labels, matched_on)
        given = {
            'nothing': [full],
            'prediction': [predicted],
            'retraining': [anew[2 * i + 1]],
            **jax.device_get(after),
        }
        for method, of_rates in given.items():
            of = [_medians(one, anew[2 * i], labels, rows) for one in of_rates]
            found[which, method] = np.stack(of)
    return found


def _data(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes: point n is of cluster n % CLUSTERS; the first TRAINED are trained on."""
    clusters = np.arange(TRAINED + HELD_OUT) % CLUSTERS
    centres = rng.normal(size=(CLUSTERS, INPUTS))
    x = centres[clusters] + SPREAD * rng.normal(size=(len(clusters), INPUTS))
    return np.float32(x), np.int32(clusters % CLASSES)


def _medians(
    logits_RNK: np.ndarray, anew_RNK: np.ndarray, labels: np.ndarray, forgotten: np.ndarray
) -> list[float]:
    """The median KLoM of POINTS."""
    of_N = klom(*(np.asarray(_margins(z, labels)) for z in (logits_RNK, anew_RNK)))
    is_trained = np.arange(len(of_N)) < TRAINED
    is_forgotten = np.isin(np.arange(len(of_N)), forgotten)
    of_points = (is_forgotten, is_trained & ~is_forgotten, ~is_trained)
    return [float(np.median(of_N[where])) for where in of_points]


def _start(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        'first': jax.random.normal(first, (INPUTS, WIDTH)) * (2 / INPUTS) ** 0.5,
        'bias': jnp.zeros((1, WIDTH)),
        'second': jax.random.normal(second, (WIDTH, CLASSES)) * (1 / WIDTH) ** 0.5,
    }


def _logits(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params['first'] + params['bias']) @ params['second']


_logits_of_all = jax.jit(jax.vmap(_logits, (0, None)))
_margins = jax.jit(margins)


@jax.jit
def _trained(keys_R: jax.Array, kept_RN: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
    """The parameters of a model for each key, on the points that it keeps; stacked."""

    def one(given):
        key, kept_N = given

        def loss(params):
            each_N = cross_entropies(_logits(params, x[:TRAINED]), labels[:TRAINED])
            return jnp.sum(jnp.where(kept_N, each_N, 0.0)) / jnp.sum(kept_N)

        transform = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))
        return descend(loss, _start(key), transform, STEPS)

    return jax.lax.map(one, (keys_R, kept_RN), batch_size=AT_ONCE)


@jax.jit
def _unlearned(
    params: Any, targets_RMK: jax.Array, x: jax.Array, labels: jax.Array, rows_M: jax.Array
) -> dict[str, jax.Array]:
    """Logits [rate, model, point, class] after ascent and after matching. rows_M: the points to
    match on, of which the first FORGOTTEN are forgotten.
    """
    forgotten = rows_M[:FORGOTTEN]

    def one(given):
        start, targets_MK = given

        def ascended(rate):
            def loss(params):
                return -jnp.mean(cross_entropies(_logits(params, x[forgotten]), labels[forgotten]))

            return _logits(descend(loss, start, optax.sgd(rate), ASCENT_STEPS), x)

        def matched(rate):
            transform = optax.adam(optax.cosine_decay_schedule(rate, MATCHING_STEPS))

            def outputs(params):
                return _logits(params, x[rows_M])

            return _logits(match(outputs, start, targets_MK, transform, MATCHING_STEPS), x)

        by = {'ascent': ascended, 'matching': matched}
        return {name: jax.vmap(by[name])(jnp.float32(RATES[name])) for name in by}

    found = jax.lax.map(one, (params, targets_RMK), batch_size=AT_ONCE)
    return jax.tree.map(lambda x_R: jnp.swapaxes(x_R, 0, 1), found)
