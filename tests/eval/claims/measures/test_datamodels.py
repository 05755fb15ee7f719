"""Reference: points and their medians by hand. Property: models depend only on the points of their
mask; ascent and matching change the logits as they should.
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
    """Returns points and classes at SIZES."""
    for name, value in SIZES.items():
        monkeypatch.setattr(datamodels, name, value)
    return datamodels._draw_points(np.random.default_rng(0))


def test_cluster_has_one_class(small):
    """Each cluster has the same number of training points; a class has several clusters."""
    x, labels = datamodels._draw_points(np.random.default_rng(0))
    np.testing.assert_array_equal(x, small[0])
    assert x.shape == (20, datamodels.TASK.inputs)
    labels_by_cluster = labels.reshape(-1, 4)
    assert (labels_by_cluster == labels_by_cluster[0]).all() and len({*labels}) == 4


def test_model_depends_on_its_points_only(small):
    """Changing a masked point changes nothing, changing another point does."""
    x, labels = small
    masks = np.ones((2, 12), bool)
    masks[0, 5] = False
    keys = jax.random.split(jax.random.key(0), 2)
    changed_x = np.where(np.arange(20)[:, None] == 5, -x, x)
    before, after = (datamodels._train(keys, masks, inputs, labels) for inputs in (x, changed_x))
    change = {
        name: np.abs(before[name] - after[name]).max((-1, -2)) for name in ('first', 'second')
    }
    assert change['first'][0] < 1e-6 and change['second'][0] < 1e-6
    assert change['first'][1] > 1e-2 and change['second'][1] > 1e-2


def test_ascent_raises_loss_and_matching_meets_targets(small):
    """Two models: one keeps its own logits, up to rounding by Adam; the other approaches its
    targets, more so at the larger rate. Ascent does not see the retained points.
    """
    x, labels = small
    params = jax.jit(jax.vmap(datamodels._init_params))(jax.random.split(jax.random.key(0), 2))
    before = np.array(datamodels._logits_per_model(params, x))
    rows = np.array([2, 7, 9, 0, 1])
    targets = before[:, rows]
    targets[1] = 3.0

    def unlearn(rows):
        return jax.device_get(datamodels._unlearn(params, {'matching': targets}, x, labels, rows))

    logits_by_method = unlearn(rows)
    assert logits_by_method['ascent'].shape == (2, 2, 20, 4) and logits_by_method[
        'matching'
    ].shape == (2, 2, 20, 4)
    np.testing.assert_allclose(logits_by_method['matching'][0, 0], before[0], atol=0.05)
    with_other_rows = unlearn(np.array([2, 7, 9, 4, 6]))
    np.testing.assert_array_equal(with_other_rows['ascent'], logits_by_method['ascent'])
    off = [np.abs(z[1, rows] - 3).mean() for z in (before, *logits_by_method['matching'])]
    assert off[0] > off[1] > 2 * off[2]

    def losses(logits):
        log_p = special.log_softmax(logits[:, rows[:3]], -1)
        return -np.take_along_axis(log_p, labels[rows[:3]][None, :, None], -1).mean((1, 2))

    first, slow, fast = map(losses, (before, *logits_by_method['ascent']))
    assert (first < slow).all() and (slow < fast).all()


def test_medians_cover_forgotten_and_retained(monkeypatch):
    """Twelve training points (three forgotten) and eight held-out points."""
    for name, value in SIZES.items():
        monkeypatch.setattr(datamodels, name, value)
    scores = np.arange(20) % 7 + 1.0
    monkeypatch.setattr(datamodels, 'klom', lambda unlearned, retrained: scores)
    logits, forgotten = np.zeros((2, 20, 4)), np.array([3, 5, 8])
    medians = datamodels._median_kloms(logits, logits, np.zeros(20, int), forgotten)
    retained = [n for n in range(12) if n not in (3, 5, 8)]
    assert medians == [np.median(scores[forgotten]), np.median(scores[retained])]


def test_selects_rate_by_forgotten_points(monkeypatch):
    """Seeds share one rate, chosen by others; the retained points play no part."""
    monkeypatch.setattr(datamodels.lab, 'TUNING_SEEDS', 1)
    medians_SRP = np.array([[[3.0, 0.1], [2.0, 5.0]], [[1.0, 0.1], [1.5, 7.0]]])
    scores = datamodels._tune_method(medians_SRP)
    assert [*scores['forgotten'].scores, *scores['retained'].scores] == [1.5, 7.0]
