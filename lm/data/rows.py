"""Rows of T+1 tokens from a stream of documents: tokens 0..T-1 predict tokens 1..T.

A split is one stream, BOS document EOS BOS document EOS ... A packing assigns spans of it to rows
so that each token but BOS is a target exactly once. A span that continues a document repeats the
token before it and always begins a row, so that this token is only an input.

Conversations are documents, too. They lie in rows whole, and only their answers are targets.
"""

import bisect
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


def pack_whole_in_order(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> PackedLayout:
    """Whole documents in their order; a row ends where the next one does not fit.

    Args:
      starts: [N], the start of each document in the stream.
      lengths: [N], at most seq_len + 1 tokens.
      seq_len: T, targets per row.
    """
    ends, rows = np.concatenate([[0], np.cumsum(lengths)]), [0]
    while rows[-1] < len(lengths):
        rows.append(int(np.searchsorted(ends, ends[rows[-1]] + seq_len + 1, side='right')) - 1)
    return PackedLayout(starts, lengths, np.array(rows))


def pack_whole_best_fit(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> PackedLayout:
    """Best-fit decreasing of whole documents, as in `best_fit`.

    Args: as in `pack_whole_in_order`.
    """
    rows_P = best_fit_decreasing(lengths, seq_len + 1, initial_room=np.empty(0, np.int64))
    order = np.argsort(rows_P, kind='stable')
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
WHOLE_PACKINGS = {'concat': pack_whole_in_order, 'best_fit': pack_whole_best_fit}


class ChatTargets(NamedTuple):
    """The tokens of conversations to learn.

    Attributes:
      spans: [S, 2], (start, stop) of each span of tokens in the stream, in order.
      n_bytes: [N], bytes of the text to learn in each document.
    """

    spans: np.ndarray
    n_bytes: np.ndarray

    def mark(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Returns bool [n], whether each of the tokens from `start` of the stream is a target."""
        # Span edges alternate in order: behind an odd number of them a token is in a span.
        edges, positions = self.spans.reshape(-1), np.arange(start, start + len(tokens))
        return np.searchsorted(edges, positions, side='right') % 2 == 1


class TextTargets(NamedTuple):
    """Every token but BOS, the targets of text in a mixture with conversations."""

    bos_id: int

    def mark(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Returns bool [n], whether each token is a target."""
        return tokens != self.bos_id


class Rows:
    """rows[i] -> {'tokens', 'segments'}, int32 [T+1]. Segments number the documents of a row; 0 is
    padding. With `targets`, a row has these too: 1 for each token to predict.

    A row reads only the chunks of the stream that it covers.

    Attributes:
      n_tokens: targets over all rows (every token but BOS, once; of conversations the answers).
      n_bytes: UTF-8 bytes of the text, so that bits per byte = sum of nats / ln 2 / n_bytes.
      n_left_out: conversations longer than a row, which no row holds.
      longest: tokens of the longest document.
    """

    n_left_out = 0

    def __init__(
        self,
        chunks: Any,
        documents: np.ndarray,
        layout: WindowLayout | PackedLayout,
        seq_len: int,
        n_bytes: int,
        targets: ChatTargets | TextTargets | None = None,
    ):
        self.seq_len, self.n_bytes, self.targets = seq_len, n_bytes, targets
        self.n_tokens = int(documents[-1]) - (len(documents) - 1)
        self._starts, self._stops, self._layout = documents[:-1], documents[1:], layout
        self.longest = int(np.diff(documents).max(initial=0))
        self._read_chunk = functools.lru_cache(CACHED_CHUNKS)(lambda i: chunks[i]['tokens'])

    def with_targets(self, bos_id: int) -> 'Rows':
        """Returns the same rows with `targets`, for a mixture with conversations."""
        rows = copy.copy(self)
        rows.targets = rows.targets or TextTargets(bos_id)
        return rows

    def __len__(self) -> int:
        return len(self._layout)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        if not 0 <= row < len(self):
            raise IndexError(f'row must be in [0, {len(self)}); got {row}.')
        tokens, segments, targets = np.zeros((3, self.seq_len + 1), np.int32)
        used = 0
        for start, length in self._layout.spans(row):
            span = slice(used, used + length)
            tokens[span] = self._read_tokens(start, start + length)
            segments[span] = (
                self._number_documents(start, start + length) + segments[max(used - 1, 0)]
            )
            if self.targets is not None:
                targets[span] = self.targets.mark(tokens[span], start)
            used += length
        arrays = {'tokens': tokens, 'segments': segments}
        return arrays if self.targets is None else arrays | {'targets': targets}

    @property
    def n_documents(self) -> int:
        return len(self._starts)

    def document(self, i: int, with_marks: bool = False) -> np.ndarray:
        """Returns the tokens of document i, without BOS and EOS (the marks) unless `with_marks`.

        A conversation has the tokens of its template, all of them.
        """
        start, stop = int(self._starts[i]), int(self._stops[i])
        offset = 0 if with_marks or isinstance(self.targets, ChatTargets) else 1
        return self._read_tokens(start + offset, stop - offset)

    def documents(self, with_marks: bool = False) -> Iterator[np.ndarray]:
        """Yields every `document`."""
        return (self.document(i, with_marks) for i in range(self.n_documents))

    def find_targets(self, i: int, bos_id: int) -> np.ndarray:
        """Returns bool [n], whether each token of document i, with its marks, is a target."""
        targets = self.targets or TextTargets(bos_id)
        return targets.mark(self.document(i, with_marks=True), int(self._starts[i]))

    def document_ids(self, row: int) -> np.ndarray:
        """Returns the document number of each token [T+1], as `documents` counts; -1: padding."""
        spans = [np.arange(start, start + n) for start, n in self._layout.spans(row)]
        positions = np.concatenate(spans)
        ids = np.full(self.seq_len + 1, -1)
        ids[: len(positions)] = np.searchsorted(self._starts, positions, side='right') - 1
        return ids

    def _read_tokens(self, start: int, stop: int) -> np.ndarray:
        """Returns tokens [start, stop) of the stream."""
        first, last = start // CHUNK, (stop - 1) // CHUNK
        chunks = [self._read_chunk(i) for i in range(first, last + 1)]
        return np.concatenate(chunks)[start - first * CHUNK : stop - first * CHUNK]

    def _number_documents(self, start: int, stop: int) -> np.ndarray:
        """Returns 1 for the tokens of the document that holds `start`, 2 for the next, ..."""
        low, high = np.searchsorted(self._starts, [start + 1, stop])
        begins = np.zeros(stop - start, np.int32)
        begins[self._starts[low:high] - start] = 1
        return 1 + np.cumsum(begins)


class ChatRows(Rows):
    """Rows of whole conversations. Those longer than a row are left out."""

    def __init__(
        self,
        chunks: Any,
        documents: np.ndarray,
        packing: Callable[[np.ndarray, np.ndarray, int], PackedLayout],
        seq_len: int,
        targets: ChatTargets,
    ):
        """Args:
        chunks: of the stream.
        documents: [N + 1], the start of each conversation, and the end of the last.
        packing: of WHOLE_PACKINGS.
        seq_len: T, targets per row.
        targets: the tokens to learn.
        """
        lengths = np.diff(documents)
        fits = lengths <= seq_len + 1
        layout = packing(documents[:-1][fits], lengths[fits], seq_len)
        targets = targets._replace(n_bytes=targets.n_bytes[fits])
        super().__init__(chunks, documents, layout, seq_len, int(targets.n_bytes.sum()), targets)
        self._starts, self._stops = documents[:-1][fits], documents[1:][fits]
        spans = targets.spans
        owner = np.searchsorted(documents, spans[:, 0], side='right') - 1
        self.n_tokens = int((spans[:, 1] - spans[:, 0])[fits[owner]].sum())
        self.n_left_out = int((~fits).sum())
