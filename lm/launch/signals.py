"""Signals that ask a program to stop: SIGTERM, SIGINT, and SIGHUP when the terminal hangs up.

Under nohup SIGHUP is ignored, and stays so. Standard library only.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from lm.launch.exit_status import ASKED

ECHO_SEC = 1.0


class Interrupted(KeyboardInterrupt):
    """A signal came where nothing would be lost. `args[0]` is its number."""


class Caught(list[int]):
    """Numbers of the signals that came."""

    at_once = False  # whether a signal ends the program where it is
    since = 0.0  # when the first one came, by `time.monotonic`


@contextlib.contextmanager
def handlers_kept(
    handler: Callable | None = None, numbers: Sequence[signal.Signals] = ASKED
) -> Iterator[None]:
    """Sets `handler` within the block, and restores all handlers behind it, as Ray sets its own."""
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) == signal.SIG_IGN:
        del before[signal.SIGHUP]
    try:
        for number in before if handler else ():
            signal.signal(number, handler)
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


@contextlib.contextmanager
def caught_signals(numbers: Sequence[signal.Signals] = ASKED) -> Iterator[Caught]:
    """Yields a list that receives the first signal; one after ECHO_SEC ends the process at once.

    Sooner ones are ignored: a launcher that passes a signal on, and the terminal or `timeout` that
    sends it to the whole group, make two of one. So does a shell that passes SIGHUP on, whenever
    that comes: a terminal hangs up once.
    """
    caught = Caught()

    def catch(number, _):
        if caught.at_once:
            raise Interrupted(number)
        if not caught:
            caught.append(number)
            caught.since = time.monotonic()
        elif number != signal.SIGHUP and time.monotonic() - caught.since > ECHO_SEC:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    with handlers_kept(catch, numbers):
        yield caught


@contextlib.contextmanager
def nothing_to_lose(caught: list[int]) -> Iterator[None]:
    """Raises Interrupted for a signal in the block, where `caught` is of `caught_signals`."""
    if isinstance(caught, Caught):
        caught.at_once = True
    try:
        yield
    finally:
        if isinstance(caught, Caught):
            caught.at_once = False
