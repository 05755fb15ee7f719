"""Gradients of weights from a sample of the tokens, in a whole step. Equivalence: unrolled layers,
remat and a resumed run change nothing. Property: it learns like the exact gradient, and each layer,
microbatch and step samples other tokens.
"""

import functools

import jax
import numpy as np
import pytest

from lm.devices.mesh import make_mesh, put_batch
from lm.devices.shardings import state_shardings
from lm.model.check import check
from lm.training.state import make_hyper
from modules.statistics import STATS
from tests.helpers import (
    assert_trees_close,
    checked_config,
    initial_state,
    jit_train_step,
    packed_batch,
    tiny_config,
    tiny_learner,
    train_step,
)
from tests.lm.training.matmul_helpers import assert_resumed_step_is_equal, train_on_repeats

WTA_CRS = {'kernels.matmul': 'wta_crs', 'kernels.wta_crs_least': 1}
SAMPLED = WTA_CRS | {'train.microbatches': 2}
BATCH = packed_batch(rows=16)


@functools.cache
def after_two_steps(**changes):
    config = checked_config(SAMPLED | {f'model.{name}': value for name, value in changes.items()})
    state = initial_state(config)
    for _ in range(2):
        state, metrics = train_step(config)(state, BATCH, make_hyper(config))
    return jax.device_get((state, metrics))


@pytest.mark.full
def test_unrolling_and_remat_keep_the_step():
    """Losses, weights and keys. Catches a recomputed layer that samples differently."""
    changed = after_two_steps(scan_layers=False, remat='full')
    assert_trees_close(changed, after_two_steps(), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_keys_never_repeat():
    """Four inputs in two layers, three steps of two microbatches: no key occurs twice."""
    config, keys = checked_config(SAMPLED), []
    state = initial_state(config)
    for step in range(3):
        if step:
            state, _ = train_step(config)(state, BATCH, make_hyper(config))
        keys += [np.asarray(key) for key in jax.tree.leaves(state.stats[STATS]['layers'])]
    assert len(keys) == 3 * 4
    assert len({tuple(key) for layers in keys for key in layers.tolist()}) == 3 * 4 * 2


@pytest.mark.full
def test_resumed_step_is_bitwise_equal(tmp_path):
    """Resumes from a checkpoint of the first step. Catches keys that are not part of the state."""
    assert_resumed_step_is_equal(SAMPLED, BATCH, tmp_path)


@pytest.mark.full
def test_sampled_gradient_learns_like_exact():
    """Trains for 50 steps on 0.3 of 64 tokens, from the same weights: the first loss is the same,
    and the last losses differ by less than a tenth of the improvement.
    """
    exact, sampled = train_on_repeats({}), train_on_repeats(WTA_CRS)
    assert exact[0] == sampled[0]
    improvement = exact[0] - np.mean(exact[-5:])
    assert improvement > 0.3
    assert 0 < np.abs(np.mean(sampled[-5:]) - np.mean(exact[-5:])) < 0.1 * improvement


@pytest.mark.full
def test_tokens_stay_on_their_device():
    """The loss on eight devices equals the loss on one, and only sums are exchanged, as without
    sampling.

    Catches tokens that are sampled from the whole batch.
    """
    config = checked_config(SAMPLED)
    mesh, learner = make_mesh(config.mesh), tiny_learner(config)
    state = jax.device_put(initial_state(config), state_shardings(learner, mesh))
    step = jit_train_step(learner, mesh).lower(state, BATCH, make_hyper(config)).compile()
    assert 'all-reduce(' in step.as_text()
    for opcode in ('all-gather(', 'all-to-all(', 'collective-permute('):
        assert opcode not in step.as_text()
    _, metrics = step(state, put_batch(mesh, BATCH), make_hyper(config))
    _, expected = train_step(config)(initial_state(config), BATCH, make_hyper(config))
    np.testing.assert_allclose(metrics['loss'], expected['loss'], rtol=1e-6)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'kernels.wta_crs_ratio': 0.0},
            'kernels.wta_crs_ratio must be above 0 and at most 1; got 0',
        ),
        (
            {'kernels.wta_crs_ratio': 1.5},
            'kernels.wta_crs_ratio must be above 0 and at most 1; got 1.5',
        ),
        ({'kernels.wta_crs_least': 0}, 'kernels.wta_crs_least must be at least 1; got 0'),
        (
            {'kernels.matmul': 'direct', 'kernels.wta_crs_ratio': 0.5},
            'wta_crs_ratio=0.5 is not used by .* It is used with kernels.matmul=wta_crs',
        ),
        (
            {'train.trainable': 'norms', 'model.norm': 'layernorm'},
            'train.trainable=norms trains no matrix, so it would have no effect',
        ),
        ({'optim.name': 'sophia'}, 'optim.name=sophia differentiates the gradient'),
        ({'optim.others': 'sophia'}, 'optim.others=sophia differentiates the gradient'),
        ({'optim.ghost_radius': 1.0}, 'optim.ghost_radius differentiates the logits'),
    ],
)
def test_conflicting_fields_are_refused(changes, message):
    """The error is raised before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        check(tiny_config({'kernels.matmul': 'wta_crs'} | changes))
