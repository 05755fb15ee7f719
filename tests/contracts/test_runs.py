"""Contract: run i of a looped sweep equals the same run alone, to the bit.

test_choices.py tests a vmapped run for every choice, to rounding.
"""

import jax
import numpy as np
import pytest

from lm.devices.mesh import make_mesh
from lm.devices.run_axis import loop
from lm.training.step import make_train_step
from tests.contracts.test_choices import BASE, STEPS, batch, four_runs
from tests.helpers import checked_config, initial_state, stack, tiny_learner, train_step


@pytest.mark.full
def test_looped_run_equals_single_run_bitwise():
    """Losses and states, of a run as configured, of other numbers, of a seed and of an order."""
    config = checked_config(BASE)
    _, hypers, _ = four_runs(config)
    init_scale = {'scaling.init_scale': float(hypers[1]['scaling.init_scale'])}
    starts = [initial_state(config, seed) for seed in (0, 0, 1, 0)]
    starts[1] = initial_state(checked_config(BASE | init_scale))
    mesh = make_mesh(config.mesh, jax.devices()[:1], runs=4)
    together = loop(mesh, make_train_step(tiny_learner(config)))
    together = jax.jit(together)
    states, active, losses = stack(starts), np.ones(4, bool), []
    orders = (0, 0, 0, 1)
    for i in range(STEPS):
        batches = stack([batch(i, order) for order in orders])
        states, metrics = together(active, states, batches, stack(hypers))
        losses.append(np.asarray(metrics['loss']))
    for run, order in enumerate(orders):
        state = starts[run]
        for i in range(STEPS):
            state, metrics = train_step(config)(state, batch(i, order), hypers[run])
            np.testing.assert_array_equal(losses[i][run], metrics['loss'])
        run_state = jax.tree.map(lambda leaf, run=run: leaf[run], states)
        jax.tree.map(np.testing.assert_array_equal, run_state, state)
