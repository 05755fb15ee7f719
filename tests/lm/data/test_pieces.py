"""One source prepared by several processes, and by one after another that was killed.

Threads stand for processes: a lock is of the file that was opened, so it holds between them, too.
"""

import contextlib
import dataclasses
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lm.data import cache, open_dataset, pieces, prepare, scan, tokenizers
from lm.data.sources import open_source
from lm.files import locked
from tests.lm.data.conftest import quiet
from tests.lm.data.test_cache import launch

N = 3
BYTES = 2000  # of a piece; the corpus has 40 documents of some hundred bytes


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(scan, 'PIECE', BYTES)


@pytest.fixture(params=['byte', 'bpe:300'])
def own(request, cfg):
    """The config of one source, with each kind of tokenizer."""
    return cfg(tokenizer=request.param)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob('*') if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def prepared_by(cfg, say=quiet) -> dict[str, bytes]:
    return contents(cache.root(cfg.cache_dir) / open_dataset(cfg, say=say).digest)


@pytest.fixture
def wanted(own, tmp_path, monkeypatch):
    """What one process makes of it, in one piece."""
    monkeypatch.setattr(scan, 'PIECE', 1 << 24)
    found = prepared_by(dataclasses.replace(own, cache_dir=str(tmp_path / 'wanted')))
    monkeypatch.setattr(scan, 'PIECE', BYTES)
    assert {'report.json', 'index.npz', 'contents.json', 'records/dataset_info.json'} < set(found)
    return found


@dataclasses.dataclass
class Encoding:
    """Counts the pieces that are encoded; `before` is called before each, with their number."""

    n: int = 0
    before: object = None

    def __post_init__(self):
        self.lock, self.encode = threading.Lock(), prepare.encode

    def __call__(self, *args):
        with self.lock:
            number, self.n = self.n, self.n + 1
        if self.before is not None:
            self.before(number)
        self.encode(*args)


@pytest.fixture
def encoding(monkeypatch):
    counted = Encoding()
    monkeypatch.setattr(prepare, 'encode', counted)
    return counted


def folder_of_pieces(cfg) -> Path:
    (folder,) = cache.root(cfg.cache_dir).glob('*.pieces')
    return folder


def n_pieces(cfg) -> int:
    with scan.opened(folder_of_pieces(cfg) / pieces.SCAN) as found:
        return len(found.pieces)


def left_in(cfg) -> list[str]:
    """Folders beside the data that is whole."""
    return [p.name for p in cache.root(cfg.cache_dir).iterdir() if p.is_dir() and p.suffix]


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

    monkeypatch.setattr('lm.files.fcntl.flock', refuse)
    said = []
    assert on_each(lambda: prepared_by(own, said.append), monkeypatch) == [wanted] * N
    assert any('cannot be locked' in line for line in said) and left_in(own) == []


def test_without_locks_the_first_folder_of_a_name_stays(tmp_path):
    path = tmp_path / 'name'

    def make(partial):
        (partial / 'ours').touch()
        path.mkdir()
        (path / 'theirs').touch()

    cache.filled(path, make, str, quiet, False)
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
            cache.filled(path, make_there, str, quiet, True)
        assert [p.name for p in partial.iterdir()] == ['ours']

    cache.filled(path, make, str, quiet, True)
    assert sorted(p.name for p in tmp_path.rglob('*')) == ['name', 'theirs']


# The process is killed within its third piece, whose files are there and not sealed.
KILL = """
from lm.data import scan
scan.PIECE = BYTES
seal, sealed = prepare.seal, []
def kill(folder):
    if len(sealed) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    sealed.append(seal(folder))
prepare.seal = kill
"""


def refuse(*args, **kwargs):
    raise AssertionError('done already')


def test_a_killed_process_is_gone_on_with(own, wanted, encoding, monkeypatch):
    """Only what is left is done: catches a scan, a training or a piece that is made once more."""
    killed = launch(own, KILL.replace('BYTES', str(BYTES)))
    _, err = killed.communicate(timeout=60)
    assert killed.returncode == -9, err
    n = n_pieces(own)
    assert len(list(folder_of_pieces(own).glob('piece-*.partial'))) == 1
    said = []
    with monkeypatch.context() as patched:
        patched.setattr(pieces, 'scan', refuse)
        patched.setattr(tokenizers, '_train_bpe', refuse)
        assert prepared_by(own, said.append) == wanted
    assert encoding.n == n - 2 > 3 and left_in(own) == []
    assert f'data: 2 of {n} pieces are encoded' in said


INTERRUPT = KeyboardInterrupt()


@contextlib.contextmanager
def interrupted(monkeypatch, after: int, error=INTERRUPT):
    """By `error`, in the midst of a piece, when `after` pieces are done."""
    seal, sealed = prepare.seal, []

    def stop(folder):
        if len(sealed) == after:
            raise error
        sealed.append(seal(folder))

    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(prepare, 'seal', stop)
        yield


@pytest.mark.parametrize('error', [INTERRUPT, OSError(errno.ENOSPC, 'full')], ids=repr)
def test_an_error_leaves_what_is_done(error, own, wanted, encoding, monkeypatch):
    with interrupted(monkeypatch, 4, error):
        open_dataset(own, say=quiet)
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


@pytest.mark.parametrize('name', [*prepare.PIECE_FILES])
@pytest.mark.parametrize('how', DAMAGES)
def test_a_damaged_piece_is_encoded_again(how, name, own, wanted, encoding, monkeypatch):
    with interrupted(monkeypatch, 3):
        open_dataset(own, say=quiet)
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


@pytest.mark.parametrize(('how', 'name'), [(swap, scan.COPY), *SCANS])
def test_a_damaged_scan_is_made_again(how, name, own, wanted, monkeypatch):
    """Before the tokenizer is trained, or anything is encoded."""
    with monkeypatch.context() as patched, pytest.raises(AssertionError):
        patched.setattr(prepare, 'training_texts', refuse)
        open_dataset(own, say=quiet)
    how(folder_of_pieces(own) / pieces.SCAN / name)
    said = []
    assert prepared_by(own, said.append) == wanted
    assert sum('what is damaged is made again' in line for line in said) == 1
    assert sum('preparing' in line for line in said) == 1


def test_a_copy_that_is_damaged_meanwhile_is_made_again(own, wanted, encoding, monkeypatch):
    """Pieces of the copy as it was are not made again."""
    with interrupted(monkeypatch, 3):
        open_dataset(own, say=quiet)
    n, before = n_pieces(own), encoding.n
    swap(folder_of_pieces(own) / pieces.SCAN / scan.COPY)
    assert prepared_by(own) == wanted
    assert encoding.n - before == n - 3 + 1  # and the one it was found by


def test_one_document_is_not_cut_by_a_damaged_copy(cfg, tmp_path, monkeypatch):
    """Its copies may be whole: their piece would hold other splits."""
    for i in range(9):
        (tmp_path / f'{i}.txt').write_text('a line\n' * 200)
    own = cfg(source=f'text:{tmp_path}/*.txt')
    wanted = prepared_by(dataclasses.replace(own, cache_dir=str(tmp_path / 'wanted')))
    with interrupted(monkeypatch, 0):
        open_dataset(own, say=quiet)
    path = folder_of_pieces(own) / pieces.SCAN / scan.COPY
    data = path.read_bytes()
    path.write_bytes(data[:1400].replace(b'\n', b' ') + data[1400:])
    assert prepared_by(own) == wanted


def test_a_disk_that_damages_every_copy_is_an_error(own, monkeypatch):
    written = scan.scan

    def damaged(source, cfg, folder):
        written(source, cfg, folder)
        flip(folder / scan.COPY)

    monkeypatch.setattr(pieces, 'scan', damaged)
    with pytest.raises(OSError, match='the copy of the text is damaged'):
        open_dataset(own, say=quiet)


def test_an_error_of_the_text_is_told_by_all_and_leaves_nothing(cfg, tmp_path, monkeypatch):
    """Each process finds it, however it waited, and none waits for ever."""
    import tokenizers as library

    made = library.Tokenizer(library.models.BPE({'l': 0, 'i': 1, 'n': 2, 'e': 3}, []))
    made.add_tokens(['line'])
    made.save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'tokenizer_config.json').write_text('{"bos_token": "line"}')
    for i in range(40):
        text = 'line' if i == 25 else 'nine' * 100
        (tmp_path / f'{i:02}.txt').write_text(f'{text}{i}')
    own = cfg(source=f'text:{tmp_path}/*.txt', tokenizer=f'hf:{tmp_path}')
    for error in on_each(lambda: open_dataset(own, say=quiet), monkeypatch):
        assert isinstance(error, ValueError) and 'makes its own BOS' in str(error)
    assert left_in(own) == []


def test_pieces_beside_whole_data_are_removed(own):
    dataset = open_dataset(own, say=quiet)
    left = cache.root(own.cache_dir) / f'{dataset.digest}.pieces'
    (left / 'scan').mkdir(parents=True)
    open_dataset(own, say=pytest.fail)
    assert not left.exists()


def test_a_mixture_goes_on_while_others_encode_the_last_pieces(cfg, tmp_path, monkeypatch):
    """Catches a process that waits for a piece while another source is not begun."""
    first = cfg()
    (tmp_path / 'second').mkdir()
    (tmp_path / 'second' / 'a.txt').write_text('some lines\n' * 100)
    with interrupted(monkeypatch, 0):
        open_dataset(first, say=quiet)
    spelt = {'one': (1, first.source), 'two': (1, f'text:{tmp_path}/second/*')}
    said, done = [], []
    mixture = cfg(source='', mixture=repr(spelt))
    thread = threading.Thread(target=lambda: done.append(open_dataset(mixture, say=said.append)))
    with locked(folder_of_pieces(first) / 'piece-000000.lock', waiting=''):
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
    with scan.scanned(open_source(own.source, 'text'), own, tmp_path) as found:
        stops, starts = [piece.stop for piece in found.pieces], [0]
        assert [piece.first for piece in found.pieces] == [0, *stops[:-1]]
        assert stops[-1] == len(found.lengths) and len(stops) > 3
        for piece in found.pieces:
            assert piece.start == starts[-1]
            lengths = found.lengths[piece.first : piece.stop]
            costs = lengths + scan.DOCUMENT_COST
            assert costs.sum() - costs[-1] < BYTES and costs.sum() > (piece.stop != stops[-1])
            starts.append(piece.start + int(lengths.sum()))
        assert starts[-1] == found.n_bytes
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name != 'corpus']
