"""Preparation of text, and prepared data, damaged from outside."""

import dataclasses
import gzip
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from configs import default
from lm.config.fields import DataConfig
from lm.config.resolve import resolve
from lm.data import Cursor, Feed, open_dataset, prepared
from lm.data.sources import open_source
from tests.lm.data.conftest import discard_line, document

N_DOCUMENTS = 100


@pytest.fixture(scope='module')
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('corpus')
    for i in range(N_DOCUMENTS):
        (folder / f'{i:03}.txt').write_text(document(i) * 5)
    return folder


@pytest.fixture(scope='module')
def cfg(corpus, tmp_path_factory) -> DataConfig:
    return dataclasses.replace(
        resolve(default.get_config()).data,
        source=f'text:{corpus}/*.txt',
        tokenizer='bpe:400',
        seq_len=64,
        batch_size=4,
        validation_fraction=0.1,
        cache_dir=str(tmp_path_factory.mktemp('cache')),
    )


@pytest.fixture(scope='module')
def expected_data(cfg):
    """Returns (the expected data, the seconds that it takes, its folder)."""
    start = time.perf_counter()
    dataset = open_dataset(cfg, say=discard_line)
    seconds = time.perf_counter() - start
    return read_everything(dataset), seconds, Path(cfg.cache_dir) / dataset.digest


def read_everything(dataset) -> dict:
    """Returns everything that a run or an evaluation may read."""
    content = {'report': dataset.report, 'digest': dataset.digest}
    for name in ('train', 'validation'):
        rows = getattr(dataset, name)
        content[name] = [tokens.tobytes() for tokens in rows.documents()]
        content[f'{name} rows'] = b''.join(rows[i]['segments'].tobytes() for i in range(len(rows)))
    texts = ['some text é🙂', document(1)]
    return content | {'encoded': [dataset.tokenizer.encode(text) for text in texts]}


def damage_file(path: Path, rng: random.Random) -> str:
    """Damages a file as disks and people do. Returns the kind of damage."""
    content = bytearray(path.read_bytes())
    kind = rng.choice(['flip', 'flips', 'cut', 'emptied', 'deleted', 'zeros'])
    at = rng.randrange(len(content))
    if kind == 'deleted':
        path.unlink()
        return kind
    if kind == 'flip':
        content[at] ^= 1 << rng.randrange(8)
    elif kind == 'flips':
        for at in rng.choices(range(len(content)), k=8):
            content[at] = rng.randrange(256)
    elif kind == 'cut':
        del content[at:]
    elif kind == 'emptied':
        content.clear()
    else:
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)
    return kind


@pytest.mark.trials(short=8, long=200)
def test_damaged_data_is_the_same_or_refused(trial, cfg, expected_data, tmp_path):
    """Other tokens are never read, or counted."""
    expected, _, folder = expected_data
    copied = tmp_path / folder.name
    shutil.copytree(folder, copied)
    rng = random.Random(trial)
    files = sorted(path for path in copied.rglob('*') if path.is_file())
    path = files[trial % len(files)]
    kind = damage_file(path, rng)
    messages = []
    try:
        content = read_everything(
            open_dataset(dataclasses.replace(cfg, cache_dir=str(tmp_path)), say=messages.append)
        )
    except OSError as error:
        assert f'{copied}, cannot be read' in str(error) and 'delete that folder' in str(error)
        assert '.array_record' in path.name  # anything else is made again
    else:
        assert content == expected, f'{path} {kind}'
        assert bool(messages) == any('is damaged' in line for line in messages)


def test_feed_refuses_tokens_beyond_vocabulary(cfg, expected_data, tmp_path):
    """JAX would clamp them, and the run would train on other tokens."""
    _, _, folder = expected_data
    copied = tmp_path / folder.name
    shutil.copytree(folder, copied)
    byte = dataclasses.replace(cfg, tokenizer='byte')
    tokenizer = (
        Path(cfg.cache_dir) / open_dataset(byte, say=discard_line).digest / prepared.TOKENIZER
    )
    shutil.rmtree(copied / prepared.TOKENIZER)
    shutil.copytree(tokenizer, copied / prepared.TOKENIZER)
    (copied / prepared.CONTENTS).unlink()  # as earlier versions left it
    rows = open_dataset(dataclasses.replace(cfg, cache_dir=str(tmp_path)), say=discard_line).train
    feed = Feed(rows, batch_size=4, prefetch=1)
    says = r'train of .*, cannot be read .*has token \d+, but data\.tokenizer has only 258 .*delete'
    with pytest.raises(OSError, match=says):
        feed.take([Cursor(0, 0, 9)])
    feed.close()


@pytest.mark.trials(short=5, long=200)
def test_damaged_parquet_file_is_named(trial, tmp_path):
    path, rng = tmp_path / 'a.parquet', random.Random(trial)
    texts = [document(i) for i in range(100)]
    compression = ('none', 'snappy', 'zstd')[trial % 3]
    table = pyarrow.table({'text': texts})
    pyarrow.parquet.write_table(
        table, path, row_group_size=30, compression=compression, write_page_checksum=True
    )
    kind = damage_file(path, rng)
    iterate_documents = (
        open_source(f'text:{tmp_path}/*', 'text').documents if path.exists() else list
    )
    try:
        documents = [b''.join(parts).decode() for _, parts in iterate_documents()]
    except ValueError as error:
        assert str(error).startswith(f'{path} ') or str(error).startswith(f'{path}[')
        assert '\n' not in str(error)
    else:
        assert documents == texts or kind == 'deleted'


COMPRESS = {'gz': gzip.compress, 'zst': zstandard.ZstdCompressor(write_checksum=True).compress}


@pytest.mark.trials(short=5, long=100)
@pytest.mark.parametrize('name', ['a.txt.gz', 'a.jsonl.gz', 'a.txt.zst', 'a.jsonl.zst'])
def test_damaged_compressed_file_is_named(name, trial, tmp_path):
    path, texts = tmp_path / name, [document(i) for i in range(30)]
    lines = [json.dumps({'text': text}) + '\n' for text in texts]
    expected = texts if '.jsonl' in name else [''.join(lines)]
    half = ''.join(lines[:15]).encode(), ''.join(lines[15:]).encode()
    path.write_bytes(b''.join(map(COMPRESS[name.rpartition('.')[2]], half)))
    kind = damage_file(path, random.Random(trial))
    iterate_documents = (
        open_source(f'text:{tmp_path}/*', 'text').documents if path.exists() else list
    )
    try:
        documents = [b''.join(parts).decode() for _, parts in iterate_documents()]
    except ValueError as error:
        assert str(error).startswith(f'{path} ') or str(error).startswith(f'{path}:')
        assert '\n' not in str(error)
    else:
        # A file that is cut between its two halves, or emptied, is whole.
        whole = [expected, expected[:15], [half[0].decode()], [''], []]
        assert documents in whole or kind == 'deleted'


PROGRAM = """
import resource, sys
import tensorflow_datasets, tokenizers
from lm.config.fields import DataConfig
from lm.data import open_dataset, scan
cfg, most_bytes = eval(sys.argv[1]), int(sys.argv[2])
scan.PIECE = 20_000  # which makes some ten of the text
if most_bytes:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
print('ready', flush=True)
open_dataset(cfg)
"""


def launch_preparation(cfg: DataConfig, most_bytes: int = 0) -> subprocess.Popen:
    """Starts a process that prepares the data, and returns when it begins."""
    process = subprocess.Popen(
        [sys.executable, '-c', PROGRAM, repr(cfg), str(most_bytes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == 'ready\n'
    return process


@pytest.mark.full
@pytest.mark.trials(short=1, long=20)
@pytest.mark.parametrize('sent', [signal.SIGKILL, signal.SIGINT])
def test_preparation_restarts_after_a_signal(sent, trial, cfg, expected_data, tmp_path):
    expected, seconds, _ = expected_data
    fields = dataclasses.replace(cfg, cache_dir=str(tmp_path / 'cache'))
    process = launch_preparation(fields)
    time.sleep(random.Random(trial).uniform(0, seconds))
    process.send_signal(sent)
    _, err = process.communicate(timeout=20)
    assert process.returncode in (0, -sent), err
    if sent == signal.SIGINT:
        assert not list(tmp_path.glob('cache/*.partial'))
        # Python says so last, or that it was ignored where it came within a finalizer.
        assert not err or 'KeyboardInterrupt' in err.splitlines()[-1]
    assert read_everything(open_dataset(fields, say=discard_line)) == expected


@pytest.mark.full
@pytest.mark.trials(short=1, long=20)
def test_another_process_continues_after_kill(trial, cfg, expected_data, tmp_path):
    """The second process neither waits for a piece that nobody encodes, nor takes half of one."""
    expected, seconds, _ = expected_data
    fields = dataclasses.replace(cfg, cache_dir=str(tmp_path / 'cache'))
    victim, survivor = launch_preparation(fields), launch_preparation(fields)
    time.sleep(random.Random(trial).uniform(0, seconds))
    victim.kill()
    _, err = survivor.communicate(timeout=60)
    victim.communicate()
    assert survivor.returncode == 0, err
    assert read_everything(open_dataset(fields, say=pytest.fail)) == expected


@pytest.mark.full
@pytest.mark.trials(short=1, long=30)
def test_full_disk_is_named(trial, cfg, corpus, tmp_path):
    """A limit on the size of files fails the same calls in the same places.

    The text is 17 kB, a file of records 131 kB.
    """
    fields = dataclasses.replace(
        cfg, source=f'text:{corpus}/00*.txt', cache_dir=str(tmp_path / 'cache')
    )
    process = launch_preparation(fields, most_bytes=int(10 ** random.Random(trial).uniform(2, 5)))
    _, err = process.communicate(timeout=60)
    if process.returncode:
        assert err.splitlines()[-1].startswith('OSError: a file in '), err
    assert not list(tmp_path.glob('cache/*.partial'))
    assert open_dataset(fields, say=discard_line).report['train']['tokens']
