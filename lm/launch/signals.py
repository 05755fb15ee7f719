"""Signals that ask a program to stop: SIGTERM, SIGINT, and SIGHUP when the terminal hangs up.

Under nohup SIGHUP is ignored, and remains so. Standard library only.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence

from lm.launch.exit_status import STOP_SIGNALS

ECHO_SEC = 1.0
RESEND_SEC = 0.05


class Interrupted(KeyboardInterrupt):
    """A signal arrived while nothing could be lost. `args[0]` is its number."""


class CaughtSignals(list[int]):
    """Numbers of the signals that arrived."""

    is_immediate = False  # whether a signal raises Interrupted
    first_at = 0.0  # when the first signal arrived, by `time.monotonic`


def raise_on_sigint() -> None:
    """Makes SIGINT raise KeyboardInterrupt, also if Python runs a callback just then.

    Python prints and drops what is raised in a callback of the garbage collector, such as the one
    that JAX registers, and in a finalizer. An interrupt that was dropped there is sent again.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a start may have set another
    sys.unraisablehook = _resend_dropped_interrupt


def _resend_dropped_interrupt(dropped: 'sys.UnraisableHookArgs') -> None:
    error = dropped.exc_value
    if not isinstance(error, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    number = error.args[0] if error.args else signal.SIGINT
    # Later and from a thread: at once, the signal would be raised in the same callback.
    timer = threading.Timer(RESEND_SEC, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def preserve_handlers(
    handler: Callable | None = None, numbers: Sequence[signal.Signals] = STOP_SIGNALS
) -> Generator[None]:
    """Sets `handler` within the block, and restores all handlers after it, since Ray sets its
    own.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    if before.get(signal.SIGHUP) == signal.SIG_IGN:
        del before[signal.SIGHUP]
    try:
        for number in before if handler else ():
            signal.signal(number, handler)
        yield
    finally:
        for number, earlier_handler in before.items():
            signal.signal(number, earlier_handler)


@contextlib.contextmanager
def catch_signals(numbers: Sequence[signal.Signals] = STOP_SIGNALS) -> Generator[CaughtSignals]:
    """Yields a list that receives the first signal; a signal after ECHO_SEC ends the process at
    once.

    Earlier signals are ignored: a launcher that forwards a signal, and the terminal or `timeout`
    that sends it to the whole group, turn one signal into two. So does a shell that forwards
    SIGHUP, at any time: a terminal hangs up once.
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
def interruptible(caught: list[int]) -> Generator[None]:
    """Raises Interrupted for a signal in the block, if `caught` comes from `catch_signals`."""
    if isinstance(caught, CaughtSignals):
        caught.is_immediate = True
    try:
        yield
    finally:
        if isinstance(caught, CaughtSignals):
            caught.is_immediate = False
