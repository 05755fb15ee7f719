"""Progress on stderr during long work; nothing is printed in the first seconds."""

import contextlib
import shutil
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

FIRST_SEC = 5.0
INTERVAL_SEC = {True: 1.0, False: 30.0}  # on a terminal, in a log


@contextlib.contextmanager
def report_periodically(format_message: Callable[[], str]) -> Generator[None]:
    """Prints `format_message()` at intervals: in place on a terminal, as lines in a log.

    A terminal shows as much of a message as fits a line, because only one line can be replaced.
    """
    finished, is_watched = threading.Event(), sys.stderr.isatty()
    prefix, suffix = ('\r', '\033[K') if is_watched else ('', '\n')

    def print_messages() -> None:
        seconds = FIRST_SEC
        while not finished.wait(seconds):
            message = format_message()
            if is_watched:
                message = message[: shutil.get_terminal_size().columns - 1]
            print(f'{prefix}{message}', end=suffix, file=sys.stderr, flush=True)
            seconds = INTERVAL_SEC[is_watched]
        if is_watched:
            print('\r\033[K', end='', file=sys.stderr, flush=True)

    thread = threading.Thread(target=print_messages, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def track_progress(iterable: Iterable[Any], total: int, label: str) -> Iterator[Any]:
    """Yields the elements, and reports how many are done.

    Args:
      iterable: yields the elements.
      total: their number.
      label: begins the message.
    """
    done = 0
    with report_periodically(lambda: f'{label}: {done:,} of {total:,}'):
        for element in iterable:
            yield element
            done += 1
