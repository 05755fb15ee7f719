"""A run belongs to one process at a time. What folders hold and refuse: tests/test_train.py and
tests/test_sweep.py.
"""

import contextlib
import errno
import subprocess
import sys
import threading

import pytest

from lm.record.workdir import InUse, open_workdir
from tests.helpers import tiny_config
from tests.test_layering import ROOT

CONFIG = tiny_config()
OTHER = """
import pathlib, sys, time
from lm.record.workdir import open_workdir
from tests.helpers import tiny_config
with open_workdir(pathlib.Path(sys.argv[1]), tiny_config(), False):
    print('held', flush=True)
    time.sleep(100)
"""


@pytest.fixture
def said():
    return []


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr('lm.record.workdir.PATIENCE_SEC', 0.0)


def test_another_process_is_refused_until_the_first_is_killed(tmp_path, said, impatient):
    command = [sys.executable, '-c', OTHER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == 'held\n'
            with (
                pytest.raises(InUse, match=f'another process trains in {tmp_path}'),
                open_workdir(tmp_path, CONFIG, False, said.append),
            ):
                pass
        finally:
            other.kill()
    with open_workdir(tmp_path, CONFIG, False, said.append):
        assert not said


def test_a_process_about_to_end_is_waited_for_and_that_is_said(tmp_path, said):
    held = contextlib.ExitStack()
    held.enter_context(open_workdir(tmp_path, CONFIG, False))
    threading.Timer(0.3, held.close).start()
    with open_workdir(tmp_path, CONFIG, False, said.append):
        assert said == [f'{tmp_path} is in use by another process: waiting for it to end']


def test_an_error_in_the_block_gives_the_folder_back(tmp_path, impatient):
    with pytest.raises(KeyError), open_workdir(tmp_path, CONFIG, False):
        raise KeyError
    with open_workdir(tmp_path, CONFIG, False):
        pass


def test_of_the_processes_of_one_run_the_first_holds_it_for_all(tmp_path, impatient, monkeypatch):
    with open_workdir(tmp_path, CONFIG, False):
        monkeypatch.setattr('jax.process_index', lambda: 1)
        with open_workdir(tmp_path, CONFIG, False):
            pass


def test_a_file_system_without_locks_is_told_of(tmp_path, said, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr('lm.files.fcntl.flock', refuse)
    with open_workdir(tmp_path, CONFIG, False, said.append):
        (note,) = said
    assert note.startswith(f'NOTE: {tmp_path}/.lock cannot be locked') and 'No locks' in note


def test_another_error_of_locking_is_one_of_writing(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.EIO, 'Input/output error')

    monkeypatch.setattr('lm.files.fcntl.flock', refuse)
    with (
        pytest.raises(OSError, match=r'cannot be written \(.*Input/output error'),
        open_workdir(tmp_path, CONFIG, False),
    ):
        pass
