"""Files of text: each format is a stream of (name, parts), the bytes of one document each.

Memory does not grow with a file: a .txt comes in blocks, a .jsonl line by line, a .parquet a few
rows at a time. Parts must be taken before the next document is.
"""

import contextlib
import functools
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lm.storage.files import first_line

Documents = Iterator[tuple[str, Iterable[bytes]]]

BLOCK = 1 << 20  # bytes read at once
LONGEST_LINE = 1 << 26  # bytes; a line is parsed whole, which takes up to ten times its bytes
PARQUET_BATCH = 1 << 24  # bytes of text in the rows that are read at once, on average
PARQUET_ROWS = 1024  # at most


def documents(files: tuple[Path, ...], text_field: str) -> Documents:
    """Yields all documents. Raises ValueError, naming file and row, for damage or no text."""
    for path in files:
        with _readable(path):
            yield from FORMATS[format_of(path)](path, text_field)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f'{path} cannot be read to its end: {first_line(error)}') from error


def format_of(path: Path) -> str:
    """Returns '.jsonl' for 'a.jsonl.gz'; a compressed .parquet is no format."""
    if path.suffix not in COMPRESSIONS:
        return path.suffix
    inner = Path(path.stem).suffix
    return inner if inner in ('.txt', '.jsonl') else inner + path.suffix


def _open_zst(path: Path) -> BinaryIO:
    import pyarrow

    # Unlike zstandard's own reader, this one tells a truncated file from a complete one.
    return pyarrow.input_stream(str(path), compression='zstd')


def _open(path: Path) -> BinaryIO:
    return COMPRESSIONS.get(path.suffix, functools.partial(open, mode='rb'))(path)


def _txt(path: Path, text_field: str) -> Documents:
    def blocks() -> Iterator[bytes]:
        with _readable(path), _open(path) as file:
            while block := file.read(BLOCK):
                yield block

    yield str(path), blocks()


def _jsonl(path: Path, text_field: str) -> Documents:
    for where, record in json_lines(path):
        check_field(text_field, record, where)
        yield where, (as_bytes(record[text_field], text_field, where),)


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (FILE:LINE, the object) of each line of a .jsonl file, which may be compressed.

    Raises ValueError, naming file and line, for one that holds no object.
    """
    with _readable(path), _open(path) as opened:
        file = io.BufferedReader(opened)
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b''), 1):
            where = f'{path}:{number}'
            if len(line) > LONGEST_LINE:
                raise ValueError(
                    f'{where} is longer than {LONGEST_LINE:,} bytes, and a line is held in memory '
                    'whole. Each line of a .jsonl file is one object; a longer text can be a .txt '
                    'file, which may have any size.'
                )
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode('utf-8', 'surrogateescape'))
            except ValueError as error:
                raise ValueError(
                    f'{where} is not JSON: {error}. Each line of a .jsonl file is one object.'
                ) from error
            except RecursionError as error:
                raise ValueError(f'{where} is nested too deeply to be read.') from error
            if not isinstance(record, dict):
                raise ValueError(f'{where} must be an object; got {type(record).__name__}.')
            yield where, record


def _parquet(path: Path, text_field: str) -> Documents:
    import pyarrow
    import pyarrow.parquet

    # Without a buffer a row group is read at once.
    how = {'buffer_size': BLOCK, 'page_checksum_verification': True}
    try:
        opened = pyarrow.parquet.ParquetFile(path, **how)
        names = opened.schema_arrow.names
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f'{path} is not a parquet file: {first_line(error)}') from error
    # Text as bytes: what is not UTF-8 is up to data.invalid_utf8.
    casts = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    with opened as file:
        check_field(text_field, names, str(path))
        row = 0
        try:
            for batch in file.iter_batches(_batch_rows(file, text_field), columns=[text_field]):
                column = batch.column(0)
                column = column.cast(casts[column.type]) if column.type in casts else column
                for value in column.to_pylist():
                    where = f'{path}[{row}]'
                    yield where, (as_bytes(value, text_field, where),)
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(
                f'{path} cannot be read from row {row} on: {first_line(error)}'
            ) from error


def _batch_rows(file: Any, text_field: str) -> int:
    """Returns how many rows have about PARQUET_BATCH bytes of text, in the widest row group."""
    most = 1
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field)
        most = max(most, size // max(group.num_rows, 1))
    return max(1, min(PARQUET_ROWS, PARQUET_BATCH // most))


def check_field(name: str, fields: Iterable[str], where: str) -> None:
    """Raises ValueError if the field with the text is missing."""
    if name not in fields:
        found = ', '.join(map(repr, fields)) or 'none'
        raise ValueError(
            f'{where} has no field {name!r}; fields found: {found}. Set data.text_field to one.'
        )


def as_bytes(value: Any, name: str, where: str) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode('utf-8', 'surrogateescape')
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, and it stays invalid
            return value.encode('utf-8', 'surrogatepass')
    if isinstance(value, bytes):
        return value
    raise ValueError(f'field {name!r} of {where} must be text; got {type(value).__name__}.')


COMPRESSIONS = {'.gz': gzip.open, '.zst': _open_zst}
FORMATS = {'.txt': _txt, '.jsonl': _jsonl, '.parquet': _parquet}
