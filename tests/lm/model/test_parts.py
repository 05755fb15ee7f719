"""Linear attention, positions and dropout in a whole step. Equivalence: unrolled layers, remat and
eight devices change nothing. Property: each option reaches the layer that reads it.
"""

import functools

import jax
import numpy as np
import pytest

from lm.devices.mesh import make_mesh, put_batch
from lm.devices.shardings import state_shardings
from lm.training.state import make_hyper
from modules.statistics import STATS, key_from_int, key_to_int
from tests.helpers import (
    assert_trees_close,
    checked_config,
    initial_state,
    jit_train_step,
    packed_batch,
    tiny_batch,
    tiny_learner,
    tiny_model,
    train_step,
)

TOGETHER = {
    'model.attention': 'linear',
    'model.n_kv_heads': 1,
    'model.activation': 'selu',
    'mlp.alpha_dropout': 0.2,
    'model.dropout': 0.1,
    'model.attention_dropout': 0.0,
    'model.embedding_dropout': 0.2,
    'attention.rope_fraction': 0.5,
    'data.mask_documents': True,
    'train.microbatches': 2,
}
BATCH = packed_batch(rows=16)


@functools.cache
def after_two_steps(**changes):
    config = checked_config(TOGETHER | {f'model.{name}': value for name, value in changes.items()})
    state = initial_state(config)
    for _ in range(2):
        state, metrics = train_step(config)(state, BATCH, make_hyper(config))
    return jax.device_get((state, metrics))


@pytest.mark.full
@pytest.mark.parametrize('changes', [{'scan_layers': False}, {'remat': 'full'}], ids=str)
def test_unrolling_and_remat_keep_the_step(changes):
    """Losses, weights and keys. Catches a recomputed layer that drops differently."""
    assert_trees_close(after_two_steps(**changes), after_two_steps(), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_eight_devices_drop_like_one():
    """Catches a device that drops by its local rows."""
    config = checked_config(TOGETHER)
    mesh, learner = make_mesh(config.mesh), tiny_learner(config)
    state = jax.device_put(initial_state(config), state_shardings(learner, mesh))
    lowered = jit_train_step(learner, mesh).lower(state, BATCH, make_hyper(config))
    step = lowered.compile()
    for _ in range(2):
        state, metrics = step(state, put_batch(mesh, BATCH), make_hyper(config))
    assert_trees_close((state, metrics), after_two_steps(), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_dropout_keys_never_repeat():
    """Two layers, two steps of two microbatches: no key occurs twice."""
    config = checked_config(TOGETHER)
    state, mlp_keys, block_keys = initial_state(config), [], []
    for step in range(3):
        if step:
            state, _ = train_step(config)(state, BATCH, make_hyper(config))
        mlp_keys.append(np.asarray(state.stats[STATS]['layers']['mlp']['dropout_key']))
        block_keys.append(np.asarray(state.stats[STATS]['layers']['dropout_key']))
    assert len({tuple(key) for layers in mlp_keys + block_keys for key in layers.tolist()}) == 12
    key = key_from_int(mlp_keys[0][0])
    for _ in range(2):  # one per microbatch
        _, key = jax.random.split(key)
    np.testing.assert_array_equal(key_to_int(key), mlp_keys[1][0])


OPTIONS = [
    {'attention.rope_base': 100.0},
    {'attention.rope_fraction': 0.5},
    {'attention.rope_scaling': 'linear', 'attention.rope_factor': 2.0},
    {'attention.rope_scaling': 'llama3', 'attention.rope_factor': 2.0},
    {'attention.rope_scaling': 'llama3', 'attention.rope_factor': 2.0}
    | {'attention.rope_original_length': 8},
    {'attention.rope_scaling': 'llama3', 'attention.rope_factor': 2.0}
    | {'attention.rope_original_length': 8, 'attention.rope_low_frequency_factor': 0.1},
    {'attention.rope_scaling': 'llama3', 'attention.rope_factor': 2.0}
    | {'attention.rope_original_length': 8, 'attention.rope_high_frequency_factor': 1.1},
]


@pytest.mark.full
def test_rope_options_change_logits():
    """Every option gives logits different from the default and from all others."""
    params, tokens = initial_state(checked_config()).params, tiny_batch(rows=2)['tokens'][:, :-1]

    @functools.partial(jax.jit)
    def compute_logits(params):
        configs = map(checked_config, [{}, *OPTIONS])
        return [tiny_model(config).apply({'params': params}, tokens) for config in configs]

    all_logits = jax.device_get(compute_logits(params))
    for i, logits in enumerate(all_logits):
        for j, earlier in enumerate(all_logits[:i]):
            assert np.abs(logits - earlier).max() > 1e-5, (i, j)
