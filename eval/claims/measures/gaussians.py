"""Classes of Gaussian clusters, and matrices of small networks that tell them apart."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import jax


@dataclasses.dataclass(frozen=True)
class Task:
    """Inputs in Gaussians of deviation `spread`, whose centres are from N(0, 1) and of one class.

    rare: the share of class 1 of two; 0: classes are equally frequent. wrong: the share of labels
    to train on that are those of another class.
    """

    classes: int
    clusters: int
    spread: float
    trained: int
    held_out: int
    passes: int
    batch: int = 64
    inputs: int = 16
    rare: float = 0.0
    wrong: float = 0.0


class Rows(NamedTuple):
    """Inputs to train on and their labels, and those that are held out, whose labels are right."""

    x: jax.Array
    labels: jax.Array
    held_out: jax.Array
    held_out_labels: jax.Array


def drawn(task: Task, key: jax.Array) -> Rows:
    """Returns rows of a task; those to train on come first from one stream of both."""
    of_centres, of_clusters, of_rare, of_noise, of_wrong, of_others = jax.random.split(key, 6)
    rows = task.trained + task.held_out
    centres = jax.random.normal(of_centres, (task.clusters, task.inputs))
    clusters = jax.random.randint(of_clusters, (rows,), 0, task.clusters)
    if task.rare:
        is_rare = jax.random.bernoulli(of_rare, task.rare, (rows,))
        clusters = clusters - clusters % task.classes + is_rare
    x = centres[clusters] + task.spread * jax.random.normal(of_noise, (rows, task.inputs))
    labels = clusters % task.classes
    is_wrong = jax.random.bernoulli(of_wrong, task.wrong, (task.trained,))
    others = jax.random.randint(of_others, (task.trained,), 1, task.classes)
    given = (labels[: task.trained] + is_wrong * others) % task.classes
    return Rows(x[: task.trained], given, x[task.trained :], labels[task.trained :])


def matrices(key: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Returns matrices [sizes[i], sizes[i + 1]] of variance 2 / sizes[i]."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        jax.random.normal(one, both) * (2 / both[0]) ** 0.5
        for one, both in zip(keys, pairwise(sizes), strict=True)
    ]


def features_of(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Returns what the last hidden layer gives, matrices and ReLUs one after the other."""
    for matrix in params[:-1]:
        x = jax.nn.relu(x @ matrix)
    return x


def logits_of(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Returns the logits, the product of `features_of` and the last matrix."""
    return features_of(params, x) @ params[-1]
