"""Fixtures of data: a section that is prepared in a fraction of a second, and its pieces."""

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
        defaults = {
            'source': f'text:{folder}/*.txt',
            'tokenizer': 'byte',
            'seq_len': 32,
            'batch_size': 4,
            'validation_fraction': 0.2,
            'cache_dir': str(tmp_path / 'cache'),
        }
        return dataclasses.replace(base, **(defaults | fields))

    return make


@pytest.fixture
def small_pieces(monkeypatch):
    """Sets a piece size at which the corpus has about ten pieces."""
    monkeypatch.setattr(scan, 'PIECE', PIECE_BYTES)


@pytest.fixture(params=['byte', 'bpe:300'])
def data_cfg(request, cfg):
    """The config of one source, with each kind of tokenizer."""
    return cfg(tokenizer=request.param)


class PreparationKilled(BaseException):
    """Stands for the end of the process."""


def raise_killed(*_, **__):
    raise PreparationKilled


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob('*') if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def prepare_contents(cfg: DataConfig, say: Callable = discard_line) -> dict[str, bytes]:
    return contents(cache.root(cfg.cache_dir) / open_dataset(cfg, say=say).digest)


@pytest.fixture
def expected_files(data_cfg, tmp_path, monkeypatch):
    """The files that one process makes, in one piece."""
    monkeypatch.setattr(scan, 'PIECE', 1 << 24)
    files = prepare_contents(dataclasses.replace(data_cfg, cache_dir=str(tmp_path / 'wanted')))
    monkeypatch.setattr(scan, 'PIECE', PIECE_BYTES)
    assert {'report.json', 'index.npz', 'contents.json', 'records/dataset_info.json'} < set(files)
    return files


@dataclasses.dataclass
class Encoding:
    """Counts the encoded pieces; `before` is called before each with its number."""

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
    counting = Encoding()
    monkeypatch.setattr(prepare, 'encode_piece', counting)
    return counting


def pieces_folder(cfg: DataConfig) -> Path:
    (folder,) = cache.root(cfg.cache_dir).glob('*.pieces')
    return folder


def n_pieces(cfg: DataConfig) -> int:
    with scan.open_scan(pieces_folder(cfg) / prepare.SCAN) as corpus:
        return len(corpus.pieces)


def write_texts(folder: Path, texts: Iterable[str | bytes]) -> str:
    """Returns the source of a folder with a .txt file of each text."""
    folder.mkdir(exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f'{i:04}.txt').write_bytes(text if isinstance(text, bytes) else text.encode())
    return f'text:{folder}/*.txt'


def write_tokenizer(folder: Path) -> str:
    """Writes a tokenizer whose BOS is no special token, so that the text 'line' spells it."""
    import tokenizers as library

    tokenizer = library.Tokenizer(library.models.BPE({'l': 0, 'i': 1, 'n': 2, 'e': 3}, []))
    tokenizer.add_tokens(['line'])
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text('{"bos_token": "line"}')
    return f'hf:{folder}'


def opening_notes(cfg: DataConfig) -> list[str]:
    """Returns the notes that opening the data prints."""
    messages = []
    open_dataset(cfg, say=messages.append)
    return [line for line in messages if line.startswith('NOTE')]


def leftover_folders(cfg: DataConfig) -> list[str]:
    """Returns the folders beside the complete data."""
    return [p.name for p in cache.root(cfg.cache_dir).iterdir() if p.is_dir() and p.suffix]


@contextlib.contextmanager
def interrupt_encoding(monkeypatch, after: int, error: BaseException = INTERRUPT) -> Iterator[None]:
    """Raises `error` within a piece, after `after` pieces are encoded."""
    encode, finished = prepare.encode_piece, []

    def stop(*args):
        encode(*args)
        if len(finished) == after:
            raise error
        finished.append(None)

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(prepare, 'encode_piece', stop)
        yield
