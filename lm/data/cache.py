"""The folder prepared data is kept in: its place, digests of files, folders made whole or not."""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lm.storage.buckets import is_url, place
from lm.storage.files import is_full, locked, user_cache, write_text

PARTIAL = '.partial'  # ends the name of a folder that is being written
OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)  # a name that a folder cannot be given
SAME = 'data: another process prepares the same data; waiting for it'


def root(cache_dir: str) -> Path:
    """`cache_dir`, for a URL the folder of this machine that stands for it; without one
    `lm.storage.files.user_cache`.
    """
    if is_url(cache_dir):
        return place(cache_dir, 'data')
    return Path(cache_dir).expanduser().absolute() if cache_dir else user_cache()


def file_digests(folder: Path, files: Iterable[Path]) -> list[str]:
    """A content hash of each file; read again only where its size or time of change differ.

    One process reads what none has read yet, and the others wait for what it finds.
    """
    memo_path, files = folder / 'files.json', list(files)
    found = _known(files, _recall(memo_path))
    if None not in found:
        return found
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # a cache that cannot be written may still be read
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / 'files.lock', waiting='', say=_nothing))
        memo = _recall(memo_path)
        found, news = _known(files, memo), {}
        for i, path in enumerate(files):
            if found[i] is None:
                stamp = _stamp(path)
                found[i] = file_digest(path)
                news[str(path.absolute())] = [*stamp, found[i]]
        if news:
            _remember(memo_path, memo | news)
    return found


def _nothing(line: str) -> None:
    del line


def _known(files: list[Path], memo: dict) -> list[str | None]:
    def digest(path: Path) -> str | None:
        match memo.get(str(path.absolute())):
            case [size, changed, str(known)] if [size, changed] == _stamp(path):
                return known
        return None

    return [digest(path) for path in files]


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def file_digest(path: Path) -> str:
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _recall(path: Path) -> dict:
    try:
        memo = json.loads(path.read_text())
    except (OSError, ValueError):  # absent, or not ours: only time is lost
        return {}
    return memo if isinstance(memo, dict) else {}


def _remember(path: Path, memo: dict) -> None:
    """Another process may do so as well: a line lost costs reading a file once more."""
    with contextlib.suppress(OSError):  # a cache that cannot be written may still be read
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(memo))


def made_once(
    folder: Path,
    name: str,
    *,
    make: Callable[[Path], None],
    damage: Callable[[Path], str],
    say: Callable[[str], None],
) -> Path:
    """folder / name, which `make` fills unless it is there, and not damaged: see `filled`."""
    path = folder / name
    if path.is_dir() and not damage(path):
        return path
    with alone(path, SAME, say) as is_locked, disk_full_explained(folder):
        filled(path, make, damage, say, is_locked)
    return path


def filled(
    path: Path,
    make: Callable[[Path], None],
    damage: Callable[[Path], str],
    say: Callable[[str], None],
    is_locked: bool,
) -> None:
    """The folder `path`, which `make` fills unless it is there: all of it or nothing.

    `make` writes into a folder beside it that is renamed when done. What is there is made again
    where `damage` says, in words, what is wrong with it. The caller has its lock, or else, where
    there are no locks, `is_locked` is False: then several may fill it, and the first one stays.
    """
    if path.is_dir():
        if not (reason := damage(path)):  # made by the process that was waited for
            return
        say(again(path, reason))
        shutil.rmtree(path)
    # Hosts may not see each other's locks, whatever their network disk says; processes of one do.
    own = socket.gethostname() if is_locked else f'{socket.gethostname()}.{os.getpid()}'
    partial = path.with_name(f'{path.name}.{own}{PARTIAL}')
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        partial.mkdir()
        make(partial)
        try:
            partial.rename(path)
        except OSError as error:
            if error.errno not in OCCUPIED:
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def again(path: Path, reason: str) -> str:
    return f'NOTE: the prepared data {path} is damaged ({reason}): it is prepared again'


def discard(folder: Path, pattern: str) -> None:
    """Removes the folders that match. Each goes at once, for whoever is about to write into it."""
    for path in folder.glob(pattern):
        if path.is_dir():
            gone = path.with_name(f'{path.name}.{os.getpid()}.removed')
            with contextlib.suppress(OSError):  # another process is at it
                path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def alone(path: Path, waiting: str, say: Callable, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of the folder `path`, and makes the one it is to be in; see `files.locked`.

    Raises InUse where another process has it and `wait` is False.
    """
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            until = math.inf if wait else 0.0
            lock = path.with_name(f'{path.name}.lock')
            is_held = held.enter_context(locked(lock, waiting=waiting, say=say, wait_until=until))
        except OSError as error:
            raise OSError(
                f'prepared data cannot be kept in {path.parent}: {error.strerror}. Set '
                'data.cache_dir to a folder that can be written.'
            ) from error
        yield is_held


@contextlib.contextmanager
def disk_full_explained(folder: Path) -> Iterator[None]:
    """An OSError that says what to do."""
    try:
        yield
    except Exception as error:  # TFDS and ArrayRecord raise what they like
        if not is_full(error):
            raise
        raise OSError(
            f'the disk that holds {folder} is full ({error}). Free some space, or set '
            'data.cache_dir to a folder on another disk.'
        ) from error
