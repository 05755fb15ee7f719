"""Reference: points and their medians by hand. Property: models know what they keep alone; ascent
and matching change what they should.
"""

import jax
import numpy as np
import pytest
from scipy import special

from eval.claims.lab import Task
from eval.claims.measures import datamodels

SIZES = {
    **{'TASK': Task(4, 4, 1.5, 12, 8, inputs=12), 'FORGOTTEN': 3, 'HALVES': 60, 'MODELS': 4},
    **{'AT_ONCE': 4, 'RETAINED': 4, 'STEPS': 30, 'MATCHING_STEPS': 20, 'ASCENT_STEPS': 2},
    **{'SEEDS': 2, 'RATES': {'ascent': (0.1, 1.0), 'matching': (1e-3, 1e-1)}},
}


@pytest.fixture
def small(monkeypatch):
    """Points and classes at SIZES."""
    for name, value in SIZES.items():
        monkeypatch.setattr(datamodels, name, value)
    return datamodels._draw_points(np.random.default_rng(0))


def test_points_of_a_cluster_are_of_one_class(small):
    """Whatever their cluster, so many are trained on; a class has several clusters."""
    x, labels = datamodels._draw_points(np.random.default_rng(0))
    np.testing.assert_array_equal(x, small[0])
    assert x.shape == (20, datamodels.TASK.inputs)
    of_clusters = labels.reshape(-1, 4)
    assert (of_clusters == of_clusters[0]).all() and len({*labels}) == 4


def test_a_model_knows_the_points_that_it_keeps(small):
    """Another point in place of one that is left out changes nothing, of one that is kept does."""
    x, labels = small
    kept = np.ones((2, 12), bool)
    kept[0, 5] = False
    keys = jax.random.split(jax.random.key(0), 2)
    other = np.where(np.arange(20)[:, None] == 5, -x, x)
    before, after = (datamodels._train(keys, kept, given, labels) for given in (x, other))
    moved = {name: np.abs(before[name] - after[name]).max((-1, -2)) for name in ('first', 'second')}
    assert moved['first'][0] < 1e-6 and moved['second'][0] < 1e-6
    assert moved['first'][1] > 1e-2 and moved['second'][1] > 1e-2


def test_ascent_raises_the_loss_and_matching_meets_its_targets(small):
    """Two models. One stays at its own logits, but for Adam's steps of rounding; the other comes
    near to what it is given, more at the larger rate. Ascent does not see the points to retain.
    """
    x, labels = small
    params = jax.jit(jax.vmap(datamodels._init_params))(jax.random.split(jax.random.key(0), 2))
    before = np.array(datamodels._logits_per_model(params, x))
    rows = np.array([2, 7, 9, 0, 1])
    targets = before[:, rows]
    targets[1] = 3.0
    found = jax.device_get(datamodels._unlearn(params, targets, x, labels, rows))
    assert found['ascent'].shape == (2, 2, 20, 4) and found['matching'].shape == (2, 2, 20, 4)
    np.testing.assert_allclose(found['matching'][0, 0], before[0], atol=0.05)
    other_rows = np.array([2, 7, 9, 4, 6])
    other = jax.device_get(datamodels._unlearn(params, targets, x, labels, other_rows))
    np.testing.assert_array_equal(other['ascent'], found['ascent'])
    off = [np.abs(z[1, rows] - 3).mean() for z in (before, *found['matching'])]
    assert off[0] > off[1] > 2 * off[2]

    def losses(logits):
        log_p = special.log_softmax(logits[:, rows[:3]], -1)
        return -np.take_along_axis(log_p, labels[rows[:3]][None, :, None], -1).mean((1, 2))

    first, slow, fast = map(losses, (before, *found['ascent']))
    assert (first < slow).all() and (slow < fast).all()


def test_medians_are_of_their_points(monkeypatch):
    """Twelve trained on, of which three are forgotten, and eight held out."""
    for name, value in SIZES.items():
        monkeypatch.setattr(datamodels, name, value)
    of = np.arange(20) % 7 + 1.0
    monkeypatch.setattr(datamodels, 'klom', lambda unlearned, anew: of)
    logits, forgotten = np.zeros((2, 20, 4)), np.array([3, 5, 8])
    found = datamodels._median_kloms(logits, logits, np.zeros(20, int), forgotten)
    left = [n for n in range(12) if n not in (3, 5, 8)]
    assert found == [np.median(of[forgotten]), np.median(of[left])]


def test_a_method_is_judged_at_the_best_rate_for_what_is_forgotten():
    """Two seeds, which have one rate; what is retained has no part."""
    medians_SRP = np.array([[[3.0, 0.1, 0.1], [2.0, 5.0, 4.0]], [[1.0, 0.1, 0.1], [1.5, 7.0, 6.0]]])
    found = datamodels._select_best_rate(medians_SRP)
    np.testing.assert_array_equal(found, [[2.0, 5.0, 4.0], [1.5, 7.0, 6.0]])
