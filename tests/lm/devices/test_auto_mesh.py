"""mesh.axes=auto: its choice follows from bytes, and the bytes agree with the compiled programs."""

import functools
from types import SimpleNamespace

import jax
import pytest

from lm.devices import auto_mesh
from lm.devices.auto_mesh import (
    estimate_residual_bytes,
    estimate_sent_bytes,
    estimate_state_bytes,
    select_mesh,
)
from lm.devices.mesh import format_mesh, make_mesh, torus_shape
from lm.devices.shardings import abstract_state, batch_shapes, state_layout
from lm.run.program import Experiment, open_text
from lm.training.state import build_learner, make_hyper
from tests.helpers import VOCAB, jit_train_step, tiny_config

WIDE = {'model.n_heads': 8, 'model.d_model': 64, 'model.d_ff': 128, 'data.batch_size': 16}
LOTS = 10**12


@functools.cache
def make_learner(**changes):
    config = tiny_config(WIDE | {'mesh.axes': 'auto'} | changes)
    return build_learner(config, VOCAB, 0, 'cpu')


def select_axes(memory=LOTS, runs=1, **changes):
    """Returns the selected mesh, and the lines that explain it."""
    learner = make_learner(**changes)
    mesh, lines = select_mesh(learner.recipe, learner, jax.devices(), memory, runs)
    return format_mesh(make_mesh(mesh, runs=runs)), lines


def estimate_bytes(**changes):
    """Returns the bytes that a device of data=8 holds for the state, and for residuals."""
    learner = make_learner(**changes)
    mesh = make_mesh(learner.recipe.mesh)
    return estimate_state_bytes(state_layout(learner), mesh), estimate_residual_bytes(learner) // 8


@pytest.mark.full
def test_rows_are_cut_if_all_fits():
    axes, lines = select_axes()
    assert axes == 'data=8' and len(lines) == 1 and 'mesh.axes=auto: data=8: ' in lines[0]


@pytest.mark.full
def test_parameters_are_cut_if_they_do_not_fit():
    state_bytes, residual_bytes = estimate_bytes()
    axes, lines = select_axes((0.6 * state_bytes + residual_bytes) / auto_mesh.USABLE_SHARE)
    assert 'fsdp=' in axes and 'tensor' not in axes and 'context' not in axes
    assert '  instead of data=8: ' in lines[1] and 'does not fit' in lines[1]
    # No more than needed: a longer fsdp sends more.
    assert int(axes.partition('fsdp=')[2]) < 8


@pytest.mark.full
def test_fewer_rows_than_devices():
    """Tokens or features are cut in this case."""
    assert select_axes(**{'data.batch_size': 2})[0] in ('data=2 tensor=4', 'data=2 context=4')


def test_explicit_axis_is_kept():
    assert 'tensor=2' in select_axes(**{'mesh.tensor': 2})[0]
    assert select_axes(**{'mesh.data': 2, 'mesh.context': 4})[0] == 'data=2 context=4'


def test_smallest_mesh_is_selected_with_note_if_nothing_fits():
    axes, lines = select_axes(1)
    assert 'NOTE: ' in lines[-1] and 'may not fit' in lines[-1]
    assert 'data' not in axes


@pytest.mark.full
def test_runs_side_by_side_get_fewest_devices():
    state_bytes, residual_bytes = estimate_bytes()
    assert select_axes(runs=8)[0] == 'run=8'
    limit = (0.6 * state_bytes + 8 * residual_bytes) / auto_mesh.USABLE_SHARE
    axes, _ = select_axes(limit, runs=8)
    assert axes in ('run=4 fsdp=2', 'run=2 fsdp=4')


def test_auto_raises_if_no_mesh_exists():
    with pytest.raises(ValueError, match=r'auto finds no valid mesh for 8 devices: mesh\.data=3 '):
        select_axes(**{'mesh.data': 3})


def test_sent_bytes_follow_closed_form():
    """Uses a model of known sizes: a wrong factor could hide among thousands of parameters."""
    learner = make_learner()
    config = learner.recipe
    n = sum(leaf.size for leaf in jax.tree.leaves(learner.description.shapes))

    def sent_bytes(**sizes):
        mesh = make_mesh(tiny_config(WIDE | {f'mesh.{a}': s for a, s in sizes.items()}).mesh)
        return estimate_sent_bytes(config, learner, mesh)

    rows = 16 * 8 * 64 * 4  # [B, T, D] in float32
    assert sent_bytes(data=8) == pytest.approx(2 * 4 * n * 7 / 8)
    assert sent_bytes(data=1, fsdp=8) == pytest.approx(3 * 4 * n * 7 / 8)
    assert sent_bytes(data=1, tensor=8) == pytest.approx(8 * rows * 7 / 8 * 2)
    kv = config.model.n_kv_heads / config.model.n_heads
    gathered = 6 * rows / 4 * kv * 3 * 2
    assert sent_bytes(data=2, context=4) == pytest.approx(2 * 4 * n * 7 / 8 + gathered / 2)


@pytest.mark.full
def test_whole_torus_doubles_fsdp_traffic(monkeypatch):
    state_bytes, residual_bytes = estimate_bytes()
    limit = (
        (state_bytes / 8 + residual_bytes) / auto_mesh.USABLE_SHARE * 1.02
    )  # the state of eight parts
    assert select_axes(limit)[0] == 'fsdp=8'
    learner, mesh = make_learner(), make_mesh(tiny_config({'mesh.data': 1, 'mesh.fsdp': 8}).mesh)
    before = estimate_sent_bytes(learner.recipe, learner, mesh)
    monkeypatch.setattr(auto_mesh, 'torus_shape', lambda devices: [2, 4])
    assert estimate_sent_bytes(learner.recipe, learner, mesh) == pytest.approx(2 * before)


def test_torus_shape_follows_coordinates():
    tpus = [SimpleNamespace(platform='tpu', coords=(x, y, 0)) for x in range(4) for y in range(2)]
    assert (
        torus_shape(tpus) == [4, 2]
        and torus_shape(tpus[::2]) == [4]
        and torus_shape(jax.devices()) == []
    )


@pytest.mark.full
@pytest.mark.parametrize('changes', [{}, {'model.remat': 'full'}, {'train.microbatches': 2}])
def test_estimated_bytes_agree_with_compiler(changes):
    """Uses a wide batch, whose activations are most of a step's memory. XLA keeps less than layers
    do, and needs more for temporaries.
    """
    sizes = {'data.batch_size': 64, 'data.seq_len': 64, 'model.n_layers': 4} | changes
    learner = make_learner(**sizes)
    mesh = make_mesh(learner.recipe.mesh)
    hyper = make_hyper(learner.recipe)
    state = abstract_state(learner, mesh)
    step = jit_train_step(learner, mesh).lower(state, batch_shapes(learner.recipe), hyper).compile()
    report = step.memory_analysis()
    gradients = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params))
    state_bytes = estimate_state_bytes(state_layout(learner), mesh) - gradients
    assert report.alias_size_in_bytes == pytest.approx(state_bytes, rel=0.02)
    ratio = estimate_residual_bytes(learner) / 8 / (report.temp_size_in_bytes - gradients)
    assert 0.7 < ratio < 1.4


def test_run_prints_selected_mesh(corpus):
    lines = []
    config = tiny_config(WIDE | corpus | {'mesh.axes': 'auto'})
    experiment = Experiment(config, open_text(config, lines.append), lines.append)
    assert format_mesh(experiment.mesh) == 'data=8'
    assert any(line.startswith('mesh.axes=auto: data=8: ') for line in lines)
