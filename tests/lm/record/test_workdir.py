"""A run belongs to one process at a time.

Contents that folders hold and refuse: tests/test_train_resumed.py and tests/test_sweep.py.
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
def messages():
    return []


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr('lm.record.workdir.PATIENCE_SEC', 0.0)


@pytest.mark.full
def test_second_process_is_refused_until_first_is_killed(tmp_path, messages, impatient):
    command = [sys.executable, '-c', OTHER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == 'held\n'
            with (
                pytest.raises(InUseError, match=f'another process is training in {tmp_path}'),
                open_workdir(tmp_path, CONFIG, False, messages.append),
            ):
                pass
        finally:
            process.kill()
    with open_workdir(tmp_path, CONFIG, False, messages.append):
        assert not messages


def test_ending_process_is_waited_for(tmp_path, messages):
    held = contextlib.ExitStack()
    held.enter_context(open_workdir(tmp_path, CONFIG, False))
    threading.Timer(0.3, held.close).start()
    with open_workdir(tmp_path, CONFIG, False, messages.append):
        assert messages == [f'{tmp_path} is in use by another process: waiting for it to end']


def test_error_in_block_unlocks_folder(tmp_path, impatient):
    with pytest.raises(KeyError), open_workdir(tmp_path, CONFIG, False):
        raise KeyError
    with open_workdir(tmp_path, CONFIG, False):
        pass


def test_first_process_locks_workdir(tmp_path, impatient, monkeypatch):
    with open_workdir(tmp_path, CONFIG, False):
        monkeypatch.setattr('jax.process_index', lambda: 1)
        with open_workdir(tmp_path, CONFIG, False):
            pass


def test_file_system_without_locks_is_noted(tmp_path, messages, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr('lm.storage.files.fcntl.flock', refuse)
    with open_workdir(tmp_path, CONFIG, False, messages.append):
        (note,) = messages
    assert note.startswith(f'NOTE: {tmp_path}/.lock cannot be locked') and 'No locks' in note


def test_other_lock_error_is_write_error(tmp_path, monkeypatch):
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
class TestDamagedFile:
    def write(self, path, text):
        path.write_text(text, encoding='latin-1')

    def test_config_is_read_from_newest_intact_checkpoint(self, tmp_path, messages, text):
        meta = META | {'config': to_dict(CONFIG)}
        checkpoints = Checkpoints(tmp_path, 2, 0)
        for step in (1, 2):
            checkpoints.save(state(step), meta, None)
        checkpoints.close()
        (tmp_path / 'checkpoints' / '2' / 'meta' / 'metadata').unlink()
        self.write(tmp_path / 'config.json', text)
        with open_workdir(tmp_path, CONFIG, False, messages.append):
            pass
        assert len(messages) == 1 and f'{tmp_path}/config.json' in messages[0]
        other_config = tiny_config({'optim.lr': 0.5})
        with (
            pytest.raises(ValueError, match=r'optim\.lr'),
            open_workdir(tmp_path, other_config, False),
        ):
            pass

    def test_config_without_checkpoint_is_written_anew(self, tmp_path, messages, text):
        self.write(tmp_path / 'config.json', text)
        with open_workdir(tmp_path, CONFIG, False, messages.append):
            write_config(tmp_path, CONFIG)
        assert len(messages) == 1 and Run(tmp_path).read_recipe() == CONFIG

    def test_invalid_summary_leaves_run_unfinished(self, tmp_path, text):
        self.write(tmp_path / 'summary.json', text)
        assert Run(tmp_path).status is None and not Run(tmp_path).is_final

    def test_error_names_file(self, tmp_path, text):
        self.write(tmp_path / 'x.json', text)
        with pytest.raises(UnreadableFile, match=r'/x\.json'):
            read_json(tmp_path / 'x.json')


def test_opening_writes_no_config(tmp_path):
    with open_workdir(tmp_path, CONFIG, False):
        pass
    with open_workdir(tmp_path, tiny_config({'optim.lr': 0.5}), False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ['.lock']


def test_existing_config_is_not_rewritten(tmp_path):
    write_config(tmp_path, CONFIG)
    before = (tmp_path / 'config.json').stat().st_ino
    write_config(tmp_path, CONFIG)
    assert (tmp_path / 'config.json').stat().st_ino == before


def test_unusable_checkpoint_path_is_refused_early(tmp_path):
    with (
        pytest.raises(ValueError, match=r'contains \[ and \]'),
        open_workdir(tmp_path / 'a[b]', CONFIG, False),
    ):
        pass
    assert not any(tmp_path.iterdir())
