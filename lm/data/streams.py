"""Text files as streams of bytes: compression, byte-order marks, blocks of UTF-8.

Memory does not grow with a file. All errors are ValueErrors that name it.
"""

import bz2
import codecs
import contextlib
import functools
import gzip
import io
import itertools
import lzma
import os
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from lm.storage.files import first_line

BLOCK = 1 << 20  # bytes read at once

ARROW_WINDOW = 1 << 27  # bytes; Arrow's reader of .zst refuses longer windows
LONGEST_WINDOW = 1 << 31  # bytes, of zstd --long=31
ZST_HEADER = 18  # bytes at most
ZST_PIECE = 1 << 14  # bytes decompressed at once, as they may become thousands of times as many
TOO_LONG_WINDOW = 'requires too much memory for decoding'  # zstd's message
UTF_8_MARKED = 'utf-8-sig'


@contextlib.contextmanager
def explain_errors(path: Path) -> Generator[None]:
    """Turns errors of reading into ValueErrors that name the file."""
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        reason = first_line(error)
        if TOO_LONG_WINDOW in reason:
            reason += (
                ' (written with --long). Install support for it: pip install "evenkeel[zstd]", or '
                f'uv sync --extra zstd. Or compress it again: zstd -dc --long=31 {path} | zstd'
            )
        raise ValueError(f'{path} cannot be read completely: {reason}') from error


def open_arrow_file(path: Path) -> Any:
    """Returns a file as pyarrow reads it."""
    import pyarrow

    # As bytes: in a locale that is not UTF-8 the name may hold surrogates, which Arrow refuses.
    return pyarrow.OSFile(os.fsencode(path))


def _open_zst(path: Path) -> Any:
    import pyarrow

    with contextlib.suppress(ImportError):
        import zstandard  # noqa: F401

        if _read_window(path) > ARROW_WINDOW:
            return BlockReader(_read_long_window(path))
    # Unlike zstandard's own reader, this one tells a truncated file from a complete one.
    return pyarrow.input_stream(open_arrow_file(path), compression='zstd')


def _read_window(path: Path) -> int:
    """Returns the window of the first frame of a .zst file in bytes; 0 if it has none."""
    import zstandard

    with open(path, 'rb') as file:
        header = file.read(ZST_HEADER)
    try:
        return zstandard.get_frame_parameters(header).window_size
    except zstandard.ZstdError:  # damaged, which the reader explains
        return 0


def _read_long_window(path: Path) -> Iterator[bytes]:
    import zstandard

    decompressor, frame = zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW), None
    with open(path, 'rb') as file:
        for piece in iter(lambda: file.read(ZST_PIECE), b''):
            while piece:
                frame = frame or decompressor.decompressobj()
                try:
                    yield frame.decompress(piece)
                except zstandard.ZstdError as error:
                    raise OSError(first_line(error)) from error
                piece = frame.unused_data if frame.eof else b''
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError('the file ended before its last frame did')


def open_stream(path: Path) -> Any:
    """Returns a binary file with the decompressed content."""
    return COMPRESSIONS.get(path.suffix.lower(), functools.partial(open, mode='rb'))(path)


def read_start(path: Path, size: int) -> bytes:
    """Returns the first bytes of the decompressed content."""
    with explain_errors(path), open_stream(path) as file:
        return io.BufferedReader(file, size).read(size)


def match_mark(start: bytes) -> tuple[str, bytes]:
    """Returns the encoding that a byte-order mark names, and the mark."""
    marks = ((encoding, mark) for encoding, mark in MARKS if start.startswith(mark))
    return next(marks, ('', b''))


def read_blocks(path: Path) -> Generator[bytes]:
    """Yields a text file in blocks of UTF-8, without its byte-order mark.

    Raises ValueError, with the offset, for text that is not in the encoding of its mark. Invalid
    UTF-8, which needs no mark, is left to data.invalid_utf8.
    """
    with explain_errors(path), open_stream(path) as opened:
        file = io.BufferedReader(opened, BLOCK)
        start = file.read(LONGEST_MARK)
        encoding, mark = match_mark(start)
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
                    f'{path} begins with the byte-order mark of {encoding.upper()}, but has other '
                    f'content: {error.reason} at offset {offset - pending + error.start}. Convert '
                    'it to UTF-8, or leave it out.'
                ) from error
            offset += len(block)
            if text:
                yield text.encode()


class BlockReader(io.RawIOBase):
    """A file that reads from an iterator of blocks."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._leftover = filter(None, blocks), memoryview(b'')

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._leftover = self._leftover or memoryview(next(self._blocks, b''))
        size = min(len(buffer), len(self._leftover))
        buffer[:size] = self._leftover[:size]
        self._leftover = self._leftover[size:]
        return size


# UTF-32 first: its mark begins with that of UTF-16.
MARKS = (
    ('utf-32-le', codecs.BOM_UTF32_LE),
    ('utf-32-be', codecs.BOM_UTF32_BE),
    ('utf-16-le', codecs.BOM_UTF16_LE),
    ('utf-16-be', codecs.BOM_UTF16_BE),
    (UTF_8_MARKED, codecs.BOM_UTF8),
)
LONGEST_MARK = max(len(mark) for _, mark in MARKS)
COMPRESSIONS = {'.gz': gzip.open, '.bz2': bz2.open, '.xz': lzma.open, '.zst': _open_zst}
