"""One source, prepared by processes that are killed one after another, and from damaged files."""

import dataclasses
import errno
from pathlib import Path

import pytest

from lm.data import cache, open_dataset, prepare, scan, tokenizers
from tests.lm.data.conftest import (
    INTERRUPT,
    PIECE_BYTES,
    discard_line,
    interrupt_encoding,
    leftover_folders,
    n_pieces,
    pieces_folder,
    prepare_contents,
    write_texts,
)
from tests.lm.data.test_cache import launch

pytestmark = pytest.mark.usefixtures('small_pieces')

# The process is killed within its third piece, whose folder has not been renamed.
KILL = """
from lm.data import scan
scan.PIECE = BYTES
encode, done = prepare.encode_piece, []
def kill(*args):
    encode(*args)
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(None)
prepare.encode_piece = kill
"""


def refuse(*args, **kwargs):
    raise AssertionError('done already')


@pytest.mark.full
def test_killed_preparation_is_resumed(data_cfg, expected_files, encoding, monkeypatch):
    """Only the rest is done: catches a scan, a training or a piece that is made twice."""
    process = launch(data_cfg, KILL.replace('BYTES', str(PIECE_BYTES)))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -9, errors
    n = n_pieces(data_cfg)
    assert len(list(pieces_folder(data_cfg).glob('piece-*.partial'))) == 1
    messages = []
    with monkeypatch.context() as patch:
        patch.setattr(scan, 'scan_source', refuse)
        patch.setattr(tokenizers, '_train_bpe', refuse)
        assert prepare_contents(data_cfg, messages.append) == expected_files
    assert encoding.n == n - 2 > 3 and leftover_folders(data_cfg) == []
    assert f'data: 2 of {n} pieces are already encoded' in messages


@pytest.mark.parametrize('error', [INTERRUPT, OSError(errno.ENOSPC, 'full')], ids=repr)
def test_errors_keep_finished_pieces(error, data_cfg, expected_files, encoding, monkeypatch):
    with interrupt_encoding(monkeypatch, 4, error):
        open_dataset(data_cfg, say=discard_line)
    assert not list(cache.root(data_cfg.cache_dir).rglob('*.partial'))
    n, before = n_pieces(data_cfg), encoding.n
    assert prepare_contents(data_cfg) == expected_files
    assert encoding.n - before == n - 4


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def swap(path: Path) -> None:
    path.write_bytes(path.read_bytes().swapcase())


DAMAGES = {'flip': flip, 'cut': cut, 'deleted': Path.unlink}


@pytest.mark.default_rows(
    'byte-flip-train.tokens',
    'byte-flip-validation.tokens',
    'byte-flip-index.npz',
    'byte-flip-contents.json',
    'byte-deleted-train.tokens',
    'byte-deleted-validation.tokens',
    'byte-deleted-index.npz',
    'byte-deleted-contents.json',
)
@pytest.mark.parametrize('name', [*prepare.PIECE_FILES])
@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_piece_is_encoded_again(
    damage, name, data_cfg, expected_files, encoding, monkeypatch
):
    with interrupt_encoding(monkeypatch, 3):
        open_dataset(data_cfg, say=discard_line)
    piece = min(p for p in pieces_folder(data_cfg).glob('piece-*') if p.is_dir())
    if not (piece / name).stat().st_size:
        (piece / name).write_bytes(b'ab')  # a piece without validation, which has now
    else:
        DAMAGES[damage](piece / name)
    n, before, messages = n_pieces(data_cfg), encoding.n, []
    assert prepare_contents(data_cfg, messages.append) == expected_files
    assert encoding.n - before == n - 3 + 1
    assert sum(f'{piece} is damaged' in line for line in messages) == 1


SCAN_DAMAGES = [(damage, name) for damage in DAMAGES.values() for name in (scan.COPY, scan.TABLE)]


@pytest.mark.default_rows(
    'byte-swap-text',
    'byte-flip-text',
    'byte-flip-documents.npz',
    'byte-cut-text',
    'byte-cut-documents.npz',
    'byte-unlink-text',
    'byte-unlink-documents.npz',
)
@pytest.mark.parametrize(('damage', 'name'), [(swap, scan.COPY), *SCAN_DAMAGES])
def test_damaged_scan_is_made_again(damage, name, data_cfg, expected_files, monkeypatch):
    """The scan is repeated before the tokenizer is trained or anything is encoded."""
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(prepare, 'training_texts', refuse)
        open_dataset(data_cfg, say=discard_line)
    damage(pieces_folder(data_cfg) / prepare.SCAN / name)
    messages = []
    assert prepare_contents(data_cfg, messages.append) == expected_files
    assert sum('the damaged part is prepared again' in line for line in messages) == 1
    assert sum('preparing' in line for line in messages) == 1


def test_copy_damaged_meanwhile_is_made_again(data_cfg, expected_files, encoding, monkeypatch):
    """Pieces of the intact copy are not made again."""
    with interrupt_encoding(monkeypatch, 3):
        open_dataset(data_cfg, say=discard_line)
    n, before = n_pieces(data_cfg), encoding.n
    swap(pieces_folder(data_cfg) / prepare.SCAN / scan.COPY)
    assert prepare_contents(data_cfg) == expected_files
    assert encoding.n - before == n - 3 + 1  # and the one it was found by


def test_damaged_copy_does_not_cut_the_document(cfg, tmp_path, monkeypatch):
    """Its copies may be intact: their piece would hold other splits."""
    data_cfg = cfg(source=write_texts(tmp_path, ['a line\n' * 200] * 9))
    expected = prepare_contents(dataclasses.replace(data_cfg, cache_dir=str(tmp_path / 'wanted')))
    with interrupt_encoding(monkeypatch, 0):
        open_dataset(data_cfg, say=discard_line)
    monkeypatch.setattr(prepare.random, 'randrange', lambda n: 1)  # the damage is in piece 0
    path = pieces_folder(data_cfg) / prepare.SCAN / scan.COPY
    content = path.read_bytes()
    path.write_bytes(content[:1400].replace(b' line\n', b'\nline ') + content[1400:])
    assert prepare_contents(data_cfg) == expected


def test_errors_disk_damages_every_copy(data_cfg, monkeypatch):
    scan_source = scan.scan_source

    def scan_and_damage(source, cfg, folder):
        scan_source(source, cfg, folder)
        flip(folder / scan.COPY)

    monkeypatch.setattr(scan, 'scan_source', scan_and_damage)
    with pytest.raises(OSError, match='the copy of the text is damaged'):
        open_dataset(data_cfg, say=discard_line)
