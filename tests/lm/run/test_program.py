"""Equivalence: the program of a single run is its step: no run axis, and no copy of its state."""

import dataclasses
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.devices.shardings import batch_shapes
from lm.launch.terminal import CellTerminal, Terminal, format_duration
from lm.record.metrics import replace_non_finite
from lm.run import program as program_of_runs
from lm.run.program import Experiment, Program
from lm.run.runs import RunSpec
from lm.run.wave import Wave
from lm.training.state import make_hyper
from modules.kernels.attention import ATTENTION_KERNELS
from tests.helpers import jit_train_step
from tests.sweep_helpers import base, cell_config, silent_experiment, write_corpus


@pytest.mark.parametrize(
    ('second_peak', 'shares', 'source'),
    [
        (200.0, [0.5, 0.75, 0.25], 'second'),
        (120.0, [0.5, None, None], 'unknown: a speed of 150 exceeds 120, '),
    ],
)
def test_utilisation_never_exceeds_peak(monkeypatch, second_peak, shares, source):
    """Catches an mfu above 100%, of a peak that was measured while others used the machine."""
    measured = iter([(second_peak, 'second')])
    monkeypatch.setattr(
        program_of_runs,
        'peak_flops',
        lambda n, dtype, remeasure=False: next(measured) if remeasure else None,
    )
    mesh = SimpleNamespace(size=1)
    recipe = SimpleNamespace(model=SimpleNamespace(dtype='float32'))
    experiment = SimpleNamespace(mesh=mesh, recipe=recipe, peak=100.0, peak_source='first')
    utilisations = [Experiment.utilisation(experiment, rate) for rate in (50.0, 150.0, 50.0)]
    assert replace_non_finite(utilisations) == shares and experiment.peak_source.startswith(source)


@pytest.mark.parametrize(('mfu', 'text'), [(0.5, 'mfu 50.0%'), (math.nan, 'mfu unknown')])
def test_row_shows_mfu_or_unknown(mfu, text):
    first, second = show_rows([1, 2], 4, mfu)
    assert first == 'step      1 of 4  loss 2.0000'
    assert second == f'step      2 of 4  loss 2.0000  9 tokens/s  {text}  4 s left'


def show_rows(steps, last_step, mfu=0.5):
    lines, terminal = [], Terminal()
    terminal.say = lines.append
    row = {'loss': 2.0, 'tokens_per_sec': 9.0, 'step_sec': 1.0, 'mfu': mfu}
    for step in steps:
        terminal.show_row({'step': step} | row, last_step, 2.0 * (last_step - step))
    return lines


def test_short_interval_shows_no_rate():
    """The first row contains the start, and the last may span few steps. Catches their rates."""
    lines = show_rows([1, 20, 40, 60, 64, 40], 64)
    assert ['tokens/s' in line for line in lines] == [False, True, True, True, False, False]
    assert [' left' in line for line in lines] == [False, True, True, True, False, False]


@pytest.mark.parametrize(
    ('seconds', 'text'), [(0.4, '0 s'), (59.4, '59 s'), (59.6, '1.0 min'), (5400, '1.5 h')]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    """Returns a config with batches that are cut over two devices."""
    corpus = write_corpus(tmp_path_factory.mktemp('corpus'))
    return cell_config(base(corpus, mesh_data=2, train_checkpoint_every=0), {})


@pytest.fixture(scope='module')
def program(config):
    return Program(silent_experiment(config))


@pytest.mark.parametrize(
    ('axis_name', 'suffixes'),
    [
        ('single', ['', '']),
        ('loop', [' for 1 run at a time (loop)', ' for 2 runs at a time (loop)']),
    ],
)
def test_each_compilation_is_printed_once(config, monkeypatch, axis_name, suffixes):
    lines: list[str] = []
    program = Program(silent_experiment(config), axis_name, lines.append)
    stub = SimpleNamespace(lower=lambda *_: SimpleNamespace(compile=lambda: 'compiled'))
    monkeypatch.setattr(program, '_step', stub)
    for slots in (1, 2, 1, 2):
        assert program.compile_step(slots) == 'compiled'
    assert lines == [f'compiled in 0.0 s{suffix}' for suffix in suffixes]


@pytest.fixture
def wave(program, config, tmp_path):
    """Yields a wave of one run that has not trained yet."""
    run = RunSpec(config, tmp_path, CellTerminal('alone', lambda text: None))
    open_wave = Wave(program, [run], size=1)
    open_wave.compile()
    open_wave.slots[0].journal.open()
    yield open_wave
    open_wave.close()


def instructions(compiled) -> str:
    """Returns the HLO without the metadata that maps it to lines of Python."""
    text = re.sub(r', metadata=\{[^}]*\}', '', compiled.as_text())
    return re.sub(
        r'\n(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?\n(?=\n)', '', text, flags=re.S
    )


def test_rows_with_too_many_documents_are_refused(program, monkeypatch):
    """Rows to train on, to evaluate and to diagnose."""
    row = dataclasses.replace(ATTENTION_KERNELS['blocked'], max_documents=lambda length: 2)
    monkeypatch.setitem(ATTENTION_KERNELS, 'blocked', row)
    monkeypatch.setattr(program, '_document_kernels', ['blocked'])
    segments = np.array([[1, 1, 2, 3], [1, 2, 2, 0]])  # the last of each is a target alone
    assert set(program.stack_batches([{'segments': segments}])) == {'segments'}
    segments[1, 2] = 3
    batch = {'segments': segments}
    for call in (
        lambda: program.stack_batches([batch]),
        lambda: program.evaluate(batch, None, None, None),
        lambda: program.diagnose(batch, None, None, None),
    ):
        with pytest.raises(
            ValueError, match=r'blocked supports at most 2 documents .* this row has 3'
        ):
            call()


@pytest.mark.full
def test_program_is_step_itself(program, config):
    """The instructions and the donated arguments are the same."""
    experiment = program.experiment
    shapes = (
        experiment.state_shapes,
        batch_shapes(config),
        jax.eval_shape(lambda: make_hyper(config)),
    )
    plain = jit_train_step(experiment.learner, experiment.mesh).lower(*shapes).compile()
    single = program.compile_step(1)
    assert instructions(single) == instructions(plain)
    assert 'input_output_alias' in instructions(single)
    assert single.memory_analysis().argument_size_in_bytes == (
        plain.memory_analysis().argument_size_in_bytes
    )


@pytest.mark.full
def test_arrays_have_no_run_axis(program, wave):
    """They are sharded as in a single run."""
    expected = program.experiment.state_shapes
    for _ in range(2):
        for leaf, shape in zip(*map(jax.tree.leaves, (wave.states, expected)), strict=True):
            assert (leaf.shape, leaf.sharding) == (shape.shape, shape.sharding)
        wave.dispatch()
    assert all(jnp.shape(leaf) == () for leaf in jax.tree.leaves((wave.hypers, wave._pending[1])))


@pytest.mark.full
def test_state_is_not_copied(wave):
    """Catches a take that doubles the memory of a large model in each checkpoint."""
    saved = []
    wave.slots[0].journal.checkpoints.save = lambda state, *_: saved.append(state)
    wave.dispatch()
    wave.fetch_pending()
    wave.save_run(0)
    assert saved[0] is wave.states
    state = jax.tree.map(jnp.copy, wave.states)
    assert wave.program.put(wave.states, state, 0) is state


@pytest.mark.full
def test_state_before_step_is_donated(wave):
    before = wave.states
    wave.dispatch()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
