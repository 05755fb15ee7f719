"""Signals that ask a program to stop: SIGTERM, SIGINT, and SIGHUP when the terminal hangs up.

Under nohup SIGHUP is ignored, and stays so. Standard library only.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from lm.launch.exit_status import STOP_SIGNALS

ECHO_SEC = 1.0


class Interrupted(KeyboardInterrupt):
    """A signal came where nothing would be lost. `args[0]` is its number."""


class CaughtSignals(list[int]):
    """Numbers of the signals that came."""

    is_immediate = False  # whether a signal ends the program where it is
    first_at = 0.0  # when the first one came, by `time.monotonic`


@contextlib.contextmanager
def preserve_handlers(
    handler: Callable | None = None, numbers: Sequence[signal.Signals] = STOP_SIGNALS
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
def catch_signals(numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[CaughtSignals]:
    """Yields a list that receives the first signal; one after ECHO_SEC ends the process at once.

    Sooner ones are ignored: a launcher that passes a signal on, and the terminal or `timeout` that
    sends it to the whole group, make two of one. So does a shell that passes SIGHUP on, whenever
    that comes: a terminal hangs up once.
    """
    caught = CaughtSignals()

    def catch(number, _):
        if caught.is_immediate:
            raise Interrupted(number)
        if not caught:
            caught.append(number)
            caught.first_at = time.monotonic()
        elif number != signal.SIGHUP and time.monotonic() - caught.first_at > ECHO_SEC:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    with preserve_handlers(catch, numbers):
        yield caught


@contextlib.contextmanager
def interruptible(caught: list[int]) -> Iterator[None]:
    """Raises Interrupted for a signal in the block, where `caught` is of `catch_signals`."""
    if isinstance(caught, CaughtSignals):
        caught.is_immediate = True
    try:
        yield
    finally:
        if isinstance(caught, CaughtSignals):
            caught.is_immediate = False
