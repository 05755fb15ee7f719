"""Contract, with W&B offline: its files have the points of metrics.jsonl, each of them once."""

import time

import psutil
import pytest

from eval.sync.follower import Follower, send_all
from eval.sync.marks import file_name, read_mark
from eval.sync.to_wandb import Wandb, list_offline_files, read_points
from tests.eval.sync.fakes import Killed, begin, go_on, on_disk, write_run
from tests.eval.sync.programs import TRAIN, finish, kill_when, start

pytestmark = [pytest.mark.full, pytest.mark.xdist_group('wandb')]


def place():
    return Wandb('offline', 'evenkeel')


def read_back(folder):
    """{(step, tag): value} of all sessions of the run; each point is there once."""
    (mark,) = folder.glob('sync-wandb-*.json')
    found = {}
    for path in list_offline_files(folder, read_mark(mark).run):
        for step, values in read_points(path):
            for tag, value in values.items():
                assert (step, tag) not in found, (step, tag)
                found[step, tag] = repr(float(value))
    return found


def has_all(folder):
    assert read_back(folder) == on_disk(folder)


def test_a_run_is_sent_as_it_is(tmp_path):
    """Sends infinities and NaN; goes on in another session; a file crosses blocks of its format."""
    tracker = place()
    write_run(tmp_path, 0, 400, 'stopped', device='2-core CPU')
    assert send_all(Follower(tmp_path, 'wandb', tracker, print))
    has_all(tmp_path)
    begin(tmp_path, mesh=8)
    go_on(tmp_path, 390, 420)
    assert send_all(Follower(tmp_path, 'wandb', place(), print))
    has_all(tmp_path)
    path, other = list_offline_files(
        tmp_path, read_mark(tmp_path / file_name('wandb', tracker.where)).run
    )
    assert path.stat().st_size > 2 << 15 > other.stat().st_size
    data = path.read_bytes()
    assert b'optim.lr' in data and b'2-core CPU' in data


@pytest.mark.parametrize('call', [1, 12])
def test_a_killed_follower_leaves_nothing_twice(tmp_path, monkeypatch, call):
    """Kills it before the first step, or between two; W&B's own process ends by itself."""
    write_run(tmp_path, 0, 20, 'stopped')
    tracker, calls, sessions = place(), [], []
    opened = tracker.open

    def open_killed(*arguments):
        session = opened(*arguments)
        sessions.append(session)
        log = session._run.log

        def killed(*values, **how):
            calls.append(how)
            if len(calls) == call:
                raise Killed
            log(*values, **how)

        monkeypatch.setattr(session._run, 'log', killed)
        return session

    tracker.open = open_killed
    with pytest.raises(Killed):
        send_all(Follower(tmp_path, 'wandb', tracker, print))
    sessions[0]._run.finish()
    go_on(tmp_path, 7, 25)
    assert send_all(Follower(tmp_path, 'wandb', place(), print))
    has_all(tmp_path)


def processes_of(folder):
    """W&B's processes that write below the folder."""
    found = []
    for process in psutil.process_iter(['name']):
        if process.info['name'] and 'wandb-core' in process.info['name']:
            files = [one.path for one in process.open_files()]
            found += [process] * any(path.startswith(str(folder)) for path in files)
    return found


def test_a_process_that_is_killed_while_it_sends(tmp_path):
    write_run(tmp_path, 0, 6000)
    flags = f'--workdir={tmp_path}', '--to=wandb', '--uri=offline'
    follower = start('-m', 'eval.sync', *flags)

    def has_begun():
        return sum(path.stat().st_size for path in tmp_path.glob('wandb/*/*.wandb')) > 1 << 16

    kill_when(follower, has_begun)
    deadline = time.monotonic() + 60
    while processes_of(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before = read_back(tmp_path)
    assert 0 < len(before) < len(on_disk(tmp_path))
    finish(start('-m', 'eval.sync', *flags))
    has_all(tmp_path)


def test_a_sweep_that_trains_is_followed(tmp_path):
    command = (*TRAIN, f'--workdir={tmp_path}', '--config.train.steps=40', '--track=wandb')
    sweep = '--config.sweep={"optim.lr": (1e-3, 3e-3)}'
    said = finish(start(*command, sweep, WANDB_MODE='offline'))
    assert 'steps sent to offline (evenkeel); runs 2' in said or 'eval.sync' in said
    assert send_all(Follower(tmp_path, 'wandb', place(), print))
    cells = [path.parent for path in tmp_path.glob('*/config.json')]
    assert len(cells) == 2
    for cell in cells:
        has_all(cell)
