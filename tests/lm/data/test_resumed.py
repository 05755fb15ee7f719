"""One source prepared by one process after another that was killed, and from what damage left."""

import dataclasses
import errno
from pathlib import Path

import pytest

from lm.data import cache, open_dataset, prepare, scan, tokenizers
from tests.lm.data.conftest import (
    INTERRUPT,
    PIECE_BYTES,
    discard_line,
    folder_of_pieces,
    interrupted,
    left_in,
    n_pieces,
    prepared_by,
    write_texts,
)
from tests.lm.data.test_cache import launch

pytestmark = pytest.mark.usefixtures('small')

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
def test_a_killed_process_is_gone_on_with(own, wanted, encoding, monkeypatch):
    """Only what is left is done: catches a scan, a training or a piece that is made once more."""
    killed = launch(own, KILL.replace('BYTES', str(PIECE_BYTES)))
    _, err = killed.communicate(timeout=60)
    assert killed.returncode == -9, err
    n = n_pieces(own)
    assert len(list(folder_of_pieces(own).glob('piece-*.partial'))) == 1
    said = []
    with monkeypatch.context() as patched:
        patched.setattr(scan, 'scan_source', refuse)
        patched.setattr(tokenizers, '_train_bpe', refuse)
        assert prepared_by(own, said.append) == wanted
    assert encoding.n == n - 2 > 3 and left_in(own) == []
    assert f'data: 2 of {n} pieces are encoded' in said


@pytest.mark.parametrize('error', [INTERRUPT, OSError(errno.ENOSPC, 'full')], ids=repr)
def test_an_error_leaves_what_is_done(error, own, wanted, encoding, monkeypatch):
    with interrupted(monkeypatch, 4, error):
        open_dataset(own, say=discard_line)
    assert not list(cache.root(own.cache_dir).rglob('*.partial'))
    n, before = n_pieces(own), encoding.n
    assert prepared_by(own) == wanted
    assert encoding.n - before == n - 4


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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
@pytest.mark.parametrize('how', DAMAGES)
def test_a_damaged_piece_is_encoded_again(how, name, own, wanted, encoding, monkeypatch):
    with interrupted(monkeypatch, 3):
        open_dataset(own, say=discard_line)
    piece = min(p for p in folder_of_pieces(own).glob('piece-*') if p.is_dir())
    if not (piece / name).stat().st_size:
        (piece / name).write_bytes(b'ab')  # a piece without validation, which has now
    else:
        DAMAGES[how](piece / name)
    n, before, said = n_pieces(own), encoding.n, []
    assert prepared_by(own, said.append) == wanted
    assert encoding.n - before == n - 3 + 1
    assert sum(f'{piece} is damaged' in line for line in said) == 1


SCANS = [(how, name) for how in DAMAGES.values() for name in (scan.COPY, scan.TABLE)]


@pytest.mark.default_rows(
    'byte-swap-text',
    'byte-flip-text',
    'byte-flip-documents.npz',
    'byte-cut-text',
    'byte-cut-documents.npz',
    'byte-unlink-text',
    'byte-unlink-documents.npz',
)
@pytest.mark.parametrize(('how', 'name'), [(swap, scan.COPY), *SCANS])
def test_a_damaged_scan_is_made_again(how, name, own, wanted, monkeypatch):
    """Before the tokenizer is trained, or anything is encoded."""
    with monkeypatch.context() as patched, pytest.raises(AssertionError):
        patched.setattr(prepare, 'training_texts', refuse)
        open_dataset(own, say=discard_line)
    how(folder_of_pieces(own) / prepare.SCAN / name)
    said = []
    assert prepared_by(own, said.append) == wanted
    assert sum('what is damaged is made again' in line for line in said) == 1
    assert sum('preparing' in line for line in said) == 1


def test_a_copy_that_is_damaged_meanwhile_is_made_again(own, wanted, encoding, monkeypatch):
    """Pieces of the copy as it was are not made again."""
    with interrupted(monkeypatch, 3):
        open_dataset(own, say=discard_line)
    n, before = n_pieces(own), encoding.n
    swap(folder_of_pieces(own) / prepare.SCAN / scan.COPY)
    assert prepared_by(own) == wanted
    assert encoding.n - before == n - 3 + 1  # and the one it was found by


def test_one_document_is_not_cut_by_a_damaged_copy(cfg, tmp_path, monkeypatch):
    """Its copies may be whole: their piece would hold other splits."""
    own = cfg(source=write_texts(tmp_path, ['a line\n' * 200] * 9))
    wanted = prepared_by(dataclasses.replace(own, cache_dir=str(tmp_path / 'wanted')))
    with interrupted(monkeypatch, 0):
        open_dataset(own, say=discard_line)
    monkeypatch.setattr(prepare.random, 'randrange', lambda n: 1)  # the damage is in piece 0
    path = folder_of_pieces(own) / prepare.SCAN / scan.COPY
    data = path.read_bytes()
    path.write_bytes(data[:1400].replace(b' line\n', b'\nline ') + data[1400:])
    assert prepared_by(own) == wanted


def test_a_disk_that_damages_every_copy_is_an_error(own, monkeypatch):
    written = scan.scan_source

    def damaged(source, cfg, folder):
        written(source, cfg, folder)
        flip(folder / scan.COPY)

    monkeypatch.setattr(scan, 'scan_source', damaged)
    with pytest.raises(OSError, match='the copy of the text is damaged'):
        open_dataset(own, say=discard_line)
