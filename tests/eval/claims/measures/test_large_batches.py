"""Reference: SGD with momentum by hand. Contract: the measure has the values of its row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims.measures import large_batches
from eval.claims.measures.gaussians import Rows
from eval.claims.measures.large_batches import Regime
from eval.claims.measures.rows import MEASURES


def test_regimes_have_as_many_passes_or_as_many_steps():
    seen = {name: one.batch * one.steps for name, one in large_batches.REGIMES.items()}
    assert seen['small'] == seen['large'] == 20 * large_batches.TASK.trained
    assert large_batches.REGIMES['adapted'].steps == large_batches.REGIMES['small'].steps


def test_a_line_in_what_it_is_a_line_of_leaves_nothing():
    steps = np.arange(1, 50)
    assert large_batches.unexplained(3 + 2 * np.log(steps), np.log(steps)) < 1e-12
    assert large_batches.unexplained(3 + 2 * np.log(steps), np.sqrt(steps)) > 0.01


def test_steps_are_those_of_momentum_and_distances_from_the_start(monkeypatch):
    """One row, so that all batches are alike; a network of matrices alone."""
    monkeypatch.setattr(large_batches, 'TASK', dataclasses.replace(large_batches.TASK, trained=1))
    rng = np.random.default_rng(0)
    x, start = np.float32(rng.normal(size=(1, 3))), np.float32(rng.normal(size=(3, 4)))
    rows = jax.tree.map(jnp.array, Rows(x, np.int32([2]), x, np.int32([2])))
    w, v, wanted = np.float64(start), 0.0, []
    for factor in (1.0, 1.0, 0.1, 0.01):
        p = np.exp(x @ w) / np.exp(x @ w).sum()
        v = large_batches.MOMENTUM * v + x.T @ (p - np.eye(4)[[2]])
        w = w - 0.5 * factor * v
        wanted.append(np.linalg.norm(w - start))
    trained = jax.jit(
        lambda rate: large_batches._trained(Regime(2, 4), rows, [start], jax.random.key(0), rate)
    )
    right, distances = trained(0.5)
    np.testing.assert_allclose(distances, wanted[:2], rtol=1e-5)
    assert right == float(np.argmax(x @ w) == 2)


@pytest.mark.full
def test_the_measure_has_the_values_of_its_row(monkeypatch):
    small = dataclasses.replace(large_batches.TASK, trained=64, held_out=64)
    regimes = {name: Regime(4, 16) for name in large_batches.REGIMES}
    sizes = {'TASK': small, 'REGIMES': regimes, 'SEEDS': 2, 'RATES': (0.01, 0.1), 'WIDTH': 8}
    for size, value in sizes.items():
        monkeypatch.setattr(large_batches, size, value)
    found = MEASURES['large_batches'].compute()
    assert found.keys() == set(MEASURES['large_batches'].values)
    assert all(np.isfinite(one.value) and one.n == 2 for one in found.values())
