"""Standard streams that never fail: what cannot be printed is dropped. Standard library only.

The reader of a pipe may leave, a terminal may hang up, the disk of a log may be full. A program
that prints an answer then ends without a word, as SIGPIPE ends others. One that trains or serves
goes on (`ignore_output_loss`): its work is in files, or on the network.
"""

import contextlib
import errno
import io
import os
import select
import signal
import sys
from typing import Any, TextIO

from lm.launch.exit_status import BAD_INPUT, SIGNALLED

_ignores_loss = False  # whether this program goes on without its output
_loss_reason = ''  # why standard output is gone


class StandardStream(io.FileIO):
    """A descriptor that turns into the null device at the first error of a write. Then other
    writers to it, such as C++ libraries and children, are heard no more either.
    """

    def __init__(self, descriptor: int):
        super().__init__(descriptor, 'w', closefd=False)

    def write(self, data: Any) -> int:
        left = memoryview(data).cast('B')
        size = left.nbytes
        try:
            while left:
                written = super().write(left)
                if written is None:  # another process made the pipe non-blocking; it is full
                    select.select([], [self], [])
                left = left[written or 0 :]
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            self.on_write_error(error)
        return size

    def on_write_error(self, error: OSError) -> None:
        """Called after the first error: by default nothing else happens."""


class StandardOutput(StandardStream):
    """Standard output: without it a program ends, unless it outlives it."""

    def on_write_error(self, error: OSError) -> None:
        global _loss_reason
        _loss_reason = error.strerror or str(error)
        if _ignores_loss:
            _write_stderr(
                f'NOTE: standard output is gone ({_loss_reason}): what is printed from here on is '
                'dropped, and the program goes on'
            )
        elif sys.is_finalizing():  # an exception would be printed, and changes nothing
            return
        elif error.errno in (errno.EPIPE, errno.EIO):  # nobody reads, or the terminal is gone
            raise SystemExit(SIGNALLED + signal.SIGPIPE)
        else:
            _write_stderr(f'error: standard output cannot be written: {_loss_reason}')
            raise SystemExit(BAD_INPUT)


def open_streams() -> None:
    """Puts a StandardStream in the place of each of Python's own, with the encoding that it had.

    A character that it lacks is escaped. A stream that is closed counts as /dev/null: its
    descriptor would otherwise be that of the next file that is opened, into which libraries that
    print would write. Streams that somebody else has put there stay, as those of a notebook.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: this descriptor
            os.set_inheritable(null, True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    for name, kind in (('stdout', StandardOutput), ('stderr', StandardStream)):
        before = getattr(sys, name)
        if before is None:
            setattr(sys, name, open(os.devnull, 'w'))  # noqa: SIM115
        elif before is getattr(sys, f'__{name}__') and not isinstance(
            _raw_stream(before), StandardStream
        ):
            stream = _wrap_text(kind(before.fileno()), before)
            setattr(sys, name, stream)
            setattr(sys, f'__{name}__', stream)


def _wrap_text(raw: StandardStream, before: TextIO) -> TextIO:
    """Returns a text stream over `raw` that buffers and encodes as the one before it."""
    return io.TextIOWrapper(
        raw if before.write_through else io.BufferedWriter(raw),
        before.encoding,
        'backslashreplace' if before.errors == 'strict' else before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )


def _raw_stream(stream: TextIO) -> io.RawIOBase:
    return getattr(stream.buffer, 'raw', stream.buffer)


def ignore_output_loss() -> None:
    """From here on the program goes on where its output cannot be printed."""
    global _ignores_loss
    _ignores_loss = True


def output_loss() -> str:
    """Returns why standard output is gone; '' while it is there, or was closed from the start."""
    return _loss_reason


def _write_stderr(text: str) -> None:
    # Not through sys.stderr, which live progress leads to standard output.
    with contextlib.suppress(OSError):  # it is gone too
        os.write(2, f'{text}\n'.encode(errors='backslashreplace'))
