"""Property: rows have the labels of their clusters, and as many of them wrong or rare as asked."""

import dataclasses

import jax
import numpy as np

from eval.claims.lab import draw_rows, he_matrices
from eval.claims.measures import classifiers


def test_wrong_labels_are_those_of_other_classes():
    """Catches wrong labels in what is held out, and right ones among those that are drawn."""
    key = jax.random.key(0)
    task = dataclasses.replace(classifiers.WRONG_LABELS.task, n_train=4096)
    x, right, held_out, wanted = draw_rows(key, task)
    same = draw_rows(key, dataclasses.replace(task, wrong=0.4))
    np.testing.assert_array_equal(same[0], x)
    np.testing.assert_array_equal(same[3], wanted)
    assert abs(np.mean(same[1] != right) - 0.4) < 0.03
    assert set(np.unique(same[1])) == set(range(10))
    alone = dataclasses.replace(task, spread=0.0)
    x, labels, held_out, wanted = draw_rows(key, alone)
    of_centres = {row.tobytes(): y for row, y in zip(np.array(held_out), wanted, strict=True)}
    assert len(of_centres) == task.clusters
    assert [of_centres[row.tobytes()] for row in np.array(x)] == labels.tolist()


def test_a_rare_class_has_its_share_and_clusters_of_its_own():
    task = classifiers.A_RARE_CLASS.task
    task = dataclasses.replace(task, n_train=4096, n_held_out=4096, spread=0.0)
    _, labels, held_out, wanted = draw_rows(jax.random.key(1), task)
    assert abs(np.mean(np.concatenate([labels, wanted])) - task.rare) < 0.004
    centres = [{row.tobytes() for row in np.array(held_out)[wanted == y]} for y in (0, 1)]
    assert len(centres[0]) == task.clusters // 2 >= len(centres[1])
    assert not centres[0] & centres[1]


def test_matrices_keep_the_size_of_what_a_relu_leaves():
    x = jax.random.normal(jax.random.key(0), (500, 256))
    first, second = he_matrices(jax.random.key(1), (256, 256, 64))
    found = np.var(np.maximum(np.array(x @ first), 0) @ np.array(second))
    np.testing.assert_allclose(found, 2, rtol=0.1)
