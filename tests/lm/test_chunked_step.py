"""Equivalence: training with the logits of some tokens at a time, as with those of all."""

import pytest

from lm.state import hyper_from
from tests.helpers import (
    assert_trees_close,
    initial_state,
    packed_batch,
    stack,
    tiny_config,
    tiny_learner,
    train_step,
    trained_on_all_devices,
)

TIED = {'model.tie_embeddings': True, 'model.logit_softcap': 5.0, 'train.microbatches': 2}


@pytest.mark.parametrize('changes', [{}, TIED], ids=['usual', 'tied'])
def test_a_step_in_chunks_is_the_step(changes):
    """State and metrics, where 3 or 6 tokens of each row do not divide it. Catches a gradient
    scaled twice, and padding that counts.
    """
    found = []
    for chunk in (0, 24):
        config = tiny_config(changes | {'loss.chunk': chunk, 'loss.z_loss': 0.1})
        found.append(train_step(config)(initial_state(config), packed_batch(), hyper_from(config)))
    assert_trees_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_cut_over_devices_it_is_the_step_on_one():
    """Two steps of chunks that hold tokens of every device."""
    config = tiny_config({'loss.chunk': 24, 'kernels.implementation': 'reference'})
    batches = [packed_batch(seed) for seed in range(2)]
    found = trained_on_all_devices(tiny_learner(config), stack(batches), hyper_from(config))
    state = initial_state(config)
    for batch in batches:
        state, _ = train_step(config)(state, batch, hyper_from(config))
    assert_trees_close(found.params, state.params, rtol=1e-4, atol=1e-5)
