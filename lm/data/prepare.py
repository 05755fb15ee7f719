"""From documents to stored tokens: split, train the tokenizer, encode, write. Which process does
what of it, and when, is for `lm.data.pieces`.

Sequence length, packing and seed come later and cost nothing here.
"""

import array
import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lm.config.fields import DataConfig
from lm.data import cache
from lm.data.prepared import CONTENTS, INDEX, RECORDS, seal
from lm.data.rows import CHUNK
from lm.data.scan import DOCUMENT_COST, LARGE, Piece, Scan
from lm.data.sources import Source
from lm.data.split import SPLITS, Rule, Span, is_one_document, spans
from lm.data.split import rule as split_rule
from lm.data.tokenizers import Plan, Tokenizer, cut
from lm.data.utf8 import characters

FORMAT = 1  # raise it when what is written for the same content changes
BATCH_CHARACTERS = 4 << 20  # encoded at once, over all cores
CHUNKS_PER_FILE = 1 << 16  # files of half a gigabyte, for 16-bit tokens
WHOLE_COST = 100  # bytes of memory for each byte of text that `tokenizers` encodes at once
TOKENS_AT_ONCE = 1 << 20  # read of a piece
TOKENS = '.tokens'  # ends the names of the files of a piece

Parts = Iterator[tuple[str, str | None]]  # (split, the next part of a document, or None at its end)


def digest(source: Source, plan: Plan, cfg: DataConfig) -> str:
    """The name of the prepared data: a hash of all that determines it."""
    state = hashlib.blake2b(digest_size=16)
    rule = f'{FORMAT} {cfg.validation_fraction!r} {cfg.invalid_utf8} {source.identity}'
    files = cache.file_digests(cache.root(cfg.cache_dir), source.files)
    for part in (rule.encode(), plan.identity, *(file.encode() for file in files)):
        state.update(b'%d ' % len(part) + part)
    return state.hexdigest()


def check_unchanged(source: Source, plan: Plan, cfg: DataConfig, name: str) -> None:
    """ValueError where the source, having been read, has not the digest `name` any more."""
    if digest(source, plan, cfg) != name:
        raise ValueError(
            f'the files of data.source={cfg.source} changed while they were read. Run the command '
            'again when they are complete.'
        )


def describe(found: Scan, cfg: DataConfig, say: Callable) -> None:
    say(
        f'data: preparing {cfg.source} with {cfg.tokenizer}: {len(found.lengths):,} documents, '
        f'{found.n_bytes / 1e6:.1f} MB'
    )
    if is_one_document(found):
        say('data: there is one document only; its last lines are the validation split')
    if found.invalid_documents:
        say(
            f'data: {found.invalid_documents:,} documents are not UTF-8 throughout: '
            f'{found.invalid_bytes:,} bytes become U+FFFD'
        )


def warn_of_whole(tokenizer: Tokenizer, found: Scan, say: Callable) -> None:
    """Where one document alone takes much memory."""
    size = int(found.lengths.max())
    if not tokenizer.cuttable and size >= LARGE:
        name = found.names[int(found.lengths.argmax())]
        say(
            f'NOTE: {name} is a document of {size / 1e6:,.1f} MB, and this tokenizer must have it '
            f'whole: that takes about {size * WHOLE_COST / 1e9:,.2f} GB of memory. Cut it into '
            'several documents, or set data.tokenizer to bpe:SIZE or byte.'
        )


def training_texts(found: Scan, fraction: float) -> Iterator[str]:
    """The training split, in parts, for a tokenizer to be trained on."""
    rule = split_rule(found, fraction)
    for piece in tracked(found.pieces, len(found.pieces), 'tokenizer'):
        for span in spans(found, rule, piece):
            if span.split == 'train':
                yield from cut(_text(found, span), span.name)


def _parts(found: Scan, rule: Rule, piece: Piece, tokenizer: Tokenizer) -> Parts:
    for span in spans(found, rule, piece):
        for part in tokenizer.parts(_text(found, span), span.name):
            yield span.split, part
        yield span.split, None


def _text(found: Scan, span: Span) -> Iterator[str]:
    for data in characters(found.read(span.start, span.stop)):
        yield data.decode('utf-8', 'replace')  # or there is nothing to replace: `scan` stops


def encode(found: Scan, rule: Rule, piece: Piece, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokens of a piece into `folder`: a file of each split, BOS document EOS BOS ...,
    and where documents end in it. Raises Damaged where the copy is not what was scanned.
    """
    found.check(piece)
    with contextlib.ExitStack() as stack:
        encoded = {}
        for split in SPLITS:
            file = stack.enter_context(open(folder / f'{split}{TOKENS}', 'wb'))
            encoded[split] = Encoded(tokenizer, file)
        for group in batched(_parts(found, rule, piece, tokenizer)):
            texts = [text for _, text in group if text is not None]
            of_texts = iter(tokenizer.encode_batch(texts))
            for split, text in group:
                if text is None:
                    encoded[split].end()
                else:
                    encoded[split].add(text, next(of_texts))
    ends = {split: np.array(one.ends, np.int64) for split, one in encoded.items()}
    n_bytes = np.array([encoded[split].n_bytes for split in SPLITS])
    np.savez(folder / INDEX, n_bytes=n_bytes, **ends)
    seal(folder)


PIECE_FILES = (*(f'{split}{TOKENS}' for split in SPLITS), INDEX, CONTENTS)


class Encoded:
    """The documents of one split in a piece, as their tokens come and go to `file`."""

    def __init__(self, tokenizer: Tokenizer, file: BinaryIO):
        dtype = dtype_of(tokenizer)
        self.bos, self.eos = (
            np.array([special], dtype) for special in (tokenizer.bos_id, tokenizer.eos_id)
        )
        self.file, self.ends, self.n_bytes, self.n_tokens = file, array.array('q'), 0, 0
        self.is_within = False

    def add(self, text: str, ids: np.ndarray) -> None:
        """The next part of a document."""
        if (ids == self.bos).any():
            raise ValueError(
                f'the tokenizer makes its own BOS, token {self.bos[0]}, out of text: the start of '
                'a document could not be told from it. Declare another bos_token beside it.'
            )
        if not self.is_within:
            self._append(self.bos)
        self.is_within = True
        self._append(ids.astype(self.bos.dtype))
        self.n_bytes += len(text.encode())

    def end(self) -> None:
        """The document is complete."""
        self._append(self.eos)
        self.is_within = False
        self.ends.append(self.n_tokens)

    def _append(self, tokens: np.ndarray) -> None:
        self.file.write(tokens.tobytes())
        self.n_tokens += len(tokens)


def dtype_of(tokenizer: Tokenizer) -> type:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


def write(folder: Path, pieces: Iterable[Path], dtype: type) -> dict[str, dict[str, int]]:
    """Writes records and index of what `encode` has put into the folders `pieces`, one after the
    other; {split: {'documents', 'bytes', 'tokens'}}.
    """
    streams = {split: Stream(dtype) for split in SPLITS}
    writer = _record_writer(folder / RECORDS, dtype)
    for piece in pieces:
        with np.load(piece / INDEX) as index:
            for split, n_bytes in zip(SPLITS, index['n_bytes'].tolist(), strict=True):
                streams[split].documents(index[split], n_bytes)
        # At once, as the writer writes all it knows of the data anew each time.
        writer.add_examples({split: streams[split].chunks_of(piece, split) for split in SPLITS})
    writer.add_examples({split: stream.take(1) for split, stream in streams.items()})
    writer.close_all()
    np.savez(folder / INDEX, **{s: np.array(streams[s].starts) for s in SPLITS})
    return {split: stream.counts() for split, stream in streams.items()}


def _tokens(path: Path, dtype: type) -> Iterator[np.ndarray]:
    with open(path, 'rb') as file:
        while data := file.read(TOKENS_AT_ONCE * np.dtype(dtype).itemsize):
            yield np.frombuffer(data, dtype)


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
    """The tokens of a split, of piece after piece, taken off in chunks."""

    def __init__(self, dtype: type):
        self.starts, self.n_bytes, self.n_tokens = array.array('q', [0]), 0, 0
        self.waiting = np.empty(0, dtype)

    def documents(self, ends: np.ndarray, n_bytes: int) -> None:
        """Those of the piece whose tokens come next; where they end in it."""
        self.starts.frombytes((ends + self.starts[-1]).tobytes())
        self.n_bytes += n_bytes

    def add(self, tokens: np.ndarray) -> None:
        self.waiting = np.concatenate([self.waiting, tokens])
        self.n_tokens += len(tokens)

    def chunks_of(self, piece: Path, split: str) -> Iterator[dict[str, np.ndarray]]:
        """Those that are full with the tokens of a piece."""
        for tokens in _tokens(piece / f'{split}{TOKENS}', self.waiting.dtype):
            self.add(tokens)
            yield from self.take(CHUNK)

    def take(self, least: int) -> list[dict[str, np.ndarray]]:
        """The chunks that are full, and the last one if it has `least` tokens."""
        tokens = self.waiting
        chunks = [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]
        self.waiting = tokens[:0]
        if chunks and len(chunks[-1]) < least:
            self.waiting = chunks.pop()
        return [{'tokens': chunk} for chunk in chunks]

    def counts(self) -> dict[str, int]:
        return {
            'documents': len(self.starts) - 1,
            'bytes': self.n_bytes,
            'tokens': self.n_tokens,
        }


def batched(parts: Parts) -> Iterator[list[tuple[str, str | None]]]:
    group, size = [], 0
    for split, text in parts:
        group.append((split, text))
        size += len(text) if text is not None else DOCUMENT_COST
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
