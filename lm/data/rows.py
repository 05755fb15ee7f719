"""Rows of one split, by number: each reads only the chunks of the stream it stands on."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lm.data.packing import Layout

# Tokens of a stored record: 37 us to read, and a row needs one or two. Part of prepare.FORMAT.
CHUNK = 4096
CACHED_CHUNKS = 2048  # 16 MiB of 16-bit tokens: the whole of a small corpus


class Rows:
    """rows[i] -> {'tokens', 'segments'}, int32 [T+1]; segments number documents, 0 is padding.

    n_tokens counts the targets over all rows (every token but BOS, once), n_bytes the UTF-8 bytes
    of the text they stand for: bits per byte = sum of nats / ln 2 / n_bytes.
    """

    def __init__(
        self,
        chunks: Sequence[dict[str, Any]],
        documents: np.ndarray,
        layout: Layout,
        seq_len: int,
        n_bytes: int,
    ):
        self.seq_len = seq_len
        self.n_tokens = int(documents[-1]) - (len(documents) - 1)
        self.n_bytes = n_bytes
        self._documents = documents
        self._layout = layout
        self._chunk = functools.lru_cache(CACHED_CHUNKS)(lambda i: chunks[i]['tokens'])

    def __len__(self) -> int:
        return len(self._layout)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        if not 0 <= row < len(self):
            raise IndexError(f'row must be in [0, {len(self)}); got {row}.')
        tokens = np.zeros(self.seq_len + 1, np.int32)
        segments = np.zeros(self.seq_len + 1, np.int32)
        used = 0
        for start, length in self._layout.spans(row):
            span = slice(used, used + length)
            tokens[span] = self._read(start, start + length)
            segments[span] = self._number(start, start + length) + segments[max(used - 1, 0)]
            used += length
        return {'tokens': tokens, 'segments': segments}

    def documents(self) -> Iterator[np.ndarray]:
        """The tokens of each document, without BOS and EOS."""
        for start, stop in itertools.pairwise(self._documents.tolist()):
            yield self._read(start + 1, stop - 1)

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream."""
        first, last = start // CHUNK, (stop - 1) // CHUNK
        found = [self._chunk(i) for i in range(first, last + 1)]
        return np.concatenate(found)[start - first * CHUNK : stop - first * CHUNK]

    def _number(self, start: int, stop: int) -> np.ndarray:
        """1 for the document that holds `start`, 2 for the next one, ..."""
        low, high = np.searchsorted(self._documents, [start + 1, stop])
        begins = np.zeros(stop - start, np.int32)
        begins[self._documents[low:high] - start] = 1
        return 1 + np.cumsum(begins)
