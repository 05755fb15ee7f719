"""Runs that several matmul kernels with a random state are tested with."""

import jax
import numpy as np

from lm.devices.mesh import make_mesh
from lm.devices.shardings import abstract_state
from lm.record.checkpoints import Checkpoints
from lm.training.state import make_hyper
from tests.helpers import (
    checked_config,
    initial_state,
    make_training,
    stack,
    tiny_batch,
    tiny_learner,
    train_step,
)


def assert_resumed_step_is_equal(changes, batch, folder):
    """Asserts bitwise equality of a second step with and without a checkpoint after the first."""
    config = checked_config(changes)
    step, hyper, mesh = train_step(config), make_hyper(config), make_mesh(config.mesh)
    first, _ = step(initial_state(config), batch, hyper)
    checkpoints = Checkpoints(folder, 1, 0, print)
    checkpoints.save(first, {'counters': {}}, None)
    checkpoints.wait()
    restored, _ = checkpoints.restore(abstract_state(tiny_learner(config), mesh))
    checkpoints.close()
    whole, resumed = (step(jax.device_get(state), batch, hyper) for state in (first, restored))
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((whole, resumed)))


def train_on_repeats(changes):
    """Returns the losses of 50 steps of one block, on rows of pairs of equal tokens."""
    batches = stack([repeating_batch(step) for step in range(50)])
    small = {'model.n_layers': 1, 'kernels.attention': 'reference', 'optim.lr': 0.01}
    config = checked_config(small | {'train.steps': 50} | changes)
    train = make_training(tiny_learner(config))
    return train(jax.random.key(0), make_hyper(config), batches)[0]


def repeating_batch(seed):
    batch = tiny_batch(seed)
    batch['tokens'][:, 1::2] = batch['tokens'][:, :-1:2]
    return batch
