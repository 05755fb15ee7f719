"""One source prepared by several processes.

Threads stand for processes: a lock is of the file that was opened, so it holds between them, too.
"""

import contextlib
import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lm.data import cache, open_dataset, prepare, scan
from lm.data.sources import open_source
from lm.storage.files import hold_lock, read_json, write_json
from tests.lm.data.conftest import (
    PIECE_BYTES,
    Killed,
    discard_line,
    folder_of_pieces,
    interrupted,
    killed,
    left_in,
    n_pieces,
    prepared_by,
    write_texts,
    write_tokenizer,
)

pytestmark = pytest.mark.usefixtures('small')
N = 3


def on_each(act, monkeypatch):
    """[what `act` gave, or the error it raised], of N processes that start at once."""
    monkeypatch.setattr(os, 'getpid', threading.get_ident)

    def one():
        try:
            return act()
        except Exception as error:
            return error

    with ThreadPoolExecutor(N) as pool:
        return [f.result(60) for f in [pool.submit(one) for _ in range(N)]]


def test_equivalence_pieces_by_one_process(own, wanted, encoding):
    assert prepared_by(own) == wanted
    assert encoding.n > 5 and left_in(own) == []


def test_equivalence_pieces_by_several_processes(own, wanted, encoding, monkeypatch):
    """All encode at once, and each piece is encoded once."""
    meet, totals = threading.Barrier(N), []

    def before(number):
        if number < N:
            meet.wait(30)
            totals.append(n_pieces(own))

    encoding.before = before
    assert on_each(lambda: prepared_by(own), monkeypatch) == [wanted] * N
    assert encoding.n == totals[0] and left_in(own) == []


def test_equivalence_without_locks(own, wanted, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr('lm.storage.files.fcntl.flock', refuse)
    said = []
    assert on_each(lambda: prepared_by(own, said.append), monkeypatch) == [wanted] * N
    assert any('cannot be locked' in line for line in said) and left_in(own) == []


def test_without_locks_the_first_folder_of_a_name_stays(tmp_path):
    path = tmp_path / 'name'

    def make(partial):
        (partial / 'ours').touch()
        path.mkdir()
        (path / 'theirs').touch()

    cache.fill(path, make, str, discard_line, False)
    assert [p.name for p in tmp_path.rglob('*')] == ['name', 'theirs']


def test_hosts_that_do_not_see_each_others_locks_write_apart(tmp_path, monkeypatch):
    """And what a killed process of this host left is gone."""
    path = tmp_path / 'name'
    killed = tmp_path / f'name.{cache.socket.gethostname()}{cache.PARTIAL}'
    killed.mkdir()
    (killed / 'old').touch()

    def make_there(partial):
        (partial / 'theirs').touch()

    def make(partial):
        (partial / 'ours').touch()
        with monkeypatch.context() as patched:
            patched.setattr(cache.socket, 'gethostname', lambda: 'elsewhere')
            cache.fill(path, make_there, str, discard_line, True)
        assert [p.name for p in partial.iterdir()] == ['ours']

    cache.fill(path, make, str, discard_line, True)
    assert sorted(p.name for p in tmp_path.rglob('*')) == ['name', 'theirs']


def test_an_error_of_the_text_is_told_by_all_and_leaves_nothing(cfg, tmp_path, monkeypatch):
    """Each process finds it, however it waited, and none waits for ever."""
    texts = [f'{"line" if i == 25 else "nine" * 100}{i}' for i in range(40)]
    own = cfg(source=write_texts(tmp_path, texts), tokenizer=write_tokenizer(tmp_path))
    for error in on_each(lambda: open_dataset(own, say=discard_line), monkeypatch):
        assert isinstance(error, ValueError) and 'makes its own BOS' in str(error)
    assert left_in(own) == []


def test_pieces_beside_whole_data_are_removed(own):
    dataset = open_dataset(own, say=discard_line)
    left = cache.root(own.cache_dir) / f'{dataset.digest}.pieces'
    (left / 'scan').mkdir(parents=True)
    open_dataset(own, say=pytest.fail)
    assert not left.exists()


@pytest.mark.parametrize('is_at_work', [False, True])
def test_pieces_of_a_text_that_has_changed_since_are_removed_and_said(
    own, tmp_path, monkeypatch, is_at_work
):
    """A process was killed, and the text changed; unless another is at work on what it was."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(prepare.Pieces, '_ensure_piece', killed)
        open_dataset(own, say=discard_line)
    (left,) = cache.root(own.cache_dir).glob('*.pieces')
    other = cache.root(own.cache_dir) / 'other.pieces'  # of another text
    shutil.copytree(left, other)
    settings = read_json(left / prepare.SETTINGS) | {'source': 'text:other'}
    write_json(other / prepare.SETTINGS, settings)
    (tmp_path / 'corpus' / '00.txt').write_text('another text of some length ' * 40)
    said = []
    with contextlib.ExitStack() as held:
        if is_at_work:
            held.enter_context(hold_lock(left / 'piece-000003.lock'))
        open_dataset(own, say=said.append)
    assert left.exists() == is_at_work and other.exists()
    told = [line for line in said if 'of a text that has changed' in line]
    assert len(told) == (not is_at_work) and all(str(left) in line for line in told)


def test_a_mixture_goes_on_while_others_encode_the_last_pieces(cfg, tmp_path, monkeypatch):
    """Catches a process that waits for a piece while another source is not begun."""
    first = cfg()
    (tmp_path / 'second').mkdir()
    (tmp_path / 'second' / 'a.txt').write_text('some lines\n' * 100)
    with interrupted(monkeypatch, 0):
        open_dataset(first, say=discard_line)
    spelt = {'one': (1, first.source), 'two': (1, f'text:{tmp_path}/second/*')}
    said, done = [], []
    mixture = cfg(source='', mixture=repr(spelt))
    thread = threading.Thread(target=lambda: done.append(open_dataset(mixture, say=said.append)))
    with hold_lock(folder_of_pieces(first) / 'piece-000000.lock', waiting_message=''):
        thread.start()
        deadline = time.monotonic() + 60
        while not any('other processes encode the last' in line for line in said):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert any('preparing' in line and 'second' in line for line in said) and not done
    thread.join(60)
    assert done[0].report['sources']['one']['train']['documents'] > 20


def test_files_are_read_for_their_digests_by_one_process(cfg, monkeypatch):
    own, read, digest = cfg(), [], cache.file_digest

    def slow(path):
        read.append(path.name)
        time.sleep(0.02)
        return digest(path)

    monkeypatch.setattr(cache, 'file_digest', slow)
    source = open_source(own.source, own.text_field)
    root = cache.root(own.cache_dir)
    found = on_each(lambda: cache.file_digests(root, source.files), monkeypatch)
    assert found == [[digest(path) for path in source.files]] * N
    assert len(read) == len(set(read)) == 40


@pytest.mark.parametrize(('length', 'n'), [(1, 400), (900, 40), (9000, 7)])
def test_property_pieces_are_all_documents_and_bounded(length, n, cfg, tmp_path):
    """Short documents count as more than their bytes: they take memory, too."""
    lines = ''.join(f'{{"text": "{"a" * (length - i % 2)}"}}\n' for i in range(n))
    (tmp_path / 'a.jsonl').write_text(lines)
    own = cfg(source=f'text:{tmp_path}/a.jsonl')
    (tmp_path / 'scan').mkdir()
    scan.scan_source(open_source(own.source, 'text'), own, tmp_path / 'scan')
    with scan.open_scan(tmp_path / 'scan') as found:
        stops, starts = [piece.stop for piece in found.pieces], [0]
        assert [piece.first for piece in found.pieces] == [0, *stops[:-1]]
        assert stops[-1] == len(found.lengths) and len(stops) > 3
        for piece in found.pieces:
            assert piece.start == starts[-1]
            lengths = found.lengths[piece.first : piece.stop]
            costs = lengths + scan.DOCUMENT_COST
            assert costs.sum() - costs[-1] < PIECE_BYTES and costs.sum() > (piece.stop != stops[-1])
            starts.append(piece.start + int(lengths.sum()))
        assert starts[-1] == found.n_bytes
