"""A data section small enough to prepare in a fraction of a second, and what pieces it makes."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from configs import default
from lm.config.fields import DataConfig
from lm.config.resolve import resolve
from lm.data import cache, open_dataset, prepare, scan
from lm.storage.files import discard_line

PIECE_BYTES = 2000
INTERRUPT = KeyboardInterrupt()

WORDS = ['a', 'the', 'of', 'norm', 'scale', 'loss', '日本', 'é', '🙂', 'x=1', '\r\n', '\t', '']


def document(i: int) -> str:
    rng = np.random.default_rng(i)
    lines = [' '.join(rng.choice(WORDS, rng.integers(1, 12))) for _ in range(rng.integers(1, 20))]
    return f'document {i}\n' + '\n'.join(lines) + '\n'


@pytest.fixture
def cfg(tmp_path):
    """cfg(field=value, ...) -> DataConfig; its source is 40 .txt files, its cache is its own."""
    base = resolve(default.get_config()).data

    def make(**fields) -> DataConfig:
        folder = tmp_path / 'corpus'
        if 'source' not in fields and not folder.exists():
            folder.mkdir()
            for i in range(40):
                (folder / f'{i:02}.txt').write_bytes(document(i).encode())
        own = {
            'source': f'text:{folder}/*.txt',
            'tokenizer': 'byte',
            'seq_len': 32,
            'batch_size': 4,
            'validation_fraction': 0.2,
            'cache_dir': str(tmp_path / 'cache'),
        }
        return dataclasses.replace(base, **(own | fields))

    return make


@pytest.fixture
def small(monkeypatch):
    """Pieces so small that the corpus has some ten."""
    monkeypatch.setattr(scan, 'PIECE', PIECE_BYTES)


@pytest.fixture(params=['byte', 'bpe:300'])
def own(request, cfg):
    """The config of one source, with each kind of tokenizer."""
    return cfg(tokenizer=request.param)


class Killed(BaseException):
    """Stands for the end of the process."""


def killed(*_, **__):
    raise Killed


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob('*') if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def prepared_by(cfg: DataConfig, say: Callable = discard_line) -> dict[str, bytes]:
    return contents(cache.root(cfg.cache_dir) / open_dataset(cfg, say=say).digest)


@pytest.fixture
def wanted(own, tmp_path, monkeypatch):
    """All that one process makes of it, in one piece."""
    monkeypatch.setattr(scan, 'PIECE', 1 << 24)
    found = prepared_by(dataclasses.replace(own, cache_dir=str(tmp_path / 'wanted')))
    monkeypatch.setattr(scan, 'PIECE', PIECE_BYTES)
    assert {'report.json', 'index.npz', 'contents.json', 'records/dataset_info.json'} < set(found)
    return found


@dataclasses.dataclass
class Encoding:
    """Counts the pieces that are encoded; `before` is called before each, with their number."""

    n: int = 0
    before: Callable | None = None

    def __post_init__(self):
        self.lock, self.encode = threading.Lock(), prepare.encode_piece

    def __call__(self, *args):
        with self.lock:
            number, self.n = self.n, self.n + 1
        if self.before is not None:
            self.before(number)
        self.encode(*args)


@pytest.fixture
def encoding(monkeypatch):
    counted = Encoding()
    monkeypatch.setattr(prepare, 'encode_piece', counted)
    return counted


def folder_of_pieces(cfg: DataConfig) -> Path:
    (folder,) = cache.root(cfg.cache_dir).glob('*.pieces')
    return folder


def n_pieces(cfg: DataConfig) -> int:
    with scan.open_scan(folder_of_pieces(cfg) / prepare.SCAN) as found:
        return len(found.pieces)


def write_texts(folder: Path, texts: Iterable[str | bytes]) -> str:
    """Returns the source of a folder with a .txt file of each text."""
    folder.mkdir(exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f'{i:04}.txt').write_bytes(text if isinstance(text, bytes) else text.encode())
    return f'text:{folder}/*.txt'


def write_tokenizer(folder: Path) -> str:
    """Returns the tokenizer of a folder whose BOS is no special token, so that text can spell it:
    'line'.
    """
    import tokenizers as library

    made = library.Tokenizer(library.models.BPE({'l': 0, 'i': 1, 'n': 2, 'e': 3}, []))
    made.add_tokens(['line'])
    made.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text('{"bos_token": "line"}')
    return f'hf:{folder}'


def notes_of(cfg: DataConfig) -> list[str]:
    """What is said that begins with NOTE as the data are opened."""
    said = []
    open_dataset(cfg, say=said.append)
    return [line for line in said if line.startswith('NOTE')]


def left_in(cfg: DataConfig) -> list[str]:
    """Folders beside the data that is whole."""
    return [p.name for p in cache.root(cfg.cache_dir).iterdir() if p.is_dir() and p.suffix]


@contextlib.contextmanager
def interrupted(monkeypatch, after: int, error: BaseException = INTERRUPT) -> Iterator[None]:
    """By `error`, in the midst of a piece, when `after` pieces are done."""
    encode, done = prepare.encode_piece, []

    def stop(*args):
        encode(*args)
        if len(done) == after:
            raise error
        done.append(None)

    with monkeypatch.context() as patched, pytest.raises(type(error)):
        patched.setattr(prepare, 'encode_piece', stop)
        yield
