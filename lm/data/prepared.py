"""The folder of prepared data: its files, their integrity checks, and their content.

It holds `tokenizer/`, `records/` (a TFDS dataset of ArrayRecord files; each split is one stream of
tokens, cut into chunks), `index.npz` (where documents start in the streams, and of conversations
the spans of tokens to learn), `report.json` and `contents.json` (sizes and hashes of the other
files).
"""

import array
import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.data import tokenizers
from lm.data.cache import file_digest
from lm.data.rows import CHUNK, PACKINGS, WHOLE_PACKINGS, ChatRows, ChatTargets, Rows
from lm.data.scan import SPLITS
from lm.storage.files import first_line, read_json, write_json

FORMAT = 1  # raise it when what is written for the same content changes
CHUNKS_PER_FILE = 1 << 16  # files of half a gigabyte, for 16-bit tokens
TOKENS_AT_ONCE = 1 << 20  # read of a piece
TOKENS = '.tokens'  # ends the names of the files of a piece
RECORDS, INDEX, REPORT, TOKENIZER = 'records', 'index.npz', 'report.json', 'tokenizer'
CONTENTS = 'contents.json'
# Ends of the names of arrays in INDEX, which data of conversations have besides.
SPANS, TARGET_BYTES = '_targets', '_target_bytes'
LEFT_OUT = 'left_out'  # conversations by the reason
SHARED = 'shared_documents'  # the field of the report: of a validation source, those also in train
ROUND_TRIP = 'round_trip'  # the field of the report with what the tokenizer loses


def seal(folder: Path) -> None:
    """Records sizes and hashes of the files of a complete folder."""
    files = sorted(path for path in folder.rglob('*') if path.is_file())
    write_json(folder / CONTENTS, {p.relative_to(folder).as_posix(): _stamp(p) for p in files})


def _stamp(path: Path) -> dict[str, Any]:
    """Returns size and hash of a file.

    Records get a size only: they are large, and ArrayRecord stores a hash of each.
    """
    stamp = {'bytes': path.stat().st_size}
    if '.array_record' not in path.name:
        stamp['blake2b'] = file_digest(path)
    return stamp


def find_damage(folder: Path, names: Sequence[str] = (RECORDS, INDEX, REPORT, TOKENIZER)) -> str:
    """Names a file that is missing or differs from its stamp; '' if the folder is intact."""
    try:  # earlier versions did not seal folders
        stamps = read_json(folder / CONTENTS) if (folder / CONTENTS).exists() else {}
    except ValueError:
        return f'{CONTENTS} has changed since it was written'
    for name in (*names, *stamps):
        if not (folder / name).exists():
            return f'{name} is missing'
    for name, stamp in stamps.items():
        if (folder / name).is_dir() or _stamp(folder / name) != stamp:
            return f'{name} has changed since it was written'
    return ''


class TokenStream:
    """The tokens of a split, collected piece by piece and emitted in chunks."""

    def __init__(self, dtype: type):
        self.starts, self.n_bytes, self.n_tokens = array.array('q', [0]), 0, 0
        self.pending = np.empty(0, dtype)

    def add_documents(self, ends: np.ndarray, n_bytes: int) -> None:
        """Adds the documents of the next piece. ends: the end of each within the piece, in
        tokens.
        """
        self.starts.frombytes((ends + self.starts[-1]).tobytes())
        self.n_bytes += n_bytes

    def read_chunks(self, piece: Path, split: str) -> Iterator[dict[str, np.ndarray]]:
        """Yields the chunks that the tokens of a piece complete."""
        with open(piece / f'{split}{TOKENS}', 'rb') as file:
            while len(tokens := np.fromfile(file, self.pending.dtype, TOKENS_AT_ONCE)):
                self.pending = np.concatenate([self.pending, tokens])
                self.n_tokens += len(tokens)
                yield from self.pop_chunks(CHUNK)

    def pop_chunks(self, min_tokens: int) -> list[dict[str, np.ndarray]]:
        """Returns the full chunks, and the last one if it has at least `min_tokens` tokens."""
        tokens = self.pending
        chunks = [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]
        self.pending = tokens[:0]
        if chunks and len(chunks[-1]) < min_tokens:
            self.pending = chunks.pop()
        return [{'tokens': chunk} for chunk in chunks]

    def counts(self) -> dict[str, int]:
        documents = len(self.starts) - 1
        return {'documents': documents, 'bytes': self.n_bytes, 'tokens': self.n_tokens}


def build_record_writer(folder: Path, dtype: type) -> Any:
    """Returns TFDS's writer of both splits, which keeps the order of the records.

    GeneratorBasedBuilder would hold a gigabyte of records in memory to shuffle them, and import
    TensorFlow beyond that. `tfds.builder_from_directory` reads the folder.
    """
    import tensorflow_datasets as tfds

    folder.mkdir()
    tokens = tfds.features.Tensor(shape=(None,), dtype=dtype, encoding=tfds.features.Encoding.BYTES)
    identity = tfds.core.DatasetIdentity(
        name='evenkeel',
        version=tfds.core.Version(f'{FORMAT}.0.0'),
        data_dir=str(folder),
        module_name='lm.data.prepare',  # of the class that TFDS would look for; written as it is
    )
    features = tfds.features.FeaturesDict({'tokens': tokens})
    dataset_info = tfds.core.DatasetInfo(
        builder=identity, features=features, disable_shuffling=True
    )
    writer = tfds.core.SequentialWriter(
        dataset_info, max_examples_per_shard=CHUNKS_PER_FILE, file_format='array_record'
    )
    writer.initialize_splits(list(SPLITS))
    return writer


class ChatIndex:
    """The targets of conversations, collected piece by piece, and the number that is left out."""

    def __init__(self):
        self.left_out: Counter[str] = Counter()
        self._spans = {split: [np.empty((0, 2), np.int64)] for split in SPLITS}
        self._n_bytes = {split: [np.empty(0, np.int64)] for split in SPLITS}

    def add_piece(self, index: Mapping[str, np.ndarray], starts: Mapping[str, int]) -> None:
        """Adds a piece. starts: the position of the piece in the stream of each split."""
        for split in SPLITS:
            self._spans[split].append(index[f'{split}{SPANS}'] + starts[split])
            self._n_bytes[split].append(index[f'{split}{TARGET_BYTES}'])
        self.left_out.update(json.loads(index[LEFT_OUT].tobytes()))

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays for INDEX."""
        spans = {f'{split}{SPANS}': np.concatenate(self._spans[split]) for split in SPLITS}
        sizes = {f'{s}{TARGET_BYTES}': np.concatenate(self._n_bytes[s]) for s in SPLITS}
        return spans | sizes


def load(
    folder: Path, packing: str, seq_len: int
) -> tuple[tokenizers.Tokenizer, dict[str, Any], dict[str, Rows]]:
    """Loads a folder of prepared data.

    Args:
      folder: the folder to load.
      packing: a name of lm.data.rows.PACKINGS.
      seq_len: T, targets per row.

    Returns:
      (tokenizer, report, {split: rows}).

    Raises:
      OSError: naming `folder`, if it is damaged.
    """
    import tensorflow_datasets as tfds

    rows = {}
    with _explain_errors(folder):
        report = read_json(folder / REPORT)
        tokenizer = tokenizers.load(folder / TOKENIZER)
        records: Any = tfds.builder_from_directory(str(folder / RECORDS))
        with np.load(folder / INDEX) as index:
            for split in SPLITS:
                chunk_source, documents = records.as_data_source(split), index[split]
                chunks = Chunks(chunk_source, f'{split} of {folder}', tokenizer.vocab_size)
                counts, n_tokens = report[split], int(documents[-1])
                if counts['tokens'] != n_tokens or len(chunk_source) != -(-n_tokens // CHUNK):
                    raise ValueError(f'{REPORT}, {INDEX} and {RECORDS} differ in size')
                if f'{split}{SPANS}' in index:
                    targets = ChatTargets(index[f'{split}{SPANS}'], index[f'{split}{TARGET_BYTES}'])
                    pack = WHOLE_PACKINGS[packing]
                    rows[split] = ChatRows(chunks, documents, pack, seq_len, targets)
                else:
                    layout = PACKINGS[packing](documents, seq_len)
                    rows[split] = Rows(chunks, documents, layout, seq_len, counts['bytes'])
    return tokenizer, report, rows


@dataclasses.dataclass(frozen=True)
class Chunks:
    """chunks[i] -> {'tokens': [CHUNK], fewer in the last}. Raises OSError if a chunk is damaged."""

    source: Sequence[dict[str, Any]]
    name: str
    vocab_size: int

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        with _explain_errors(self.name):
            tokens = self.source[i]['tokens']
            # Indexing out of range is clamped by JAX: a model would train on other tokens.
            if tokens.max() >= self.vocab_size:
                raise ValueError(
                    f'chunk {i} has token {tokens.max()}, but data.tokenizer has only '
                    f'{self.vocab_size} tokens'
                )
        return {'tokens': tokens}


@contextlib.contextmanager
def _explain_errors(subject: Path | str) -> Generator[None]:
    """Turns any exception into an OSError that names `subject` and a remedy."""
    try:
        yield
    except Exception as error:  # TFDS, ArrayRecord, zipfile and json raise what they like
        reason = f'{type(error).__name__}: {first_line(error)}'
        raise OSError(
            f'the prepared data, {subject}, cannot be read ({reason}). If they are damaged, delete '
            'that folder and run the same command again.'
        ) from error
