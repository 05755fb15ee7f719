"""Files that are written whole or not at all, and locks that go with their process."""

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

POLL_SEC = 0.1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Libraries raise errors of their own with the system's words in it.
FULL_WORDS = tuple(os.strerror(number).lower() for number in FULL)
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class InUse(ValueError):
    """Another process holds the lock."""


class Unreadable(ValueError):
    """A file is cut, damaged, or holds something else."""


def user_cache() -> Path:
    """$XDG_CACHE_HOME/evenkeel, or else ~/.cache/evenkeel."""
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'evenkeel'


def is_full(error: BaseException) -> bool:
    """Whether an error of any type says that a disk, or a quota of it, is full."""
    known = getattr(error, 'errno', None) in FULL
    return known or any(words in str(error).lower() for words in FULL_WORDS)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which takes its place when the block ends without an error,
    once what was written to it would outlast a power cut.

    Each process has one of its own, so that several may write the same file: the last one stays.
    An OSError gets the name of the file.
    """
    temporary = path.with_name(f'{path.name}.{socket.gethostname()}.{os.getpid()}.tmp')
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        if error.errno and not error.filename:  # a write does not know where it goes
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Has the system write a file, or the names in a folder, so that they outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """All of it or nothing, even if killed midway."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """As `write_text`, indented."""
    write_text(path, json.dumps(record, indent=2) + '\n')


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises Unreadable, naming the file, where there is none."""
    try:
        record = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
        raise Unreadable(f'{path} cannot be read as JSON ({error})') from error
    if not isinstance(record, dict):
        raise Unreadable(f'{path} cannot be read as JSON (it holds no object)')
    return record


@contextlib.contextmanager
def locked(
    path: Path,
    *,
    waiting: str,
    in_use: str = '',
    say: Callable[[str], None] = print,
    wait_until: float = math.inf,
) -> Iterator[bool]:
    """Holds the lock of the file `path`, which is made, until the block or the process ends.

    Where another process holds it, `waiting` is said, and it is waited for until `wait_until`, by
    `time.monotonic`. Then InUse is raised with the text `in_use`. On a file system without locks a
    note is said, and the block runs, given False.
    """
    with open(path, 'w') as file:
        held = _try_lock(file, say)
        if held is False and time.monotonic() < wait_until:
            say(waiting)
        while held is False:
            if time.monotonic() >= wait_until:
                raise InUse(in_use)
            time.sleep(POLL_SEC)
            held = _try_lock(file, say)
        yield held is True


def _try_lock(file: IO, say: Callable[[str], None]) -> bool | None:
    """Whether it is held now, and not by another process; None where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        say(
            f'NOTE: {file.name} cannot be locked ({error}): see to it that no other process '
            'writes to its folder'
        )
        return None
