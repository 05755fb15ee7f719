"""A folder of prepared data: its files, whether they are as they were written, and their content.

It holds `tokenizer/`, `records/` (a TFDS dataset of ArrayRecord files: each split is one stream of
tokens, cut into chunks), `index.npz` (where documents start in the streams), `report.json` and
`contents.json` (sizes and hashes of the other files).
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.data import tokenizers
from lm.data.cache import file_digest
from lm.data.formats import first_line
from lm.data.rows import CHUNK
from lm.data.split import SPLITS
from lm.storage.files import read_json, write_json

RECORDS, INDEX, REPORT, TOKENIZER = 'records', 'index.npz', 'report.json', 'tokenizer'
CONTENTS = 'contents.json'


@dataclasses.dataclass(frozen=True)
class Prepared:
    """`documents` [N + 1] and chunks of each split; see `lm.data.rows.Rows`."""

    tokenizer: tokenizers.Tokenizer
    report: dict[str, Any]
    documents: dict[str, np.ndarray]
    chunks: dict[str, 'Chunks']


def seal(folder: Path) -> None:
    """Notes the files of a folder that is complete."""
    files = sorted(path for path in folder.rglob('*') if path.is_file())
    write_json(
        folder / CONTENTS, {path.relative_to(folder).as_posix(): _stamp(path) for path in files}
    )


def _stamp(path: Path) -> dict[str, Any]:
    """The hash as well, but not of records: they are large, and ArrayRecord has one of each."""
    stamp = {'bytes': path.stat().st_size}
    if '.array_record' not in path.name:
        stamp['blake2b'] = file_digest(path)
    return stamp


def damage(folder: Path, names: Sequence[str] = (RECORDS, INDEX, REPORT, TOKENIZER)) -> str:
    """What is not as it was written, in words, or ''; `names` must be there. Earlier versions did
    not seal folders.
    """
    for name in names:
        if not (folder / name).exists():
            return f'{name} is missing'
    if not (folder / CONTENTS).exists():
        return ''
    try:
        stamps = dict(read_json(folder / CONTENTS))
    except (TypeError, ValueError):
        return f'{CONTENTS} is not as it was written'
    for name, stamp in stamps.items():
        if not (folder / name).is_file():
            return f'{name} is missing'
        if _stamp(folder / name) != stamp:
            return f'{name} is not as it was written'
    return ''


def load(folder: Path) -> Prepared:
    """Opens what `prepare` wrote. Raises OSError, naming `folder`, where it is damaged."""
    import tensorflow_datasets as tfds

    with _explained(folder):
        report = read_json(folder / REPORT)
        tokenizer = tokenizers.load(folder / TOKENIZER)
        with np.load(folder / INDEX) as index:
            documents = {split: index[split] for split in SPLITS}
        records = tfds.builder_from_directory(str(folder / RECORDS))
        chunks = {
            split: Chunks(
                records.as_data_source(split), f'{split} of {folder}', tokenizer.vocab_size
            )
            for split in SPLITS
        }
        for split in SPLITS:
            counts, n_tokens = report[split], int(documents[split][-1])
            if counts['tokens'] != n_tokens or len(chunks[split]) != -(-n_tokens // CHUNK):
                raise ValueError(f'{REPORT}, {INDEX} and {RECORDS} differ in size')
    return Prepared(tokenizer, report, documents, chunks)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """chunks[i] -> {'tokens': [CHUNK], fewer in the last}, checked as they are read.

    Raises OSError where a record is damaged, or holds a token that `vocab_size` does not.
    """

    source: Sequence[dict[str, Any]]
    name: str
    vocab_size: int

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        with _explained(self.name):
            tokens = self.source[i]['tokens']
            # Indexing out of range is clamped by JAX: a model would train on other tokens.
            if tokens.max() >= self.vocab_size:
                raise ValueError(
                    f'chunk {i} holds token {tokens.max()}, and data.tokenizer has '
                    f'{self.vocab_size} tokens'
                )
        return {'tokens': tokens}


@contextlib.contextmanager
def _explained(what: Path | str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # TFDS, ArrayRecord, zipfile and json raise what they like
        reason = f'{type(error).__name__}: {first_line(error)}'
        raise OSError(
            f'the prepared data, {what}, cannot be read ({reason}). If it is damaged, delete that '
            'folder: the same command prepares it again.'
        ) from error
