"""Standard streams that never fail: output that cannot be printed is dropped. Standard library
only.

The reader of a pipe may leave, a terminal may hang up, the disk of a log may be full. A program
that prints an answer then exits silently, as SIGPIPE ends other programs. A program that trains or
serves continues (`ignore_output_loss`), since its work is in files, or on the network.
"""

import contextlib
import errno
import io
import os
import select
import signal
import sys
from typing import Any, BinaryIO, TextIO

from lm.launch.exit_status import BAD_INPUT, SIGNALLED

_ignores_loss = False  # whether this program continues without its output
_loss_reason = ''  # why standard output is gone


class StandardStream(io.FileIO):
    """A descriptor that turns into the null device at the first error of a write.

    This silences other writers to it as well, such as C++ libraries and children.
    """

    def __init__(self, descriptor: int):
        super().__init__(descriptor, 'w', closefd=False)

    def write(self, data: Any) -> int:
        """Writes data; returns its size also if it was dropped."""
        remaining = memoryview(data).cast('B')
        size = remaining.nbytes
        try:
            while remaining:
                written = super().write(remaining)
                if written is None:  # another process made the pipe non-blocking; it is full
                    select.select([], [self], [])
                remaining = remaining[written or 0 :]
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            self.on_write_error(error)
        return size

    def on_write_error(self, error: OSError) -> None:
        """Is called after the first error; does nothing by default."""


class StandardOutput(StandardStream):
    """Standard output: without it a program exits, unless it ignores the loss."""

    def on_write_error(self, error: OSError) -> None:
        """Exits, or prints a note to standard error."""
        global _loss_reason
        _loss_reason = error.strerror or str(error)
        if _ignores_loss:
            _write_stderr(
                f'NOTE: standard output failed ({_loss_reason}); the program continues without it'
            )
        elif sys.is_finalizing():  # an exception would be printed, and changes nothing
            return
        elif error.errno in (errno.EPIPE, errno.EIO):  # nobody reads, or the terminal is gone
            raise SystemExit(SIGNALLED + signal.SIGPIPE)
        else:
            _write_stderr(f'error: standard output cannot be written: {_loss_reason}')
            raise SystemExit(BAD_INPUT)


def open_streams() -> None:
    """Replaces each of Python's own streams by a StandardStream with the same encoding.

    A character that the encoding lacks is escaped. A closed stream counts as /dev/null: the next
    opened file would otherwise get its descriptor, and libraries that print would write into that
    file. Streams that another program has set stay, such as a notebook's.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # os.open returns the lowest free descriptor, which is this one.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    for name, kind in (('stdout', StandardOutput), ('stderr', StandardStream)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, 'w'))  # noqa: SIM115
        elif stream is getattr(sys, f'__{name}__') and not isinstance(
            _raw_stream(stream), StandardStream
        ):
            new_stream = _wrap_text(kind(stream.fileno()), stream)
            setattr(sys, name, new_stream)
            setattr(sys, f'__{name}__', new_stream)


def _wrap_text(raw: StandardStream, before: io.TextIOWrapper) -> TextIO:
    """Returns a text stream over `raw` that buffers and encodes like the stream before it."""
    return io.TextIOWrapper(
        raw if before.write_through else io.BufferedWriter(raw),
        before.encoding,
        'backslashreplace' if before.errors == 'strict' else before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )


def _raw_stream(stream: TextIO) -> io.RawIOBase | BinaryIO:
    """Returns the unbuffered stream below a text stream."""
    return getattr(stream.buffer, 'raw', stream.buffer)


def ignore_output_loss() -> None:
    """Lets the program continue from here on if its output cannot be printed."""
    global _ignores_loss
    _ignores_loss = True


def output_loss() -> str:
    """Returns why standard output is gone; '' if it is there, or was closed from the start."""
    return _loss_reason


def _write_stderr(text: str) -> None:
    # Not through sys.stderr, which live progress leads to standard output.
    """Writes a line to standard error."""
    with contextlib.suppress(OSError):  # it is gone too
        os.write(2, f'{text}\n'.encode(errors='backslashreplace'))
