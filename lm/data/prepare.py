"""Prepares a source: documents to stored tokens, by all processes that start on one cache.

Beside the folder NAME that is to be made lies NAME.pieces, with folders that are renamed when
complete:

    scan          a copy of the text, and the table of its documents
    built         the tokenizer
    settings.json what determines the data besides the text, to recognize outdated pieces
    piece-000000  the tokens of the first piece of the copy; and so on

A process that holds the lock of NAME makes the scan and the tokenizer if they are missing. Then it
encodes missing pieces that no other process has locked, until all exist; the tokens of a piece do
not depend on the process. With the lock of NAME again, it writes the records from the pieces in
order, unless another process has. Sequence length, packing and seed come later.

Existing folders are verified by their hashes before use, and made again if damaged. A lock ends
with its process, so that nobody waits for a killed process, and its finished work remains. Without
locks, work is duplicated, and the first folder of a name stays. NAME.pieces needs the space of text
and tokens, until NAME exists or the text turns out to be impossible to prepare.
"""

import array
import codecs
import contextlib
import dataclasses
import functools
import math
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.config.fields import DataConfig
from lm.data import cache, chat_pieces, prepared, round_trip, scan, tokenizers
from lm.data.long_documents import list_cut_hashes
from lm.data.prepared import (
    CONTENTS,
    INDEX,
    LEFT_OUT,
    RECORDS,
    REPORT,
    ROUND_TRIP,
    SHARED,
    TOKENIZER,
    TOKENS,
)
from lm.data.progress import track_progress
from lm.data.scan import SPLITS, Boundary, DamagedCopy, Piece, Scan, Span
from lm.data.sources import Source
from lm.data.tokenizers import Tokenizer, TokenizerPlan
from lm.storage.files import POLL_SEC, InUseError, UnreadableFile, hold_lock, read_json, write_json

if TYPE_CHECKING:
    from lm.data.chat_encoder import ChatEncoder

BATCH_CHARACTERS = 4 << 20  # encoded at once, over all cores
WHOLE_COST = 100  # bytes of memory for each byte of text that `tokenizers` encodes at once
PIECE_FILES = (*(f'{split}{TOKENS}' for split in SPLITS), INDEX, CONTENTS)
# Rename these when their content changes: a newer version may resume the work of an older one.
SCAN, BUILT, PIECE, SETTINGS = 'scan', 'built', 'piece', 'settings.json'
TRIES = 10  # attempts, if other processes remove the pieces meanwhile
WRITING_MESSAGE = 'data: another process is writing the records of the same data'

Parts = Iterator[tuple[str, str | None]]  # (split, the next part of a document, or None at its end)


def digest(source: Source, plan: TokenizerPlan, cfg: DataConfig) -> str:
    """Returns the name of the prepared data: a hash of everything that determines it.

    Text whose documents are whole, and which is split, has the name of versions that had no other.

    Args:
      source: the text.
      plan: the tokenizer's plan.
      cfg: the data section.
    """
    folder, apart = cache.root(cfg.cache_dir), source.validation
    split = repr(cfg.validation_fraction) if apart is None else 'apart'
    rule = f'{prepared.FORMAT} {split} {cfg.invalid_utf8} {source.identity}'
    # Earlier versions stopped at records without text: what they prepared has none.
    rule += ' missing_text=stop' * (cfg.missing_text == 'stop')
    parts = [rule, *cache.file_digests(folder, source.files)]
    if apart is not None:
        parts += [f'validation {apart.identity}', *cache.file_digests(folder, apart.files)]
    if list_cut_hashes(source, cfg):
        parts.append('long documents are cut')
    rule_bytes, *file_bytes = (part.encode() for part in parts)
    chats = [chat_pieces.identify_chats(cfg.tokenizer)] if source.is_chat else []
    return cache.digest_bytes(rule_bytes, plan.identity, *chats, *file_bytes)


def check_unchanged(source: Source, plan: TokenizerPlan, cfg: DataConfig, name: str) -> None:
    """Checks a digest again after the source was read.

    Args:
      source: the text.
      plan: the tokenizer's plan.
      cfg: the data section.
      name: the digest before reading.

    Raises:
      ValueError: if the digest is another one now.
    """
    if digest(source, plan, cfg) != name:
        raise ValueError(
            f'the files of data.source={cfg.source} changed while they were read. Run the command '
            'again when they are complete.'
        )


def prepare(
    source: Source,
    plan: TokenizerPlan,
    cfg: DataConfig,
    name: str,
    say: Callable,
    wait: bool = True,
) -> Path:
    """Returns the folder of prepared data, and makes it first unless it exists.

    Memory grows by about 40 bytes per document, and by the distinct words of a trained bpe.

    Args:
      source: the text.
      plan: the tokenizer's plan.
      cfg: the data section.
      name: the digest of the data, which names the folder.
      say: gets lines of progress.
      wait: whether to wait for other processes once they do all the remaining work.

    Returns:
      The folder.

    Raises:
      ValueError: for a corpus that cannot be split, is not UTF-8, or changes while it is read.
      InUseError: if other processes do all the remaining work and `wait` is False.
    """
    job = PreparationJob(source, plan, cfg, name, say, wait)
    is_suspect, tries = False, 0
    while not job.path.is_dir() or prepared.find_damage(job.path):
        try:
            with cache.explain_full_disk(job.path.parent):
                job.begin(is_suspect)
                job.encode_and_write()
                break
        except Exception as error:
            tries += 1
            if isinstance(error, InUseError) or tries > TRIES:
                raise
            if job.is_removed() or isinstance(error, FileNotFoundError):
                continue
            if isinstance(error, DamagedCopy) and not is_suspect:
                say(f'NOTE: {error}; the damaged part is prepared again')
                is_suspect = True
                continue
            if isinstance(error, ValueError):
                cache.discard(job.path.parent, job.pieces.name)
            raise
    cache.discard(job.path.parent, f'{name}.*')
    return job.path


def _assume_intact(folder: Path) -> str:
    return ''


def find_scan_damage(folder: Path) -> str:
    """Describes the damage of a scan; '' if it is intact."""
    try:
        with scan.open_scan(folder) as corpus:
            for piece in corpus.pieces:
                corpus.check(piece)
    except DamagedCopy as error:
        return str(error)
    return ''


_find_tokenizer_damage = functools.partial(prepared.find_damage, names=(TOKENIZER, CONTENTS))
_find_piece_damage = functools.partial(prepared.find_damage, names=PIECE_FILES)


@dataclasses.dataclass(frozen=True)
class PreparationJob:
    """The share of one process in preparing a dataset."""

    source: Source
    plan: TokenizerPlan
    cfg: DataConfig
    name: str
    say: Callable[[str], None]
    wait: bool

    @property
    def path(self) -> Path:
        return cache.root(self.cfg.cache_dir) / self.name

    @property
    def pieces(self) -> Path:
        return self.path.with_name(f'{self.name}.pieces')

    def is_removed(self) -> bool:
        """Returns whether another process has removed the pieces: all is done, or the text is
        invalid.
        """
        return self.path.is_dir() or not self.pieces.is_dir()

    def begin(self, is_suspect: bool) -> None:
        """Makes the scan and the tokenizer. A suspect scan is verified, and made again if
        damaged.
        """
        with cache.hold_folder_lock(
            self.path, cache.WAITING_MESSAGE, self.say, self.wait
        ) as is_locked:
            if cache.is_intact(self.path, prepared.find_damage, self.say):
                return
            self._remove_outdated()
            self.pieces.mkdir(exist_ok=True)
            write_json(self.pieces / SETTINGS, self._settings())
            damage = find_scan_damage if is_suspect else _assume_intact
            cache.fill(self.pieces / SCAN, self._scan_source, damage, self.say, is_locked)
            cache.fill(
                self.pieces / BUILT,
                self._build_tokenizer,
                _find_tokenizer_damage,
                self.say,
                is_locked,
            )

    def _settings(self) -> dict[str, Any]:
        """Returns the settings that determine the data besides the text itself."""
        names = ('source', 'text_field', 'tokenizer', 'validation_fraction', 'invalid_utf8')
        settings = {name: getattr(self.cfg, name) for name in names}
        apart, missing_text = self.cfg.validation_source, self.cfg.missing_text
        settings |= {'validation_source': apart} if apart else {}
        return settings | ({'missing_text': 'stop'} if missing_text == 'stop' else {})

    def _remove_outdated(self) -> None:
        """Removes pieces of an earlier state of the same text, unless a process works on them."""
        for outdated in self.path.parent.glob('*.pieces'):
            with (
                contextlib.suppress(OSError, UnreadableFile, InUseError),
                contextlib.ExitStack() as stack,
            ):
                if outdated == self.pieces or read_json(outdated / SETTINGS) != self._settings():
                    continue
                for lock in (outdated.with_suffix('.lock'), *outdated.glob('*.lock')):
                    stack.enter_context(hold_lock(lock, wait_until=0.0))
                size = sum(file.stat().st_size for file in outdated.rglob('*') if file.is_file())
                cache.discard(outdated.parent, outdated.name)
                self.say(
                    f'data: removed {outdated} ({size / 1e6:,.1f} MB), which belongs to an earlier '
                    'version of this text'
                )

    def _scan_source(self, folder: Path) -> None:
        scan.scan_source(self.source, self.cfg, folder)
        check_unchanged(self.source, self.plan, self.cfg, self.name)
        with scan.open_scan(folder) as corpus:
            self.say(
                f'data: preparing {self.cfg.source} with {self.cfg.tokenizer}: '
                f'{len(corpus.lengths):,} documents, {corpus.n_bytes / 1e6:.1f} MB'
            )
            if corpus.is_one_document and self.source.is_chat:
                raise ValueError(
                    f'{self.cfg.source} has a single conversation, which cannot be split into '
                    'training and validation. Add conversations, or set data.validation_source.'
                )
            if corpus.is_one_document:
                self.say(
                    'data: there is only one document; its last lines are the validation split'
                )
            if n_cut := sum(map(corpus.cut_hashes.__contains__, corpus.hashes.tolist())):
                self.say(
                    f'data: there are few documents, and {n_cut} of {len(corpus.hashes)} are long; '
                    'the last lines of each of these are in the validation split'
                )
            for remark in corpus.remarks:
                self.say(remark)

    def _build_tokenizer(self, folder: Path) -> None:
        with scan.open_scan(self.pieces / SCAN) as corpus:
            if self.plan.is_trained:
                for piece in corpus.pieces:
                    corpus.check(piece)
            texts = training_texts(corpus, self.cfg.validation_fraction, self.source.is_chat)
            tokenizer = self.plan.build(texts)
            size = int(corpus.lengths.max())
            if not tokenizer.cuttable and size >= scan.LARGE:
                name = corpus.names[int(corpus.lengths.argmax())]
                self.say(
                    f'NOTE: {name} is a document of {size / 1e6:,.1f} MB. This tokenizer must '
                    f'encode it as a whole, which takes about {size * WHOLE_COST / 1e9:,.2f} GB of '
                    'memory. Cut it into several documents, or set data.tokenizer to bpe:SIZE or '
                    'byte.'
                )
        tokenizer.save(folder / TOKENIZER)
        prepared.seal(folder)

    def encode_and_write(self) -> None:
        """Encodes free pieces, waits for the others, and writes the records."""
        if self.path.is_dir():
            return
        with (
            contextlib.ExitStack() as stack,
            scan.open_scan(self.pieces / SCAN) as corpus,
        ):
            boundary = scan.select_boundary(corpus, self.cfg.validation_fraction)
            tokenizer = tokenizers.load(self.pieces / BUILT / TOKENIZER)
            encoder = None
            if self.source.is_chat:
                encoder = chat_pieces.build_encoder(tokenizer, self.cfg.tokenizer)
                stack.callback(encoder.close)
            pieces = Pieces(self, corpus, boundary, tokenizer, encoder)
            for _ in track_progress(
                pieces.encode_all(), len(corpus.pieces), 'data: pieces encoded'
            ):
                pass
            with cache.hold_folder_lock(
                self.path, WRITING_MESSAGE, self.say, self.wait
            ) as is_locked:
                cache.fill(
                    self.path, pieces.write_dataset, prepared.find_damage, self.say, is_locked
                )


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of a job, which all its processes encode."""

    job: PreparationJob
    corpus: Scan
    boundary: Boundary
    tokenizer: Tokenizer
    chat_encoder: 'ChatEncoder | None' = None  # of a source of conversations

    def encode_all(self) -> Iterator[None]:
        """Encodes missing pieces; yields once for each piece, even if another process
        encodes it.
        """
        missing = [i for i in range(len(self.corpus.pieces)) if not self._path(i).is_dir()]
        if n_encoded := len(self.corpus.pieces) - len(missing):
            self.job.say(
                f'data: {n_encoded:,} of {len(self.corpus.pieces):,} pieces are already encoded'
            )
        # Without locks, processes with the same start would do the same work all along.
        start, is_reported = random.randrange(len(missing) or 1), False
        missing = missing[start:] + missing[:start]
        yield from [None] * n_encoded
        while missing:
            for i in missing:
                with contextlib.suppress(InUseError):
                    self._ensure_piece(i, _assume_intact, wait=False)
                    missing.remove(i)
                    yield
                    break
            else:
                if not self.job.wait:
                    raise InUseError
                if not is_reported:
                    self.job.say('data: other processes are encoding the last pieces')
                is_reported = True
                time.sleep(POLL_SEC)

    def _path(self, i: int) -> Path:
        return self.job.pieces / f'{PIECE}-{i:06}'

    def _ensure_piece(self, i: int, find_damage: Callable[[Path], str], wait: bool) -> None:
        """Encodes a piece unless it exists. Raises InUseError if another process does and `wait` is
        False.
        """
        path, wait_until = self._path(i), math.inf if wait else 0.0
        with hold_lock(path.with_name(f'{path.name}.lock'), wait_until=wait_until) as is_locked:
            cache.fill(
                path,
                functools.partial(self._encode_piece, self.corpus.pieces[i]),
                find_damage,
                self.job.say,
                is_locked,
            )

    def _encode_piece(self, piece: Piece, folder: Path) -> None:
        if self.chat_encoder is None:
            encode_piece(self.corpus, self.boundary, piece, self.tokenizer, folder)
            return
        self.corpus.check(piece)
        spans = scan.iterate_spans(self.corpus, self.boundary, piece)
        documents = ((span.split, ''.join(_decode_span(self.corpus, span))) for span in spans)
        dtype = token_dtype(self.tokenizer)
        chat_pieces.encode_chats(documents, self.chat_encoder, dtype, folder)

    def write_dataset(self, folder: Path) -> None:
        """Writes the folder of prepared data."""
        dtype = token_dtype(self.tokenizer)
        streams = {split: prepared.TokenStream(dtype) for split in SPLITS}
        writer = prepared.build_record_writer(folder / RECORDS, dtype)
        chats = None if self.chat_encoder is None else prepared.ChatIndex()
        for i in range(len(self.corpus.pieces)):
            self._ensure_piece(i, _find_piece_damage, wait=True)  # encodes it again if damaged
            with np.load(self._path(i) / INDEX) as index:
                if chats is not None:
                    chats.add_piece(index, {s: streams[s].starts[-1] for s in SPLITS})
                for split, n_bytes in zip(SPLITS, index['n_bytes'].tolist(), strict=True):
                    streams[split].add_documents(index[split], n_bytes)
            # Both splits in one call, because each call rewrites the metadata of the dataset.
            writer.add_examples({s: streams[s].read_chunks(self._path(i), s) for s in SPLITS})
        writer.add_examples({split: stream.pop_chunks(1) for split, stream in streams.items()})
        if chats is not None:
            n_documents = {split: len(streams[split].starts) - 1 for split in SPLITS}
            chat_pieces.check_left_out(n_documents, chats.left_out, self.job.cfg)
        writer.close_all()
        starts: dict[str, Any] = {s: np.array(streams[s].starts) for s in SPLITS}
        np.savez(folder / INDEX, **starts, **({} if chats is None else chats.arrays()))
        counts = {split: stream.counts() for split, stream in streams.items()}
        shutil.copytree(self.job.pieces / BUILT / TOKENIZER, folder / TOKENIZER)
        self.job.say(
            f'data: {counts["train"]["tokens"]:,} training tokens, '
            f'{counts["validation"]["tokens"]:,} validation tokens'
        )
        corpus = self.corpus
        invalid = {'documents': corpus.invalid_documents, 'bytes': corpus.invalid_bytes}
        report: dict[str, Any] = {
            **counts,
            'empty_documents': corpus.empty,
            'invalid_utf8': invalid,
        }
        if corpus.validation_start is not None:
            report[SHARED] = corpus.n_shared_documents
        report |= {'missing_text': corpus.missing} if corpus.missing else {}
        loss = round_trip.measure_loss(self.tokenizer, round_trip.sample_scan(corpus))
        report |= {} if loss is None else {ROUND_TRIP: loss}
        if chats is not None:
            report[LEFT_OUT] = dict(chats.left_out)
        write_json(folder / REPORT, report)
        prepared.seal(folder)


def training_texts(corpus: Scan, fraction: float, is_chat: bool = False) -> Iterator[str]:
    """Yields the training split in parts, to train a tokenizer on.

    Args:
      corpus: the scan.
      fraction: share of the validation split.
      is_chat: whether documents are conversations.
    """
    boundary = scan.select_boundary(corpus, fraction)
    for piece in track_progress(
        corpus.pieces, len(corpus.pieces), 'data: pieces read for the tokenizer'
    ):
        for span in scan.iterate_spans(corpus, boundary, piece):
            if span.split == 'train':
                texts: Iterable[str] = _decode_span(corpus, span)
                texts = [chat_pieces.plain_text(''.join(texts))] if is_chat else texts
                yield from tokenizers.split_text(texts, span.name)


def _split_spans(corpus: Scan, boundary: Boundary, piece: Piece, tokenizer: Tokenizer) -> Parts:
    """Yields the parts of each document with its split."""
    for span in scan.iterate_spans(corpus, boundary, piece):
        for part in tokenizer.split(_decode_span(corpus, span), span.name):
            yield span.split, part
        yield span.split, None


def _decode_span(corpus: Scan, span: Span) -> Iterator[str]:
    # With data.invalid_utf8=stop nothing is replaced here: the scan has raised an error.
    return codecs.iterdecode(corpus.read(span.start, span.stop), 'utf-8', 'replace')


def batch_parts(parts: Parts) -> Iterator[list[tuple[str, str | None]]]:
    """Groups parts until they have BATCH_CHARACTERS."""
    group, size = [], 0
    for split, text in parts:
        group.append((split, text))
        size += len(text) if text is not None else scan.DOCUMENT_COST
        if size >= BATCH_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_piece(
    corpus: Scan, boundary: Boundary, piece: Piece, tokenizer: Tokenizer, folder: Path
) -> None:
    """Writes the tokens of a piece, BOS document EOS BOS ..., and the ends of its documents.

    Args:
      corpus: the scan.
      boundary: between the splits.
      piece: the piece to encode.
      tokenizer: the tokenizer.
      folder: the folder to write to.
    """
    corpus.check(piece)
    dtype, bos = token_dtype(tokenizer), tokenizer.bos_id
    ends = {split: array.array('q') for split in SPLITS}
    n_bytes, n_tokens = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    at_document_start = True
    with contextlib.ExitStack() as stack:
        files = {s: stack.enter_context(open(folder / f'{s}{TOKENS}', 'wb')) for s in SPLITS}
        for group in batch_parts(_split_spans(corpus, boundary, piece, tokenizer)):
            encoded = iter(tokenizer.encode_batch([text for _, text in group if text is not None]))
            for split, text in group:
                tokens: Any = [tokenizer.eos_id] if text is None else next(encoded)
                if text is not None and (tokens == bos).any():
                    raise ValueError(
                        f'the tokenizer encodes some text as its own BOS, token {bos}, which marks '
                        'the start of a document. Declare another bos_token in the files of the '
                        'tokenizer.'
                    )
                tokens = np.concatenate([[bos], tokens]) if at_document_start else tokens
                files[split].write(np.asarray(tokens, dtype).tobytes())
                n_tokens[split] += len(tokens)
                n_bytes[split] += len((text or '').encode())
                at_document_start = text is None
                if at_document_start:
                    ends[split].append(n_tokens[split])
    index: dict[str, Any] = {split: np.array(ends[split], np.int64) for split in SPLITS}
    np.savez(folder / INDEX, n_bytes=np.array([n_bytes[split] for split in SPLITS]), **index)
    prepared.seal(folder)


def token_dtype(tokenizer: Tokenizer) -> type:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
