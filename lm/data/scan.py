"""One pass over a source: documents are copied into one file, counted and hashed.

Everything after it reads the copy, so that files are read once here and once for their digest.
"""

import array
import contextlib
import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lm.data.formats import BLOCK
from lm.data.sources import Source
from lm.data.utf8 import INVALID_UTF8, characters
from lm.sections import DataConfig
from modules.choices import choose

LARGE = 1 << 22  # bytes of a document whose name is kept: it may be too long for a tokenizer


@dataclasses.dataclass
class Scan:
    """What was found, and the copy: document i is hashes[i], lengths[i] bytes behind those before.

    Per document 16 bytes of memory are taken, and as many as it has of the disk, until `close`.
    """

    copy: int  # the descriptor of a file without a name: the system removes it, come what may
    lengths: array.array = dataclasses.field(default_factory=lambda: array.array('q'))
    hashes: array.array = dataclasses.field(default_factory=lambda: array.array('Q'))
    names: dict[int, str] = dataclasses.field(
        default_factory=dict
    )  # of the large ones, and the first
    n_bytes: int = 0
    empty: int = 0  # left out of everything: nothing to learn from or to predict
    invalid_documents: int = 0
    invalid_bytes: int = 0

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) of the copy, in blocks."""
        for at in range(start, stop, BLOCK):
            yield os.pread(self.copy, min(BLOCK, stop - at), at)


@contextlib.contextmanager
def scanned(source: Source, cfg: DataConfig, folder: Path) -> Iterator[Scan]:
    """What `source` holds; the copy lies in `folder` until the block ends.

    Raises ValueError for a source without text, or one that data.invalid_utf8 refuses.
    """
    invalid_in = choose(INVALID_UTF8, cfg.invalid_utf8, 'data.invalid_utf8')
    with tempfile.TemporaryFile(dir=folder, buffering=BLOCK) as file:
        found = Scan(file.fileno())
        for name, parts in source.documents():
            state, length, invalid = hashlib.blake2b(digest_size=8), 0, 0
            for data in characters(parts):
                invalid += invalid_in(name, data, length)
                state.update(data)
                file.write(data)
                length += len(data)
            if not length:
                found.empty += 1
                continue
            if length >= LARGE or not found.lengths:
                found.names[len(found.lengths)] = name
            found.lengths.append(length)
            found.hashes.append(int.from_bytes(state.digest()))
            found.n_bytes += length
            found.invalid_documents += invalid > 0
            found.invalid_bytes += invalid
        if not found.lengths:
            raise ValueError(
                f'data.source={cfg.source} holds no text: {found.empty} documents, all of them '
                'empty.'
            )
        file.flush()
        yield found
