"""What a program that trains does when it is asked to stop."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

ASKED = (signal.SIGTERM, signal.SIGINT)
ECHO_SEC = 1.0


class Interrupted(KeyboardInterrupt):
    """A signal came where nothing would be lost. `args[0]` is its number."""


class Caught(list[int]):
    """Signals that came. `at_once`: whether one ends the program where it is; `since`: when the
    first came, by `time.monotonic`.
    """

    at_once = False
    since = 0.0


@contextlib.contextmanager
def caught_signals() -> Iterator[Caught]:
    """A list that the first SIGTERM or SIGINT is put in; a later one ends the process at once.

    Later is after ECHO_SEC: a launcher that passes a signal on, and the terminal or `timeout` that
    sends it to the whole group, make two of one.
    """
    caught = Caught()

    def catch(number, frame):
        del frame
        if caught.at_once:
            raise Interrupted(number)
        if not caught:
            caught.append(number)
            caught.since = time.monotonic()
        elif time.monotonic() - caught.since > ECHO_SEC:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {number: signal.signal(number, catch) for number in ASKED}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """What the block makes of SIGTERM and SIGINT ends with it: Ray takes them for itself."""
    before = {number: signal.getsignal(number) for number in ASKED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def nothing_to_lose(caught: list[int]) -> Iterator[None]:
    """Text is prepared, or a program compiled: a signal that comes now raises Interrupted, where
    `caught` is of `caught_signals`.
    """
    if not isinstance(caught, Caught):
        yield
        return
    caught.at_once = True
    try:
        yield
    finally:
        caught.at_once = False
