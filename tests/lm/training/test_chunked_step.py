"""Equivalence: training with the logits of some tokens at a time, as with those of all."""

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
def test_a_step_in_chunks_is_the_step(changes):
    """State and metrics, where 3 or 6 tokens of each row do not divide it. Catches a gradient
    scaled twice, and padding that counts.
    """
    found = []
    for chunk in (0, 24):
        config = tiny_config(changes | {'loss.chunk': chunk, 'loss.z_loss': 0.1})
        found.append(train_step(config)(initial_state(config), packed_batch(), make_hyper(config)))
    assert_trees_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_cut_over_devices_it_is_the_step_on_one():
    """Two steps of chunks that hold tokens of every device."""
    config = tiny_config({'loss.chunk': 24, 'kernels.implementation': 'reference'})
    batches = [packed_batch(seed) for seed in range(2)]
    found = trained_on_all_devices(tiny_learner(config), stack(batches), make_hyper(config))
    state = initial_state(config)
    for batch in batches:
        state, _ = train_step(config)(state, batch, make_hyper(config))
    assert_trees_close(found.params, state.params, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('changes', [{}, TIED], ids=['usual', 'tied'])
@pytest.mark.parametrize(
    'sizes',
    [{'data': 2, 'fsdp': 2, 'context': 2}, {'fsdp': 2, 'tensor': 2}],
    ids=['context', 'tensor'],
)
def test_on_a_mesh_each_device_goes_through_its_own(sizes, changes):
    """A step of two microbatches, or one, is that of all logits on one device."""
    mesh_of = {f'mesh.{axis}': n for axis, n in ({'data': 1} | sizes).items()}
    given = changes | {'loss.z_loss': 0.1, 'kernels.implementation': 'reference'}
    alone, config = (
        tiny_config(given | more) for more in ({'loss.chunk': 0}, {'loss.chunk': 16} | mesh_of)
    )
    mesh, learner = make_mesh(config.mesh), tiny_learner(config)
    state = jax.device_put(initial_state(config), state_shardings(learner, mesh))
    batch = put_batch(mesh, packed_batch())
    found = jit_train_step(learner, mesh)(state, batch, make_hyper(config))
    right = train_step(alone)(initial_state(alone), packed_batch(), make_hyper(alone))
    assert_trees_close(jax.device_get(found), right, rtol=1e-4, atol=1e-5)


def test_tokens_at_a_time_are_chosen_for_each_device():
    """As many on each of a mesh as on one device; where `tensor` cuts their logits, more. Catches
    rounds of two tokens on a pod.
    """
    learner, vocab = tiny_learner(tiny_config()), 2**14
    alone = loss_chunk_size(learner, (512, 8192), vocab)
    assert alone == MAX_LOGITS // vocab
    for sizes, parts in (({'data': 2, 'fsdp': 2, 'context': 2}, 8), ({'data': 2, 'tensor': 4}, 8)):
        mesh = make_mesh(MeshConfig(**{'data': 1} | sizes))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            assert loss_chunk_size(learner, (512, 8192), vocab) == parts * alone
            assert (
                loss_chunk_size(learner, (1, 8192), vocab) <= parts // 2 * alone
            )  # rows are whole
            assert loss_chunk_size(learner, (8, parts * alone // 8), vocab) == 0
