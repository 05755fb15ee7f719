"""One pass over a source: documents are copied into one file, counted, hashed and split.

Later steps read the copy, so that each file is read once here and once for its digest. Only the
hash of a document's content decides whether it is in the validation split: copies stay together,
and order, machine and number of hosts do not matter. A few long documents are cut into both splits
(`lm.data.long_documents`). If the validation split is a source of its own, its documents follow
those of the training split, and nothing is split.
"""

import array
import codecs
import contextlib
import dataclasses
import hashlib
import itertools
import json
import mmap
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm.config.fields import DataConfig
from lm.data.long_documents import hash_threshold, list_cut_hashes
from lm.data.progress import report_periodically
from lm.data.sources import Source
from lm.data.streams import BLOCK
from modules.choices import choose

LARGE = 1 << 22  # bytes; names of larger documents are kept, since a tokenizer may refuse them
PIECE = 1 << 24  # bytes: some seconds of work on one core, which is the most that a kill loses
DOCUMENT_COST = 256  # bytes that a document costs in memory and time, however short it is
ZERO_SHARE = 1 / 4  # of zero bytes, above which a document may be UTF-16
COPY, TABLE = 'text', 'documents.npz'
SPLITS = ('train', 'validation')


class DamagedCopy(OSError):
    """The copy of the text, or its table, differs from its hashes."""


def align_characters(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the same bytes, cut between characters; blocks grow by at most three bytes."""
    remainder = b''
    for block in blocks:
        block = remainder + block
        tail = block[-3:]  # the longest beginning of a character
        border = len(block) - len(tail) + codecs.utf_8_decode(tail, 'replace')[1]
        block, remainder = block[:border], block[border:]
        if block:
            yield block
    if remainder:
        yield remainder


def count_invalid(name: str, block: bytes, offset: int) -> int:
    """Returns the number of bytes that are not UTF-8. They become U+FFFD.

    Args: as in `refuse_invalid`.
    """
    try:
        block.decode()
    except UnicodeDecodeError:
        # surrogateescape makes one character, found in no valid text, of each byte not valid.
        return sum(
            '\udc80' <= character <= '\udcff'
            for character in block.decode('utf-8', 'surrogateescape')
        )
    return 0


def refuse_invalid(name: str, block: bytes, offset: int) -> int:
    """Checks that a block is UTF-8.

    Args:
      name: the document, for errors.
      block: bytes, cut between characters.
      offset: position of the block in the document.

    Returns:
      0, the number of invalid bytes.

    Raises:
      ValueError: for an invalid byte.
    """
    try:
        block.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f'{name} is not UTF-8: byte 0x{block[error.start]:02x} at offset '
            f'{offset + error.start} ({error.reason}). Correct it, or set '
            'data.invalid_utf8=replace to replace and count such bytes.'
        ) from error
    return 0


def check_missing(name: str, cfg: DataConfig) -> int:
    """Returns 1, the number of records that are left out, for one without text.

    Raises ValueError if data.missing_text is 'stop'.
    """
    if cfg.missing_text == 'stop':
        raise ValueError(
            f'{name} has no text in its field {cfg.text_field!r}. Remove such records from the '
            'file, or set data.missing_text=skip to skip and count them.'
        )
    return 1


INVALID_UTF8 = {'replace': count_invalid, 'stop': refuse_invalid}


class Piece(NamedTuple):
    """Documents [first, stop), which begin at byte `start` of the copy."""

    first: int
    stop: int
    start: int


@dataclasses.dataclass(frozen=True)
class Scan:
    """The concatenated documents, and their table of 16 bytes per document.

    Attributes:
      copy: a file descriptor, which stays readable after the file is deleted.
      lengths: bytes of each document.
      hashes: 64 bits of each document's hash.
      pieces: the units of work.
      names: {index: name} of the large documents, and of the first.
      n_bytes: size of the copy.
      empty: documents without text, which are left out of everything.
      invalid_documents: documents with invalid UTF-8.
      invalid_bytes: bytes of invalid UTF-8.
      remarks: lines about the encoding of the text, and records without text.
      missing: records without text, which are left out of everything.
      cut_hashes: hashes of the documents that are cut because there are few and long ones.
      validation_start: number of the first document of a validation split that is a source of its
        own; else None.
    """

    copy: int
    lengths: np.ndarray
    hashes: np.ndarray
    pieces: list[Piece]
    names: dict[int, str]
    n_bytes: int
    empty: int
    invalid_documents: int
    invalid_bytes: int
    remarks: tuple[str, ...]
    missing: int = 0  # in scans of earlier versions
    cut_hashes: frozenset[int] = frozenset()
    validation_start: int | None = None

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields bytes [start, stop) of the copy, in blocks."""
        for offset in range(start, stop, BLOCK):
            yield os.pread(self.copy, min(BLOCK, stop - offset), offset)

    def check(self, piece: Piece) -> None:
        """Raises DamagedCopy if a document of the piece does not match its hash."""
        offset, documents = piece.start, slice(piece.first, piece.stop)
        hashes = self.hashes[documents].tolist()
        for length, expected in zip(self.lengths[documents].tolist(), hashes, strict=True):
            state = hashlib.blake2b(digest_size=8)
            for block in self.read(offset, offset + length):
                state.update(block)
            if int.from_bytes(state.digest()) != expected:
                raise DamagedCopy(
                    f'the copy of the text is damaged in the document that begins at byte {offset}'
                )
            offset += length

    @property
    def is_one_document(self) -> bool:
        """Whether there is only one document, perhaps in copies. Each copy is cut into both
        splits.
        """
        return self.validation_start is None and self.hashes.min() == self.hashes.max()

    @property
    def n_shared_documents(self) -> int:
        """Number of documents of the validation source that the training source has too."""
        start = len(self.hashes) if self.validation_start is None else self.validation_start
        return int(np.isin(self.hashes[start:], self.hashes[:start]).sum())


def scan_source(source: Source, cfg: DataConfig, folder: Path) -> None:
    """Writes copy and table of a source.

    Args:
      source: the text.
      cfg: the data section.
      folder: the folder to write to.

    Raises:
      ValueError: if the source of a split has no text, or for invalid UTF-8 that cfg.invalid_utf8
        refuses.
    """
    invalid_in = choose(INVALID_UTF8, cfg.invalid_utf8, 'data.invalid_utf8')
    lengths, hashes, names, pieces = array.array('q'), array.array('Q'), {}, [Piece(0, 0, 0)]
    names_of_counts = 'n_bytes empty invalid_documents invalid_bytes missing'
    counts = dict.fromkeys(names_of_counts.split(), 0)
    first_invalid, first_with_zeros, n_with_zeros, first_missing = '', '', 0, ''
    validation_start = None
    format_progress = 'data: {:,} documents read, {:,.0f} MB'.format
    progress = report_periodically(lambda: format_progress(len(lengths), file.tell() / 1e6))
    with open(folder / COPY, 'wb', buffering=BLOCK) as file, progress:
        for split, name, parts in _iterate_documents(source):
            if split == 'validation' and validation_start is None:
                validation_start = len(lengths)
            if parts is None:
                first_missing = first_missing or name
                counts['missing'] += check_missing(name, cfg)
                continue
            state, length, invalid, zeros = hashlib.blake2b(digest_size=8), 0, 0, 0
            for block in align_characters(parts):
                invalid += invalid_in(name, block, length)
                zeros += block.count(0)
                state.update(block)
                file.write(block)
                length += len(block)
            if not length:
                counts['empty'] += 1
                continue
            first, _, start = pieces[-1]
            # The document begins a new piece if the current one is full.
            if counts['n_bytes'] - start + DOCUMENT_COST * (len(lengths) - first) >= PIECE:
                pieces[-1] = Piece(first, len(lengths), start)
                pieces.append(Piece(len(lengths), 0, counts['n_bytes']))
            if length >= LARGE or not lengths:
                names[len(lengths)] = name
            lengths.append(length)
            hashes.append(int.from_bytes(state.digest()))
            counts['n_bytes'] += length
            counts['invalid_documents'] += invalid > 0
            first_invalid = first_invalid or (name if invalid else '')
            if zeros >= length * ZERO_SHARE:
                first_with_zeros = first_with_zeros or name
                n_with_zeros += 1
            counts['invalid_bytes'] += invalid
    if not lengths or validation_start == 0:
        summary = f'{counts["empty"]} documents, all of them empty'
        if counts['missing']:
            summary += f', and {counts["missing"]} records without {cfg.text_field!r}'
        raise ValueError(f'data.source={cfg.source}{source.contents} has no text: {summary}.')
    if source.validation is not None and validation_start in (None, len(lengths)):
        raise ValueError(f'data.validation_source={cfg.validation_source} has no text.')
    pieces[-1] = pieces[-1]._replace(stop=len(lengths))
    remarks = []
    if first_invalid:
        remarks.append(
            f'data: {counts["invalid_documents"]:,} documents have bytes that are not UTF-8: '
            f'{counts["invalid_bytes"]:,} bytes become U+FFFD; the first such document is '
            f'{first_invalid}'
        )
    if first_missing:
        remarks.append(
            f'NOTE: {counts["missing"]:,} records without text in {cfg.text_field!r} are skipped; '
            f'the first is {first_missing}. To stop at such records instead, set '
            'data.missing_text=stop.'
        )
    if first_with_zeros:
        remarks.append(
            f'NOTE: in {n_with_zeros:,} documents at least a quarter of the bytes are 0, as in '
            f'UTF-16; the first is {first_with_zeros}. Convert them to UTF-8, or begin them with a '
            'byte-order mark.'
        )
    metadata = {
        'names': list(names.items()),
        'pieces': pieces,
        'counts': counts,
        'remarks': remarks,
        'cut_hashes': list_cut_hashes(source, cfg),
        'validation_start': validation_start,
    }
    arrays: dict[str, Any] = {
        'lengths': np.frombuffer(lengths, np.int64),
        'hashes': np.frombuffer(hashes, 'u8'),
    }
    np.savez(folder / TABLE, about=np.frombuffer(json.dumps(metadata).encode(), np.uint8), **arrays)


def _iterate_documents(source: Source) -> Iterator[tuple[str, str, Iterable[bytes] | None]]:
    """Yields (split, name, parts); all documents are 'train' if the source is to be split."""
    for split, part in zip(SPLITS, (source, source.validation), strict=True):
        if part is not None:
            for name, parts in part.documents():
                yield split, name, parts


@contextlib.contextmanager
def open_scan(folder: Path) -> Generator[Scan]:
    """Opens the folder of `scan_source`. Raises DamagedCopy for a damaged table or a truncated
    copy.
    """
    with contextlib.ExitStack() as stack:
        try:
            copy = stack.enter_context(open(folder / COPY, 'rb')).fileno()
            with np.load(folder / TABLE) as table:  # a zip file, with a checksum of each array
                lengths, hashes = table['lengths'], table['hashes']
                metadata = json.loads(table['about'].tobytes())
        except Exception as error:  # zipfile and zlib raise what they like
            raise DamagedCopy(f'{folder} cannot be read: {error}') from error
        counts = metadata['counts']
        if os.fstat(copy).st_size != counts['n_bytes']:
            raise DamagedCopy(f'{folder / COPY} does not have its original size')
        pieces = [Piece(*piece) for piece in metadata['pieces']]
        yield Scan(
            copy,
            lengths,
            hashes,
            pieces,
            names=dict(metadata['names']),
            **counts,
            remarks=tuple(metadata.get('remarks', ())),
            cut_hashes=frozenset(metadata.get('cut_hashes', ())),
            validation_start=metadata.get('validation_start'),
        )


class Boundary(NamedTuple):
    """The boundary between the splits.

    Attributes:
      threshold: whole documents with a smaller hash are in the validation split.
      heads: {hash: bytes in the training split} of the documents that are cut.
      validation_start: documents from this number on are in the validation split.
    """

    threshold: int
    heads: Mapping[int, int]
    validation_start: int


def select_boundary(corpus: Scan, fraction: float) -> Boundary:
    """Selects a boundary that leaves neither split empty."""
    if corpus.validation_start is not None:
        return Boundary(0, {}, corpus.validation_start)
    end = len(corpus.lengths)
    if corpus.is_one_document:
        return Boundary(0, _cut_documents(corpus, {int(corpus.hashes[0])}, fraction), end)
    if corpus.cut_hashes:
        heads = _cut_documents(corpus, corpus.cut_hashes, fraction)
        return Boundary(int(fraction * 2**64), heads, end)
    return Boundary(hash_threshold(corpus.hashes, fraction), {}, end)


def _cut_documents(corpus: Scan, cut_hashes: Set[int], fraction: float) -> dict[int, int]:
    """Returns {hash: bytes in the training split}. Of equal documents, reads the first."""
    heads, stops = {}, np.cumsum(corpus.lengths)
    with mmap.mmap(corpus.copy, 0, access=mmap.ACCESS_READ) as content:
        for piece in corpus.pieces:
            hashes = corpus.hashes[piece.first : piece.stop].tolist()
            if not (cut_hashes - heads.keys()) & {*hashes}:
                continue
            corpus.check(piece)
            for number, document_hash in enumerate(hashes, piece.first):
                if document_hash in cut_hashes and document_hash not in heads:
                    name, length = corpus.names.get(number, ''), int(corpus.lengths[number])
                    start, share = int(stops[number]) - length, max(fraction, 1e-9)
                    heads[document_hash] = cut_point(name, content, length, share, start)
    return heads


def cut_point(
    name: str, text: bytes | mmap.mmap, length: int, fraction: float, start: int = 0
) -> int:
    """Returns the number of bytes of a document that are before its cut.

    The cut is at the start of a line, or else of a character, with about `fraction` of the document
    after it.

    Args:
      name: the document, for errors.
      text: holds the document.
      length: bytes of the document.
      fraction: share of the validation split.
      start: offset of the document in the text.

    Raises:
      ValueError: if the document is too short to be cut.
    """
    stop = start + length
    target = min(start + int(length * (1 - fraction)), stop - 1)
    cut = text.rfind(b'\n', start, target) + 1 or text.find(b'\n', target, stop) + 1
    if not start < cut < stop:
        nearby_offsets = itertools.chain(
            range(target, start, -1), range(max(target, start + 1), stop)
        )
        is_border = (i for i in nearby_offsets if text[i] & 0xC0 != 0x80)  # no continuation byte
        cut = next(is_border, start)
    if cut == start:
        raise ValueError(
            f'{name}, of {length} bytes, is the only document and too short to be split into '
            'training and validation. Add text to data.source.'
        )
    return cut - start


class Span(NamedTuple):
    """Bytes [start, stop) of the copy, a document of `split`. name: of a large document,
    else ''.
    """

    split: str
    start: int
    stop: int
    name: str


def iterate_spans(corpus: Scan, boundary: Boundary, piece: Piece) -> Iterator[Span]:
    """Yields the documents of a piece, in the order of the source.

    Args:
      corpus: the scan.
      boundary: the boundary between the splits.
      piece: a piece of the corpus.
    """
    offset, documents = piece.start, range(piece.first, piece.stop)
    lengths, hashes = (
        x[piece.first : piece.stop].tolist() for x in (corpus.lengths, corpus.hashes)
    )
    for number, length, document_hash in zip(documents, lengths, hashes, strict=True):
        name = corpus.names.get(number, '')
        stop = offset + length
        if head := boundary.heads.get(document_hash, 0):
            yield Span('train', offset, offset + head, name)
            yield Span('validation', offset + head, stop, name)
        else:
            is_validation = (
                number >= boundary.validation_start or document_hash < boundary.threshold
            )
            yield Span(SPLITS[is_validation], offset, stop, name)
        offset += length
