"""Kills within the process of a test: from a file event below a folder on, nothing is written.

The folder then holds what SIGKILL would have left, since no `finally` of the command can write or
remove anything either. Writes of TensorStore, which is C++, are no events.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from lm.record.checkpoints import Checkpoints

# By event of CPython, where among its arguments there is the descriptor that a path starts from.
EVENTS = {
    'os.mkdir': 2,
    'os.rmdir': 1,
    'os.remove': 1,
    'os.rename': 2,
    'os.link': 2,
    'os.symlink': 2,
    'os.truncate': None,
    'os.chmod': 2,
    'os.utime': 3,
}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class KilledAtEvent(BaseException):
    """The process ends at this point."""


class KilledBeforeStep(BaseException):
    """The process ends before a run makes a step."""


class _Death:
    folder = ''  # none is watched
    at = 0  # 0: never
    events: list[str]  # so far


def _event_path(event: str, arguments: tuple) -> str | None:
    """Returns the path that an event writes; None if it only reads."""
    if event == 'open':
        path, mode, flags = arguments
        writes = any(c in mode for c in 'wax+') if isinstance(mode, str) else flags & WRITES
        if not writes or not isinstance(path, str | bytes | os.PathLike):
            return None
        return os.path.abspath(os.fsdecode(path))
    path, at = arguments[0], EVENTS[event]
    if not isinstance(path, str | bytes | os.PathLike):
        return None
    descriptor = -1 if at is None else arguments[at]
    start = os.getcwd() if descriptor < 0 else os.readlink(f'/proc/self/fd/{descriptor}')
    return os.path.normpath(os.path.join(start, os.fsdecode(path)))


def _watch(event: str, arguments: tuple) -> None:
    if not _Death.folder or (event != 'open' and event not in EVENTS):
        return
    path = _event_path(event, arguments)
    if path is None or not path.startswith(_Death.folder):
        return
    _Death.events.append(f'{event} {path.removeprefix(_Death.folder)}')
    if 0 < _Death.at <= len(_Death.events):
        raise KilledAtEvent(_Death.events[-1])


@contextlib.contextmanager
def dying(folder: Path, at: int) -> Iterator[list[str]]:
    """Yields the events of the block; raises KilledAtEvent at event `at` and at all later events.

    at: from 1; 0 only counts.
    """
    if not hasattr(_Death, 'is_watching'):
        sys.addaudithook(_watch)  # which stays as long as the process
        _Death.is_watching = True
    _Death.events, _Death.at, _Death.folder = [], at, str(folder.absolute())
    try:
        yield _Death.events
    finally:
        _Death.folder = ''
        Checkpoints._writers.clear()  # of the process that has died


def list_events(command: Callable[[], None], folder: Path) -> list[str]:
    """Returns the file events of a command below a folder."""
    with dying(folder, 0) as events:
        command()
    return events


def kill(command: Callable[[], None], folder: Path, at: int) -> str:
    """Runs a command that is killed at its event number `at`; returns that event."""
    with dying(folder, at) as events:
        try:
            command()
        except BaseException as error:
            # Libraries may wrap it, or fail as something that was to be written is not there.
            if len(events) < at:
                raise AssertionError(f'it failed before event {at}') from error
        else:
            assert len(events) >= at, f'it has {len(events)} events, and was to die at {at}'
    return events[at - 1]
