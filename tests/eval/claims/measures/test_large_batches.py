"""Reference: SGD with momentum by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.lab import LabeledSplit
from eval.claims.measures import large_batches
from eval.claims.measures.large_batches import Regime


def test_regimes_match_passes_or_steps():
    n_rows = {name: regime.batch * regime.steps for name, regime in large_batches.REGIMES.items()}
    assert n_rows['small'] == n_rows['large'] == 20 * large_batches.TASK.n_train
    for name in ('adapted', 'early_drops'):
        assert large_batches.REGIMES[name].steps == large_batches.REGIMES['small'].steps


def test_line_explains_itself():
    steps = np.arange(1, 50)
    assert large_batches.unexplained_variance(3 + 2 * np.log(steps), np.log(steps)) < 1e-12
    assert large_batches.unexplained_variance(3 + 2 * np.log(steps), np.sqrt(steps)) > 0.01


def test_steps_follow_momentum(monkeypatch):
    """A single row, so that all batches are equal; a network of one matrix."""
    monkeypatch.setattr(large_batches, 'TASK', dataclasses.replace(large_batches.TASK, n_train=1))
    rng = np.random.default_rng(0)
    x, start = np.float32(rng.normal(size=(1, 3))), np.float32(rng.normal(size=(3, 4)))
    rows = jax.tree.map(jnp.array, LabeledSplit(x, np.int32([2]), x, np.int32([2])))
    w, v, expected = np.float64(start), 0.0, []
    for factor in (1.0, 1.0, 0.1, 0.01, 0.01):
        p = np.exp(x @ w) / np.exp(x @ w).sum()
        v = large_batches.MOMENTUM * v + x.T @ (p - np.eye(4)[[2]])
        w = w - 0.5 * factor * v
        expected.append(np.linalg.norm(w - start))
    regime = Regime(batch=2, steps=5, schedule=4, rates=())
    train = jax.jit(
        lambda rate: large_batches.train_once(regime, rows, [start], jax.random.key(0), rate)
    )
    accuracy, distances = train(0.5)
    np.testing.assert_allclose(distances, expected[:2], rtol=1e-5)
    assert accuracy == float(np.argmax(x @ w) == 2)
