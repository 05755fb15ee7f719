"""Equivalence: the program of a run alone is its step: no run axis, and no copy of its state."""

import dataclasses
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.devices.shardings import batch_shapes
from lm.launch.terminal import CellTerminal, Terminal
from lm.record.metrics import replace_non_finite
from lm.run import program as program_of_runs
from lm.run.program import Experiment, Program
from lm.run.runs import RunSpec
from lm.run.wave import Wave
from lm.training.state import make_hyper
from modules.kernels.attention import ATTENTION_KERNELS
from tests.helpers import jit_train_step
from tests.sweep_helpers import base, changed, silent_experiment, write_corpus


@pytest.mark.parametrize(
    ('again', 'shares', 'said'),
    [(200.0, [0.5, 0.75, 0.25], 'second'), (120.0, [0.5, None, None], 'unknown: 150 exceed 120, ')],
)
def test_no_run_is_faster_than_its_peak(monkeypatch, again, shares, said):
    """Catches an mfu above 100%: of a peak that was measured while others used the machine."""
    measured = iter([(again, 'second')])
    monkeypatch.setattr(
        program_of_runs,
        'peak_flops',
        lambda n, remeasure=False: next(measured) if remeasure else None,
    )
    mesh = SimpleNamespace(size=1)
    experiment = SimpleNamespace(mesh=mesh, peak=100.0, peak_source='first')
    found = [Experiment.utilisation(experiment, rate) for rate in (50.0, 150.0, 50.0)]
    assert replace_non_finite(found) == shares and experiment.peak_source.startswith(said)


@pytest.mark.parametrize(('mfu', 'said'), [(0.5, 'mfu 50.0%'), (math.nan, 'mfu unknown')])
def test_a_row_has_the_mfu_or_says_that_it_is_unknown(mfu, said):
    lines, terminal = [], Terminal()
    terminal.say = lines.append
    terminal.show_row(
        {'step': 1, 'loss': 2.0, 'tokens_per_sec': 9.0, 'step_sec': 1.0, 'mfu': mfu}, 2
    )
    assert f'tokens/s  {said}  ' in lines[0]


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    """Whose batches are cut over two devices."""
    corpus = write_corpus(tmp_path_factory.mktemp('corpus'))
    return changed(base(corpus, mesh_data=2, train_checkpoint_every=0), {})


@pytest.fixture(scope='module')
def program(config):
    return Program(silent_experiment(config))


@pytest.fixture
def wave(program, config, tmp_path):
    """Of one run that has not trained yet."""
    run = RunSpec(config, tmp_path, CellTerminal('alone', lambda text: None))
    opened = Wave(program, [run], size=1)
    opened.compile()
    opened.slots[0].journal.open()
    yield opened
    opened.close()


def instructions(compiled) -> str:
    """HLO without the metadata that says which line of Python each came from."""
    text = re.sub(r', metadata=\{[^}]*\}', '', compiled.as_text())
    return re.sub(
        r'\n(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?\n(?=\n)', '', text, flags=re.S
    )


def test_rows_with_too_many_documents_for_the_kernel_are_refused(program, monkeypatch):
    """Rows to train on, to evaluate and to diagnose."""
    row = dataclasses.replace(ATTENTION_KERNELS['blocked'], max_documents=lambda length: 2)
    monkeypatch.setitem(ATTENTION_KERNELS, 'blocked', row)
    monkeypatch.setattr(program, '_masks_documents', True)
    segments = np.array([[1, 1, 2, 3], [1, 2, 2, 0]])  # the last of each is a target alone
    assert set(program.stack_batches([{'segments': segments}])) == {'segments'}
    segments[1, 2] = 3
    batch = {'segments': segments}
    for put in (
        lambda: program.stack_batches([batch]),
        lambda: program.evaluate(batch, None, None, None),
        lambda: program.diagnose(batch, None, None, None),
    ):
        with pytest.raises(ValueError, match=r'blocked takes 2 documents, .* and one here has 3'):
            put()


@pytest.mark.full
def test_is_the_step_itself(program, config):
    """The same instructions and the same arguments donated."""
    experiment = program.experiment
    shapes = (
        experiment.state_shapes,
        batch_shapes(config),
        jax.eval_shape(lambda: make_hyper(config)),
    )
    plain = jit_train_step(experiment.learner, experiment.mesh).lower(*shapes).compile()
    alone = program.compile_step(1)
    assert instructions(alone) == instructions(plain)
    assert 'input_output_alias' in instructions(alone)
    assert alone.memory_analysis().argument_size_in_bytes == (
        plain.memory_analysis().argument_size_in_bytes
    )


@pytest.mark.full
def test_arrays_have_no_axis_more(program, wave):
    """Nor are they laid out otherwise than those of one run."""
    wanted = program.experiment.state_shapes
    for _ in range(2):
        for leaf, shape in zip(*map(jax.tree.leaves, (wave.states, wanted)), strict=True):
            assert (leaf.shape, leaf.sharding) == (shape.shape, shape.sharding)
        wave.dispatch()
    assert all(jnp.shape(leaf) == () for leaf in jax.tree.leaves((wave.hypers, wave._pending[1])))


@pytest.mark.full
def test_a_state_goes_in_and_out_without_a_copy(wave):
    """Catches a take that doubles the memory of a large model in each checkpoint."""
    saved = []
    wave.slots[0].journal.checkpoints.save = lambda state, *_: saved.append(state)
    wave.dispatch()
    wave.fetch_pending()
    wave.save_run(0)
    assert saved[0] is wave.states
    state = jax.tree.map(jnp.copy, wave.states)
    assert wave.program.put(wave.states, state, 0) is state


def test_the_state_before_a_step_is_donated(wave):
    before = wave.states
    wave.dispatch()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
