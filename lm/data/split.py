"""Which documents validate: those whose hash is below a threshold.

A document's content alone decides, so copies stay together, and order, machine and number of hosts
do not matter.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lm.data.formats import BLOCK
from lm.data.scan import Piece, Scan

SPLITS = ('train', 'validation')
CONTINUATION = bytes(range(0x80, 0xC0))  # no character of UTF-8 begins with one


class Span(NamedTuple):
    """Bytes [start, stop) of the copy of the documents, which are one document of `split`."""

    split: str
    start: int
    stop: int
    name: str  # of a large document, else ''


class Rule(NamedTuple):
    """A document whose hash is below `threshold` validates. Where all documents are one, `head`
    bytes of it train, and the rest validates; else `head` is 0.
    """

    threshold: int
    head: int


def is_one_document(found: Scan) -> bool:
    """Also where it has copies. It is cut then, into both splits."""
    return found.hashes.min() == found.hashes.max()


def rule(found: Scan, fraction: float) -> Rule:
    """That leaves neither split empty.

    Raises ValueError for one document that is too short to be cut, Damaged where its copy is.
    """
    if is_one_document(found):
        found.check(found.pieces[0])
        length = int(found.lengths[0])
        return Rule(0, cut_point(found.names[0], found.read, length, max(fraction, 1e-9)))
    threshold = max(int(fraction * 2**64), int(found.hashes.min()) + 1)
    return Rule(min(threshold, int(found.hashes.max())), 0)


def spans(found: Scan, rule: Rule, piece: Piece) -> Iterator[Span]:
    """Those of a piece, in the order of the source."""
    at, documents = piece.start, range(piece.first, piece.stop)
    lengths, hashes = (
        column[piece.first : piece.stop].tolist() for column in (found.lengths, found.hashes)
    )
    for number, length, hashed in zip(documents, lengths, hashes, strict=True):
        name = found.names.get(number, '')
        if rule.head:
            yield Span('train', at, at + rule.head, name)
            yield Span('validation', at + rule.head, at + length, name)
        else:
            yield Span(SPLITS[hashed < rule.threshold], at, at + length, name)
        at += length


def cut_point(name: str, read: Callable, length: int, fraction: float) -> int:
    """The line start, or else the character start, that leaves about `fraction` of it behind.

    `read(start, stop)` gives the bytes of the document in blocks.
    """
    target = min(int(length * (1 - fraction)), length - 1)
    at = _last(read, 0, target, lambda block: block.rfind(b'\n')) + 1
    at = at or _first(read, target, length, lambda block: block.find(b'\n')) + 1
    if not 0 < at < length:
        at = max(_last(read, 1, target + 1, _last_character), 0)
        at = at or max(_first(read, max(target, 1), length, _first_character), 0)
    if not at:
        raise ValueError(
            f'the corpus is {name} alone, {length} bytes: too short to be split into training '
            'and validation. Name more text in data.source.'
        )
    return at


def _last_character(block: bytes) -> int:
    return len(block.rstrip(CONTINUATION)) - 1


def _first_character(block: bytes) -> int:
    begins = len(block) - len(block.lstrip(CONTINUATION))
    return begins if begins < len(block) else -1


def _first(read: Callable, start: int, stop: int, find: Callable[[bytes], int]) -> int:
    """Where `find`, which gives -1 for nothing, finds something in [start, stop); or -1."""
    for block in read(start, stop):
        if (at := find(block)) >= 0:
            return start + at
        start += len(block)
    return -1


def _last(read: Callable, start: int, stop: int, find: Callable[[bytes], int]) -> int:
    """As `_first`, block by block from the end."""
    for begin in itertools.chain(range(stop - BLOCK, start, -BLOCK), [start]):
        block = b''.join(read(begin, stop))
        if (at := find(block)) >= 0:
            return begin + at
        stop = begin
    return -1
