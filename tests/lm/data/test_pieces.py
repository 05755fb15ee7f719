"""One source, prepared by several processes.

Threads stand for processes: a lock belongs to the opened file, so that it also works between
threads.
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
    PreparationKilled,
    discard_line,
    interrupt_encoding,
    leftover_folders,
    n_pieces,
    pieces_folder,
    prepare_contents,
    raise_killed,
    write_texts,
    write_tokenizer,
)

pytestmark = pytest.mark.usefixtures('small_pieces')
N = 3


def run_at_once(function, monkeypatch):
    """Returns [the result of `function`, or its error] of N processes that start at once."""
    monkeypatch.setattr(os, 'getpid', threading.get_ident)

    def run():
        try:
            return function()
        except Exception as error:
            return error

    with ThreadPoolExecutor(N) as pool:
        return [future.result(60) for future in [pool.submit(run) for _ in range(N)]]


def test_equivalence_pieces_by_one_process(data_cfg, expected_files, encoding):
    assert prepare_contents(data_cfg) == expected_files
    assert encoding.n > 5 and leftover_folders(data_cfg) == []


def test_equivalence_pieces_by_several_processes(data_cfg, expected_files, encoding, monkeypatch):
    """All processes encode at once, and each piece is encoded once."""
    meet, totals = threading.Barrier(N), []

    def before(number):
        if number < N:
            meet.wait(30)
            totals.append(n_pieces(data_cfg))

    encoding.before = before
    assert run_at_once(lambda: prepare_contents(data_cfg), monkeypatch) == [expected_files] * N
    assert encoding.n == totals[0] and leftover_folders(data_cfg) == []


def test_equivalence_without_locks(data_cfg, expected_files, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr('lm.storage.files.fcntl.flock', refuse)
    messages = []
    assert (
        run_at_once(lambda: prepare_contents(data_cfg, messages.append), monkeypatch)
        == [expected_files] * N
    )
    assert any('cannot be locked' in line for line in messages) and leftover_folders(data_cfg) == []


def test_first_folder_stays_without_locks(tmp_path):
    path = tmp_path / 'name'

    def make(partial):
        (partial / 'ours').touch()
        path.mkdir()
        (path / 'theirs').touch()

    cache.fill(path, make, str, discard_line, False)
    assert [p.name for p in tmp_path.rglob('*')] == ['name', 'theirs']


def test_hosts_without_locks_write_separately(tmp_path, monkeypatch):
    """The folder that a killed process of this host left is removed."""
    path = tmp_path / 'name'
    left_by_killed = tmp_path / f'name.{cache.socket.gethostname()}{cache.PARTIAL}'
    left_by_killed.mkdir()
    (left_by_killed / 'old').touch()

    def make_elsewhere(partial):
        (partial / 'theirs').touch()

    def make(partial):
        (partial / 'ours').touch()
        with monkeypatch.context() as patch:
            patch.setattr(cache.socket, 'gethostname', lambda: 'elsewhere')
            cache.fill(path, make_elsewhere, str, discard_line, True)
        assert [p.name for p in partial.iterdir()] == ['ours']

    cache.fill(path, make, str, discard_line, True)
    assert sorted(p.name for p in tmp_path.rglob('*')) == ['name', 'theirs']


def test_all_processes_raise_text_errors(cfg, tmp_path, monkeypatch):
    """Each process raises the error, however it waited, and none waits for ever."""
    texts = [f'{"line" if i == 25 else "nine" * 100}{i}' for i in range(40)]
    data_cfg = cfg(source=write_texts(tmp_path, texts), tokenizer=write_tokenizer(tmp_path))
    for error in run_at_once(lambda: open_dataset(data_cfg, say=discard_line), monkeypatch):
        assert isinstance(error, ValueError) and 'as its own BOS' in str(error)
    assert leftover_folders(data_cfg) == []


def test_complete_data_removes_pieces(data_cfg):
    dataset = open_dataset(data_cfg, say=discard_line)
    pieces = cache.root(data_cfg.cache_dir) / f'{dataset.digest}.pieces'
    (pieces / 'scan').mkdir(parents=True)
    open_dataset(data_cfg, say=pytest.fail)
    assert not pieces.exists()


@pytest.mark.parametrize('is_at_work', [False, True])
def test_outdated_pieces_are_removed(data_cfg, tmp_path, monkeypatch, is_at_work):
    """A process was killed, and the text changed. Pieces that another process locks stay."""
    with monkeypatch.context() as patch, pytest.raises(PreparationKilled):
        patch.setattr(prepare.Pieces, '_ensure_piece', raise_killed)
        open_dataset(data_cfg, say=discard_line)
    (outdated,) = cache.root(data_cfg.cache_dir).glob('*.pieces')
    unrelated = cache.root(data_cfg.cache_dir) / 'other.pieces'  # of another text
    shutil.copytree(outdated, unrelated)
    settings = read_json(outdated / prepare.SETTINGS) | {'source': 'text:other'}
    write_json(unrelated / prepare.SETTINGS, settings)
    (tmp_path / 'corpus' / '00.txt').write_text('another text of some length ' * 40)
    messages = []
    with contextlib.ExitStack() as stack:
        if is_at_work:
            stack.enter_context(hold_lock(outdated / 'piece-000003.lock'))
        open_dataset(data_cfg, say=messages.append)
    assert outdated.exists() == is_at_work and unrelated.exists()
    removals = [line for line in messages if 'an earlier version of this text' in line]
    assert len(removals) == (not is_at_work) and all(str(outdated) in line for line in removals)


def test_mixture_prepares_other_sources_meanwhile(cfg, tmp_path, monkeypatch):
    """Catches a process that waits for a piece before it has started another source."""
    locked_cfg = cfg()
    (tmp_path / 'second').mkdir()
    (tmp_path / 'second' / 'a.txt').write_text('some lines\n' * 100)
    with interrupt_encoding(monkeypatch, 0):
        open_dataset(locked_cfg, say=discard_line)
    sources = {'one': (1, locked_cfg.source), 'two': (1, f'text:{tmp_path}/second/*')}
    messages, datasets = [], []
    mixture = cfg(source='', mixture=repr(sources))
    thread = threading.Thread(
        target=lambda: datasets.append(open_dataset(mixture, say=messages.append))
    )
    with hold_lock(pieces_folder(locked_cfg) / 'piece-000000.lock', waiting_message=''):
        thread.start()
        deadline = time.monotonic() + 60
        while not any('other processes are encoding the last' in line for line in messages):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert any('preparing' in line and 'second' in line for line in messages) and not datasets
    thread.join(60)
    assert datasets[0].report['sources']['one']['train']['documents'] > 20


def test_one_process_reads_files_for_digests(cfg, monkeypatch):
    data_cfg, names_read, digest = cfg(), [], cache.file_digest

    def slow(path):
        names_read.append(path.name)
        time.sleep(0.02)
        return digest(path)

    monkeypatch.setattr(cache, 'file_digest', slow)
    source = open_source(data_cfg.source, data_cfg.text_field)
    root = cache.root(data_cfg.cache_dir)
    digests = run_at_once(lambda: cache.file_digests(root, source.files), monkeypatch)
    assert digests == [[digest(path) for path in source.files]] * N
    assert len(names_read) == len(set(names_read)) == 40


@pytest.mark.parametrize(('length', 'n'), [(1, 400), (900, 40), (9000, 7)])
def test_property_pieces_cover_documents_and_are_bounded(length, n, cfg, tmp_path):
    """Short documents count as more than their bytes, because they take memory too."""
    lines = ''.join(f'{{"text": "{"a" * (length - i % 2)}"}}\n' for i in range(n))
    (tmp_path / 'a.jsonl').write_text(lines)
    data_cfg = cfg(source=f'text:{tmp_path}/a.jsonl')
    (tmp_path / 'scan').mkdir()
    scan.scan_source(open_source(data_cfg.source, 'text'), data_cfg, tmp_path / 'scan')
    with scan.open_scan(tmp_path / 'scan') as corpus:
        stops, starts = [piece.stop for piece in corpus.pieces], [0]
        assert [piece.first for piece in corpus.pieces] == [0, *stops[:-1]]
        assert stops[-1] == len(corpus.lengths) and len(stops) > 3
        for piece in corpus.pieces:
            assert piece.start == starts[-1]
            lengths = corpus.lengths[piece.first : piece.stop]
            costs = lengths + scan.DOCUMENT_COST
            assert costs.sum() - costs[-1] < PIECE_BYTES and costs.sum() > (piece.stop != stops[-1])
            starts.append(piece.start + int(lengths.sum()))
        assert starts[-1] == corpus.n_bytes
