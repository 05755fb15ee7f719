"""Equivalence: a function mapped over runs is that function of each run, wherever the runs lie.

Contract: what every layout of the runs of a program promises.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.fields import FIELDS, MeshConfig
from lm.devices.mesh import (
    batch_sharding,
    make_mesh,
    param_sharding,
    replicated_sharding,
    stacked_sharding,
)
from lm.devices.run_axis import RUN_AXES, SINGLE, loop, make_layout, select_run_axis
from modules.parallel.axes import BATCH
from modules.params import ParamSpec

R = 8
ATOL = 1e-6  # of float32 sums of a few terms of size 1, added in another order


def function(shared, weights, scale):
    """A product with a sum over rows, which lie over `data`, and a second result."""
    return {'y': jnp.tanh(shared @ weights) * scale, 'total': jnp.sum(shared) * scale}


def arguments():
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(4, 3)).astype(np.float32)
    weights = rng.normal(size=(R, 3, 5)).astype(np.float32)
    return shared, weights, np.linspace(0.5, 2.0, R, dtype=np.float32)


def mapped(how, mesh, active):
    shared, weights, scale = arguments()
    run = stacked_sharding(replicated_sharding(mesh))
    many = jax.jit(
        RUN_AXES[how](mesh, function, n_shared=1),
        in_shardings=(batch_sharding(mesh), run, run, run),
        out_shardings=run,
    )
    return many(shared, active, weights, scale)


@pytest.mark.parametrize('how', RUN_AXES)
@pytest.mark.parametrize(('run', 'data'), [(1, 1), (4, 1), (8, 1), (4, 2), (1, 4)])
def test_each_run_has_its_own_result(how, run, data):
    mesh = make_mesh(MeshConfig(data=data, run=run), runs=R)
    result = mapped(how, mesh, np.ones(R, bool))
    assert result['y'].sharding.spec == stacked_sharding(replicated_sharding(mesh)).spec
    shared, weights, scale = arguments()
    for i in range(R):
        own = function(shared, weights[i], scale[i])
        for name, value in own.items():
            np.testing.assert_allclose(result[name][i], value, rtol=1e-6, atol=ATOL)


@pytest.mark.parametrize(('run', 'data'), [(1, 1), (4, 1), (4, 2)])
def test_loop_leaves_out_runs_that_are_not_active(run, data):
    """Also where the devices have unequal numbers of them, of which one has none."""
    mesh = make_mesh(MeshConfig(data=data, run=run), runs=R)
    active = np.isin(np.arange(R), (1, 4, 5, 7))
    every, some = (mapped('loop', mesh, a) for a in (np.ones(R, bool), active))
    for name in every:
        np.testing.assert_array_equal(some[name][active], every[name][active])
        assert not np.any(some[name][~active])


def test_loop_does_not_compute_what_is_left_out():
    """Counted by a callback: a mask over computed results would call it for every run."""
    calls = []

    def counted(x):
        jax.debug.callback(lambda: calls.append(1))
        return x

    mesh = make_mesh(MeshConfig(data=1, run=1), runs=R)
    active = np.arange(R) < 3
    jax.block_until_ready(jax.jit(loop(mesh, counted))(active, np.ones(R)))
    jax.effects_barrier()
    assert len(calls) == 3


@pytest.mark.parametrize('how', RUN_AXES)
def test_a_run_that_is_not_finite_leaves_the_others_as_they_were(how):
    mesh = make_mesh(MeshConfig(data=1, run=1), runs=R)
    many = jax.jit(RUN_AXES[how](mesh, function, n_shared=1))
    shared, weights, scale = arguments()
    active = np.ones(R, bool)
    clean = many(shared, active, weights, scale)
    weights[2] = np.nan
    broken = many(shared, active, weights, scale)
    assert np.isnan(broken['y'][2]).all()
    others = np.arange(R) != 2
    np.testing.assert_array_equal(broken['y'][others], clean['y'][others])


def test_sharding_over_runs_puts_the_run_first():
    mesh = make_mesh(MeshConfig(data=2, run=4), runs=R)
    spec = ParamSpec('hidden', ('embed', 'mlp'), ('embed',))
    assert tuple(stacked_sharding(param_sharding(mesh, spec, (4, 4))).spec) == ('run', None, None)
    assert tuple(stacked_sharding(batch_sharding(mesh)).spec) == ('run', BATCH)


def test_auto_names_a_row_by_platform():
    assert select_run_axis('auto', 'cpu') == 'loop'
    assert select_run_axis('auto', 'tpu') == select_run_axis('auto', 'gpu') == 'vmap'
    assert select_run_axis('vmap', 'cpu') == 'vmap'
    assert set(FIELDS['kernels.run_axis'].option.choices) == {'auto', *RUN_AXES}


STATE = {'w': jax.ShapeDtypeStruct((3, 5), jnp.float32)}  # of one run


class TestLayout:
    """Alone there is one run, stacked there are R."""

    @pytest.fixture(params=[SINGLE, *RUN_AXES])
    def laid(self, request):
        """(layout, number of slots)."""
        mesh = make_mesh(MeshConfig(data=1, run=1))
        found = make_layout(
            request.param, mesh, jax.tree.map(lambda _: replicated_sharding(mesh), STATE)
        )
        return found, 1 if request.param == SINGLE else R

    def test_takes_out_what_was_put_in(self, laid):
        laid, slots = laid
        states = laid.make_buffer(STATE, slots)
        for slot in range(slots):
            states = laid.put(states, {'w': jnp.full((3, 5), slot + 1.0)}, slot)
        assert states['w'].shape == laid.shapes(STATE, slots)['w'].shape
        for slot in range(slots):
            np.testing.assert_array_equal(laid.take(states, slot)['w'], np.full((3, 5), slot + 1.0))

    def test_picks_what_was_stacked(self, laid):
        laid, slots = laid
        own = [{'x': np.float32(i), 'y': np.full(2, i)} for i in range(slots)]
        for stacked in (laid.stack(own), jax.device_get(laid.stack_scalars(own))):
            for slot in range(slots):
                jax.tree.map(np.testing.assert_array_equal, laid.pick(stacked, slot), own[slot])

    def test_computes_each_run_with_its_own(self, laid):
        laid, slots = laid
        shared, weights, scale = arguments()
        own = [(weights[i], scale[i]) for i in range(slots)]
        result = jax.jit(laid.map_runs(function, n_shared=1))(
            shared, np.ones(slots, bool), *(laid.stack(column) for column in zip(*own, strict=True))
        )
        for slot, one in enumerate(own):
            wanted = function(shared, *one)
            for name, value in laid.pick(jax.device_get(result), slot).items():
                np.testing.assert_allclose(value, wanted[name], rtol=1e-6, atol=ATOL)


def test_a_config_cannot_name_the_layout_of_a_single_run():
    assert SINGLE not in RUN_AXES
