"""Sweeps through train.train_sweep and through the command: their files, refusals and recovery.

Equivalence: a cell of a sweep equals the same run alone; an interrupted sweep equals an
uninterrupted one.
"""

import contextlib
import functools
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

import train
from eval.load import load
from eval.suites.perplexity import perplexity
from lm.launch.command import parse_flags
from lm.record.workdir import open_workdir
from lm.run.wave import Wave
from lm.study.tables.results import TABLE
from lm.study.train import engines, groups
from lm.study.train.engines import parse_resources
from tests.commands import PATIENCE_SEC, log_path, start_sweep
from tests.sweep_helpers import (
    MODES,
    assert_close,
    base,
    before_step,
    cell_config,
    cell_folders,
    copy_workdir,
    curves,
    statuses,
    table,
    terminate_at,
    timeless,
    write_corpus,
)
from train import BAD_INPUT, DONE, SIGNALLED, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')

ROOT = Path(__file__).parent.parent
CELLS = (  # two groups of two, so that programs of one size and kind do for all tests
    {'optim.lr': 0.01, 'train.seed': 1},
    {'data.seed': 1, 'optim.b1': 0.5, 'train.steps': 12},
    {'train.log_every': 2},
    {'train.log_every': 2, 'scaling.init_scale': 2.0},
)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus'))


@pytest.fixture(scope='module')
def single_run_curves(corpus, tmp_path_factory):
    """Returns the rows of each cell trained by itself. How runs share a device does not affect one
    run.
    """
    folder = tmp_path_factory.mktemp('alone')
    tree = base(corpus)
    for i, changes in enumerate(CELLS):
        assert train.train(cell_config(tree, changes), folder / str(i)) == DONE
    return {json.dumps(changes): timeless(folder / str(i)) for i, changes in enumerate(CELLS)}


@pytest.fixture(scope='module')
def sweep_workdir(corpus, tmp_path_factory):
    """Returns a function from a run axis to the workdir of CELLS, which must not be written to."""

    @functools.cache
    def workdir(axis):
        folder = tmp_path_factory.mktemp('swept')
        assert train_sweep(base(corpus, kernels_run_axis=axis), CELLS, folder) == DONE
        return folder

    return workdir


def contents(workdir: Path) -> dict[Path, bytes]:
    """Returns the content of every file of the cells."""
    return {p: p.read_bytes() for p in sorted(workdir.glob('*/**/*')) if p.is_file()}


class TestACell:
    @pytest.mark.full
    def test_loop_cell_equals_single_run(self, sweep_workdir, single_run_curves):
        assert curves(sweep_workdir('loop')) == single_run_curves

    @pytest.mark.full
    def test_vmap_cell_matches_single_run(self, sweep_workdir, single_run_curves):
        cell_curves = curves(sweep_workdir('vmap'))
        assert cell_curves.keys() == single_run_curves.keys()
        for changes, rows in single_run_curves.items():
            assert_close(cell_curves[changes], rows)

    @pytest.mark.full
    @pytest.mark.parametrize('axis', MODES)
    def test_cell_evaluates_to_recorded_loss(self, axis, sweep_workdir):
        """Each checkpoint holds the weights of its own run: tests the first and the last."""
        first, *_, last = cell_folders(sweep_workdir(axis)).values()
        for folder in (first, last):
            recorded = json.loads((folder / 'summary.json').read_text())
            validation_ce = perplexity(load(folder)).numbers['validation_ce']
            assert validation_ce == pytest.approx(recorded['validation_ce'], rel=1e-6)

    @pytest.mark.full
    @pytest.mark.default_rows('loop')
    @pytest.mark.parametrize('axis', MODES)
    def test_cell_stops_at_its_last_step(self, axis, sweep_workdir):
        assert [
            (record['status'], record['step'], record['ce'] > 0)
            for record in table(sweep_workdir(axis))
        ] == [('done', steps, True) for steps in (8, 12, 8, 8)]


class TestTheSameCommandAgain:
    def test_plan_flag_trains_nothing(self, sweep_workdir, corpus, tmp_path, monkeypatch):
        workdir = copy_workdir(sweep_workdir('loop'), tmp_path / 'again')
        before, table_before = contents(workdir), table(workdir)
        monkeypatch.setattr(groups, 'Program', lambda *_: pytest.fail('made a program'))
        (workdir / TABLE).unlink()
        assert train_sweep(base(corpus), CELLS, workdir) == DONE
        assert contents(workdir) == before and table(workdir) == table_before
        assert (workdir / TABLE).exists()

    def test_cells_from_other_code_are_counted_once(
        self, sweep_workdir, corpus, tmp_path, capsys, request
    ):
        workdir = copy_workdir(sweep_workdir('loop'), tmp_path / 'again')
        edited = request.getfixturevalue('edited_sources')  # from now on
        capsys.readouterr()
        assert train_sweep(base(corpus), CELLS, workdir) == DONE
        printed = ' '.join(capsys.readouterr().out.split())
        note = 'NOTE: of 4 finished cells, trained by other code: 4 by '
        assert printed.count('other code') == 1 == printed.count(note)
        assert f'the code is now {edited}. ' in printed

    @pytest.mark.full
    def test_resumed_cells_from_other_code_are_counted(
        self, sweep_workdir, corpus, tmp_path, monkeypatch, capsys, request
    ):
        with monkeypatch.context() as patch:
            before_step(patch, fail_at(7))
            assert train_sweep(base(corpus), CELLS, tmp_path) == BAD_INPUT
        request.getfixturevalue('edited_sources')
        capsys.readouterr()
        assert train_sweep(base(corpus), CELLS, tmp_path) == DONE
        printed = ' '.join(capsys.readouterr().out.split())
        assert printed.count('NOTE: other code started some of these runs: 2 by ') == 1
        assert printed.count('NOTE: of 2 finished cells, trained by other code: 2 by ') == 1
        assert printed.count('other code') == 2
        assert curves(tmp_path) == curves(sweep_workdir('loop'))

    @pytest.mark.full
    def test_other_axes_train_only_new_cells(
        self, sweep_workdir, single_run_curves, corpus, tmp_path, monkeypatch
    ):
        workdir = copy_workdir(sweep_workdir('loop'), tmp_path / 'extended')
        before, trained = contents(workdir), []
        before_step(monkeypatch, lambda wave: trained.append([s.recipe for s in wave.slots]))
        new_cells = [{'optim.lr': 0.02}, {'optim.lr': 0.04}]
        assert train_sweep(base(corpus), [*new_cells, CELLS[1]], workdir) == DONE
        assert trained == [[cell_config(base(corpus), changes) for changes in new_cells]] * 8
        assert before.items() <= contents(workdir).items()
        assert curves(workdir).items() > single_run_curves.items()
        groups = {record['cell']: record['group'] for record in table(workdir)}
        folders = cell_folders(workdir)
        cell_groups = [
            groups[folders[json.dumps(changes)].name] for changes in (*new_cells, *CELLS)
        ]
        assert cell_groups == [0, 0, None, 0, None, None]
        assert statuses(workdir) == ['done'] * 6

    @pytest.mark.full
    def test_failed_cells_are_retried(self, sweep_workdir, corpus, tmp_path, monkeypatch, capsys):
        """Failed cells resume from their checkpoints, with the results of a sweep that did not
        fail.
        """
        with monkeypatch.context() as patch:
            before_step(patch, fail_at(7))
            assert train_sweep(base(corpus), CELLS, tmp_path) == BAD_INPUT
        assert capsys.readouterr().out.count('FAILED: RuntimeError: the device is on fire') == 2
        assert statuses(tmp_path) == ['failed', 'failed', 'done', 'done']
        assert train_sweep(base(corpus), CELLS, tmp_path) == DONE
        assert capsys.readouterr().out.count('resuming after step 4') == 2
        assert table(tmp_path) == table(sweep_workdir('loop'))
        assert curves(tmp_path) == curves(sweep_workdir('loop'))


def fail_at(step: int):
    """Raises an error at a step, only in the first group."""

    def act(wave: Wave) -> None:
        log_every = wave.experiment.recipe.train.log_every
        if log_every == 1 and wave.slots[0].journal.step == step - 1:
            raise RuntimeError('the device is on fire')

    return act


class TestAFailure:
    def test_failed_group_leaves_the_others(self, sweep_workdir, corpus, tmp_path, capsys):
        """One group needs more text than there is."""
        short = [{'data.epochs': 1, 'train.steps': steps} for steps in (8, 5000)]
        assert train_sweep(base(corpus), [*short, *CELLS[2:]], tmp_path) == BAD_INPUT
        records = table(tmp_path)
        assert [record['status'] for record in records] == ['failed', 'failed', 'done', 'done']
        assert all('Set data.epochs=' in record['reason'] for record in records[:2])
        assert [record['ce'] for record in records[2:]] == [
            record['ce'] for record in table(sweep_workdir('loop'))[2:]
        ]
        stdout = capsys.readouterr().out
        assert 'FAILED: ValueError' in stdout and '2 of 4 done, 2 failed' in stdout

    @pytest.mark.full
    def test_unopenable_cell_leaves_its_group(self, sweep_workdir, corpus, tmp_path, capsys):
        """A file has the name of a cell's folder."""
        name = cell_folders(sweep_workdir('loop'))[json.dumps(CELLS[0])].name
        (tmp_path / name).write_text('in the way')
        assert train_sweep(base(corpus), CELLS, tmp_path) == BAD_INPUT
        assert f'workdir {tmp_path / name} cannot be written' in capsys.readouterr().out
        assert statuses(tmp_path)[1:] == ['done', 'done', 'done']
        assert (tmp_path / name).read_text() == 'in the way'

    @pytest.mark.full
    def test_cell_held_by_another_process_is_skipped(
        self, sweep_workdir, corpus, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.setattr('lm.record.workdir.PATIENCE_SEC', 0.0)
        workdir, cell = copy_workdir(sweep_workdir('loop'), tmp_path / 'shared'), CELLS[0]
        folder = cell_folders(workdir)[json.dumps(cell)]
        (folder / 'summary.json').unlink()
        before = contents(workdir)
        with open_workdir(folder, cell_config(base(corpus), cell), continue_changed=False):
            assert train_sweep(base(corpus), CELLS, workdir) == BAD_INPUT
        assert f'{folder.name} skipped: another process is training in' in capsys.readouterr().out
        assert contents(workdir) == before
        assert train_sweep(base(corpus), CELLS, workdir) == DONE
        assert table(workdir) == table(sweep_workdir('loop'))

    def test_cell_ended_elsewhere_is_not_retrained(
        self, sweep_workdir, corpus, tmp_path, monkeypatch
    ):
        workdir, cell = copy_workdir(sweep_workdir('loop'), tmp_path / 'shared'), CELLS[0]
        summary = cell_folders(workdir)[json.dumps(cell)] / 'summary.json'
        text = summary.read_text()
        summary.unlink()
        held = contextlib.ExitStack()
        held.enter_context(open_workdir(summary.parent, cell_config(base(corpus), cell), False))
        held.callback(summary.write_text, text)  # before it lets go
        programs = []
        monkeypatch.setattr(groups, 'Program', lambda *setting: programs.append(setting))
        threading.Timer(1.0, held.close).start()
        assert train_sweep(base(corpus), CELLS, workdir) == DONE and not programs
        assert table(workdir) == table(sweep_workdir('loop'))


class TestRefused:
    def test_sweep_refuses_single_run_workdir(self, corpus, tmp_path):
        tree = base(corpus, train_steps=1)
        assert train.train(cell_config(tree, {}), tmp_path) == DONE
        with pytest.raises(ValueError, match='contains a single run; use another --workdir'):
            train_sweep(tree, {'optim.lr': (0.1, 0.2)}, tmp_path)

    def test_sweep_workdir_for_single_run(self, sweep_workdir, corpus):
        with pytest.raises(ValueError, match='contains a sweep; use another --workdir'):
            train.train(cell_config(base(corpus), {}), sweep_workdir('loop'))

    def test_other_base_config_is_refused_with_differences(self, sweep_workdir, corpus):
        other_base = base(corpus, optim_weight_decay=0.2, data_batch_size=16)
        before = contents(sweep_workdir('loop'))
        with pytest.raises(ValueError, match=r'optim\.weight_decay: 0\.1 -> 0\.2') as error:
            train_sweep(other_base, {'optim.lr': (0.1, 0.2)}, sweep_workdir('loop'))
        assert 'data.batch_size: 8 -> 16' in str(error.value)
        assert 'model.' not in str(error.value) and '--continue_changed' in str(error.value)
        assert contents(sweep_workdir('loop')) == before

    def test_unknown_engine_with_the_nearest(self, corpus, tmp_path):
        with pytest.raises(ValueError, match=r"--engine must be one of .*Did you mean 'local'"):
            train_sweep(base(corpus), {'optim.lr': (0.1,)}, tmp_path / 'x', engine='locla')
        assert not (tmp_path / 'x').exists()

    def test_axis_without_effect_is_refused(self, corpus, tmp_path):
        with pytest.raises(ValueError, match=r'decay_fraction=0\.1 is not used by'):
            train_sweep(base(corpus), {'optim.decay_fraction': (0.1, 0.2)}, tmp_path / 'x')
        assert not (tmp_path / 'x').exists()

    def test_batch_not_divisible_by_devices(self, corpus, tmp_path):
        with pytest.raises(ValueError, match=r'data\.batch_size must be a multiple'):
            train_sweep(base(corpus, mesh_data=8), {'data.batch_size': (8, 12)}, tmp_path / 'x')

    @pytest.mark.parametrize('text', ['GPU', 'GPU=one', 'GPU=1=2', ''])
    def test_nonnumeric_resources_are_refused(self, text):
        with pytest.raises(ValueError, match='--resources must be NAME=NUMBER, as in CPU=2,GPU=1'):
            parse_resources(['CPU=2', text])
        assert parse_resources(['CPU=2', 'GPU=0.5']) == {'CPU': 2, 'GPU': 0.5}

    def test_negative_runs_at_once_is_refused(self, capsys):
        with flagsaver.flagsaver(), pytest.raises(SystemExit) as stopped:
            parse_flags(['train.py', '--runs_at_once=-1'])
        assert stopped.value.code == BAD_INPUT
        assert 'runs_at_once' in capsys.readouterr().err
        assert flags.FLAGS['runs_at_once'].value == 0


@pytest.mark.full
def test_sigterm_saves_all_runs_for_resuming(sweep_workdir, corpus, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        before_step(patch, terminate_at(7))
        assert train_sweep(base(corpus), CELLS, tmp_path) == SIGNALLED + signal.SIGTERM
    assert 'SIGTERM: stopped. Run the same command to resume.' in capsys.readouterr().out
    for changes in CELLS[:2]:
        folder = cell_folders(tmp_path)[json.dumps(changes)]
        assert (folder / 'checkpoints' / '7').is_dir()
        assert timeless(folder)[-1]['step'] == 7
    assert statuses(tmp_path) == ['stopped', 'stopped', 'waiting', 'waiting']
    assert train_sweep(base(corpus), CELLS, tmp_path) == DONE
    assert capsys.readouterr().out.count('resuming after step 7') == 2
    resumed, whole = table(tmp_path), table(sweep_workdir('loop'))
    steps, whole_steps = (
        [json.loads(record.pop('checkpoints')) for record in records]
        for records in (resumed, whole)
    )
    assert steps[:2] == [[7, 8], [8, 12]]
    assert steps[2:] == whole_steps[2:]  # of those that had not begun
    assert resumed == whole
    assert curves(tmp_path) == curves(sweep_workdir('loop'))


def test_bad_input_gives_one_line(corpus, tmp_path):
    sweep = {'optim.lrr': (0.003, 0.01)}
    process = start_sweep(tmp_path / 'x', corpus, sweep)
    assert process.wait(timeout=PATIENCE_SEC) == BAD_INPUT and not (tmp_path / 'x').exists()
    assert log_path(tmp_path / 'x').read_text() == (
        "error: sweep axis 'optim.lrr' is not a config field. Did you mean 'optim.lr'?\n"
    )


FOR_SWEEPS = '--engine, --runs_at_once and --resources apply only to'


@pytest.mark.parametrize(
    'flag_values', [{'engine': 'ray'}, {'runs_at_once': 2}, {'resources': ['CPU=1']}]
)
def test_sweep_flags_are_refused_for_single_run(flag_values):
    """The flags would be ignored silently."""
    with flagsaver.flagsaver():
        parse_flags(['train.py'])
        assert engines.read_sweep_flags(False)
        for name, value in flag_values.items():
            flags.FLAGS[name].value = value
        with pytest.raises(ValueError, match=FOR_SWEEPS):
            engines.read_sweep_flags(False)


@pytest.mark.full
def test_command_refuses_sweep_flags_for_single_run(tmp_path):
    command = [sys.executable, 'train.py', '--config=configs/default.py', '--runs_at_once=2']
    done = subprocess.run(
        [*command, f'--workdir={tmp_path}/x'], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == BAD_INPUT and not (tmp_path / 'x').exists()
    assert done.stderr.startswith(f'error: {FOR_SWEEPS}')
