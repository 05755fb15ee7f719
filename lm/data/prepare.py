"""From documents to stored tokens: split, train the tokenizer, encode, write, once per content.

A prepared folder holds `tokenizer/`, `records/` (a TFDS dataset of ArrayRecord files: each split
is one stream of tokens, cut into chunks), `index.npz` (where documents start in the streams) and
`report.json`. Sequence length, packing and seed come later and cost nothing here.
"""

import array
import dataclasses
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lm.config import DataConfig
from lm.data import cache
from lm.data.rows import CHUNK
from lm.data.sources import Source
from lm.data.tokenizers import Plan, Tokenizer
from modules.choices import choose

FORMAT = 1  # raise it when what is written for the same content changes
SPLITS = ('train', 'validation')
BATCH_CHARACTERS = 4 << 20  # encoded at once, over all cores
CHUNKS_PER_FILE = 1 << 16  # files of half a gigabyte, for 16-bit tokens

Texts = Iterator[tuple[str, str]]  # (split, text)


def digest(source: Source, plan: Plan, cfg: DataConfig) -> str:
    """The name of the prepared data: a hash of all that determines it."""
    state = hashlib.blake2b(digest_size=16)
    rule = f'{FORMAT} {cfg.validation_fraction!r} {cfg.invalid_utf8} {source.identity}'
    files = cache.file_digests(cache.root(cfg.cache_dir), source.files)
    for part in (rule.encode(), plan.identity, *(file.encode() for file in files)):
        state.update(b'%d ' % len(part) + part)
    return state.hexdigest()


def prepare(source: Source, plan: Plan, cfg: DataConfig, folder: Path, say: Callable) -> None:
    """Fills `folder`. Raises ValueError for a corpus that cannot be split, or is not UTF-8."""
    found = scan(source, cfg)
    split = Split.of(found, cfg.validation_fraction)
    say(
        f'data: preparing {cfg.source} with {cfg.tokenizer}: {found.documents:,} documents, '
        f'{found.bytes / 1e6:.1f} MB'
    )
    if split.cut:
        say('data: there is one document only; its last lines are the validation split')
    if found.invalid_documents:
        say(
            f'data: {found.invalid_documents:,} documents are not UTF-8 throughout: '
            f'{found.invalid_bytes:,} bytes become U+FFFD'
        )

    def texts(what: str) -> Texts:
        read = tracked(source.documents(), found.documents + found.empty, what)
        return ((side, decode(cfg, name, data)[0]) for side, name, data in split(read))

    tokenizer = plan.build(text for side, text in texts('tokenizer') if side == 'train')
    counts = write(folder, texts('encoding'), tokenizer)
    tokenizer.save(folder / 'tokenizer')
    say(
        f'data: {counts["train"]["tokens"]:,} tokens to train on, '
        f'{counts["validation"]["tokens"]:,} to validate on'
    )
    invalid = {'documents': found.invalid_documents, 'bytes': found.invalid_bytes}
    report = {**counts, 'empty_documents': found.empty, 'invalid_utf8': invalid}
    (folder / 'report.json').write_text(json.dumps(report, indent=2) + '\n')


@dataclasses.dataclass
class Scan:
    documents: int = 0
    bytes: int = 0
    empty: int = 0  # left out of everything: nothing to learn from or to predict
    invalid_documents: int = 0
    invalid_bytes: int = 0
    smallest: int = 1 << 64  # of the documents' hashes
    largest: int = -1


def scan(source: Source, cfg: DataConfig) -> Scan:
    found = Scan()
    for name, data in source.documents():
        if not data:
            found.empty += 1
            continue
        invalid = decode(cfg, name, data)[1]
        found.documents += 1
        found.bytes += len(data)
        found.invalid_documents += invalid > 0
        found.invalid_bytes += invalid
        found.smallest = min(found.smallest, hash64(data))
        found.largest = max(found.largest, hash64(data))
    if not found.documents:
        raise ValueError(
            f'data.source={cfg.source} holds no text: {found.empty} documents, all of them empty.'
        )
    return found


def hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


@dataclasses.dataclass(frozen=True)
class Split:
    """A document validates where its hash is below `threshold`: its content alone decides, so
    copies stay together, and order, machine and number of hosts do not matter."""

    threshold: int
    cut: float  # 0, or the fraction that a corpus of one document gives to validation

    @classmethod
    def of(cls, found: Scan, fraction: float) -> 'Split':
        if found.smallest == found.largest:
            return cls(0, max(fraction, 1e-9))
        # Neither split is left empty.
        threshold = max(int(fraction * 2**64), found.smallest + 1)
        return cls(min(threshold, found.largest), 0)

    def __call__(self, documents: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, str, bytes]]:
        for name, data in documents:
            if not data:
                continue
            if self.cut:
                at = cut_point(name, data, self.cut)
                yield 'train', name, data[:at]
                yield 'validation', name, data[at:]
            else:
                yield SPLITS[hash64(data) < self.threshold], name, data


def cut_point(name: str, data: bytes, fraction: float) -> int:
    """The line start, or else the character start, that leaves about `fraction` of it behind."""
    target = min(int(len(data) * (1 - fraction)), len(data) - 1)
    at = data.rfind(b'\n', 0, target) + 1 or data.find(b'\n', target) + 1
    if not 0 < at < len(data):
        near = itertools.chain(range(target, 0, -1), range(max(target, 1), len(data)))
        at = next((i for i in near if data[i] & 0xC0 != 0x80), 0)  # a character starts there
    if not at:
        raise ValueError(
            f'the corpus is {name} alone, {len(data)} bytes: too short to be split into training '
            'and validation. Name more text in data.source.'
        )
    return at


def decode(cfg: DataConfig, name: str, data: bytes) -> tuple[str, int]:
    """The text, and how many bytes of it were not UTF-8."""
    try:
        return data.decode(), 0
    except UnicodeDecodeError as error:
        return choose(INVALID_UTF8, cfg.invalid_utf8, 'data.invalid_utf8')(name, data, error)


def _replace(name: str, data: bytes, error: UnicodeDecodeError) -> tuple[str, int]:
    # surrogateescape makes one character, found in no valid text, of each byte that is not valid.
    escaped = data.decode('utf-8', 'surrogateescape')
    return data.decode('utf-8', 'replace'), sum('\udc80' <= c <= '\udcff' for c in escaped)


def _stop(name: str, data: bytes, error: UnicodeDecodeError) -> tuple[str, int]:
    raise ValueError(
        f'{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} '
        f'({error.reason}). Mend it, or set data.invalid_utf8=replace to read on and count.'
    ) from error


INVALID_UTF8 = {'replace': _replace, 'stop': _stop}


def write(folder: Path, texts: Texts, tokenizer: Tokenizer) -> dict[str, dict[str, int]]:
    """Writes records and index in one pass; {split: {'documents', 'bytes', 'tokens'}}."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    streams = {split: Stream(tokenizer, dtype) for split in SPLITS}
    writer = _record_writer(folder / 'records', dtype)
    for group in batched(texts):
        encoded = tokenizer.encode_batch([text for _, text in group])
        for (split, text), ids in zip(group, encoded, strict=True):
            streams[split].add(text, ids)
        writer.add_examples({split: stream.take(CHUNK) for split, stream in streams.items()})
    writer.add_examples({split: stream.take(1) for split, stream in streams.items()})
    writer.close_all()
    np.savez(folder / 'index.npz', **{s: np.array(streams[s].starts) for s in SPLITS})
    return {split: stream.counts() for split, stream in streams.items()}


def _record_writer(folder: Path, dtype: type) -> Any:
    """TFDS's writer of datasets in the order given, both splits at once.

    Not a GeneratorBasedBuilder: that one holds a gigabyte of records in memory to shuffle them, and
    past it imports TensorFlow. What is written here is read by `tfds.builder_from_directory`.
    """
    import tensorflow_datasets as tfds

    folder.mkdir()
    tokens = tfds.features.Tensor(shape=(None,), dtype=dtype, encoding=tfds.features.Encoding.BYTES)
    identity = tfds.core.DatasetIdentity(
        name='evenkeel',
        version=tfds.core.Version(f'{FORMAT}.0.0'),
        data_dir=str(folder),
        module_name=__name__,
    )
    info = tfds.core.DatasetInfo(
        builder=identity,
        features=tfds.features.FeaturesDict({'tokens': tokens}),
        disable_shuffling=True,
    )
    writer = tfds.core.SequentialWriter(
        info, max_examples_per_shard=CHUNKS_PER_FILE, file_format='array_record'
    )
    writer.initialize_splits(list(SPLITS))
    return writer


class Stream:
    """BOS document EOS BOS document EOS ..., taken off in chunks."""

    def __init__(self, tokenizer: Tokenizer, dtype: type):
        self.tokenizer, self.dtype = tokenizer, dtype
        self.starts, self.n_bytes = array.array('q', [0]), 0
        self.waiting = np.empty(0, dtype)
        self.news = []

    def add(self, text: str, ids: np.ndarray) -> None:
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        if (ids == bos).any():
            raise ValueError(
                f'the tokenizer makes its own BOS, token {bos}, out of text: the start of a '
                'document could not be told from it. Declare another bos_token beside it.'
            )
        self.news.append(np.concatenate([[bos], ids, [eos]]).astype(self.dtype))
        self.starts.append(self.starts[-1] + len(ids) + 2)
        self.n_bytes += len(text.encode())

    def take(self, least: int) -> list[dict[str, np.ndarray]]:
        """The chunks that are full, and the last one if it has `least` tokens."""
        tokens = np.concatenate([self.waiting, *self.news])
        chunks = [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]
        self.news = []
        self.waiting = tokens[:0]
        if chunks and len(chunks[-1]) < least:
            self.waiting = chunks.pop()
        return [{'tokens': chunk} for chunk in chunks]

    def counts(self) -> dict[str, int]:
        return {
            'documents': len(self.starts) - 1,
            'bytes': self.n_bytes,
            'tokens': self.starts[-1],
        }


def batched(texts: Texts) -> Iterator[list[tuple[str, str]]]:
    group, size = [], 0
    for split, text in texts:
        group.append((split, text))
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def tracked(items: Iterable[Any], total: int, what: str) -> Iterable[Any]:
    """With a progress bar where somebody watches, and silent in a log."""
    if not sys.stderr.isatty():
        return items
    import rich.console
    import rich.progress

    console = rich.console.Console(stderr=True)
    return rich.progress.track(items, what, total, transient=True, console=console)
