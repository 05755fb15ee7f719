"""Equivalence: a function mapped over runs equals the function of each run.

Contract: the promises of every layout of the runs of a program.
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
    """Returns a product with a sum over rows, which are cut over `data`, and a second output."""
    return {'y': jnp.tanh(shared @ weights) * scale, 'total': jnp.sum(shared) * scale}


def arguments():
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(4, 3)).astype(np.float32)
    weights = rng.normal(size=(R, 3, 5)).astype(np.float32)
    return shared, weights, np.linspace(0.5, 2.0, R, dtype=np.float32)


def map_function(axis_name, mesh, active):
    shared, weights, scale = arguments()
    run = stacked_sharding(replicated_sharding(mesh))
    many = jax.jit(
        RUN_AXES[axis_name](mesh, function, n_shared=1),
        in_shardings=(batch_sharding(mesh), run, run, run),
        out_shardings=run,
    )
    return many(shared, active, weights, scale)


@pytest.mark.parametrize('axis_name', RUN_AXES)
@pytest.mark.parametrize(('run', 'data'), [(1, 1), (4, 1), (8, 1), (4, 2), (1, 4)])
def test_each_run_equals_single_run(axis_name, run, data):
    mesh = make_mesh(MeshConfig(data=data, run=run), runs=R)
    outputs = map_function(axis_name, mesh, np.ones(R, bool))
    assert outputs['y'].sharding.spec == stacked_sharding(replicated_sharding(mesh)).spec
    shared, weights, scale = arguments()
    for i in range(R):
        expected = function(shared, weights[i], scale[i])
        for name, value in expected.items():
            np.testing.assert_allclose(outputs[name][i], value, rtol=1e-6, atol=ATOL)


@pytest.mark.parametrize(('run', 'data'), [(1, 1), (4, 1), (4, 2)])
def test_loop_skips_inactive_runs(run, data):
    """Devices may have unequal numbers of active runs, or none."""
    mesh = make_mesh(MeshConfig(data=data, run=run), runs=R)
    active = np.isin(np.arange(R), (1, 4, 5, 7))
    all_runs, active_runs = (map_function('loop', mesh, a) for a in (np.ones(R, bool), active))
    for name in all_runs:
        np.testing.assert_array_equal(active_runs[name][active], all_runs[name][active])
        assert not np.any(active_runs[name][~active])


def test_loop_does_not_compute_inactive_runs():
    """Counted by a callback: a mask over computed results would call it for every run."""
    calls = []

    def count_call(x):
        jax.debug.callback(lambda: calls.append(1))
        return x

    mesh = make_mesh(MeshConfig(data=1, run=1), runs=R)
    active = np.arange(R) < 3
    jax.block_until_ready(jax.jit(loop(mesh, count_call))(active, np.ones(R)))
    jax.effects_barrier()
    assert len(calls) == 3


@pytest.mark.parametrize('axis_name', RUN_AXES)
def test_non_finite_run_does_not_change_others(axis_name):
    mesh = make_mesh(MeshConfig(data=1, run=1), runs=R)
    many = jax.jit(RUN_AXES[axis_name](mesh, function, n_shared=1))
    shared, weights, scale = arguments()
    active = np.ones(R, bool)
    clean = many(shared, active, weights, scale)
    weights[2] = np.nan
    broken = many(shared, active, weights, scale)
    assert np.isnan(broken['y'][2]).all()
    is_other = np.arange(R) != 2
    np.testing.assert_array_equal(broken['y'][is_other], clean['y'][is_other])


def test_stacked_sharding_has_run_first():
    mesh = make_mesh(MeshConfig(data=2, run=4), runs=R)
    spec = ParamSpec('hidden', ('embed', 'mlp'), ('embed',))
    assert tuple(stacked_sharding(param_sharding(mesh, spec, (4, 4))).spec) == ('run', None, None)
    assert tuple(stacked_sharding(batch_sharding(mesh)).spec) == ('run', BATCH)


def test_auto_selects_run_axis_by_platform():
    assert select_run_axis('auto', 'cpu') == 'loop'
    assert select_run_axis('auto', 'tpu') == select_run_axis('auto', 'gpu') == 'vmap'
    assert select_run_axis('vmap', 'cpu') == 'vmap'
    assert set(FIELDS['kernels.run_axis'].option.choices) == {'auto', *RUN_AXES}


STATE = {'w': jax.ShapeDtypeStruct((3, 5), jnp.float32)}  # of one run


class TestLayout:
    """A single layout has one run, a stacked layout R."""

    @pytest.fixture(params=[SINGLE, *RUN_AXES])
    def laid_out(self, request):
        """Returns (layout, number of slots)."""
        mesh = make_mesh(MeshConfig(data=1, run=1))
        layout = make_layout(
            request.param, mesh, jax.tree.map(lambda _: replicated_sharding(mesh), STATE)
        )
        return layout, 1 if request.param == SINGLE else R

    def test_take_returns_put_state(self, laid_out):
        layout, slots = laid_out
        states = layout.make_buffer(STATE, slots)
        for slot in range(slots):
            states = layout.put(states, {'w': jnp.full((3, 5), slot + 1.0)}, slot)
        assert states['w'].shape == layout.shapes(STATE, slots)['w'].shape
        for slot in range(slots):
            np.testing.assert_array_equal(
                layout.take(states, slot)['w'], np.full((3, 5), slot + 1.0)
            )

    def test_pick_inverts_stack(self, laid_out):
        layout, slots = laid_out
        slot_values = [{'x': np.float32(i), 'y': np.full(2, i)} for i in range(slots)]
        for stacked in (
            layout.stack(slot_values),
            jax.device_get(layout.stack_scalars(slot_values)),
        ):
            for slot in range(slots):
                jax.tree.map(
                    np.testing.assert_array_equal, layout.pick(stacked, slot), slot_values[slot]
                )

    def test_maps_function_over_runs(self, laid_out):
        layout, slots = laid_out
        shared, weights, scale = arguments()
        run_arguments = [(weights[i], scale[i]) for i in range(slots)]
        outputs = jax.jit(layout.map_runs(function, n_shared=1))(
            shared,
            np.ones(slots, bool),
            *(layout.stack(column) for column in zip(*run_arguments, strict=True)),
        )
        for slot, slot_arguments in enumerate(run_arguments):
            expected = function(shared, *slot_arguments)
            for name, value in layout.pick(jax.device_get(outputs), slot).items():
                np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=ATOL)


def test_single_layout_is_no_run_axis():
    assert SINGLE not in RUN_AXES
