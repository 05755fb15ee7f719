"""Text file formats: each reader yields (name, parts), the bytes of one document at a time.

Memory does not grow with a file: a .txt is read in blocks, a .jsonl line by line, a .parquet a few
rows at a time. Parts must be consumed before the next document.
"""

import codecs
import contextlib
import functools
import gzip
import io
import itertools
import json
import os
import zlib
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lm.storage.files import first_line

Documents = Iterator[tuple[str, Iterable[bytes]]]

BLOCK = 1 << 20  # bytes read at once
LONGEST_LINE = 1 << 26  # bytes; a line is parsed whole, which takes up to ten times its bytes
PARQUET_BATCH = 1 << 24  # bytes of text in the rows that are read at once, on average
PARQUET_ROWS = 64  # at most, as rows may be longer than the average; more are not faster
DELTA, DICTIONARY = 'DELTA_', {'RLE_DICTIONARY', 'PLAIN_DICTIONARY'}  # encodings

TOO_LONG_WINDOW = 'requires too much memory for decoding'  # zstd's message, above 128 MiB
UTF_8_MARKED = 'utf-8-sig'
MARKED_FORMATS = ('.txt', '.jsonl')  # they may begin with a byte-order mark, and be compressed


def read_documents(files: tuple[Path, ...], text_field: str) -> Documents:
    """Yields all documents. Raises ValueError, with file and row, for damage or missing text."""
    for path in files:
        with _explain_errors(path):
            yield from FORMATS[file_format(path)](path, text_field)


@contextlib.contextmanager
def _explain_errors(path: Path) -> Generator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error) as error:
        reason = first_line(error)
        if TOO_LONG_WINDOW in reason:
            reason += f' (written with --long). Write it anew: zstd -dc --long=31 {path} | zstd'
        raise ValueError(f'{path} cannot be read to its end: {reason}') from error


def file_format(path: Path) -> str:
    """Returns '.jsonl' for 'a.jsonl.gz'; a compressed .parquet is no format."""
    if path.suffix not in COMPRESSIONS:
        return path.suffix
    inner = Path(path.stem).suffix
    return inner if inner in MARKED_FORMATS else inner + path.suffix


def _open_file(path: Path) -> Any:
    import pyarrow

    # As bytes: in a locale that is not UTF-8 the name may hold surrogates, which Arrow refuses.
    return pyarrow.OSFile(os.fsencode(path))


def _open_zst(path: Path) -> BinaryIO:
    import pyarrow

    # Unlike zstandard's own reader, this one tells a truncated file from a complete one.
    return pyarrow.input_stream(_open_file(path), compression='zstd')


def _open_text(path: Path) -> Any:
    return COMPRESSIONS.get(path.suffix, functools.partial(open, mode='rb'))(path)


def detect_mark(path: Path) -> str:
    """Returns the encoding that a text file's byte-order mark names, or '' without a mark."""
    if file_format(path) not in MARKED_FORMATS:
        return ''
    with _explain_errors(path), _open_text(path) as file:
        return _match_mark(io.BufferedReader(file, LONGEST_MARK).read(LONGEST_MARK))[0]


def _match_mark(start: bytes) -> tuple[str, bytes]:
    """Returns the encoding that a byte-order mark names, and the mark."""
    marks = ((encoding, mark) for encoding, mark in MARKS if start.startswith(mark))
    return next(marks, ('', b''))


def _read_blocks(path: Path) -> Generator[bytes]:
    """Yields a text file in blocks of UTF-8, without its byte-order mark.

    Raises ValueError, with the offset, for text that is not in the encoding of its mark. Invalid
    UTF-8, which needs no mark, is left to data.invalid_utf8.
    """
    with _explain_errors(path), _open_text(path) as opened:
        file = io.BufferedReader(opened, BLOCK)
        start = file.read(LONGEST_MARK)
        encoding, mark = _match_mark(start)
        blocks = itertools.chain([start[len(mark) :]], iter(lambda: file.read(BLOCK), b''))
        if encoding in ('', UTF_8_MARKED):
            yield from filter(None, blocks)
            return
        decoder, offset = codecs.getincrementaldecoder(encoding)(), len(mark)
        for block in itertools.chain(blocks, [b'']):
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f'{path} begins with the mark of {encoding.upper()}, and is not that: '
                    f'{error.reason} at offset {offset - pending + error.start}. Convert it to '
                    'UTF-8, or leave it out.'
                ) from error
            offset += len(block)
            if text:
                yield text.encode()


class _BlockReader(io.RawIOBase):
    """A file that reads from an iterator of blocks."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._leftover = blocks, memoryview(b'')

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._leftover = self._leftover or memoryview(next(self._blocks, b''))
        size = min(len(buffer), len(self._leftover))
        buffer[:size] = self._leftover[:size]
        self._leftover = self._leftover[size:]
        return size


def _read_txt(path: Path, text_field: str) -> Documents:
    yield str(path), _read_blocks(path)


def _read_jsonl(path: Path, text_field: str) -> Documents:
    for location, record in read_json_lines(path):
        check_field(text_field, record, location)
        yield location, (to_bytes(record[text_field], text_field, location),)


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (FILE:LINE, object) for each line of a .jsonl file, which may be compressed.

    Raises ValueError, with file and line, for a line that is no object.
    """
    with contextlib.closing(_read_blocks(path)) as blocks:
        file = io.BufferedReader(_BlockReader(blocks), BLOCK)
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b''), 1):
            location = f'{path}:{number}'
            if len(line) > LONGEST_LINE:
                raise ValueError(
                    f'{location} is longer than {LONGEST_LINE:,} bytes, and a line is held in '
                    'memory whole. Each line of a .jsonl file is one object; a longer text can be '
                    'a .txt file, which may have any size.'
                )
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode('utf-8', 'surrogateescape'))
            except ValueError as error:
                raise ValueError(
                    f'{location} is not JSON: {error}. Each line of a .jsonl file is one object.'
                ) from error
            except RecursionError as error:
                raise ValueError(f'{location} is nested too deeply to be read.') from error
            if not isinstance(record, dict):
                raise ValueError(f'{location} must be an object; got {type(record).__name__}.')
            yield location, record


def _read_parquet(path: Path, text_field: str) -> Documents:
    import pyarrow
    import pyarrow.parquet

    # Without a buffer a row group is read at once.
    options: dict[str, Any] = {'buffer_size': BLOCK, 'page_checksum_verification': True}
    try:
        parquet_file = pyarrow.parquet.ParquetFile(_open_file(path), **options)
        column_type = dict(
            zip(parquet_file.schema_arrow.names, parquet_file.schema_arrow.types, strict=True)
        )
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f'{path} is not a parquet file: {first_line(error)}') from error
    with parquet_file as file:
        check_field(text_field, column_type, str(path))
        if pyarrow.types.is_nested(column_type[text_field]):
            raise ValueError(
                f'field {text_field!r} of {path} must be text; got {column_type[text_field]}.'
            )
        row = 0
        try:
            rows = _rows_per_batch(file, text_field)
            if _is_dictionary(file, text_field):
                # A value that a dictionary holds once may stand in millions of rows.
                options |= {'read_dictionary': [text_field], 'metadata': file.metadata}
            with pyarrow.parquet.ParquetFile(_open_file(path), **options) as file:
                for batch in file.iter_batches(rows, columns=[text_field]):
                    for value in _cast_to_binary(batch.column(0)):
                        location = f'{path}[{row}]'
                        yield location, (to_bytes(value.as_py(), text_field, location),)
                        row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(
                f'{path} cannot be read from row {row} on: {first_line(error)}'
            ) from error


def _cast_to_binary(column: Any) -> Any:
    """Returns a text column as bytes; invalid UTF-8 is left to data.invalid_utf8."""
    import pyarrow

    casts = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    if isinstance(column, pyarrow.DictionaryArray):
        values = _cast_to_binary(column.dictionary)
        return pyarrow.DictionaryArray.from_arrays(column.indices, values)
    return column.cast(casts[column.type]) if column.type in casts else column


def _list_encodings(file: Any, text_field: str) -> Iterator[tuple[set[str], int, int]]:
    """Yields (encodings of the text, its encoded bytes, rows) for each row group."""
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        chunks = [group.column(i) for i in range(group.num_columns)]
        chunks = [chunk for chunk in chunks if chunk.path_in_schema == text_field]
        encodings = {encoding for chunk in chunks for encoding in chunk.encodings}
        yield encodings, sum(chunk.total_uncompressed_size for chunk in chunks), group.num_rows


def _is_dictionary(file: Any, text_field: str) -> bool:
    """Returns whether Arrow can read the text as a dictionary, which it cannot if there are deltas
    too.
    """
    encodings = {
        encoding
        for row_group_encodings, _, _ in _list_encodings(file, text_field)
        for encoding in row_group_encodings
    }
    return bool(encodings & DICTIONARY) and not any(
        encoding.startswith(DELTA) for encoding in encodings
    )


def _rows_per_batch(file: Any, text_field: str) -> int:
    """Returns the number of rows with about PARQUET_BATCH bytes of text, in the widest row group.

    With delta encodings a row may share text with the row above, so that it may be as long as the
    whole row group is in encoded form.
    """
    may_expand, longest_row = not _is_dictionary(file, text_field), 1
    for encodings, size, n_rows in _list_encodings(file, text_field):
        is_shared = may_expand and encodings & {f'{DELTA}BYTE_ARRAY', *DICTIONARY}
        longest_row = max(longest_row, size if is_shared else size // max(n_rows, 1))
    return max(1, min(PARQUET_ROWS, PARQUET_BATCH // longest_row))


def check_field(name: str, fields: Iterable[str], location: str) -> None:
    """Checks that the field with the text exists.

    Args:
      name: data.text_field.
      fields: the fields of the record or file.
      location: the record or file, for the error.

    Raises:
      ValueError: if it is missing.
    """
    if name not in fields:
        names = ', '.join(map(repr, fields)) or 'none'
        raise ValueError(
            f'{location} has no field {name!r}; fields found: {names}. Set data.text_field to one.'
        )


def to_bytes(value: Any, name: str, location: str) -> bytes:
    """Returns the text of a record as bytes.

    Args:
      value: the value of the field.
      name: the name of the field, for errors.
      location: the record, for errors.

    Raises:
      ValueError: if it is null or no text.
    """
    if isinstance(value, str):
        try:
            return value.encode('utf-8', 'surrogateescape')
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, and it stays invalid
            return value.encode('utf-8', 'surrogatepass')
    if isinstance(value, bytes):
        return value
    if value is None:
        raise ValueError(
            f'field {name!r} of {location} is null. Leave such rows out, or write them with empty '
            'text, which is passed over.'
        )
    raise ValueError(f'field {name!r} of {location} must be text; got {type(value).__name__}.')


# UTF-32 first: its mark begins with that of UTF-16.
MARKS = (
    ('utf-32-le', codecs.BOM_UTF32_LE),
    ('utf-32-be', codecs.BOM_UTF32_BE),
    ('utf-16-le', codecs.BOM_UTF16_LE),
    ('utf-16-be', codecs.BOM_UTF16_BE),
    (UTF_8_MARKED, codecs.BOM_UTF8),
)
LONGEST_MARK = max(len(mark) for _, mark in MARKS)
COMPRESSIONS = {'.gz': gzip.open, '.zst': _open_zst}
FORMATS = {'.txt': _read_txt, '.jsonl': _read_jsonl, '.parquet': _read_parquet}
