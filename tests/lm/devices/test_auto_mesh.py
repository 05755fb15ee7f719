"""mesh.axes=auto: what it chooses follows from bytes, and the bytes are those of the programs."""

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
def learner_of(**changes):
    config = tiny_config(WIDE | {'mesh.axes': 'auto'} | changes)
    return build_learner(config, VOCAB, 0, 'cpu')


def words(memory=LOTS, runs=1, **changes):
    """The mesh that is chosen, and what is said."""
    learner = learner_of(**changes)
    mesh, said = select_mesh(learner.recipe, learner, jax.devices(), memory, runs)
    return format_mesh(make_mesh(mesh, runs=runs)), said


def needed_by(**changes):
    """What a device of data=8 holds, and what it keeps."""
    learner = learner_of(**changes)
    mesh = make_mesh(learner.recipe.mesh)
    return estimate_state_bytes(state_layout(learner), mesh), estimate_residual_bytes(learner) // 8


@pytest.mark.full
def test_rows_alone_where_all_fits():
    found, said = words()
    assert found == 'data=8' and len(said) == 1 and 'mesh.axes=auto: data=8: ' in said[0]


@pytest.mark.full
def test_parameters_are_cut_where_they_do_not_fit_beside_activations():
    held, kept = needed_by()
    found, said = words((0.6 * held + kept) / auto_mesh.USABLE_SHARE)
    assert 'fsdp=' in found and 'tensor' not in found and 'context' not in found
    assert '  data=8: ' in said[1] and 'does not fit' in said[1]
    # No more than needed: a longer fsdp sends more.
    assert int(found.partition('fsdp=')[2]) < 8


@pytest.mark.full
def test_fewer_rows_than_devices():
    """Tokens or features are cut then."""
    assert words(**{'data.batch_size': 2})[0] in ('data=2 tensor=4', 'data=2 context=4')


def test_an_axis_that_is_given_stays():
    assert 'tensor=2' in words(**{'mesh.tensor': 2})[0]
    assert words(**{'mesh.data': 2, 'mesh.context': 4})[0] == 'data=2 context=4'


def test_where_nothing_fits_the_least_is_taken_and_said():
    found, said = words(1)
    assert 'NOTE: ' in said[-1] and 'may not fit' in said[-1]
    assert 'data' not in found


@pytest.mark.full
def test_runs_side_by_side_get_as_few_devices_as_they_fit_on():
    held, kept = needed_by()
    assert words(runs=8)[0] == 'run=8'
    limit = (0.6 * held + 8 * kept) / auto_mesh.USABLE_SHARE
    found, _ = words(limit, runs=8)
    assert found in ('run=4 fsdp=2', 'run=2 fsdp=4')


def test_no_mesh_at_all():
    with pytest.raises(ValueError, match=r'auto finds no mesh of 8 devices: mesh\.data=3 '):
        words(**{'mesh.data': 3})


def test_what_is_sent_by_closed_form():
    """124 parameters in thousands would hide a factor: a model of known sizes."""
    learner = learner_of()
    config = learner.recipe
    n = sum(leaf.size for leaf in jax.tree.leaves(learner.description.shapes))

    def moved(**sizes):
        mesh = make_mesh(tiny_config(WIDE | {f'mesh.{a}': s for a, s in sizes.items()}).mesh)
        return estimate_sent_bytes(config, learner, mesh)

    rows = 16 * 8 * 64 * 4  # [B, T, D] in float32
    assert moved(data=8) == pytest.approx(2 * 4 * n * 7 / 8)
    assert moved(data=1, fsdp=8) == pytest.approx(3 * 4 * n * 7 / 8)
    assert moved(data=1, tensor=8) == pytest.approx(8 * rows * 7 / 8 * 2)
    kv = config.model.n_kv_heads / config.model.n_heads
    gathered = 6 * rows / 4 * kv * 3 * 2
    assert moved(data=2, context=4) == pytest.approx(2 * 4 * n * 7 / 8 + gathered / 2)


@pytest.mark.full
def test_a_whole_torus_is_not_given_to_fsdp(monkeypatch):
    held, kept = needed_by()
    limit = (held / 8 + kept) / auto_mesh.USABLE_SHARE * 1.02  # the state of eight parts
    assert words(limit)[0] == 'fsdp=8'
    learner, mesh = learner_of(), make_mesh(tiny_config({'mesh.data': 1, 'mesh.fsdp': 8}).mesh)
    before = estimate_sent_bytes(learner.recipe, learner, mesh)
    monkeypatch.setattr(auto_mesh, 'torus_shape', lambda devices: [2, 4])
    assert estimate_sent_bytes(learner.recipe, learner, mesh) == pytest.approx(2 * before)


def test_torus_of_devices():
    tpus = [SimpleNamespace(platform='tpu', coords=(x, y, 0)) for x in range(4) for y in range(2)]
    assert (
        torus_shape(tpus) == [4, 2]
        and torus_shape(tpus[::2]) == [4]
        and torus_shape(jax.devices()) == []
    )


@pytest.mark.full
@pytest.mark.parametrize('changes', [{}, {'model.remat': 'full'}, {'train.microbatches': 2}])
def test_bytes_are_those_that_the_compiler_reports(changes):
    """Of a wide batch, whose activations are most of what a step takes; XLA keeps less than layers
    do, and more for what is on the way.
    """
    sizes = {'data.batch_size': 64, 'data.seq_len': 64, 'model.n_layers': 4} | changes
    learner = learner_of(**sizes)
    mesh = make_mesh(learner.recipe.mesh)
    hyper = make_hyper(learner.recipe)
    state = abstract_state(learner, mesh)
    step = jit_train_step(learner, mesh).lower(state, batch_shapes(learner.recipe), hyper).compile()
    report = step.memory_analysis()
    gradients = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params))
    held = estimate_state_bytes(state_layout(learner), mesh) - gradients
    assert report.alias_size_in_bytes == pytest.approx(held, rel=0.02)
    ratio = estimate_residual_bytes(learner) / 8 / (report.temp_size_in_bytes - gradients)
    assert 0.7 < ratio < 1.4


def test_a_run_says_what_was_chosen(corpus):
    said = []
    config = tiny_config(WIDE | corpus | {'mesh.axes': 'auto'})
    experiment = Experiment(config, open_text(config, said.append), said.append)
    assert format_mesh(experiment.mesh) == 'data=8'
    assert any(line.startswith('mesh.axes=auto: data=8: ') for line in said)
