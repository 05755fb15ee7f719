"""Contract: attention layers, residual streams and reparametrisations with all of their options.

A row is two blocks with every option of a layer at once, or a layer with state. Mapped and scanned
runs equal a run that is single, unrolled and sharded over eight devices; a restored state continues
to the bit. test_choices.py tests that each name and option learns.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.devices.mesh import make_mesh
from lm.devices.shardings import abstract_state
from lm.record.checkpoints import Checkpoints
from lm.training.state import make_hyper
from modules.attention import ATTENTIONS
from modules.residual import STREAMS
from tests.contracts.test_choices import ATTENTION_OPTIONS
from tests.helpers import (
    assert_trees_close,
    checked_config,
    initial_state,
    make_training,
    packed_batch,
    stack,
    tiny_learner,
    train_step,
    trained_on_all_devices,
)

STEPS = 2
BASE = {'data.mask_documents': True, 'optim.lr': 0.01, 'train.microbatches': 1}
# Each stream, most with one of the ways to add values of other layers or tables.
STREAM_ROWS = {name: {'model.stream': name} for name in STREAMS if name != 'plain'} | {
    'attention_residual': {
        'model.stream': 'attention_residual',
        'attention.value_residual': 'learned',
    },
    'depth_sums': {
        'model.stream': 'attention_residual',
        'model.depth_sums': 2,
        'attention.value_residual': 'constant',
    },
    'dense_former': {'model.stream': 'dense_former', 'model.placement': 'peri'},
    'hyper_connections': {
        'model.stream': 'hyper_connections',
        'model.n_streams': 2,
        'attention.value_embeddings': True,
        'model.n_kv_heads': 1,
    },
    'mhc': {
        'model.stream': 'mhc',
        'attention.value_residual': 'learned',
        'attention.value_embeddings': True,
    },
    'x0_scalars': {
        'model.stream': 'x0_scalars',
        'model.embedding_norm': 'rmsnorm',
        'model.attention': 'linear',
    },
}
ROWS = (
    {name: {'model.attention': name} for name in ATTENTIONS}
    | STREAM_ROWS
    | {
        'softmax': ATTENTION_OPTIONS[0],
        'l2': {'model.attention': 'l2', 'model.position': 'alibi'},
        'linear': {'model.attention': 'linear', 'attention.gate': 'headwise'},
        'nala': {'model.attention': 'nala', 'model.n_kv_heads': 1},
        'gla': {'model.attention': 'gla', 'model.n_kv_heads': 1},
        'gated_delta': {'model.attention': 'gated_delta', 'attention.negative_eigenvalues': True},
        'sigma': {'model.reparam': 'sigma+weight_standardization', 'model.bias': True},
        'projected': {'model.reparam': 'weight_compander+normalize_and_project'},
    }
)


def row_learner(row: str, scanned: bool = True):
    return tiny_learner(checked_config(BASE | ROWS[row] | {'model.scan_layers': scanned}))


@pytest.mark.full
@pytest.mark.parametrize('row', ROWS)
def test_mapped_scan_equals_unrolled_sharded_run(row):
    learner = row_learner(row)
    hyper = make_hyper(learner.recipe)
    hypers = [hyper, hyper | {'optim.lr': hyper['optim.lr'] / 2}]
    many = stack([stack([packed_batch(i)] * 2) for i in range(STEPS)])
    _, states = make_training(learner, runs=2)(
        jnp.stack([jax.random.key(0)] * 2), stack(hypers), many
    )
    second = jax.tree.map(lambda leaf: leaf[1], states)
    batches = stack([packed_batch(i) for i in range(STEPS)])
    expected = trained_on_all_devices(row_learner(row, scanned=False), batches, hypers[1])
    assert_trees_close(second, expected, 1e-3, 1e-4)


@functools.cache
def one_device():
    return make_mesh(checked_config({'mesh.data': 1}).mesh, jax.devices()[:1])


@pytest.mark.full
@pytest.mark.parametrize('row', ROWS)
def test_restored_state_continues_bitwise(row, tmp_path):
    """Includes the state of layers and reparametrisations: catches vectors that are drawn again."""
    learner = row_learner(row)
    step, hyper = train_step(learner.recipe), make_hyper(learner.recipe)
    half, _ = step(initial_state(learner.recipe), packed_batch(0), hyper)
    checkpoints = Checkpoints(tmp_path, 1, 0, print)
    checkpoints.save(half, {'counters': {}}, None)
    checkpoints.wait()
    restored, _ = checkpoints.restore(abstract_state(learner, one_device()))
    checkpoints.close()
    ends = [step(state, packed_batch(1), hyper)[0] for state in (half, restored)]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert jax.tree.leaves(half.reparam) or row not in ('sigma', 'projected')
