"""Reference: SGD with momentum by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.lab import LabeledSplit
from eval.claims.measures import large_batches
from eval.claims.measures.large_batches import Regime


def test_regimes_have_as_many_passes_or_as_many_steps():
    seen = {name: one.batch * one.steps for name, one in large_batches.REGIMES.items()}
    assert seen['small'] == seen['large'] == 20 * large_batches.TASK.n_train
    assert large_batches.REGIMES['adapted'].steps == large_batches.REGIMES['small'].steps


def test_a_line_in_what_it_is_a_line_of_leaves_nothing():
    steps = np.arange(1, 50)
    assert large_batches.unexplained_variance(3 + 2 * np.log(steps), np.log(steps)) < 1e-12
    assert large_batches.unexplained_variance(3 + 2 * np.log(steps), np.sqrt(steps)) > 0.01


def test_steps_are_those_of_momentum_and_distances_from_the_start(monkeypatch):
    """One row, so that all batches are alike; a network of matrices alone."""
    monkeypatch.setattr(large_batches, 'TASK', dataclasses.replace(large_batches.TASK, n_train=1))
    rng = np.random.default_rng(0)
    x, start = np.float32(rng.normal(size=(1, 3))), np.float32(rng.normal(size=(3, 4)))
    rows = jax.tree.map(jnp.array, LabeledSplit(x, np.int32([2]), x, np.int32([2])))
    w, v, wanted = np.float64(start), 0.0, []
    for factor in (1.0, 1.0, 0.1, 0.01):
        p = np.exp(x @ w) / np.exp(x @ w).sum()
        v = large_batches.MOMENTUM * v + x.T @ (p - np.eye(4)[[2]])
        w = w - 0.5 * factor * v
        wanted.append(np.linalg.norm(w - start))
    trained = jax.jit(
        lambda rate: large_batches.train_once(Regime(2, 4), rows, [start], jax.random.key(0), rate)
    )
    right, distances = trained(0.5)
    np.testing.assert_allclose(distances, wanted[:2], rtol=1e-5)
    assert right == float(np.argmax(x @ w) == 2)
