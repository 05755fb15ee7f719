"""Contract: a follower never stops training, and ends with it."""

import subprocess
import sys
import types

import pytest

from lm.launch import tracking


def program(monkeypatch, code):
    """Lets followers run this code instead; returns the list of their processes."""
    started = []

    def start(workdir, name):
        command = [sys.executable, '-S', '-c', f'import sys, time, os\n{code}']
        pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True}
        started.append(subprocess.Popen(command, **pipes))
        return started[-1]

    monkeypatch.setattr(tracking, '_start_follower', start)
    monkeypatch.setattr(tracking.importlib.util, 'find_spec', lambda name: name)
    return started


def test_unknown_tracker_suggests_nearest(monkeypatch):
    monkeypatch.setattr(tracking.flags, 'FLAGS', types.SimpleNamespace(track=['mlflow', 'wandbb']))
    with pytest.raises(ValueError, match=r"--track must be one of .*'wandbb'.* mean 'wandb'\?"):
        tracking.read_track_flag()


def test_follower_ends_with_training(tmp_path, monkeypatch):
    started = program(monkeypatch, 'sys.stdin.read(); print("3 steps", flush=True)')
    lines = []
    with tracking.send_to_trackers(tmp_path, ['mlflow'], lines.append):
        (process,) = started
        assert process.poll() is None and not lines
    assert process.returncode == 0 and lines == ['3 steps']


@pytest.mark.parametrize(
    'code', ['time.sleep(600)', 'os.kill(os.getpid(), 9)', 'print("error: no"); sys.exit(1)']
)
def test_unsent_rows_are_reported_with_command(tmp_path, monkeypatch, code):
    """Tries an unreachable network, a crash, and an error."""
    started, lines = program(monkeypatch, code), []
    monkeypatch.setattr(tracking, 'LAST_SEC', 0.5)
    with tracking.send_to_trackers(tmp_path, ['wandb'], lines.append):
        pass
    command = f'python -m eval.sync --workdir={tmp_path} --to=wandb'
    assert lines[-1] == f'wandb: not all rows were sent. To send the rest, run {command}'
    assert lines[:-1] == (['error: no'] if 'error' in code else [])
    assert started[0].poll() is not None


def test_training_error_is_raised(tmp_path, monkeypatch):
    started = program(monkeypatch, 'sys.stdin.read()')
    with (
        pytest.raises(ValueError, match='of training'),
        tracking.send_to_trackers(tmp_path, ['mlflow'], [].append),
    ):
        raise ValueError('of training')
    assert started[0].returncode == 0


def test_missing_package_stops_nothing(tmp_path, monkeypatch):
    started, lines = program(monkeypatch, ''), []
    monkeypatch.setattr(tracking.importlib.util, 'find_spec', lambda name: None)
    with tracking.send_to_trackers(tmp_path, ['wandb'], lines.append):
        pass
    assert not started and len(lines) == 1
    assert 'wandb not installed (uv sync --extra wandb)' in lines[0] and 'eval.sync' in lines[0]


def test_only_first_process_starts_followers(tmp_path, monkeypatch):
    started = program(monkeypatch, 'sys.stdin.read()')
    monkeypatch.setattr('lm.launch.distributed.is_first', lambda: False)
    with tracking.send_to_trackers(tmp_path, ['mlflow', 'wandb'], print):
        assert not started
    monkeypatch.setattr('lm.launch.distributed.is_first', lambda: True)
    with tracking.send_to_trackers(tmp_path, ['mlflow', 'wandb', 'mlflow'], print):
        assert len(started) == 2
