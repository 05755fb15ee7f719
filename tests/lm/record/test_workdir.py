"""A run belongs to one process at a time. What folders hold and refuse: tests/test_train_resumed.py
and tests/test_sweep.py.
"""

import contextlib
import errno
import subprocess
import sys
import threading

import pytest

from lm.config.resolve import to_dict
from lm.record.checkpoints import Checkpoints
from lm.record.run import Run
from lm.record.workdir import (
    InUseError,
    open_workdir,
    write_config,
)
from lm.storage.files import UnreadableFile, read_json
from tests import ROOT
from tests.helpers import tiny_config
from tests.lm.record.test_checkpoints import META, state

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


@pytest.mark.full
def test_another_process_is_refused_until_the_first_is_killed(tmp_path, said, impatient):
    command = [sys.executable, '-c', OTHER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == 'held\n'
            with (
                pytest.raises(InUseError, match=f'another process trains in {tmp_path}'),
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

    monkeypatch.setattr('lm.storage.files.fcntl.flock', refuse)
    with open_workdir(tmp_path, CONFIG, False, said.append):
        (note,) = said
    assert note.startswith(f'NOTE: {tmp_path}/.lock cannot be locked') and 'No locks' in note


def test_another_error_of_locking_is_one_of_writing(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.EIO, 'Input/output error')

    monkeypatch.setattr('lm.storage.files.fcntl.flock', refuse)
    with (
        pytest.raises(OSError, match=r'cannot be written \(.*Input/output error'),
        open_workdir(tmp_path, CONFIG, False),
    ):
        pass


DAMAGES = ['', '{', '[]', '{"model": ', '[' * 100_000, '\xff']


@pytest.mark.parametrize('text', DAMAGES, ids=range(len(DAMAGES)))
class TestADamagedFile:
    def write(self, path, text):
        path.write_text(text, encoding='latin-1')

    def test_config_is_that_of_the_newest_checkpoint_that_can_be_read(self, tmp_path, said, text):
        meta = META | {'config': to_dict(CONFIG)}
        checkpoints = Checkpoints(tmp_path, 2, 0)
        for step in (1, 2):
            checkpoints.save(state(step), meta, None)
        checkpoints.close()
        (tmp_path / 'checkpoints' / '2' / 'meta' / 'metadata').unlink()
        self.write(tmp_path / 'config.json', text)
        with open_workdir(tmp_path, CONFIG, False, said.append):
            pass
        assert len(said) == 1 and f'{tmp_path}/config.json' in said[0]
        other = tiny_config({'optim.lr': 0.5})
        with pytest.raises(ValueError, match=r'optim\.lr'), open_workdir(tmp_path, other, False):
            pass

    def test_config_without_a_checkpoint_is_written_anew(self, tmp_path, said, text):
        self.write(tmp_path / 'config.json', text)
        with open_workdir(tmp_path, CONFIG, False, said.append):
            write_config(tmp_path, CONFIG)
        assert len(said) == 1 and Run(tmp_path).read_recipe() == CONFIG

    def test_summary_is_of_a_run_that_has_not_ended(self, tmp_path, text):
        self.write(tmp_path / 'summary.json', text)
        assert Run(tmp_path).status is None and not Run(tmp_path).is_final

    def test_any_is_named(self, tmp_path, text):
        self.write(tmp_path / 'x.json', text)
        with pytest.raises(UnreadableFile, match=r'/x\.json'):
            read_json(tmp_path / 'x.json')


def test_opening_leaves_no_config_until_a_run_begins(tmp_path):
    with open_workdir(tmp_path, CONFIG, False):
        pass
    with open_workdir(tmp_path, tiny_config({'optim.lr': 0.5}), False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ['.lock']


def test_a_config_that_is_there_is_not_written_again(tmp_path):
    write_config(tmp_path, CONFIG)
    before = (tmp_path / 'config.json').stat().st_ino
    write_config(tmp_path, CONFIG)
    assert (tmp_path / 'config.json').stat().st_ino == before


def test_a_path_that_checkpoints_could_not_be_read_from_is_refused_at_once(tmp_path):
    with (
        pytest.raises(ValueError, match=r'holds \[ and \]'),
        open_workdir(tmp_path / 'a[b]', CONFIG, False),
    ):
        pass
    assert not any(tmp_path.iterdir())
