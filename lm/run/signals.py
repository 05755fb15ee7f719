"""What a program that trains does when it is asked to stop."""

import contextlib
import signal
from collections.abc import Iterator

ASKED = (signal.SIGTERM, signal.SIGINT)


class Interrupted(KeyboardInterrupt):
    """A signal came where nothing would be lost. `args[0]` is its number."""


class Caught(list[int]):
    """Signals that came. `at_once`: whether one ends the program where it is."""

    at_once = False


@contextlib.contextmanager
def caught_signals() -> Iterator[Caught]:
    """A list that the first SIGTERM or SIGINT is put in; a second one ends the process at once."""
    caught = Caught()

    def catch(number, frame):
        del frame
        if caught.at_once:
            raise Interrupted(number)
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, catch) for number in ASKED}
    try:
        yield caught
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
