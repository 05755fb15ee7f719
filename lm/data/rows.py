"""Rows of T+1 tokens from a stream of documents: tokens 0..T-1 predict tokens 1..T.

A split is one stream, BOS document EOS BOS document EOS ... A packing assigns spans of it to rows
so that each token but BOS is a target exactly once. A span that continues a document repeats the
token before it and always begins a row, so that this token is only an input.
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

# Tokens of a stored record: 37 us to read, and a row needs one or two. Part of prepare.FORMAT.
CHUNK = 4096
CACHED_CHUNKS = 2048  # 16 MiB of 16-bit tokens: the whole of a small corpus


@dataclasses.dataclass(frozen=True)
class WindowLayout:
    """A layout in which row r is the span [r T, r T + T + 1) of a stream of `end` tokens."""

    end: int
    seq_len: int

    def __len__(self) -> int:
        return max(0, -(-(self.end - 1) // self.seq_len))

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Returns (start, length) of each span of a row, in order."""
        start = row * self.seq_len
        return [(start, min(self.seq_len + 1, self.end - start))]


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """A layout in which row r is the spans (starts[p], lengths[p]) for rows[r] <= p < rows[r+1]."""

    starts: np.ndarray  # int64 [P]
    lengths: np.ndarray  # int64 [P]
    rows: np.ndarray  # int64 [R + 1]

    def __len__(self) -> int:
        return len(self.rows) - 1

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Returns (start, length) of each span of a row, in order."""
        first, last = self.rows[row : row + 2]
        lengths = self.lengths[first:last].tolist()
        return list(zip(self.starts[first:last].tolist(), lengths, strict=True))


def concat(documents: np.ndarray, seq_len: int) -> WindowLayout:
    """Windows of seq_len + 1 over the stream, overlapping by one; only the last may be shorter.

    `documents` [N + 1] holds the start of each document in the stream, and the end of the last.
    """
    return WindowLayout(int(documents[-1]), seq_len)


def best_fit(documents: np.ndarray, seq_len: int) -> PackedLayout:
    """Best-fit decreasing of whole documents into rows (arXiv:2404.10830).

    Only documents longer than a row are cut, into full rows and a rest. The rest begins a new row,
    and whole documents fill its free space: in mid-row its repeated first token would be a target a
    second time.
    """
    starts, lengths, continues = _cut_documents(np.asarray(documents, np.int64), seq_len)
    rows_P = np.empty(len(starts), np.int64)
    # Rests and full spans begin a row each; whole documents then fill what the rests leave free.
    first = np.flatnonzero(continues | (lengths == seq_len + 1))
    rows_P[first] = np.arange(len(first))
    whole = np.flatnonzero(~continues & (lengths <= seq_len))
    free = seq_len + 1 - lengths[first]
    rows_P[whole] = best_fit_decreasing(lengths[whole], seq_len + 1, initial_room=free)
    order = np.lexsort((np.arange(len(starts)), ~continues, rows_P))
    edges = np.concatenate([[0], np.cumsum(np.bincount(rows_P))])
    return PackedLayout(starts[order], lengths[order], edges)


def _cut_documents(
    documents: np.ndarray, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns starts and lengths of spans of at most seq_len + 1, and whether each continues a
    document.
    """
    lengths = np.diff(documents)
    # A document of n tokens has n - 1 targets, and a row seq_len.
    counts = -(-(lengths - 1) // seq_len)
    owner = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts
    offsets = (np.arange(counts.sum()) - first[owner]) * seq_len
    remaining = lengths[owner] - offsets
    return documents[owner] + offsets, np.minimum(remaining, seq_len + 1), offsets > 0


def best_fit_decreasing(lengths: np.ndarray, capacity: int, initial_room: np.ndarray) -> np.ndarray:
    """Assigns spans to rows: the longest first, each to the fullest row with enough room.

    Spans of equal length are placed together, so that the work is a sort plus one step per distinct
    length.

    Args:
      lengths: [N], tokens of each span.
      capacity: tokens of a new row.
      initial_room: free tokens of rows 0, 1, ..., which exist already.

    Returns:
      [N], the row of each span.
    """
    rows_P = np.empty(len(lengths), np.int64)
    room = _RowsBySpace(initial_room)
    order = np.argsort(-lengths, kind='stable')
    values, counts = np.unique(lengths, return_counts=True)
    n_placed = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        remaining = count
        while remaining:
            space, rows = room.take_rows(length, remaining, capacity)
            per_row = space // length
            placed = min(remaining, per_row * len(rows))
            rows_P[order[n_placed : n_placed + placed]] = np.repeat(rows, per_row)[:placed]
            # All rows get `per_row` spans, except the last one, which gets the remainder.
            full, remainder = divmod(placed, per_row)
            room.add_rows(space - per_row * length, rows[:full])
            room.add_rows(space - remainder * length, rows[full:])
            n_placed, remaining = n_placed + placed, remaining - placed
    return rows_P


class _RowsBySpace:
    """Rows, grouped by their number of free tokens."""

    def __init__(self, initial_room: np.ndarray):
        self.n_rows = len(initial_room)
        self.rows = {}  # room -> arrays of row numbers
        self.spaces = []  # the keys, sorted
        order = np.argsort(initial_room, kind='stable')
        values, firsts = np.unique(initial_room[order], return_index=True)
        for space, rows in zip(values.tolist(), np.split(order, firsts)[1:], strict=True):
            self.add_rows(space, rows)

    def take_rows(self, length: int, n_spans: int, capacity: int) -> tuple[int, np.ndarray]:
        """Removes rows for up to `n_spans` spans of `length` tokens.

        They are the rows with the least sufficient space, or new rows if none has enough. Returns
        (free tokens of each, row numbers).
        """
        first_fit = bisect.bisect_left(self.spaces, length)
        if first_fit == len(self.spaces):
            needed = -(-n_spans // (capacity // length))
            self.n_rows += needed
            return capacity, np.arange(self.n_rows - needed, self.n_rows)
        space = self.spaces.pop(first_fit)
        needed = -(-n_spans // (space // length))
        rows = np.concatenate(self.rows.pop(space))
        self.add_rows(space, rows[needed:])
        return space, rows[:needed]

    def add_rows(self, space: int, rows: np.ndarray) -> None:
        """Adds rows with `space` free tokens; full rows are forgotten."""
        if not len(rows) or not space:
            return
        if space not in self.rows:
            bisect.insort(self.spaces, space)
        self.rows.setdefault(space, []).append(rows)


PACKINGS = {'concat': concat, 'best_fit': best_fit}


class Rows:
    """rows[i] -> {'tokens', 'segments'}, int32 [T+1]. Segments number the documents of a row; 0 is
    padding.

    A row reads only the chunks of the stream that it covers.

    Attributes:
      n_tokens: targets over all rows (every token but BOS, once).
      n_bytes: UTF-8 bytes of the text, so that bits per byte = sum of nats / ln 2 / n_bytes.
    """

    def __init__(
        self,
        chunks: Any,
        documents: np.ndarray,
        layout: WindowLayout | PackedLayout,
        seq_len: int,
        n_bytes: int,
    ):
        self.seq_len, self.n_bytes = seq_len, n_bytes
        self.n_tokens = int(documents[-1]) - (len(documents) - 1)
        self._documents, self._layout = documents, layout
        self._read_chunk = functools.lru_cache(CACHED_CHUNKS)(lambda i: chunks[i]['tokens'])

    def __len__(self) -> int:
        return len(self._layout)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        if not 0 <= row < len(self):
            raise IndexError(f'row must be in [0, {len(self)}); got {row}.')
        tokens, segments = np.zeros((2, self.seq_len + 1), np.int32)
        used = 0
        for start, length in self._layout.spans(row):
            span = slice(used, used + length)
            tokens[span] = self._read_tokens(start, start + length)
            segments[span] = (
                self._number_documents(start, start + length) + segments[max(used - 1, 0)]
            )
            used += length
        return {'tokens': tokens, 'segments': segments}

    @property
    def n_documents(self) -> int:
        return len(self._documents) - 1

    def document(self, i: int, with_marks: bool = False) -> np.ndarray:
        """Returns the tokens of document i, without BOS and EOS (the marks) unless `with_marks`."""
        start, stop = self._documents[i : i + 2].tolist()
        offset = 0 if with_marks else 1
        return self._read_tokens(start + offset, stop - offset)

    def documents(self, with_marks: bool = False) -> Iterator[np.ndarray]:
        """Yields every `document`."""
        return (self.document(i, with_marks) for i in range(self.n_documents))

    def document_ids(self, row: int) -> np.ndarray:
        """Returns the document number of each token [T+1], as `documents` counts; -1: padding."""
        spans = [np.arange(start, start + n) for start, n in self._layout.spans(row)]
        positions = np.concatenate(spans)
        ids = np.full(self.seq_len + 1, -1)
        ids[: len(positions)] = np.searchsorted(self._documents, positions, side='right') - 1
        return ids

    def _read_tokens(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) of the stream."""
        first, last = start // CHUNK, (stop - 1) // CHUNK
        chunks = [self._read_chunk(i) for i in range(first, last + 1)]
        return np.concatenate(chunks)[start - first * CHUNK : stop - first * CHUNK]

    def _number_documents(self, start: int, stop: int) -> np.ndarray:
        """Returns 1 for the tokens of the document that holds `start`, 2 for the next, ..."""
        low, high = np.searchsorted(self._documents, [start + 1, stop])
        begins = np.zeros(stop - start, np.int32)
        begins[self._documents[low:high] - start] = 1
        return 1 + np.cumsum(begins)
