"""One pass over a source: documents are copied into one file, counted and hashed.

Everything after it reads the copy, so that files are read once here and once for their digest.
"""

import array
import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.config.fields import DataConfig
from lm.data.formats import BLOCK
from lm.data.sources import Source
from lm.data.utf8 import INVALID_UTF8, characters
from modules.choices import choose

LARGE = 1 << 22  # bytes of a document whose name is kept: it may be too long for a tokenizer
PIECE = 1 << 24  # bytes of a piece: some seconds of a core's work, all that is lost by a kill
DOCUMENT_COST = 256  # bytes that a document, however short, counts as in memory and in time
COPY, TABLE = 'text', 'documents.npz'


class Damaged(OSError):
    """The copy, or its table, is not as it was written."""


class Piece(NamedTuple):
    """Documents [first, stop), which begin at byte `start` of the copy."""

    first: int
    stop: int
    start: int


@dataclasses.dataclass(frozen=True)
class Scan:
    """What was found, and the copy: document i is hashes[i], lengths[i] bytes behind those before.

    Per document 16 bytes of memory are taken, and as many as it has of the disk.
    """

    copy: int  # a descriptor: what is opened can be read also where its name has gone
    lengths: np.ndarray
    hashes: np.ndarray
    pieces: list[Piece]
    names: dict[int, str]  # of the large documents, and of the first
    n_bytes: int
    empty: int  # left out of everything: nothing to learn from or to predict
    invalid_documents: int
    invalid_bytes: int

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) of the copy, in blocks."""
        for at in range(start, stop, BLOCK):
            yield os.pread(self.copy, min(BLOCK, stop - at), at)

    def check(self, piece: Piece) -> None:
        """Raises Damaged where a document of the piece is not the one that was hashed."""
        at, documents = piece.start, slice(piece.first, piece.stop)
        hashes = self.hashes[documents].tolist()
        for length, wanted in zip(self.lengths[documents].tolist(), hashes, strict=True):
            state = hashlib.blake2b(digest_size=8)
            for block in self.read(at, at + length):
                state.update(block)
            if int.from_bytes(state.digest()) != wanted:
                raise Damaged(f'the copy of the text is damaged between byte {at} and the next')
            at += length


@contextlib.contextmanager
def scanned(source: Source, cfg: DataConfig, folder: Path) -> Iterator[Scan]:
    """As `scan` and `opened`; what is written in `folder` lies there until the block ends."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        scan(source, cfg, Path(own))
        with opened(Path(own)) as found:
            yield found


def scan(source: Source, cfg: DataConfig, folder: Path) -> None:
    """Writes what `source` holds into `folder`: the copy and its table.

    Raises ValueError for a source without text, or one that data.invalid_utf8 refuses.
    """
    invalid_in = choose(INVALID_UTF8, cfg.invalid_utf8, 'data.invalid_utf8')
    lengths, hashes, names, pieces = array.array('q'), array.array('Q'), {}, [Piece(0, 0, 0)]
    n_bytes = empty = invalid_documents = invalid_bytes = 0
    with open(folder / COPY, 'wb', buffering=BLOCK) as file:
        for name, parts in source.documents():
            state, length, invalid = hashlib.blake2b(digest_size=8), 0, 0
            for data in characters(parts):
                invalid += invalid_in(name, data, length)
                state.update(data)
                file.write(data)
                length += len(data)
            if not length:
                empty += 1
                continue
            first, _, start = pieces[-1]
            if n_bytes - start + DOCUMENT_COST * (len(lengths) - first) >= PIECE:
                pieces[-1] = Piece(first, len(lengths), start)
                pieces.append(Piece(len(lengths), 0, n_bytes))
            if length >= LARGE or not lengths:
                names[len(lengths)] = name
            lengths.append(length)
            hashes.append(int.from_bytes(state.digest()))
            n_bytes += length
            invalid_documents += invalid > 0
            invalid_bytes += invalid
    if not lengths:
        raise ValueError(
            f'data.source={cfg.source} holds no text: {empty} documents, all of them empty.'
        )
    pieces[-1] = pieces[-1]._replace(stop=len(lengths))
    counts = {
        'n_bytes': n_bytes,
        'empty': empty,
        'invalid_documents': invalid_documents,
        'invalid_bytes': invalid_bytes,
    }
    about = json.dumps({'names': list(names.items()), 'pieces': pieces, 'counts': counts})
    arrays = {'lengths': np.frombuffer(lengths, np.int64), 'hashes': np.frombuffer(hashes, 'u8')}
    np.savez(folder / TABLE, about=np.frombuffer(about.encode(), np.uint8), **arrays)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Scan]:
    """What `scan` wrote. Raises Damaged where the table is not as it was written, or the copy has
    another size; what is in the copy is for `Scan.check`.
    """
    with contextlib.ExitStack() as stack:
        try:
            copy = stack.enter_context(open(folder / COPY, 'rb')).fileno()
            with np.load(folder / TABLE) as table:  # a zip file, with a checksum of each array
                lengths, hashes = table['lengths'], table['hashes']
                about = json.loads(table['about'].tobytes())
        except Exception as error:  # zipfile and zlib raise what they like
            raise Damaged(f'{folder} cannot be read: {error}') from error
        counts = about['counts']
        if os.fstat(copy).st_size != counts['n_bytes']:
            raise Damaged(f'{folder / COPY} has not the size it was written with')
        pieces = [Piece(*piece) for piece in about['pieces']]
        yield Scan(copy, lengths, hashes, pieces, dict(about['names']), **counts)
