"""Selects the documents that are cut, each into both splits, because there are few and long ones.

The hash of a document decides its split, which gives a share near data.validation_fraction if there
are many documents. Of two files it gives half or more. So a source of files, with fewer than FEW
documents, is judged by two rules:

1. If the documents that hashing selects hold between half and twice the share, no document is cut.
2. Otherwise each long document is cut, and its last lines, `fraction` of it, are in the validation
   split. A document is long if it alone holds more than half the share, and if its part for
   validation is at least MIN_TAIL bytes. The hash still decides for the other documents.

The rules read the text before it is prepared, since the name of prepared data depends on them.
Lengths and hashes of few documents are therefore recorded beside the prepared data.
"""

import contextlib
import hashlib
import json
from pathlib import Path

import numpy as np

from lm.config.fields import DataConfig
from lm.data import cache
from lm.data.sources import Source
from lm.storage.files import write_text

FEW = 100  # documents; of more, whole ones give about the share
MIN_TAIL = 64  # bytes, about a line; a shorter rest is no text to validate on
MEMO = 'few_documents.json'

DocumentTable = list[tuple[int, int]]  # (bytes, hash) of each document that is not empty


def list_cut_hashes(source: Source, cfg: DataConfig) -> tuple[int, ...]:
    """Returns the hashes of the documents that are cut; empty for most sources.

    Args:
      source: the text.
      cfg: the data section.
    """
    # Files of the hub or a bucket are not fetched for it. A conversation is never cut.
    if source.is_chat or source.validation is not None or not 0 < len(source.files) < FEW:
        return ()
    table = _recall_few_documents(source, cache.root(cfg.cache_dir))
    if not table:
        return ()
    lengths = np.array([length for length, _ in table], np.int64)
    hashes = np.array([document_hash for _, document_hash in table], np.uint64)
    is_cut = select_cut_documents(lengths, hashes, cfg.validation_fraction)
    return tuple(sorted({*hashes[is_cut].tolist()}))


def select_cut_documents(lengths: np.ndarray, hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Returns a mask of the documents that are cut.

    Args:
      lengths: bytes of each document, [D].
      hashes: 64 bits of each document's hash, [D].
      fraction: share of the validation split.
    """
    is_cut = np.zeros(len(lengths), bool)
    if len(lengths) >= FEW or hashes.min() == hashes.max():  # the only document is always cut
        return is_cut
    n_bytes = int(lengths.sum())
    share = int(lengths[hashes < hash_threshold(hashes, fraction)].sum()) / n_bytes
    if fraction / 2 <= share <= 2 * fraction:
        return is_cut
    return (lengths > fraction / 2 * n_bytes) & (fraction * lengths >= MIN_TAIL)


def hash_threshold(hashes: np.ndarray, fraction: float) -> int:
    """Returns the hash below which a document is in the validation split.

    It is above the smallest hash and at most the largest, so that both splits have a document.
    """
    return min(max(int(fraction * 2**64), int(hashes.min()) + 1), int(hashes.max()))


def _recall_few_documents(source: Source, folder: Path) -> DocumentTable:
    """Returns the documents of a source, or [] if there are FEW or more; reads them once."""
    digests = cache.file_digests(folder, source.files)
    key = cache.digest_bytes(source.identity.encode(), *(digest.encode() for digest in digests))
    memo_path = folder / MEMO
    match cache.read_memo(memo_path).get(key):
        case [*rows] if all(_is_row(row) for row in rows):
            return [(length, document_hash) for length, document_hash in rows]
    table = _read_few_documents(source)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs a reading each time
        write_text(memo_path, json.dumps(cache.read_memo(memo_path) | {key: table}))
    return table


def _is_row(row: object) -> bool:
    return isinstance(row, list) and [*map(type, row)] == [int, int]


def _read_few_documents(source: Source) -> DocumentTable:
    table = []
    for _, parts in source.documents():
        state, length = hashlib.blake2b(digest_size=8), 0
        for block in parts or ():
            state.update(block)
            length += len(block)
        if length:
            table.append((length, int.from_bytes(state.digest())))
        if len(table) >= FEW:
            return []
    return table
