"""Rows of columnar files, .parquet and .arrow: (location, row), a few rows at a time."""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.data.records import Records
from lm.data.streams import BLOCK, open_arrow_file
from lm.storage.files import first_line

PARQUET_BATCH = 1 << 24  # bytes of text in the rows that are read at once, on average
PARQUET_ROWS = 64  # at most, as rows may be longer than the average; more are not faster
DELTA, DICTIONARY = 'DELTA_', {'RLE_DICTIONARY', 'PLAIN_DICTIONARY'}  # encodings
ARROW_FILE = b'ARROW1'  # begins the files whose batches have an index; streams have none
# Begins each message of a stream since Arrow 0.15, and with a length of 0 ends the stream.
CONTINUATION, NO_LENGTH = b'\xff\xff\xff\xff', b'\0\0\0\0'


def read_schema(path: Path) -> dict[str, Any]:
    """Returns {column: Arrow type}. Raises ValueError for another kind of file."""
    with _open_columns(path) as file:
        schema = file.schema_arrow if _is_parquet(path) else file.schema
        return dict(zip(schema.names, schema.types, strict=True))


def read_rows(path: Path, columns: Sequence[str]) -> Records:
    """Yields (FILE[ROW], {column: value}); text is bytes, as invalid UTF-8 is left to
    data.invalid_utf8.

    Raises ValueError, with file and row, for damage.
    """
    import pyarrow

    iterate_batches = _iterate_parquet if _is_parquet(path) else _iterate_arrow
    row = 0
    try:
        for batch in iterate_batches(path, columns):
            arrays = {name: _cast_to_binary(batch.column(name)) for name in columns}
            for array in arrays.values():
                # Unlike those of parquet, the offsets of an Arrow file are read as they are.
                array.validate(full=True)
            for i in range(batch.num_rows):
                yield f'{path}[{row}]', {name: array[i].as_py() for name, array in arrays.items()}
                row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f'{path} cannot be read from row {row} on: {first_line(error)}') from error


def _is_parquet(path: Path) -> bool:
    with open(path, 'rb') as file:
        return file.read(len(ARROW_FILE)).startswith(b'PAR1') or path.suffix.lower() == '.parquet'


@contextlib.contextmanager
def _open_columns(path: Path) -> Generator[Any]:
    """Opens a file. Raises ValueError for one of another kind."""
    import pyarrow

    is_parquet = _is_parquet(path)
    try:
        file = _open_parquet(path) if is_parquet else _open_arrow(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = 'a parquet' if is_parquet else 'an Arrow'
        raise ValueError(f'{path} is not {kind} file: {first_line(error)}') from error
    with file:
        yield file


def _open_parquet(path: Path, **options: Any) -> Any:
    import pyarrow.parquet

    # Without a buffer a row group is read at once.
    options |= {'buffer_size': BLOCK, 'page_checksum_verification': True}
    return pyarrow.parquet.ParquetFile(open_arrow_file(path), **options)


def _iterate_parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    with _open_columns(path) as file:
        chunks = {name: [*_list_chunks(file, name)] for name in columns}
        n_rows = min(map(_rows_per_batch, chunks.values()))
        # A value that a dictionary holds once may stand in millions of rows.
        texts = [name for name in columns if not is_nested(file.schema_arrow.field(name).type)]
        repeated = [name for name in texts if _is_dictionary(chunks[name])]
        options = {'read_dictionary': repeated, 'metadata': file.metadata} if repeated else {}
    with _open_parquet(path, **options) as file:
        yield from file.iter_batches(n_rows, columns=[*columns])


def _open_arrow(path: Path, columns: Sequence[str] = ()) -> Any:
    """Returns the reader of an Arrow file or stream, of all columns unless some are named."""
    import pyarrow.ipc

    with open(path, 'rb') as raw_file:
        start = raw_file.read(len(ARROW_FILE))
        is_stream = start != ARROW_FILE
        end_mark = (CONTINUATION if start.startswith(CONTINUATION) else b'') + NO_LENGTH
        raw_file.seek(-min(len(end_mark), raw_file.seek(0, 2)), 2)
        if is_stream and raw_file.read() != end_mark:
            raise pyarrow.ArrowInvalid('it has no end mark, as if its writer had been interrupted')
    opener = pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file
    if not columns:
        return opener(open_arrow_file(path))
    with opener(open_arrow_file(path)) as file:
        indices = [file.schema.get_field_index(name) for name in columns]
    options = pyarrow.ipc.IpcReadOptions(included_fields=indices)
    return opener(open_arrow_file(path), options=options)


def _iterate_arrow(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow.ipc

    with _open_arrow(path, columns) as file:
        if isinstance(file, pyarrow.ipc.RecordBatchFileReader):
            yield from map(file.get_batch, range(file.num_record_batches))
        else:
            yield from file


def _cast_to_binary(column: Any) -> Any:
    """Returns a text column as bytes; invalid UTF-8 is left to data.invalid_utf8."""
    import pyarrow

    casts = {
        pyarrow.string(): pyarrow.binary(),
        pyarrow.large_string(): pyarrow.large_binary(),
        pyarrow.string_view(): pyarrow.binary_view(),
    }
    if isinstance(column, pyarrow.DictionaryArray):
        values = _cast_to_binary(column.dictionary)
        return pyarrow.DictionaryArray.from_arrays(column.indices, values)
    return column.cast(casts[column.type]) if column.type in casts else column


def is_text(column_type: Any) -> bool:
    """Returns whether an Arrow type is text."""
    import pyarrow.types as types

    if types.is_dictionary(column_type):
        return is_text(column_type.value_type)
    checks = (types.is_string, types.is_large_string, types.is_string_view)
    return any(is_kind(column_type) for is_kind in checks)


def is_nested(column_type: Any) -> bool:
    """Returns whether the values of an Arrow type are lists, structs or maps."""
    import pyarrow.types

    return pyarrow.types.is_nested(column_type)


class ColumnChunk(NamedTuple):
    """The values of a column in a row group: their encodings, encoded bytes, and rows."""

    encodings: set[str]
    n_bytes: int
    n_rows: int


def _list_chunks(file: Any, column: str) -> Iterator[ColumnChunk]:
    """Yields the chunk of each row group that can be read.

    The error of another group is raised when its turn to be read comes.
    """
    schema = file.metadata.schema
    paths = [schema.column(i).path for i in range(len(schema))]
    indices = [i for i, path in enumerate(paths) if f'{path}.'.startswith(f'{column}.')]
    for number in range(file.num_row_groups):
        if not _is_readable(file, number, column):
            continue
        group = file.metadata.row_group(number)
        leaves = [group.column(i) for i in indices]
        encodings = {encoding for leaf in leaves for encoding in leaf.encodings}
        yield ColumnChunk(
            encodings, sum(leaf.total_uncompressed_size for leaf in leaves), group.num_rows
        )


def _is_readable(file: Any, row_group: int, column: str) -> bool:
    """Returns whether the first row of a column in a row group can be read.

    For invalid statistics of a chunk, pyarrow's reader raises an error, but the metadata of the
    chunk (`row_group(i).column(j)`, as of pyarrow 26) ends the process.
    """
    import pyarrow

    try:
        next(file.iter_batches(1, row_groups=[row_group], columns=[column]), None)
    except (pyarrow.ArrowException, OSError):
        return False
    return True


def _is_dictionary(chunks: Sequence[ColumnChunk]) -> bool:
    """Returns whether Arrow can read a text as a dictionary, which it cannot if there are deltas
    too.
    """
    encodings = {encoding for chunk in chunks for encoding in chunk.encodings}
    return bool(encodings & DICTIONARY) and not any(
        encoding.startswith(DELTA) for encoding in encodings
    )


def _rows_per_batch(chunks: Sequence[ColumnChunk]) -> int:
    """Returns the number of rows with about PARQUET_BATCH bytes of text, in the widest row group.

    With delta encodings a row may share text with the row above, so that it may be as long as the
    whole row group is in encoded form.
    """
    may_expand, longest_row = not _is_dictionary(chunks), 1
    for chunk in chunks:
        is_shared = may_expand and chunk.encodings & {f'{DELTA}BYTE_ARRAY', *DICTIONARY}
        size = chunk.n_bytes if is_shared else chunk.n_bytes // max(chunk.n_rows, 1)
        longest_row = max(longest_row, size)
    return max(1, min(PARQUET_ROWS, PARQUET_BATCH // longest_row))
