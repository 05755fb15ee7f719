"""Checkpoints that stay (train.checkpoint_steps): in runs, sweeps and buckets, after kills.

Property: whatever interrupts a run, it ends with the same checkpoints, each of which can be loaded.
"""

import contextlib
import re
import signal

import numpy as np
import pytest

from lm.inference.load import load
from lm.record.checkpoint import list_steps, read_meta
from lm.record.checkpoints import Checkpoints
from lm.storage.files import read_json
from modules.params import named_leaves
from tests.commands import tiny
from tests.killed import KilledBeforeStep
from tests.sweep_helpers import base, before_step, cell_folders, terminate_at, timeless
from train import DONE, SIGNALLED, train, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')
LOG = {'train_checkpoint_steps': 'log', 'train_keep_last': 1, 'train_keep_best': 0}
STEPS = [0, 1, 2, 4, 8, 12]  # of 12 steps; the last is kept as the newest


@pytest.fixture(scope='module')
def log_run(corpus, tmp_path_factory):
    """Returns the workdir of a run with the checkpoints of `LOG`; read only."""
    workdir = tmp_path_factory.mktemp('log_run') / 'run'
    assert train(tiny(corpus, **LOG), workdir) == DONE
    return workdir


def digests(workdir) -> dict[int, list[str]]:
    folder = workdir / 'checkpoints'
    return {step: read_meta(folder, step)['digests'] for step in list_steps(folder)}


def test_permanent_checkpoints_stay(log_run, whole, corpus):
    """They change neither the numbers of a run nor its name, and step 0 has no update."""
    assert list_steps(log_run / 'checkpoints') == STEPS
    assert timeless(log_run) == timeless(whole)
    first, second = (load(f'{log_run}@{step}') for step in (0, 1))
    assert (first.step, second.step) == (0, 1) and first.path == log_run / 'checkpoints' / '0'
    weights = [named_leaves(checkpoint.weights.params) for checkpoint in (first, second)]
    assert any(np.any(weights[0][path] != weights[1][path]) for path in weights[0])


def test_disk_use_is_said_before_training(corpus, tmp_path, capsys, monkeypatch):
    """5 stay beside 1 newest, each of three float32 copies of the weights."""
    monkeypatch.setattr('shutil.disk_usage', lambda path: type('', (), {'free': 10})())
    stop(3, tiny(corpus, **LOG), tmp_path)
    printed = ' '.join(capsys.readouterr().out.split())
    n = read_json(tmp_path / 'summary.json')['parameters']
    (line,) = re.findall(r'checkpoints: (\d+) stay .* at most (\d+), of ([\d.]+) MB each', printed)
    assert line[:2] == ('5', '6') and abs(float(line[2]) - 12 * n / 1e6) < 0.01
    assert 'has not enough space for these checkpoints' in printed


def stop(step, config, workdir) -> None:
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, terminate_at(step))
        assert train(config, workdir) == SIGNALLED + signal.SIGTERM


def kill(step, config, workdir, is_saved=True) -> None:
    """Trains until that step is to be made; the checkpoint in writing is complete or lost."""

    def act(wave):
        journal = wave.slots[0].journal
        if journal.step == step - 1:
            if is_saved:
                journal.checkpoints.wait()
            raise KilledBeforeStep

    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, act)
        if not is_saved:  # of the last one nothing arrives on the disk
            save = Checkpoints.save

            def save_others(checkpoints, state, meta, loss):
                if int(state.step) < step - 1:
                    save(checkpoints, state, meta, loss)

            patch.setattr(Checkpoints, 'save', save_others)
        with pytest.raises(KilledBeforeStep):
            train(config, workdir)


@pytest.mark.parametrize('is_saved', [pytest.param(True, marks=pytest.mark.full), False])
@pytest.mark.parametrize('step', [1, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 9))])
def test_killed_run_has_all_checkpoints(step, is_saved, log_run, corpus, tmp_path, monkeypatch):
    """Before step 1 with and without the checkpoint of step 0; none is saved twice."""
    config = tiny(corpus, **LOG)
    kill(step, config, tmp_path, is_saved)
    complete, saved, save = list_steps(tmp_path / 'checkpoints'), [], Checkpoints.save

    def record(checkpoints, state, meta, loss):
        saved.append(int(state.step))
        save(checkpoints, state, meta, loss)

    monkeypatch.setattr(Checkpoints, 'save', record)
    assert train(config, tmp_path) == DONE
    assert sorted([*complete, *saved]) == STEPS
    assert digests(tmp_path) == digests(log_run) and timeless(tmp_path) == timeless(log_run)


@pytest.mark.full
def test_later_command_removes_none(corpus, tmp_path):
    """Catches permanence that ends with the flag."""
    stop(6, tiny(corpus, **LOG), tmp_path)
    assert list_steps(tmp_path / 'checkpoints') == [0, 1, 2, 4, 6]
    later = {'train_checkpoint_steps': '7', 'train_keep_last': 1, 'train_keep_best': 0}
    assert train(tiny(corpus, **later), tmp_path) == DONE
    assert list_steps(tmp_path / 'checkpoints') == [0, 1, 2, 4, 7, 12]


@pytest.mark.parametrize(('changes', 'steps'), [({}, []), (LOG, [0])])
def test_stop_before_first_step_saves_only_step_0(changes, steps, corpus, tmp_path, monkeypatch):
    """A plain run has nothing to save yet, as before."""
    monkeypatch.setattr(
        'train.signals.catch_signals', lambda: contextlib.nullcontext([signal.SIGTERM])
    )
    assert train(tiny(corpus, **changes), tmp_path) == SIGNALLED + signal.SIGTERM
    assert list_steps(tmp_path / 'checkpoints') == steps


@pytest.mark.parametrize('mode', ['loop', pytest.param('vmap', marks=pytest.mark.full)])
def test_cells_keep_their_own_steps(mode, corpus, tmp_path):
    """The decay begins at another step in each cell of a program."""
    wsd = {'optim_schedule': 'warmup_stable_decay', 'train_checkpoint_steps': 'before_decay+1'}
    axes = {'optim.decay_fraction': (0.25, 0.5)}
    tree = base(corpus, **LOG | wsd | {'train_checkpoint_every': 0}, kernels_run_axis=mode)
    assert train_sweep(tree, axes, tmp_path / 'sweep') == DONE
    steps = {
        changes: list_steps(folder / 'checkpoints')
        for changes, folder in cell_folders(tmp_path / 'sweep').items()
    }
    assert steps == {
        '{"optim.decay_fraction": 0.25}': [1, 6, 8],
        '{"optim.decay_fraction": 0.5}': [1, 4, 8],
    }
