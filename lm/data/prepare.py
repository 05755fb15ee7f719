"""From documents to stored tokens: split, train the tokenizer, encode, write, once per content.

Sequence length, packing and seed come later and cost nothing here.
"""

import array
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lm.data import cache
from lm.data.prepared import INDEX, RECORDS, REPORT, TOKENIZER, seal
from lm.data.rows import CHUNK
from lm.data.scan import LARGE, Scan, scanned
from lm.data.sources import Source
from lm.data.split import SPLITS, Span, is_one_document, spans
from lm.data.tokenizers import Plan, Tokenizer, cut
from lm.data.utf8 import characters
from lm.files import write_json
from lm.sections import DataConfig

FORMAT = 1  # raise it when what is written for the same content changes
BATCH_CHARACTERS = 4 << 20  # encoded at once, over all cores
DOCUMENT_COST = 256  # characters that a document, however short, counts as in memory
CHUNKS_PER_FILE = 1 << 16  # files of half a gigabyte, for 16-bit tokens
WHOLE_COST = 100  # bytes of memory for each byte of text that `tokenizers` encodes at once

Parts = Iterator[tuple[str, str | None]]  # (split, the next part of a document, or None at its end)


def digest(source: Source, plan: Plan, cfg: DataConfig) -> str:
    """The name of the prepared data: a hash of all that determines it."""
    state = hashlib.blake2b(digest_size=16)
    rule = f'{FORMAT} {cfg.validation_fraction!r} {cfg.invalid_utf8} {source.identity}'
    files = cache.file_digests(cache.root(cfg.cache_dir), source.files)
    for part in (rule.encode(), plan.identity, *(file.encode() for file in files)):
        state.update(b'%d ' % len(part) + part)
    return state.hexdigest()


def prepare(
    source: Source, plan: Plan, cfg: DataConfig, name: str, folder: Path, say: Callable
) -> None:
    """Fills `folder` with what has the digest `name`; the disk holds a copy of the text meanwhile.

    Memory grows by about 40 bytes a document (24 of `Scan` and `Stream`, which arrays that grow and
    the index's copy make 40), and not with the size of files or documents; a bpe that is trained
    holds the distinct words of the text besides. Raises ValueError for a corpus that cannot be
    split, is not UTF-8, or changes while it is read.
    """
    with scanned(source, cfg, folder) as found:
        check_unchanged(source, plan, cfg, name)
        _describe(found, cfg, say)
        tokenizer = plan.build(training_texts(found, cfg.validation_fraction))
        _warn_of_whole(tokenizer, found, say)
        counts = write(folder, _parts(found, cfg.validation_fraction, tokenizer), tokenizer)
    tokenizer.save(folder / TOKENIZER)
    say(
        f'data: {counts["train"]["tokens"]:,} tokens to train on, '
        f'{counts["validation"]["tokens"]:,} to validate on'
    )
    invalid = {'documents': found.invalid_documents, 'bytes': found.invalid_bytes}
    report = {**counts, 'empty_documents': found.empty, 'invalid_utf8': invalid}
    write_json(folder / REPORT, report)
    seal(folder)


def check_unchanged(source: Source, plan: Plan, cfg: DataConfig, name: str) -> None:
    """ValueError where the source, having been read, has not the digest `name` any more."""
    if digest(source, plan, cfg) != name:
        raise ValueError(
            f'the files of data.source={cfg.source} changed while they were read. Run the command '
            'again when they are complete.'
        )


def _describe(found: Scan, cfg: DataConfig, say: Callable) -> None:
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


def _warn_of_whole(tokenizer: Tokenizer, found: Scan, say: Callable) -> None:
    size = max(found.lengths)
    if not tokenizer.cuttable and size >= LARGE:
        name = found.names[found.lengths.index(size)]
        say(
            f'NOTE: {name} is a document of {size / 1e6:,.1f} MB, and this tokenizer must have it '
            f'whole: that takes about {size * WHOLE_COST / 1e9:,.2f} GB of memory. Cut it into '
            'several documents, or set data.tokenizer to bpe:SIZE or byte.'
        )


def training_texts(found: Scan, fraction: float) -> Iterator[str]:
    """The training split, in parts, for a tokenizer to be trained on."""
    for span in tracked(spans(found, fraction), len(found.lengths), 'tokenizer'):
        if span.split == 'train':
            yield from cut(_text(found, span), span.name)


def _parts(found: Scan, fraction: float, tokenizer: Tokenizer) -> Parts:
    for span in tracked(spans(found, fraction), len(found.lengths), 'encoding'):
        for part in tokenizer.parts(_text(found, span), span.name):
            yield span.split, part
        yield span.split, None


def _text(found: Scan, span: Span) -> Iterator[str]:
    for data in characters(found.read(span.start, span.stop)):
        yield data.decode('utf-8', 'replace')  # or there is nothing to replace: `scanned` stops


def write(folder: Path, parts: Parts, tokenizer: Tokenizer) -> dict[str, dict[str, int]]:
    """Writes records and index in one pass; {split: {'documents', 'bytes', 'tokens'}}."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    streams = {split: Stream(tokenizer, dtype) for split in SPLITS}
    writer = _record_writer(folder / RECORDS, dtype)
    for group in batched(parts):
        texts = [text for _, text in group if text is not None]
        encoded = iter(tokenizer.encode_batch(texts))
        for split, text in group:
            if text is None:
                streams[split].end()
            else:
                streams[split].add(text, next(encoded))
        writer.add_examples({split: stream.take(CHUNK) for split, stream in streams.items()})
    writer.add_examples({split: stream.take(1) for split, stream in streams.items()})
    writer.close_all()
    np.savez(folder / INDEX, **{s: np.array(streams[s].starts) for s in SPLITS})
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
        self.bos, self.eos = (
            np.array([special], dtype) for special in (tokenizer.bos_id, tokenizer.eos_id)
        )
        self.starts, self.n_bytes, self.n_tokens = array.array('q', [0]), 0, 0
        self.waiting = np.empty(0, dtype)
        self.news = []

    def add(self, text: str, ids: np.ndarray) -> None:
        """The next part of a document."""
        if (ids == self.bos).any():
            raise ValueError(
                f'the tokenizer makes its own BOS, token {self.bos[0]}, out of text: the start of '
                'a document could not be told from it. Declare another bos_token beside it.'
            )
        if self.n_tokens == self.starts[-1]:
            self._append(self.bos)
        self._append(ids.astype(self.bos.dtype))
        self.n_bytes += len(text.encode())

    def end(self) -> None:
        """The document is complete."""
        self._append(self.eos)
        self.starts.append(self.n_tokens)

    def _append(self, tokens: np.ndarray) -> None:
        self.news.append(tokens)
        self.n_tokens += len(tokens)

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
