"""One pass over a source: documents are copied into one file, counted, hashed and split.

Everything after it reads the copy, so files are read once here and once for their digest. The hash
of a document's content alone decides whether it validates: copies stay together, and order, machine
and number of hosts do not matter.
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
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.config.fields import DataConfig
from lm.data.formats import BLOCK
from lm.data.progress import report_periodically
from lm.data.sources import Source
from modules.choices import choose

LARGE = 1 << 22  # bytes of a document whose name is kept: it may be too long for a tokenizer
PIECE = 1 << 24  # bytes of a piece: some seconds of a core's work, all that is lost by a kill
DOCUMENT_COST = 256  # bytes that a document, however short, counts as in memory and in time
ZERO_SHARE = 1 / 4  # the share of zero bytes in a document above which it may be UTF-16
COPY, TABLE = 'text', 'documents.npz'
SPLITS = ('train', 'validation')


class DamagedCopy(OSError):
    """The copy of the text, or its table, is not as it was written."""


def align_characters(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Cuts the same bytes between characters; blocks grow by three bytes at most."""
    rest = b''
    for block in blocks:
        block = rest + block
        tail = block[-3:]  # the longest beginning of a character
        border = len(block) - len(tail) + codecs.utf_8_decode(tail, 'replace')[1]
        block, rest = block[:border], block[border:]
        if block:
            yield block
    if rest:
        yield rest


def count_invalid(name: str, block: bytes, offset: int) -> int:
    """Returns how many bytes are not UTF-8. They become U+FFFD."""
    try:
        block.decode()
    except UnicodeDecodeError:
        # surrogateescape makes one character, found in no valid text, of each byte not valid.
        return sum('\udc80' <= c <= '\udcff' for c in block.decode('utf-8', 'surrogateescape'))
    return 0


def refuse_invalid(name: str, block: bytes, offset: int) -> int:
    """Raises ValueError for a byte that is not UTF-8; `data` is at `offset` in the document."""
    try:
        block.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f'{name} is not UTF-8: byte 0x{block[error.start]:02x} at offset '
            f'{offset + error.start} ({error.reason}). Correct it, or set '
            'data.invalid_utf8=replace to read on and count.'
        ) from error
    return 0


INVALID_UTF8 = {'replace': count_invalid, 'stop': refuse_invalid}


class Piece(NamedTuple):
    """Documents [first, stop), which begin at byte `start` of the copy."""

    first: int
    stop: int
    start: int


@dataclasses.dataclass(frozen=True)
class Scan:
    """The copy of the documents, one behind the other, and its table of 16 bytes each."""

    copy: int  # a descriptor: an open file can be read even after its name is gone
    lengths: np.ndarray
    hashes: np.ndarray
    pieces: list[Piece]
    names: dict[int, str]  # of the large documents, and of the first
    n_bytes: int
    empty: int  # left out of everything: nothing to learn from or to predict
    invalid_documents: int
    invalid_bytes: int
    remarks: tuple[str, ...]  # lines about the encoding of the text

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields bytes [start, stop) of the copy, in blocks."""
        for at in range(start, stop, BLOCK):
            yield os.pread(self.copy, min(BLOCK, stop - at), at)

    def check(self, piece: Piece) -> None:
        """Raises DamagedCopy if a document of the piece is not the one that was hashed."""
        at, documents = piece.start, slice(piece.first, piece.stop)
        hashes = self.hashes[documents].tolist()
        for length, wanted in zip(self.lengths[documents].tolist(), hashes, strict=True):
            state = hashlib.blake2b(digest_size=8)
            for block in self.read(at, at + length):
                state.update(block)
            if int.from_bytes(state.digest()) != wanted:
                raise DamagedCopy(f'the copy of the text is damaged between byte {at} and the next')
            at += length

    @property
    def is_one_document(self) -> bool:
        """Whether there is one document, perhaps in copies. Each copy is cut into both splits."""
        return self.hashes.min() == self.hashes.max()


def scan_source(source: Source, cfg: DataConfig, folder: Path) -> None:
    """Writes copy and table of a source. Raises ValueError if it has no text, or invalid UTF-8."""
    invalid_in = choose(INVALID_UTF8, cfg.invalid_utf8, 'data.invalid_utf8')
    lengths, hashes, names, pieces = array.array('q'), array.array('Q'), {}, [Piece(0, 0, 0)]
    counts = dict.fromkeys(('n_bytes', 'empty', 'invalid_documents', 'invalid_bytes'), 0)
    first_invalid, first_with_zeros, n_with_zeros = '', '', 0
    words = 'data: {:,} documents are read, {:,.0f} MB'.format
    said = report_periodically(lambda: words(len(lengths), file.tell() / 1e6))
    with open(folder / COPY, 'wb', buffering=BLOCK) as file, said:
        for name, parts in source.documents():
            state, length, invalid, zeros = hashlib.blake2b(digest_size=8), 0, 0, 0
            for data in align_characters(parts):
                invalid += invalid_in(name, data, length)
                zeros += data.count(0)
                state.update(data)
                file.write(data)
                length += len(data)
            if not length:
                counts['empty'] += 1
                continue
            first, _, start = pieces[-1]
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
    if not lengths:
        found = f'{counts["empty"]} documents, all of them empty'
        raise ValueError(f'data.source={cfg.source} holds no text: {found}.')
    pieces[-1] = pieces[-1]._replace(stop=len(lengths))
    remarks = []
    if first_invalid:
        remarks.append(
            f'data: {counts["invalid_documents"]:,} documents are not UTF-8 throughout: '
            f'{counts["invalid_bytes"]:,} bytes become U+FFFD; the first is {first_invalid}'
        )
    if first_with_zeros:
        remarks.append(
            f'NOTE: {n_with_zeros:,} documents have a zero in every four bytes or more, as UTF-16 '
            f'has; the first is {first_with_zeros}. Convert them to UTF-8, or begin them with a '
            'byte-order mark.'
        )
    about = {'names': list(names.items()), 'pieces': pieces, 'counts': counts, 'remarks': remarks}
    arrays = {'lengths': np.frombuffer(lengths, np.int64), 'hashes': np.frombuffer(hashes, 'u8')}
    np.savez(folder / TABLE, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)


@contextlib.contextmanager
def open_scan(folder: Path) -> Generator[Scan]:
    """Opens what `scan` wrote. Raises DamagedCopy for a damaged table or a cut copy."""
    with contextlib.ExitStack() as stack:
        try:
            copy = stack.enter_context(open(folder / COPY, 'rb')).fileno()
            with np.load(folder / TABLE) as table:  # a zip file, with a checksum of each array
                lengths, hashes = table['lengths'], table['hashes']
                about = json.loads(table['about'].tobytes())
        except Exception as error:  # zipfile and zlib raise what they like
            raise DamagedCopy(f'{folder} cannot be read: {error}') from error
        counts = about['counts']
        if os.fstat(copy).st_size != counts['n_bytes']:
            raise DamagedCopy(f'{folder / COPY} does not have the size it was written with')
        pieces = [Piece(*piece) for piece in about['pieces']]
        names, remarks = dict(about['names']), tuple(about.get('remarks', ()))
        yield Scan(copy, lengths, hashes, pieces, names, **counts, remarks=remarks)


class Boundary(NamedTuple):
    """The boundary between the splits, in hashes or within the only document."""

    threshold: int  # a document whose hash is below it validates
    head: int  # bytes of the only document that train, while the rest validates; else 0


def select_boundary(corpus: Scan, fraction: float) -> Boundary:
    """Picks a hash threshold that leaves neither split empty."""
    if corpus.is_one_document:
        corpus.check(corpus.pieces[0])
        with mmap.mmap(corpus.copy, 0, access=mmap.ACCESS_READ) as data:
            length = int(corpus.lengths[0])
            return Boundary(0, cut_point(corpus.names[0], data, length, max(fraction, 1e-9)))
    threshold = max(int(fraction * 2**64), int(corpus.hashes.min()) + 1)
    return Boundary(min(threshold, int(corpus.hashes.max())), 0)


def cut_point(name: str, text: bytes | mmap.mmap, length: int, fraction: float) -> int:
    """Returns the line start, or else the character start, with about `fraction` of it behind.

    The document is data[:length]. Raises ValueError if it is too short to be cut.
    """
    target = min(int(length * (1 - fraction)), length - 1)
    at = text.rfind(b'\n', 0, target) + 1 or text.find(b'\n', target, length) + 1
    if not 0 < at < length:
        near = itertools.chain(range(target, 0, -1), range(max(target, 1), length))
        at = next((i for i in near if text[i] & 0xC0 != 0x80), 0)  # no continuation byte
    if not at:
        raise ValueError(
            f'the corpus is {name} alone, {length} bytes: too short to be split into training '
            'and validation. Name more text in data.source.'
        )
    return at


class Span(NamedTuple):
    """Bytes [start, stop) of the copy, which are one document of `split`."""

    split: str
    start: int
    stop: int
    name: str  # of a large document, else ''


def iterate_spans(corpus: Scan, boundary: Boundary, piece: Piece) -> Iterator[Span]:
    """Yields the documents of a piece, in the order of the source."""
    at, documents = piece.start, range(piece.first, piece.stop)
    lengths, hashes = (
        x[piece.first : piece.stop].tolist() for x in (corpus.lengths, corpus.hashes)
    )
    for number, length, hashed in zip(documents, lengths, hashes, strict=True):
        name = corpus.names.get(number, '')
        if boundary.head:
            yield Span('train', at, at + boundary.head, name)
            yield Span('validation', at + boundary.head, at + length, name)
        else:
            yield Span(SPLITS[hashed < boundary.threshold], at, at + length, name)
        at += length
