"""Disturbed runs: signals, a full disk, lost rights, a clock that jumps, a moved folder.

A run goes on, or ends with one line; then the same command resumes it, and no number changes.
"""

import ctypes
import errno
import os
import random
import resource
import signal
import time

import pytest

from lm.storage.files import read_json
from tests.commands import OF_240_STEPS, start_run, wait_for_command, wait_for_step
from tests.sweep_helpers import timeless
from train import BAD_INPUT, DONE, SIGNALLED

LAST_MOMENT = 220  # step; the run still has work to do
FULL_BYTES = 1000  # of a file, once the disk is full
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
JUMPING_CLOCK = """
import runpy, signal, sys, time
real, offset = time.time, [0.0]
time.time = lambda: real() + offset[0]
jump, sys.argv = sys.argv[1], sys.argv[2:]
signal.signal(signal.SIGUSR1, lambda *_: offset.append(offset.pop() + float(jump)))
runpy.run_path(sys.argv[0], run_name='__main__')
"""
PR_CAPBSET_DROP, CAPABILITIES = 24, (1, 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


def start_disturbed(workdir, corpus, trial):
    """Starts a run and waits for a random step; returns the process."""
    process = start_run(workdir, corpus, **OF_240_STEPS)
    wait_for_step(workdir, random.Random(trial).randrange(1, LAST_MOMENT), process)
    return process


def check_resumes(workdir, corpus, whole_run):
    code, stdout = wait_for_command(start_run(workdir, corpus, **OF_240_STEPS))
    assert code == DONE and 'Traceback' not in stdout, stdout
    assert timeless(workdir) == whole_run


def check_one_error(process, *words):
    """Checks that the run ends with one line that has the words."""
    code, stdout = wait_for_command(process)
    assert code == BAD_INPUT and 'Traceback' not in stdout, stdout
    *_, last = stdout.strip().splitlines()
    assert last.startswith('error: ') and all(word in last for word in words), stdout


@pytest.mark.full
@pytest.mark.parametrize('sent', STOPPING, ids=[sent.name for sent in STOPPING])
@pytest.mark.trials(short=1, long=50)
def test_signal_stops_with_checkpoint(sent, trial, whole_run, corpus, tmp_path):
    process = start_disturbed(tmp_path, corpus, trial)
    process.send_signal(sent)
    code, stdout = wait_for_command(process)
    assert code == SIGNALLED + sent and 'Traceback' not in stdout, stdout
    step = read_json(tmp_path / 'summary.json')['step']
    assert (tmp_path / 'checkpoints' / str(step)).is_dir()
    assert timeless(tmp_path) == [row for row in whole_run if row['step'] <= step]
    check_resumes(tmp_path, corpus, whole_run)


@pytest.mark.full
@pytest.mark.trials(short=1, long=50)
def test_suspended_run_continues(trial, whole_run, corpus, tmp_path):
    process = start_disturbed(tmp_path, corpus, trial)
    process.send_signal(signal.SIGSTOP)
    time.sleep(random.Random(trial).uniform(0.1, 2))
    process.send_signal(signal.SIGCONT)
    code, stdout = wait_for_command(process)
    assert code == DONE and timeless(tmp_path) == whole_run, stdout


@pytest.mark.full
@pytest.mark.trials(short=1, long=50)
def test_disk_fills_up(trial, whole_run, corpus, tmp_path):
    """A limit on the size of files raises as a full disk does, in any file that reaches it."""
    process = start_disturbed(tmp_path, corpus, trial)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))
    check_one_error(process, os.strerror(errno.EFBIG), str(tmp_path))
    check_resumes(tmp_path, corpus, whole_run)


@pytest.mark.full
@pytest.mark.trials(short=1, long=50)
def test_rights_are_removed(trial, whole_run, corpus, tmp_path):
    """The run may not override rights, even if its user is root."""
    libc = ctypes.CDLL(None)

    def drop_capabilities():
        for capability in CAPABILITIES:
            libc.prctl(PR_CAPBSET_DROP, capability)

    process = start_run(tmp_path / 'run', corpus, before_start=drop_capabilities, **OF_240_STEPS)
    wait_for_step(tmp_path / 'run', random.Random(trial).randrange(1, LAST_MOMENT), process)
    folders = [path for path in (tmp_path / 'run').rglob('*') if path.is_dir()]
    for folder in (tmp_path / 'run', tmp_path / 'run' / 'checkpoints'):
        folder.chmod(0o500)
    check_one_error(process, os.strerror(errno.EACCES))
    for folder in (tmp_path / 'run', *folders):
        if folder.exists():
            folder.chmod(0o700)
    check_resumes(tmp_path / 'run', corpus, whole_run)


@pytest.mark.full
@pytest.mark.trials(short=1, long=50)
def test_clock_jumps(trial, whole_run, corpus, tmp_path):
    """By up to a day, ahead or back. A checkpoint that is being written may be lost."""
    rng = random.Random(trial)
    jump_sec = rng.uniform(-86_400, 86_400)
    prelude = ('-c', JUMPING_CLOCK, str(jump_sec))
    process = start_run(tmp_path, corpus, prelude=prelude, **OF_240_STEPS)
    wait_for_step(tmp_path, rng.randrange(1, LAST_MOMENT), process)
    process.send_signal(signal.SIGUSR1)
    code, stdout = wait_for_command(process)
    assert code == DONE and timeless(tmp_path) == whole_run, stdout
    assert 0 < read_json(tmp_path / 'summary.json')['wall_sec'] < 3600
    assert (tmp_path / 'checkpoints' / '240').is_dir()


@pytest.mark.full
@pytest.mark.trials(short=1, long=50)
def test_moved_workdir_resumes(trial, whole_run, corpus, tmp_path):
    process = start_disturbed(tmp_path / 'run', corpus, trial)
    (tmp_path / 'run').rename(tmp_path / 'moved')
    check_one_error(process, 'no longer exists', '--workdir')
    check_resumes(tmp_path / 'moved', corpus, whole_run)
