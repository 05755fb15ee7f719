"""Files of text: each format is a stream of (name, parts), the bytes of one document each.

Memory does not grow with a file: a .txt comes in blocks, a .jsonl line by line, a .parquet a few
rows at a time. Parts must be taken before the next document is.
"""

import contextlib
import functools
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

Documents = Iterator[tuple[str, Iterable[bytes]]]

BLOCK = 1 << 20  # bytes read at once
# A line is parsed whole, which takes up to ten times its bytes.
LONGEST_LINE = 1 << 26
PARQUET_BATCH = 1 << 24  # bytes of text in the rows that are read at once, on average
PARQUET_ROWS = 1024  # at most


def documents(files: tuple[Path, ...], text_field: str) -> Documents:
    """The documents of all files.

    Raises ValueError, naming file and line or row, for whatever is damaged or no text.
    """
    for path in files:
        with _readable(path):
            yield from FORMATS[format_of(path)](path, text_field)


def first_line(error: Exception) -> str:
    return str(error).strip().partition('\n')[0]


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f'{path} cannot be read to its end: {first_line(error)}') from error


def format_of(path: Path) -> str:
    """'.jsonl' of 'a.jsonl.gz'; a compressed .parquet is no format."""
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
    del text_field
    yield str(path), _blocks(path)


def _blocks(path: Path) -> Iterator[bytes]:
    with _readable(path), _open(path) as file:
        while block := file.read(BLOCK):
            yield block


def _jsonl(path: Path, text_field: str) -> Documents:
    with _open(path) as file:
        for number, line in enumerate(_lines(path, io.BufferedReader(file)), 1):
            if not line.strip():
                continue
            where = f'{path}:{number}'
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
            yield where, (_field(record, text_field, where),)


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    for number in itertools.count(1):
        line = file.readline(LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > LONGEST_LINE:
            raise ValueError(
                f'{path}:{number} is longer than {LONGEST_LINE:,} bytes, and a line is held in '
                'memory whole. Each line of a .jsonl file is one object; a longer text can be a '
                '.txt file, which may have any size.'
            )
        yield line


def _parquet(path: Path, text_field: str) -> Documents:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without a buffer a row group is read at once.
        opened = pyarrow.parquet.ParquetFile(
            path, buffer_size=BLOCK, page_checksum_verification=True
        )
        names = opened.schema_arrow.names
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f'{path} is not a parquet file: {first_line(error)}') from error
    with opened as file:
        if text_field not in names:
            raise ValueError(no_field(str(path), text_field, names))
        row = 0
        try:
            for batch in file.iter_batches(_batch_rows(file, text_field), columns=[text_field]):
                for value in _values(batch.column(0)):
                    where = f'{path}[{row}]'
                    yield where, (as_bytes(value, text_field, where),)
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(
                f'{path} cannot be read from row {row} on: {first_line(error)}'
            ) from error


def _batch_rows(file: Any, text_field: str) -> int:
    """So many rows that their text is about PARQUET_BATCH bytes in the widest row group."""
    most = 1
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == text_field)
        most = max(most, size // max(group.num_rows, 1))
    return max(1, min(PARQUET_ROWS, PARQUET_BATCH // most))


def _values(column: Any) -> list:
    """As Python has them, but text as bytes: what is not UTF-8 is up to data.invalid_utf8."""
    import pyarrow

    for text, binary in (
        (pyarrow.string(), pyarrow.binary()),
        (pyarrow.large_string(), pyarrow.large_binary()),
    ):
        if column.type == text:
            column = column.cast(binary)
    return column.to_pylist()


def _field(record: dict[str, Any], name: str, where: str) -> bytes:
    if name not in record:
        raise ValueError(no_field(where, name, record))
    return as_bytes(record[name], name, where)


def no_field(where: str, name: str, fields: Any) -> str:
    found = ', '.join(map(repr, fields)) or 'none'
    return f'{where} has no field {name!r}; fields found: {found}. Set data.text_field to one.'


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
