"""Words on stderr while long work goes on; none where it takes some seconds only."""

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

FIRST_SEC = 5.0
INTERVAL_SEC = {True: 1.0, False: 30.0}  # by whether a person watches


@contextlib.contextmanager
def report_periodically(format_message: Callable[[], str]) -> Generator[None]:
    """Says `words()` now and then: on a terminal over what it said before, in a log as a line."""
    done, is_watched = threading.Event(), sys.stderr.isatty()
    before, after = ('\r', '\033[K') if is_watched else ('', '\n')

    def print_messages() -> None:
        seconds = FIRST_SEC
        while not done.wait(seconds):
            print(f'{before}{format_message()}', end=after, file=sys.stderr, flush=True)
            seconds = INTERVAL_SEC[is_watched]
        if is_watched:
            print('\r\033[K', end='', file=sys.stderr, flush=True)

    thread = threading.Thread(target=print_messages, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def track_progress(iterable: Iterable[Any], total: int, label: str) -> Iterator[Any]:
    """Yields the items, and says how many are done."""
    done = 0
    with report_periodically(lambda: f'{label}: {done:,} of {total:,}'):
        for item in iterable:
            yield item
            done += 1
