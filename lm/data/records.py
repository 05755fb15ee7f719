"""Records of text files, JSON and CSV: each reader yields (location, record).

Memory does not grow with a file: a record is held whole, and may have LONGEST_LINE bytes.
"""

import codecs
import contextlib
import csv
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.data.kinds import file_suffix
from lm.data.streams import BLOCK, BlockReader, read_blocks
from lm.storage.files import first_line

Records = Iterator[tuple[str, dict[str, Any]]]

LONGEST_LINE = 1 << 26  # bytes; a record is parsed whole, which takes up to ten times its bytes
WHITESPACE = ' \t\n\r'  # of JSON
LONGEST_LITERAL = 16  # characters that may be missing behind a parser's error in a cut text
DELIMITERS = ',;\t|'  # of .csv: the first of them that the header has
EXPECTED_OBJECTS = 'A JSON file must have one object per line, or an array of objects.'


def read_json(path: Path) -> Records:
    """Yields the objects of a file of JSON, which may be compressed.

    Lines of objects have locations FILE:LINE. The objects of an array, and those that are written
    over several lines, have FILE[NUMBER].

    Raises ValueError, with the location, for a value that is no object.
    """
    with contextlib.closing(read_blocks(path)) as blocks:
        start = b''
        while b'\n' not in start.lstrip()[:BLOCK] and (block := next(blocks, b'')):
            start += block
            if len(start.lstrip()) >= BLOCK:
                break
        content, start = itertools.chain([start], blocks), start.lstrip()
        is_array = start.startswith(b'[')
        if is_array or _is_cut_value(start):
            yield from _read_values(path, content, is_array)
        else:
            yield from _read_lines(path, content)


def read_json_lines(path: Path) -> Records:
    """Yields (FILE:LINE, object) for each line of a .jsonl file, which may be compressed.

    Raises ValueError, with file and line, for a line that is no object.
    """
    with contextlib.closing(read_blocks(path)) as blocks:
        yield from _read_lines(path, blocks)


def _is_cut_value(start: bytes) -> bool:
    """Returns whether the first line ends within an object, which goes on in the next."""
    line, newline, _ = start.partition(b'\n')
    if not newline:
        return False
    try:
        json.loads(line.decode('utf-8', 'surrogateescape'))
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc.rstrip())
    except RecursionError:
        pass  # the reader of lines names it
    return False


def _read_lines(path: Path, blocks: Iterator[bytes]) -> Records:
    file = io.BufferedReader(BlockReader(blocks), BLOCK)
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b''), 1):
        location = f'{path}:{number}'
        if len(line) > LONGEST_LINE:
            raise _too_long(location)
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode('utf-8', 'surrogateescape'))
        except ValueError as error:
            raise ValueError(f'{location} is not JSON: {error}. {EXPECTED_OBJECTS}') from error
        except RecursionError as error:
            raise ValueError(f'{location} is nested too deeply.') from error
        yield location, _check_object(record, location)


def _too_long(location: str) -> ValueError:
    return ValueError(
        f'{location} is longer than {LONGEST_LINE:,} bytes, the limit for a record. Longer text '
        'can be a .txt file, which may have any size.'
    )


def _check_object(record: Any, location: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(
            f'{location} must be an object; got {type(record).__name__}. {EXPECTED_OBJECTS}'
        )
    return record


class _Characters:
    """The text of a file, of which only the part from `position` on is held."""

    def __init__(self, blocks: Iterator[bytes]):
        self._pieces = codecs.iterdecode(blocks, 'utf-8', 'surrogateescape')
        self.text, self.position = '', 0

    def refill(self) -> bool:
        """Doubles the part that is held. Returns False at the end of the file."""
        tail = self.text[self.position :]
        pieces, size = [tail], 0
        while size <= len(tail) and (piece := next(self._pieces, '')):
            pieces.append(piece)
            size += len(piece)
        self.text, self.position = ''.join(pieces), 0
        return size > 0

    def skip_whitespace(self) -> str:
        """Returns the next character that is not white, or '' at the end of the file."""
        while True:
            while self.position < len(self.text):
                if (character := self.text[self.position]) not in WHITESPACE:
                    return character
                self.position += 1
            if not self.refill():
                return ''

    def parse_value(self, location: str) -> Any:
        """Returns the next value. Raises ValueError, with the location, if it is not JSON."""
        decoder = json.JSONDecoder()
        while True:
            try:
                value, self.position = decoder.raw_decode(self.text, self.position)
                return value
            except json.JSONDecodeError as error:
                # A cut text fails at its end, or in the string that it ends in.
                is_cut = error.pos >= len(self.text) - LONGEST_LITERAL
                is_cut |= error.msg.startswith('Unterminated string')
                if len(self.text) - self.position > LONGEST_LINE:
                    raise _too_long(location) from error
                if not is_cut or not self.refill():
                    raise ValueError(
                        f'{location} is not JSON: {error.msg}. {EXPECTED_OBJECTS}'
                    ) from error
            except RecursionError as error:
                raise ValueError(f'{location} is nested too deeply.') from error


def _read_values(path: Path, blocks: Iterator[bytes], is_array: bool) -> Records:
    """Yields the objects of an array, or objects with white space between them."""
    characters = _Characters(blocks)
    if is_array:
        characters.skip_whitespace()
        characters.position += 1
    for number in itertools.count():
        location, character = f'{path}[{number}]', characters.skip_whitespace()
        if is_array and number and character == ',':
            characters.position += 1
            character = characters.skip_whitespace()
        elif is_array and number and character not in (']', ''):
            raise ValueError(
                f'{location} is not JSON: there is no comma before it. {EXPECTED_OBJECTS}'
            )
        elif is_array and character == ']':
            characters.position += 1
            if characters.skip_whitespace():
                raise ValueError(f'{path} continues after the end of its array. {EXPECTED_OBJECTS}')
            return
        if not character and is_array:
            raise ValueError(
                f'{path} ends within its array, before {location}: the file is truncated.'
            )
        if not character:
            return
        yield location, _check_object(characters.parse_value(location), location)


def read_csv(path: Path) -> Records:
    """Yields (FILE:LINE, record) for each row of a .csv or .tsv file with a header.

    Fields may be quoted, and quoted fields may hold delimiters, newlines and doubled quotes.

    Raises ValueError, with file and line, for a row that has not the fields of the header.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_LINE))
    with contextlib.closing(read_blocks(path)) as blocks:
        raw_file = io.BufferedReader(BlockReader(blocks), BLOCK)
        file = io.TextIOWrapper(raw_file, 'utf-8', 'surrogateescape', newline='')
        lines = iter(lambda: file.readline(LONGEST_LINE + 1), '')
        head = next(lines, '')
        delimiters = '\t' if file_suffix(path) == '.tsv' else DELIMITERS
        delimiter = next((mark for mark in delimiters if mark in head), delimiters[0])
        lines = _check_lengths(path, itertools.chain([head], lines))
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        header, location = None, str(path)
        while True:
            location = f'{path}:{rows.line_num + 1}'
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise ValueError(
                    f'{location} is not CSV: {first_line(error)}. A field that contains quotes '
                    'must be quoted, with its quotes doubled.'
                ) from error
            if row is None:
                return
            if header is None:
                header = row
            elif row and len(row) != len(header):
                raise ValueError(
                    f'{location} has {len(row)} fields, but the header has {len(header)}. A field '
                    f'that contains {delimiter!r} or a newline must be quoted.'
                )
            elif row:
                yield location, dict(zip(header, row, strict=True))


def _check_lengths(path: Path, lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST_LINE:
            raise _too_long(f'{path}:{number}')
        yield line
