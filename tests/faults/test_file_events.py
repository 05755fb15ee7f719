"""Training killed at each of its file events: the same command ends with the same numbers.

Contract: one row for each kind of training.
"""

import contextlib
import dataclasses
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs import default
from lm.config.resolve import resolve
from lm.record.checkpoint import list_steps, read_meta
from lm.run import start
from lm.storage.files import read_json
from tests.commands import tiny
from tests.faults.test_kills import ARMS, TUNE
from tests.killed import dying, list_events
from tests.sweep_helpers import base, cell_folders, curves, table, timeless
from train import DONE, train, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')
RUN = {'train_checkpoint_every': 4, 'train_eval_every': 6}
SWEEP = {'optim.lr': (0.003, 0.01), 'train.log_every': (1, 2)}
NAMES = ('run', 'stages', 'branch', 'permanent checkpoints', 'sweep', 'tuned sweep')


@dataclasses.dataclass(frozen=True)
class Training:
    """command(workdir): trains, or resumes; collect(workdir): the records that may not differ."""

    command: Callable[[Path], int]
    collect: Callable[[Path], Any]


def read_run(workdir: Path) -> dict[str, Any]:
    summary = read_json(workdir / 'summary.json')
    status = {name: summary[name] for name in ('status', 'step', 'validation_ce')}
    return {'rows': timeless(workdir)} | status


def read_sweep_folder(workdir: Path) -> dict[str, Any]:
    runs = {name: read_run(folder) for name, folder in cell_folders(workdir).items()}
    return {'table': table(workdir), 'curves': curves(workdir), 'runs': runs}


@pytest.fixture(scope='module')
def trainings(corpus, tmp_path_factory):
    trunk = tmp_path_factory.mktemp('trunk') / 'trunk'
    assert train(tiny(corpus, **RUN), trunk) == DONE

    def make_run(**changes):
        config = tiny(corpus, **RUN | changes)
        return Training(lambda workdir: train(config, workdir), read_run)

    def make_sweep(axes, **options):
        tree = base(corpus, **RUN | {'train_steps': 8, 'train_eval_every': 4})
        return Training(
            lambda workdir: train_sweep(tree, axes, workdir, **options), read_sweep_folder
        )

    def train_branch(workdir):
        changes = {'train.branch_from': f'{trunk}@8', 'train.steps': 16}
        raw = default.get_config()
        raw.update_from_flattened_dict(changes)
        return train(resolve(start.merge_source_model(raw.to_dict(), changes, workdir)[0]), workdir)

    return {
        'run': make_run(),
        'stages': make_run(train_stages='0.5: seq_len=8; 1:'),
        'branch': Training(train_branch, read_run),
        'permanent checkpoints': make_run(train_checkpoint_steps='log', train_keep_last=1),
        'sweep': make_sweep(SWEEP),
        'tuned sweep': make_sweep(ARMS, tune=TUNE),
    }


def train_until_killed(training: Training, workdir: Path, at: int) -> str:
    """Trains until the event number `at`; returns that event, '' if there are not so many.

    Threads write some files, so that not every attempt has the same number of events.
    """
    before = {*threading.enumerate()}
    with dying(workdir, at) as events, contextlib.suppress(BaseException):
        training.command(workdir)
    deadline = time.monotonic() + 2
    for thread in {*threading.enumerate()} - before:  # which a kill ends
        threading.Thread.join(thread, timeout=max(0, deadline - time.monotonic()))
    return events[at - 1] if len(events) >= at else ''


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize('name', NAMES)
def test_killed_training_resumes(name, trainings, is_long, tmp_path):
    """The long form kills at every event, otherwise at three."""
    training, whole = trainings[name], tmp_path / 'whole'
    n = len(list_events(lambda: training.command(whole), whole))
    expected, kills = training.collect(whole), 0
    ats = (
        range(1, n + 1)
        if is_long
        else (n // 2,)
        if name == 'tuned sweep'
        else (2, n // 2, n * 9 // 10)
    )
    for at in ats:
        workdir = tmp_path / str(at)
        event = train_until_killed(training, workdir, at)
        kills += bool(event)
        assert training.command(workdir) == DONE, event
        assert training.collect(workdir) == expected, event
        # A kill in the last removal of an older checkpoint leaves it, or a part of it.
        for folder in whole.rglob('checkpoints'):
            for step in list_steps(folder):
                saved, resumed = (
                    read_meta(path, step)['digests']
                    for path in (folder, workdir / folder.relative_to(whole))
                )
                assert resumed == saved, event
        shutil.rmtree(workdir)
    assert kills > 0.95 * len(ats)
    print(f'{name}: {n} events, {kills} kills')
