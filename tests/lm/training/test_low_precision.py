"""Products of few bits in a whole step. Equivalence: unrolled layers, remat, eight devices, several
runs in one program and a resumed run change nothing. Property: each recipe changes the logits and
learns; unrounded readouts and routers are the wide ones.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.resolve import update_recipe
from lm.devices.mesh import make_mesh, put_batch
from lm.devices.shardings import state_shardings
from lm.model.check import check
from lm.training.state import make_hyper
from modules.kernels.matmul.low_precision import LAYERS
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
from tests.modules.test_kernels import RECIPES

NVFP4 = {'kernels.matmul': 'nvfp4'}  # with every kind of rounding that there is
ELASTIC = {'kernels.matmul': 'simulated', 'kernels.w_format': 'int2|int8'}
BATCH = packed_batch(rows=16)


def one_step(changes, state=None):
    config = checked_config(changes)
    state = initial_state(config) if state is None else state
    return train_step(config)(state, BATCH, make_hyper(config))


@functools.cache
def after_two_steps(**changes):
    changes = NVFP4 | {f'model.{name}': value for name, value in changes.items()}
    state, _ = one_step(changes)
    return jax.device_get(one_step(changes, state))


@pytest.mark.full
def test_unrolling_and_remat_keep_the_step():
    """Losses, weights and keys. Catches a recomputed layer that rounds with another key."""
    changed = after_two_steps(scan_layers=False, remat='full')
    assert_trees_close(changed, after_two_steps(), rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_one_program_has_any_format():
    """Reference: a program for each format. Catches an operand, forward or backward, that keeps
    the format of the program, and a constant in place of a number.
    """
    changes = {'kernels.matmul': 'simulated', 'kernels.g_rounding': 'stochastic'}
    traced = train_step(checked_config(changes | {'kernels.traced_formats': True}))
    state, metrics = initial_state(checked_config(changes)), []
    for name in ('e4m3', 'e2m1', 'int6'):
        formats = {f'kernels.{operand}_format': name for operand in 'xwg'}
        config = checked_config(changes | formats)
        hyper = make_hyper(update_recipe(config, {'kernels.traced_formats': True}))
        shared = traced(state, BATCH, hyper)
        assert_trees_close(
            jax.device_get(shared),
            jax.device_get(train_step(config)(state, BATCH, make_hyper(config))),
            rtol=1e-4,
            atol=1e-5,
        )
        metrics.append(float(shared[1]['grad_norm']))
    assert len({*metrics}) == 3 and traced._cache_size() == 1


@pytest.mark.full
def test_keys_never_repeat():
    """The products of two layers in three steps of two microbatches: no key occurs twice."""
    config, keys = checked_config(NVFP4 | {'train.microbatches': 2}), []
    state = initial_state(config)
    for step in range(3):
        if step:
            state, _ = train_step(config)(state, BATCH, make_hyper(config))
        keys += [np.asarray(key) for key in jax.tree.leaves(state.stats[STATS]['layers'])]
    all_keys = [tuple(key) for layers in keys for key in layers.tolist()]
    assert len(all_keys) == len(set(all_keys)) > 3 * 2 * 5


@pytest.mark.full
@pytest.mark.parametrize('changes', [NVFP4, ELASTIC], ids=['nvfp4', 'elastic'])
def test_resumed_step_is_bitwise_equal(tmp_path, changes):
    """Resumes from a checkpoint of the first step. Catches keys that are not part of the state."""
    assert_resumed_step_is_equal(changes, BATCH, tmp_path)


SHARDED = {
    name: {'kernels.matmul': name} for name in ('fp8_tensorwise', 'deepseek_fp8', 'nvfp4', 'int8')
} | {'elastic': ELASTIC}
MESHES = (
    {'mesh.data': 8},
    {'mesh.data': 2, 'mesh.fsdp': 2, 'mesh.tensor': 2},
    {'mesh.data': 4, 'mesh.context': 2},
)


@pytest.mark.full
@pytest.mark.parametrize('name', SHARDED)
@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_eight_devices_match_one(name, mesh):
    """Loss and gradient norm: a scale is of the whole tensor and not of a shard, and random numbers
    do not depend on the mesh. Catches scales of shards.
    """
    config = checked_config(SHARDED[name] | mesh)
    devices, learner = make_mesh(config.mesh), tiny_learner(config)
    state = jax.device_put(initial_state(config), state_shardings(learner, devices))
    step = jit_train_step(learner, devices)
    _, metrics = step(state, put_batch(devices, BATCH), make_hyper(config))
    _, expected = one_step(SHARDED[name])
    for key in ('loss', 'grad_norm'):
        np.testing.assert_allclose(metrics[key], expected[key], rtol=2e-4)


@pytest.mark.full
@pytest.mark.parametrize('name', RECIPES)
def test_recipe_changes_step(name):
    """The loss and the gradient differ from the wide ones, by less than a tenth. Catches a recipe
    that no product uses.
    """
    _, wide = one_step({'model.n_layers': 1})
    _, rounded = one_step({'model.n_layers': 1, 'kernels.matmul': name})
    assert 1e-6 < abs(rounded['loss'] / wide['loss'] - 1) < 0.1
    assert 1e-5 < abs(rounded['grad_norm'] / wide['grad_norm'] - 1) < 0.5


@pytest.mark.full
def test_named_layers_stay_wide():
    """A step that rounds only one kind of layer has another loss for each kind, and than without
    rounding. Catches a layer that reads the name of another.
    """
    changes = {'model.n_layers': 1, 'model.mlp': 'moe', 'kernels.matmul': 'bitnet'}
    losses = {float(one_step(changes | {'kernels.matmul': 'auto'})[1]['loss'])}
    for rounded in LAYERS:
        wide = '+'.join(layers for layers in LAYERS if layers != rounded)
        losses.add(float(one_step(changes | {'kernels.wide_layers': wide})[1]['loss']))
    assert len(losses) == 1 + len(LAYERS)


@pytest.mark.full
@pytest.mark.parametrize('name', ['fp8_tensorwise', 'nvfp4', 'bitnet'])
def test_recipe_learns(name):
    """In 50 steps of text whose tokens repeat, at least 0.7 of the wide model's improvement."""
    wide, rounded = train_on_repeats({}), train_on_repeats({'kernels.matmul': name})
    improvement = wide[0] - np.mean(wide[-5:])
    assert improvement > 0.3
    assert rounded[0] - np.mean(rounded[-5:]) > 0.7 * improvement
    assert not np.array_equal(rounded, wide)


@pytest.mark.parametrize('name', RECIPES)
def test_recipe_has_no_idle_options(name):
    """Each recipe passes its own check: catches a recipe that sets an option without effect."""
    kernel = RECIPES[name]()
    for option in kernel.list_idle_options():
        assert vars(kernel)[option] == vars(RECIPES['simulated']())[option], option
    check(tiny_config({'kernels.matmul': name}))


@pytest.mark.full
def test_runs_in_one_program_have_their_own_scales():
    """Two runs of different sizes, mapped: each has the loss that it has alone."""
    config = checked_config({'kernels.matmul': 'fp8_tensorwise', 'model.n_layers': 1})
    step, hyper = train_step(config), make_hyper(config)
    states = [initial_state(config)]
    states.append(states[0].replace(params=jax.tree.map(lambda p: 3 * p, states[0].params)))
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    losses = jax.vmap(lambda state: step(state, BATCH, hyper)[1]['loss'])(stacked)
    expected = [step(state, BATCH, hyper)[1]['loss'] for state in states]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert abs(expected[0] - expected[1]) > 0.01


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'kernels.x_format': 'fp8'}, 'kernels.x_format: a format is eXmY .* got .fp8.'),
        ({'kernels.g_block': '8x16'}, 'kernels.g_block: a block is tensor, row .* got .8x16.'),
        ({'kernels.w_scale': 'mean'}, 'kernels.w_scale=mean is for ternary weights'),
        ({'kernels.x_format': 'e8m7'}, 'kernels.x_format=e8m7 .* set kernels.x_scale=none'),
        ({'kernels.g_format': 'wide', 'kernels.g_block': 'row'}, 'g_block=row has no effect with'),
        ({'kernels.backward': 'wide', 'kernels.g_format': 'e4m3'}, 'g_format=e4m3 has no effect'),
        ({'kernels.backward': 'saved', 'kernels.hadamard': 16}, 'hadamard=16 has no effect with'),
        ({'kernels.x_scale': 'none', 'kernels.x_block': 'row'}, 'x_block=row has no effect with'),
        ({'kernels.x_block': '32', 'kernels.real_products': True}, 'real_products=True has no'),
        ({f'kernels.{o}_format': 'wide' for o in 'xwg'}, 'rounds nothing: all formats are wide'),
        ({'kernels.wide_layers': 'attention+mlp+router+readout'}, 'rounds nothing'),
        (
            {'kernels.wide_layers': 'none', 'kernels.g_rounding': 'stochastic'},
            'rounds stochastically, which the readout cannot',
        ),
        (
            {'kernels.traced_formats': True, 'kernels.real_products': True},
            'traced_formats=True cannot be combined with kernels.real_products=True',
        ),
        (
            {'kernels.traced_formats': True, 'kernels.wide_layers': 'none'},
            'cannot be combined with a rounded readout',
        ),
        (
            {
                'kernels.traced_formats': True,
                'model.n_layers': 2,
                'model.pattern': 'softmax|softmax:matmul=auto',
            },
            'blocks of several kinds',
        ),
        (
            {'kernels.traced_formats': True, 'eval.suites': 'perplexity'},
            'cannot be combined with suites in training',
        ),
        ({'kernels.rounding': 'up'}, 'kernels.rounding must be one of nearest'),
        ({'kernels.hadamard': 12}, 'kernels.hadamard must be a power of two'),
        ({'kernels.wide_layers': 'head'}, 'kernels.wide_layers must be .*; got .head.'),
        ({'kernels.matmul': 'direct', 'kernels.x_block': 'row'}, 'x_block=row is not used by'),
        ({'optim.name': 'sophia'}, 'optim.name=sophia differentiates the gradient'),
        ({'optim.ghost_radius': 1.0}, 'optim.ghost_radius differentiates the logits'),
        ({'model.mlp': 'moe', 'mlp.dispatch': 'ragged'}, 'Choose kernels.matmul=direct'),
    ],
)
def test_conflicting_fields_are_refused(changes, message):
    """The error is raised before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        check(tiny_config({'kernels.matmul': 'simulated'} | changes))
