"""How a stream of documents becomes rows of T+1 tokens: tokens 0..T-1 predict tokens 1..T.

A split is one stream, BOS document EOS BOS document EOS ... A packing lays spans of it into rows;
each token but BOS is a target exactly once. A span that continues a document repeats the token
before it, and always begins a row, where it is only an input.
"""

import bisect
import dataclasses
from typing import Protocol

import numpy as np


class Layout(Protocol):
    """Which spans of the stream a row is made of."""

    def __len__(self) -> int:
        """The number of rows."""

    def spans(self, row: int) -> list[tuple[int, int]]:
        """(start, length) of each, in order."""


@dataclasses.dataclass(frozen=True)
class Windows:
    """Row r is the span [r T, r T + T + 1) of a stream of `end` tokens, as far as that goes. No
    array is held, whatever the number of rows.
    """

    end: int
    seq_len: int

    def __len__(self) -> int:
        return max(0, -(-(self.end - 1) // self.seq_len))

    def spans(self, row: int) -> list[tuple[int, int]]:
        start = row * self.seq_len
        return [(start, min(self.seq_len + 1, self.end - start))]


@dataclasses.dataclass(frozen=True)
class Placed:
    """Row r is the spans [starts[p], starts[p] + lengths[p]) for p in [rows[r], rows[r + 1])."""

    starts: np.ndarray  # int64 [P]
    lengths: np.ndarray  # int64 [P]
    rows: np.ndarray  # int64 [R + 1]

    def __len__(self) -> int:
        return len(self.rows) - 1

    def spans(self, row: int) -> list[tuple[int, int]]:
        first, last = self.rows[row : row + 2]
        lengths = self.lengths[first:last].tolist()
        return list(zip(self.starts[first:last].tolist(), lengths, strict=True))


def concat(documents: np.ndarray, seq_len: int) -> Windows:
    """Windows of seq_len + 1 over the stream, overlapping by one; only the last may be shorter.

    `documents` [N + 1] is where each document starts in the stream, and where the last ends.
    """
    return Windows(int(documents[-1]), seq_len)


def best_fit(documents: np.ndarray, seq_len: int) -> Placed:
    """Best-fit decreasing of whole documents into rows (arXiv:2404.10830).

    Only a document longer than a row is cut, into full rows and a rest. The rest begins a row of
    its own, and whole documents fill what it leaves: a rest in mid-row would make its repeated
    first token a target a second time.
    """
    starts, lengths, continues = _pieces(np.asarray(documents, np.int64), seq_len)
    rows_P = np.empty(len(starts), np.int64)
    first = np.flatnonzero(continues | (lengths == seq_len + 1))
    rows_P[first] = np.arange(len(first))
    whole = np.flatnonzero(~continues & (lengths <= seq_len))
    rows_P[whole] = _best_fit_decreasing(
        lengths[whole], seq_len + 1, seeded=seq_len + 1 - lengths[first]
    )
    order = np.lexsort((np.arange(len(starts)), ~continues, rows_P))
    edges = np.concatenate([[0], np.cumsum(np.bincount(rows_P))])
    return Placed(starts[order], lengths[order], edges)


def _pieces(documents: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts and lengths of pieces of at most seq_len + 1 tokens, and which continue a document."""
    lengths = np.diff(documents)
    counts = -(-(lengths - 1) // seq_len)
    owner = np.repeat(np.arange(len(lengths)), counts)
    first_piece = np.cumsum(counts) - counts
    offsets = (np.arange(counts.sum()) - first_piece[owner]) * seq_len
    remaining = lengths[owner] - offsets
    return documents[owner] + offsets, np.minimum(remaining, seq_len + 1), offsets > 0


def _best_fit_decreasing(lengths: np.ndarray, capacity: int, seeded: np.ndarray) -> np.ndarray:
    """The row of each piece: longest first, into the fullest row that still has room.

    Rows 0, 1, ... exist already with `seeded` tokens of room; new ones have `capacity`. Pieces of
    one length are placed together: the fullest row with room r takes r // length of them before
    any other does, so the work is of the order of the number of lengths, plus a sort.
    """
    rows_P = np.empty(len(lengths), np.int64)
    room = _Room(seeded)
    order = np.argsort(-lengths, kind='stable')
    values, counts = np.unique(lengths, return_counts=True)
    done = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            space, bins = room.take(length, left, capacity)
            each = space // length
            placed = min(left, each * len(bins))
            rows_P[order[done : done + placed]] = np.repeat(bins, each)[:placed]
            full, rest = divmod(placed, each)
            room.give(space - each * length, bins[:full])
            room.give(space - rest * length, bins[full:])
            done, left = done + placed, left - placed
    return rows_P


class _Room:
    """Rows by how many tokens they still have room for."""

    def __init__(self, seeded: np.ndarray):
        self.n_rows = len(seeded)
        self.rows = {}  # room -> arrays of row numbers
        self.spaces = []  # the keys, sorted
        order = np.argsort(seeded, kind='stable')
        values, firsts = np.unique(seeded[order], return_index=True)
        for space, rows in zip(values.tolist(), np.split(order, firsts)[1:], strict=True):
            self.give(space, rows)

    def take(self, length: int, pieces: int, capacity: int) -> tuple[int, np.ndarray]:
        """Rows, as many as `pieces` of `length` need, of the least room that fits one; or new."""
        at = bisect.bisect_left(self.spaces, length)
        if at == len(self.spaces):
            needed = -(-pieces // (capacity // length))
            self.n_rows += needed
            return capacity, np.arange(self.n_rows - needed, self.n_rows)
        space = self.spaces[at]
        needed = -(-pieces // (space // length))
        rows = np.concatenate(self.rows.pop(space))
        del self.spaces[at]
        self.give(space, rows[needed:])
        return space, rows[:needed]

    def give(self, space: int, rows: np.ndarray) -> None:
        if not len(rows) or not space:
            return
        if space not in self.rows:
            bisect.insort(self.spaces, space)
            self.rows[space] = []
        self.rows[space].append(rows)


PACKINGS = {'concat': concat, 'best_fit': best_fit}
