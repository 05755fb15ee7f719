"""Equivalence: training with logits in chunks of tokens, and with all logits at once."""

import jax
import pytest

from lm.config.fields import MeshConfig
from lm.devices.mesh import make_mesh, put_batch
from lm.devices.shardings import state_shardings
from lm.training.state import make_hyper
from lm.training.step import loss_chunk_size
from modules.losses.chunked import MAX_LOGITS
from tests.helpers import (
    assert_trees_close,
    initial_state,
    jit_train_step,
    packed_batch,
    stack,
    tiny_config,
    tiny_learner,
    train_step,
    trained_on_all_devices,
)

TIED = {'model.tie_embeddings': True, 'model.logit_softcap': 5.0, 'train.microbatches': 2}


@pytest.mark.full
@pytest.mark.parametrize('changes', [{}, TIED], ids=['usual', 'tied'])
def test_chunked_step_equals_whole(changes):
    """State and metrics, with chunks of 3 or 6 tokens that do not divide a row.

    Catches a gradient scaled twice, and padding that counts.
    """
    steps = []
    for chunk in (0, 24):
        config = tiny_config(changes | {'loss.chunk': chunk, 'loss.z_loss': 0.1})
        steps.append(train_step(config)(initial_state(config), packed_batch(), make_hyper(config)))
    assert_trees_close(steps[1], steps[0], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_sharded_chunks_equal_one_device():
    """Two steps with chunks that hold tokens of every device."""
    config = tiny_config({'loss.chunk': 24, 'kernels.implementation': 'reference'})
    batches = [packed_batch(seed) for seed in range(2)]
    final = trained_on_all_devices(tiny_learner(config), stack(batches), make_hyper(config))
    state = initial_state(config)
    for batch in batches:
        state, _ = train_step(config)(state, batch, make_hyper(config))
    assert_trees_close(final.params, state.params, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('changes', [{}, TIED], ids=['usual', 'tied'])
@pytest.mark.parametrize(
    'sizes',
    [{'data': 2, 'fsdp': 2, 'context': 2}, {'fsdp': 2, 'tensor': 2}],
    ids=['context', 'tensor'],
)
def test_chunks_on_mesh_equal_one_device(sizes, changes):
    """A step of one or two microbatches equals that with all logits on one device."""
    mesh_changes = {f'mesh.{axis}': n for axis, n in ({'data': 1} | sizes).items()}
    common = changes | {'loss.z_loss': 0.1, 'kernels.implementation': 'reference'}
    single, config = (
        tiny_config(common | extra)
        for extra in ({'loss.chunk': 0}, {'loss.chunk': 16} | mesh_changes)
    )
    mesh, learner = make_mesh(config.mesh), tiny_learner(config)
    state = jax.device_put(initial_state(config), state_shardings(learner, mesh))
    batch = put_batch(mesh, packed_batch())
    actual = jit_train_step(learner, mesh)(state, batch, make_hyper(config))
    expected = train_step(single)(initial_state(single), packed_batch(), make_hyper(single))
    assert_trees_close(jax.device_get(actual), expected, rtol=1e-4, atol=1e-5)


def test_chunk_size_is_selected_per_device():
    """Each device of a mesh gets as many tokens as a single device; more if `tensor` cuts their
    logits.

    Catches rounds of two tokens on a pod.
    """
    learner, vocab = tiny_learner(tiny_config()), 2**14
    on_one = loss_chunk_size(learner, (512, 8192), vocab)
    assert on_one == MAX_LOGITS // vocab
    for sizes, n_parts in (
        ({'data': 2, 'fsdp': 2, 'context': 2}, 8),
        ({'data': 2, 'tensor': 4}, 8),
    ):
        mesh = make_mesh(MeshConfig(**{'data': 1} | sizes))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            assert loss_chunk_size(learner, (512, 8192), vocab) == n_parts * on_one
            assert (
                loss_chunk_size(learner, (1, 8192), vocab) <= n_parts // 2 * on_one
            )  # rows are whole
            assert loss_chunk_size(learner, (8, n_parts * on_one // 8), vocab) == 0
