"""Contract: run i of a sweep is the same run alone, for every named choice and every axis.

The rows are those of tests/contracts/test_choices.py, so that a new norm, placement,
reparametrisation, loss or optimizer is tested here once it has a name. A sweep has a run for each field of Hyper, one with
another seed and one with another order of the text, and takes 50 steps.
"""

import dataclasses

import jax
import numpy as np
import pytest

from lm.many import over_mesh
from lm.mesh import make_mesh
from lm.state import Hyper
from lm.step import make_train_step
from lm.sweep.unread import read_fields
from tests.contracts.test_choices import BASE, ROWS
from tests.helpers import BOS, FAST, VOCAB, initial_state, program, stack, tiny_config

STEPS = 50
CHANGED = {  # a value for each field, far enough from TINY's to show in the loss
    'lr': 0.01,
    'weight_decay': 1.0,
    'z_loss': 0.01,
    'label_smoothing': 0.1,
    'balance_loss': 1.0,
    'b1': 0.8,
    'b2': 0.99,
    'eps': 0.01,
    'clip_norm': 0.5,
    'init_scale': 0.5,
    'warmup_steps': 5.0,
    'steps': 30.0,
    'decay_fraction': 0.5,
    'final_lr_fraction': 0.1,
}
SWEEP = {'optim.schedule': 'warmup_stable_decay', 'optim.lr': 0.003, 'train.steps': STEPS}
# Of the loss, relative. Batched products add up in another order than single ones; `loop` does the
# very operations of a single run, and is equal to the bit.
RTOL = {'float32': 1e-6, 'bfloat16': 1e-3}
RTOL_OF_NORM = {'crmsnorm': 3e-6}  # its square of a sum rounds more: 1.4e-6 seen


def batch(step: int, order: int) -> dict[str, np.ndarray]:
    """Half of the tokens random, so that the loss stays well above 0; half repeat the last."""
    rng = np.random.default_rng((step, order))
    tokens = rng.integers(1, VOCAB, (8, 9), dtype=np.int32)
    tokens[:, 1::2] = tokens[:, :-1:2]
    return {'tokens': tokens, 'segments': np.ones_like(tokens)}


def sweep_of(changes):
    """(config, and for each run its start, Hyper and order of the text): the first one is plain."""
    config = tiny_config(BASE | SWEEP | changes)
    plain = program(config).hyper
    hypers = [plain, *(plain.replace(**{k: np.float32(v)}) for k, v in CHANGED.items())]
    hypers += [plain, plain]
    seeds = [0] * (len(hypers) - 2) + [1, 0]
    orders = [0] * (len(hypers) - 1) + [1]
    starts = [initial_state(config, seed) for seed in seeds]
    scaled = dataclasses.replace(config.scaling, init_scale=CHANGED['init_scale'])
    starts[1 + list(CHANGED).index('init_scale')] = initial_state(
        dataclasses.replace(config, scaling=scaled)
    )
    return config, starts, hypers, orders


def losses_together(config, how, starts, hypers, orders):
    mesh = make_mesh(config.mesh, jax.devices()[:1], runs=len(hypers))
    step = make_train_step(config, program(config).model, BOS)
    step = jax.jit(over_mesh(how, mesh, step), compiler_options=FAST)
    states, hypers, active, losses = stack(starts), stack(hypers), np.ones(len(hypers), bool), []
    for i in range(STEPS):
        batches = stack([batch(i, order) for order in orders])
        states, metrics = step(active, states, batches, hypers)
        losses.append(np.asarray(metrics['loss']))
    return np.array(losses), states


def losses_alone(config, start, hyper, order):
    state, losses = start, []
    for i in range(STEPS):
        state, metrics = program(config).step(state, batch(i, order), hyper)
        losses.append(np.asarray(metrics['loss']))
    return np.array(losses), state


@pytest.mark.parametrize('changes', ROWS, ids=lambda row: ''.join(f'{k}={row[k]}' for k in row))
def test_run_of_a_vmapped_sweep_is_the_run_alone(changes):
    config, starts, hypers, orders = sweep_of(changes)
    together, _ = losses_together(config, 'vmap', starts, hypers, orders)
    names = ['plain', *CHANGED, 'seed', 'order']
    matters = read_fields(config) | {'seed', 'order'}
    for run, name in enumerate(names):
        alone, _ = losses_alone(config, starts[run], hypers[run], orders[run])
        rtol = RTOL_OF_NORM.get(config.model.norm, RTOL[config.model.dtype])
        np.testing.assert_allclose(together[:, run], alone, rtol=rtol, atol=0, err_msg=name)
        assert np.array_equal(together[:, run], together[:, 0]) == (name not in matters), name


def test_loop_is_the_run_alone_to_the_bit():
    config, starts, hypers, orders = sweep_of({})
    together, states = losses_together(config, 'loop', starts, hypers, orders)
    for run in range(len(hypers)):
        alone, state = losses_alone(config, starts[run], hypers[run], orders[run])
        np.testing.assert_array_equal(together[:, run], alone)
        own = jax.tree.map(lambda leaf, run=run: leaf[run], states)
        jax.tree.map(np.testing.assert_array_equal, own, state)


def test_every_field_of_hyper_has_a_run():
    assert set(CHANGED) == set(Hyper.__dataclass_fields__)
