"""Property: rows have the labels of their clusters, with the requested shares of wrong or rare
labels.
"""

import dataclasses

import jax
import numpy as np

from eval.claims.lab import draw_rows, he_matrices
from eval.claims.measures import classifiers


def test_wrong_labels_come_from_other_classes():
    """Catches wrong labels among held-out rows, and correct ones among the corrupted."""
    key = jax.random.key(0)
    task = dataclasses.replace(classifiers.WRONG_LABELS.task, n_train=4096)
    x, labels_right, held_out, held_out_labels = draw_rows(key, task)
    corrupted = draw_rows(key, dataclasses.replace(task, wrong=0.4))
    np.testing.assert_array_equal(corrupted[0], x)
    np.testing.assert_array_equal(corrupted[3], held_out_labels)
    assert abs(np.mean(corrupted[1] != labels_right) - 0.4) < 0.03
    assert set(np.unique(corrupted[1])) == set(range(10))
    without_spread = dataclasses.replace(task, spread=0.0)
    x, labels, held_out, held_out_labels = draw_rows(key, without_spread)
    label_by_centre = {
        row.tobytes(): y for row, y in zip(np.array(held_out), held_out_labels, strict=True)
    }
    assert len(label_by_centre) == task.clusters
    assert [label_by_centre[row.tobytes()] for row in np.array(x)] == labels.tolist()


def test_rare_class_has_its_share_and_clusters():
    task = classifiers.A_RARE_CLASS.task
    task = dataclasses.replace(task, n_train=4096, n_held_out=4096, spread=0.0)
    _, labels, held_out, held_out_labels = draw_rows(jax.random.key(1), task)
    assert abs(np.mean(np.concatenate([labels, held_out_labels])) - task.rare) < 0.004
    centres = [{row.tobytes() for row in np.array(held_out)[held_out_labels == y]} for y in (0, 1)]
    assert len(centres[0]) == task.clusters // 2 >= len(centres[1])
    assert not centres[0] & centres[1]


def test_matrices_preserve_variance_behind_relu():
    x = jax.random.normal(jax.random.key(0), (500, 256))
    first, second = he_matrices(jax.random.key(1), (256, 256, 64))
    variance = np.var(np.maximum(np.array(x @ first), 0) @ np.array(second))
    np.testing.assert_allclose(variance, 2, rtol=0.1)
