"""Contract, with W&B offline: its files have each point of metrics.jsonl once."""

import time

import psutil
import pytest

from eval.sync.follower import Follower, send_all
from eval.sync.marks import file_name, read_mark
from eval.sync.to_wandb import Wandb, list_offline_files, read_points
from tests.eval.sync.fakes import FollowerKilled, begin, go_on, on_disk, write_run
from tests.eval.sync.programs import TRAIN, finish, kill_when, start

pytestmark = [pytest.mark.full, pytest.mark.xdist_group('wandb')]


def open_tracker():
    return Wandb('offline', 'evenkeel')


def read_back(folder):
    """Returns {(step, tag): value} of all sessions of the run; each point is there once."""
    (mark,) = folder.glob('sync-wandb-*.json')
    points = {}
    for path in list_offline_files(folder, read_mark(mark).run):
        for step, values in read_points(path):
            for tag, value in values.items():
                assert (step, tag) not in points, (step, tag)
                points[step, tag] = repr(float(value))
    return points


def assert_has_all(folder):
    assert read_back(folder) == on_disk(folder)


def test_run_is_sent_unchanged(tmp_path):
    """Sends infinities and NaN; resumes in another session; a file crosses blocks of its format."""
    tracker = open_tracker()
    write_run(tmp_path, 0, 400, 'stopped', device='2-core CPU')
    assert send_all(Follower(tmp_path, 'wandb', tracker, print))
    assert_has_all(tmp_path)
    begin(tmp_path, mesh=8)
    go_on(tmp_path, 390, 420)
    assert send_all(Follower(tmp_path, 'wandb', open_tracker(), print))
    assert_has_all(tmp_path)
    path, second_path = list_offline_files(
        tmp_path, read_mark(tmp_path / file_name('wandb', tracker.destination)).run
    )
    assert path.stat().st_size > 2 << 15 > second_path.stat().st_size
    content = path.read_bytes()
    assert b'optim.lr' in content and b'2-core CPU' in content


@pytest.mark.parametrize('call', [1, 12])
def test_killed_follower_sends_nothing_twice(tmp_path, monkeypatch, call):
    """Kills it before the first step, or between two steps; W&B's own process ends by itself."""
    write_run(tmp_path, 0, 20, 'stopped')
    tracker, calls, sessions = open_tracker(), [], []
    open_session = tracker.open

    def open_with_kill(*arguments):
        session = open_session(*arguments)
        sessions.append(session)
        log = session._run.log

        def log_or_kill(*values, **options):
            calls.append(options)
            if len(calls) == call:
                raise FollowerKilled
            log(*values, **options)

        monkeypatch.setattr(session._run, 'log', log_or_kill)
        return session

    tracker.open = open_with_kill
    with pytest.raises(FollowerKilled):
        send_all(Follower(tmp_path, 'wandb', tracker, print))
    sessions[0]._run.finish()
    go_on(tmp_path, 7, 25)
    assert send_all(Follower(tmp_path, 'wandb', open_tracker(), print))
    assert_has_all(tmp_path)


def list_processes(folder):
    """Returns W&B's processes that write in the folder."""
    processes = []
    for process in psutil.process_iter(['name']):
        if process.info['name'] and 'wandb-core' in process.info['name']:
            files = [open_file.path for open_file in process.open_files()]
            processes += [process] * any(path.startswith(str(folder)) for path in files)
    return processes


def test_killed_process_sends_everything_once(tmp_path):
    write_run(tmp_path, 0, 6000)
    flags = f'--workdir={tmp_path}', '--to=wandb', '--uri=offline'
    follower = start('-m', 'eval.sync', *flags)

    def has_begun():
        return sum(path.stat().st_size for path in tmp_path.glob('wandb/*/*.wandb')) > 1 << 16

    kill_when(follower, has_begun)
    deadline = time.monotonic() + 60
    while list_processes(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before = read_back(tmp_path)
    assert 0 < len(before) < len(on_disk(tmp_path))
    finish(start('-m', 'eval.sync', *flags))
    assert_has_all(tmp_path)


def test_training_sweep_is_followed(tmp_path):
    command = (*TRAIN, f'--workdir={tmp_path}', '--config.train.steps=40', '--track=wandb')
    sweep = '--config.sweep={"optim.lr": (1e-3, 3e-3)}'
    stdout = finish(start(*command, sweep, WANDB_MODE='offline'))
    assert 'steps of 2 runs sent to offline (evenkeel)' in stdout or 'eval.sync' in stdout
    assert send_all(Follower(tmp_path, 'wandb', open_tracker(), print))
    cells = [path.parent for path in tmp_path.glob('*/config.json')]
    assert len(cells) == 2
    for cell in cells:
        assert_has_all(cell)
