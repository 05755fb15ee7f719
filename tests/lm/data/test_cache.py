"""The folder of prepared data in trouble: killed, shared, full, not writable."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lm.data import cache, open_dataset
from tests.lm.data.conftest import discard_line


def test_property_unchanged_files_are_not_read_again(tmp_path, monkeypatch):
    path = tmp_path / 'a.txt'
    path.write_text('some')
    first = cache.file_digests(tmp_path / 'cache', [path])
    monkeypatch.setattr(cache.hashlib, 'file_digest', None)
    assert cache.file_digests(tmp_path / 'cache', [path]) == first
    path.write_text('more')
    os.utime(path, ns=(1, 1))
    with pytest.raises(TypeError):
        cache.file_digests(tmp_path / 'cache', [path])


@pytest.mark.parametrize('memo', ['', 'null', '[]', '{{"{path}": 3}}', '{{"{path}": [4, 5]}}'])
def test_property_invalid_memo_is_rewritten(memo, tmp_path):
    path = tmp_path / 'a.txt'
    path.write_text('some')
    (tmp_path / 'files.json').write_text(memo.format(path=path))
    assert cache.file_digests(tmp_path, [path]) == [cache.file_digest(path)]
    assert str(path) in json.loads((tmp_path / 'files.json').read_text())


@pytest.mark.parametrize(
    ('error', 'cause'),
    [
        (OSError(errno.ENOSPC, 'words of numpy'), 'the disk that holds {} is full'),
        (
            RuntimeError('words of ArrayRecord: File too large'),
            r'a file in {} has .*ulimit -f\)',
        ),
        (
            Exception('words of tokenizers: No space left on device (os error 28)'),
            'the disk that holds {} is full',
        ),
    ],
)
def test_errors_full_disk(error, cause, tmp_path):
    def make(partial):
        raise error

    message = f'{cause.format(tmp_path)} .*words of .*data.cache_dir'
    with pytest.raises(OSError, match=message):
        cache.make_once(tmp_path / 'name', make, str, discard_line)
    assert not (tmp_path / 'name.partial').exists()


def test_errors_unwritable_cache_folder(cfg, tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError, match=r'cannot be stored in .*file/cache.*Set data\.cache_dir'):
        open_dataset(cfg(cache_dir=str(tmp_path / 'file' / 'cache')), say=discard_line)


def test_property_cache_location(monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert cache.root('') == tmp_path / 'evenkeel'
    assert cache.root('here') == Path.cwd() / 'here'
    monkeypatch.delenv('XDG_CACHE_HOME')
    monkeypatch.setenv('HOME', '/home/nobody')
    assert cache.root('') == Path('/home/nobody/.cache/evenkeel')


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from lm.config.fields import DataConfig
from lm.data import open_dataset, prepare, prepared
cfg = eval(sys.argv[1])
flag = Path(cfg.cache_dir + '.flag')
def say(line):
    print(line, flush=True)
{hook}
ds = open_dataset(cfg, say=say)
print('digest', ds.digest)
print('tensorflow' in sys.modules)
"""
# By then records, index and tokenizer are written, and the report is not.
KILL = """
class Stream(prepared.TokenStream):
    def counts(self):
        os.kill(os.getpid(), signal.SIGKILL)
prepared.TokenStream = Stream
"""
# The process that prepares continues once the other one waits.
RACE = """
def say(line):
    print(line, flush=True)
    if 'waiting' in line:
        flag.touch()
    if 'preparing' in line:
        until = time.time() + 30
        while not flag.exists() and time.time() < until:
            time.sleep(0.01)
"""


def launch(cfg, hook=''):
    program = PROGRAM.replace('{hook}', hook)
    return subprocess.Popen(
        [sys.executable, '-c', program, repr(cfg)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_property_killed_midway_and_prepared_again(cfg, tmp_path):
    killed_process = launch(cfg(), KILL)
    killed_process.communicate()
    assert killed_process.returncode == -9
    (partial,) = (tmp_path / 'cache').glob('*.partial')
    assert (partial / 'index.npz').exists()
    again = open_dataset(cfg(), say=discard_line)
    assert not list((tmp_path / 'cache').glob('*.partial'))
    fresh = open_dataset(cfg(cache_dir=str(tmp_path / 'fresh')), say=discard_line)
    assert again.report == fresh.report
    for restored, original in zip(again.train, fresh.train, strict=True):
        np.testing.assert_array_equal(restored['tokens'], original['tokens'])


@pytest.mark.full
def test_property_two_at_once_prepare_once(cfg):
    processes = [launch(cfg(), RACE) for _ in range(2)]
    stdouts = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum('data: preparing' in stdout for stdout in stdouts) == 1
    assert sum('waiting for it' in stdout for stdout in stdouts) == 1
    digests = [re.search('digest (.*)', stdout).group(1) for stdout in stdouts]
    assert digests[0] == digests[1]


@pytest.mark.full
def test_property_no_tensorflow(cfg):
    process = launch(cfg(tokenizer='bpe:300', packing='best_fit'))
    stdout, errors = process.communicate()
    assert process.returncode == 0, errors
    assert stdout.splitlines()[-1] == 'False'
