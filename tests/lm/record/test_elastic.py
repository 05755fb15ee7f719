"""Equivalence: a run resumes from a checkpoint on another mesh, with layers scanned or not."""

import jax
import numpy as np
import pytest

from lm.config.fields import MeshConfig
from lm.config.resolve import update_recipe
from lm.devices.mesh import make_mesh
from lm.devices.shardings import abstract_state, jit_init
from lm.inference.load import make_default_mesh
from lm.record.checkpoints import Checkpoints
from lm.training.state import make_hyper
from tests.helpers import jit_train_step, packed_batch, tiny_config, tiny_learner

CONFIG = tiny_config(
    {'optim.name': 'soap', 'model.reparam': 'sigma', 'model.n_heads': 4, 'model.n_kv_heads': 4}
)
META = {'config': {}, 'counters': {'best': {}}}
STEPS = 3


def train_steps(learner, mesh, state, steps):
    """Returns (the state after these steps, their losses)."""
    step, hyper, losses = jit_train_step(learner, mesh), make_hyper(learner.recipe), []
    for i in steps:
        state, metrics = step(state, packed_batch(i), hyper)
        losses.append(float(metrics['loss']))
    return state, losses


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """Returns (folder, state after STEPS steps on eight devices, losses of the next STEPS)."""
    folder, learner = tmp_path_factory.mktemp('elastic'), tiny_learner(CONFIG)
    mesh = make_mesh(MeshConfig(data=8))
    state = jit_init(learner, mesh)(jax.random.key(0), make_hyper(CONFIG))
    state, _ = train_steps(learner, mesh, state, range(STEPS))
    saved = jax.device_get(state)
    checkpoints = Checkpoints(folder, 1, 1)
    checkpoints.save(state, META, None)
    checkpoints.wait()
    checkpoints.close()
    _, losses = train_steps(learner, mesh, state, range(STEPS, 2 * STEPS))
    return folder, saved, losses


@pytest.mark.full
@pytest.mark.parametrize(
    ('sizes', 'scanned'),
    [
        ({}, True),
        ({'fsdp': 2}, True),
        ({'data': 2, 'tensor': 2}, False),
        ({'data': 2, 'fsdp': 2, 'tensor': 2}, True),
    ],
)
def test_run_resumes_on_another_mesh(sizes, scanned, written):
    """Catches state that is read into the wrong part, or not sharded as the step needs it."""
    folder, saved, losses = written
    learner = tiny_learner(update_recipe(CONFIG, {'model.scan_layers': scanned}))
    config = MeshConfig(**{'data': 1} | sizes)
    n = int(np.prod([*sizes.values()], dtype=int))
    mesh = make_mesh(config, jax.devices()[:n])
    checkpoints = Checkpoints(folder, 1, 1)
    state, _ = checkpoints.restore(abstract_state(learner, mesh))
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), saved)
    assert {leaf.sharding.mesh.size for leaf in jax.tree.leaves(state)} == {n}
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state)) == (n > 1)
    _, resumed_losses = train_steps(learner, mesh, state, range(STEPS, 2 * STEPS))
    np.testing.assert_allclose(resumed_losses, losses, rtol=0, atol=1e-5)


def test_large_weights_are_sharded_over_all_devices(monkeypatch):
    """Loads weights for evaluation. Catches a mesh that does not divide the model's width."""
    learner = tiny_learner(CONFIG)
    assert make_default_mesh(learner).size == 1
    monkeypatch.setattr('lm.inference.load.device_memory_bytes', lambda: 1000)
    assert make_default_mesh(learner).shape['fsdp'] == 8
    assert (
        make_default_mesh(
            tiny_learner(
                update_recipe(
                    CONFIG, {'model.d_model': 20, 'model.n_heads': 2, 'model.n_kv_heads': 2}
                )
            )
        ).shape['fsdp']
        == 4
    )
