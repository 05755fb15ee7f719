"""Text files of all kinds: documents, as (name, parts of its bytes), and records.

Memory does not grow with a file: text is read in blocks, records one by one, columnar files a few
rows at a time. Parts must be consumed before the next document.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lm.data import columnar
from lm.data.kinds import ARROW, COLUMNAR, CSV, JSON, KINDS, PARQUET, TEXT, detect_kind
from lm.data.records import Records, read_csv, read_json
from lm.data.streams import explain_errors, read_blocks
from lm.data.text_field import CHAT_FIELDS, check_field, explain_type, to_bytes

# A document, or None in place of its parts for a record without text: data.missing_text.
Documents = Iterator[tuple[str, Iterable[bytes] | None]]

FIRST = 10  # records that tell whether a file has texts
MOST_MISSING = 1000  # records at the beginning of a file that may all lack the field of the text


def read_documents(files: Sequence[Path], text_field: str) -> Documents:
    """Yields all documents: a file of text is one, and each record of another file.

    Raises ValueError, with file and row, for damage, a missing field, and a value that is no text.
    """
    for path in files:
        with explain_errors(path):
            yield from READERS[detect_kind(path)](path, text_field)


def read_records(path: Path, fields: Collection[str] = ()) -> Records:
    """Yields (location, {field: value}) for each record of a file of any kind but text.

    Text is str, with a surrogate in place of each byte that is not UTF-8.

    Args:
      path: the file.
      fields: the columns to read of a columnar file, if it has some of them; else all are read.

    Raises:
      ValueError: with file and row, for damage, and for a file of text.
    """
    kind = detect_kind(path)
    if kind == TEXT:
        raise ValueError(
            f'{path} is read as text. To read records, its name must end with one of '
            f'{", ".join(suffix for suffix in KINDS if KINDS[suffix] != TEXT)}.'
        )
    with explain_errors(path):
        if kind not in COLUMNAR:
            yield from RECORD_READERS[kind](path)
            return
        schema = columnar.read_schema(path)
        columns = [name for name in schema if name in fields] or [*schema]
        texts = {name for name in columns if columnar.is_text(schema[name])}
        for location, row in columnar.read_rows(path, columns):
            for name in texts:
                if row[name] is not None:
                    row[name] = row[name].decode('utf-8', 'surrogateescape')
            yield location, row


def has_texts(path: Path, text_field: str) -> bool:
    """Returns whether one of the first records of a file has text or a chat.

    It is also true of a damaged file.
    """
    alternatives = ({text_field}, *CHAT_FIELDS)
    try:
        records = itertools.islice(read_records(path), FIRST)
        return any(fields <= record.keys() for _, record in records for fields in alternatives)
    except ValueError:  # the reader names what is wrong
        return True


def _read_text(path: Path, text_field: str) -> Documents:
    yield str(path), read_blocks(path)


def _read_record_texts(path: Path, text_field: str) -> Documents:
    """Yields the texts of records. Some may lack the field, and it is missing if all do."""
    first_record, has_field = None, False
    for number, (location, record) in enumerate(RECORD_READERS[detect_kind(path)](path), 1):
        first_record = first_record or (location, record)
        has_field = has_field or text_field in record
        if number == MOST_MISSING and not has_field:
            break
        yield location, _to_parts(record.get(text_field), text_field, location)
    if first_record and not has_field:
        location, record = first_record
        texts = [name for name, value in record.items() if isinstance(value, str)]
        check_field(text_field, record, location, texts)


def _read_columnar_texts(path: Path, text_field: str) -> Documents:
    schema = columnar.read_schema(path)
    texts = [name for name, column_type in schema.items() if columnar.is_text(column_type)]
    check_field(text_field, schema, str(path), texts)
    if columnar.is_nested(schema[text_field]):
        raise ValueError(explain_type(text_field, str(path), str(schema[text_field])))
    for location, row in columnar.read_rows(path, [text_field]):
        yield location, _to_parts(row[text_field], text_field, location)


def _to_parts(value: Any, text_field: str, location: str) -> Iterable[bytes] | None:
    return None if value is None else (to_bytes(value, text_field, location),)


RECORD_READERS = {JSON: read_json, CSV: read_csv}
READERS = {
    TEXT: _read_text,
    JSON: _read_record_texts,
    CSV: _read_record_texts,
    PARQUET: _read_columnar_texts,
    ARROW: _read_columnar_texts,
}
