"""Contract: every norm layer at every placement, one row each.

A row trains two blocks for 50 steps on real text, two runs of other hyperparameters mapped
together and their blocks scanned: traced once, with falling loss; saved half way and read again,
the same to the bit. Alone, unrolled and with its batch cut over eight devices, a run gives the
same.
"""

import argparse
import inspect

import jax
import numpy as np
import pytest

from lm.check import check_program
from lm.mesh import batch_sharding, make_mesh, replicated
from lm.model import build_model
from lm.record.checkpoint import Checkpoints
from lm.state import hyper_from, init_state
from lm.step import make_train_step
from modules.norms import NORMS
from modules.placements import PLACEMENTS
from tests.helpers import BOS, FAST, assert_trees_close, stack, tiny_config

TEXT = np.frombuffer(inspect.getsource(argparse).encode('ascii'), np.uint8).astype(np.int32)
VOCAB, STEPS, HALF, COMPARED = 128, 50, 25, 2
BASE = {
    'model.n_layers': 2,
    'model.qk_norm': 'rmsnorm',  # hybrid needs one
    'optim.lr': 0.01,
    'data.seq_len': 16,
}
# How far the loss falls in 50 steps at least, in nats, from 4.9 for bytes that are all as likely.
# No pair is known not to; the batch norms' trouble is in evaluation.
FALL = 0.5


def batch(step: int) -> dict[str, np.ndarray]:
    starts = np.random.default_rng(step).integers(0, len(TEXT) - 17, 8)
    tokens = np.stack([TEXT[i : i + 17] for i in starts])
    return {'tokens': tokens, 'segments': np.ones_like(tokens)}


def config_of(norm: str, placement: str, scanned: bool):
    changes = {'model.norm': norm, 'model.placement': placement, 'model.scan_layers': scanned}
    if placement == 'mix':
        changes['model.mix_fraction'] = 0.5  # one block of each kind
    if norm.endswith('_removal'):
        changes['norm.removal_start'] = 10
    config = tiny_config(BASE | changes)
    check_program(config)
    return config


def build(config):
    """(start, two Hypers, step)."""
    model = build_model(config, VOCAB, 'cpu')
    hyper = hyper_from(config)
    hypers = [hyper, hyper.replace(lr=hyper.lr / 2, weight_decay=hyper.weight_decay * 4)]
    start = jax.jit(
        lambda: init_state(config, model, hyper, jax.random.key(0)), compiler_options=FAST
    )()
    return jax.device_get(start), hypers, make_train_step(config, model, BOS)


@pytest.mark.parametrize('placement', PLACEMENTS)
@pytest.mark.parametrize('norm', NORMS)
def test_every_norm_at_every_placement(norm, placement, tmp_path):
    start, hypers, step = build(config_of(norm, placement, scanned=True))
    traces = []

    def counted(*arguments):
        traces.append(1)
        return step(*arguments)

    mapped = jax.jit(jax.vmap(counted, in_axes=(0, None, 0)), compiler_options=FAST)
    both, losses, states = stack(hypers), [], {}
    state = stack([start, start])
    for i in range(STEPS):
        state, metrics = mapped(state, batch(i), both)
        losses.append(np.asarray(metrics['loss']))
        states[i + 1] = state if i + 1 in (COMPARED, HALF, STEPS) else None
    assert len(traces) == 1
    fell = losses[0] - np.mean(losses[-5:], 0)
    assert np.all(fell > FALL), fell

    restored = saved_and_read(states[HALF], tmp_path)
    for i in range(HALF, STEPS):
        restored, _ = mapped(restored, batch(i), both)
    jax.tree.map(np.testing.assert_array_equal, restored, states[STEPS])

    config = config_of(norm, placement, scanned=False)
    step = make_train_step(config, build_model(config, VOCAB, 'cpu'), BOS)
    alone, mesh = start, make_mesh(config.mesh)
    everywhere, rows = replicated(mesh), batch_sharding(mesh)
    cut = jax.jit(
        step,
        in_shardings=(everywhere, rows, everywhere),
        out_shardings=everywhere,
        compiler_options=FAST,
    )
    alone, hyper = jax.device_put((alone, hypers[1]), everywhere)
    for i in range(COMPARED):
        alone, _ = cut(alone, jax.device_put(batch(i), rows), hyper)
    second = jax.tree.map(lambda leaf: leaf[1], states[COMPARED])
    assert_trees_close(second, alone, rtol=1e-3, atol=1e-4)


def saved_and_read(state, folder):
    """The state, through a checkpoint; `step` of the first run names it."""
    checkpoints = Checkpoints(folder, keep_last=1, keep_best=0)
    one = state.replace(step=state.step[0])
    checkpoints.save(one, {}, None)
    checkpoints.wait()
    restored, _ = checkpoints.restore(jax.tree.map(jax.numpy.zeros_like, one))
    checkpoints.close()
    return jax.device_get(restored.replace(step=state.step))  # committed, it would be compiled for
