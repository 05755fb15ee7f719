"""The folder prepared data is kept in: its place, digests of files, one writer at a time."""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lm.files import is_full, locked, write_text


def root(cache_dir: str) -> Path:
    """`cache_dir`, or else $XDG_CACHE_HOME/evenkeel, or else ~/.cache/evenkeel."""
    if cache_dir:
        return Path(cache_dir).expanduser().absolute()
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'evenkeel'


def file_digests(folder: Path, files: Iterable[Path]) -> list[str]:
    """A content hash of each file; read again only where its size or time of change differ."""
    memo_path = folder / 'files.json'
    memo = _recall(memo_path)
    digests, news = [], {}
    for path in files:
        stat, key = path.stat(), str(path.absolute())
        stamp = [stat.st_size, stat.st_mtime_ns]
        match memo.get(key):
            case [size, changed, str(known)] if [size, changed] == stamp:
                digests.append(known)
            case _:
                digests.append(file_digest(path))
                news[key] = [*stamp, digests[-1]]
    if news:
        _remember(memo_path, memo | news)
    return digests


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
    wait: bool = True,
) -> Path:
    """folder / name, which `make` fills unless it is there: all of it or nothing, and by one.

    `make` writes into a folder beside it that is renamed when done, under a lock the system
    releases when its holder dies; what a killed process left is removed by the next. What is there
    is made again where `damage` says, in words, what is wrong with it. Raises InUse where another
    process is making it and `wait` is False.
    """
    path, partial = folder / name, folder / f'{name}.partial'
    if path.is_dir() and not damage(path):
        return path
    with _held(folder, name, say, math.inf if wait else 0.0):
        if path.is_dir():
            if not (reason := damage(path)):  # made by the process that was waited for
                return path
            say(f'NOTE: the prepared data {path} is damaged ({reason}): it is prepared again')
            shutil.rmtree(path)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with _disk_full_explained(folder):
                partial.mkdir()
                make(partial)
                partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return path


@contextlib.contextmanager
def _held(folder: Path, name: str, say: Callable, wait_until: float) -> Iterator[None]:
    waiting = 'data: another process prepares the same data; waiting for it'
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = folder / f'{name}.lock'
            held.enter_context(locked(lock, waiting=waiting, say=say, wait_until=wait_until))
        except OSError as error:
            raise OSError(
                f'prepared data cannot be kept in {folder}: {error.strerror}. Set data.cache_dir '
                'to a folder that can be written.'
            ) from error
        yield


@contextlib.contextmanager
def _disk_full_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # TFDS and ArrayRecord raise what they like
        if not is_full(error):
            raise
        raise OSError(
            f'the disk that holds {folder} is full ({error}). Free some space, or set '
            'data.cache_dir to a folder on another disk.'
        ) from error
