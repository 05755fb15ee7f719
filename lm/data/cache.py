"""The folder that prepared data is kept in: its path, digests of files, folders made all or not.

A data.cache_dir in object storage has a folder of this machine that stands for it: whoever prepares
data first uploads it, and others fetch it.
"""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

from lm.data import formats
from lm.storage import complete_folders
from lm.storage.buckets import BucketError, cache_folder, is_url, join_url, open_bucket
from lm.storage.files import (
    UnreadableFile,
    describe_full_disk,
    expand_home,
    hold_lock,
    read_json,
    user_cache,
    write_text,
)

PARTIAL = '.partial'  # ends the name of a folder that is being written
OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)  # errors of a rename to a folder that exists
MARKS_COUNT = 'mark'  # ends the note of a file whose mark, if any, is in its digest
WAITING_MESSAGE = 'data: another process prepares the same data; waiting for it'


def root(cache_dir: str) -> Path:
    """Returns `cache_dir` as a path, the local folder of a URL, or `user_cache()` for ''."""
    if is_url(cache_dir):
        return cache_folder(cache_dir, 'data')
    return Path(expand_home(cache_dir)).absolute() if cache_dir else user_cache()


def file_digests(folder: Path, files: Iterable[Path]) -> list[str]:
    """Returns a content hash of each file; reads again only if size or time of change differ.

    The hash of a file that begins with a byte-order mark ends in its encoding: earlier versions
    took the mark for text, and what they prepared has the hash without it.
    """
    memo_path, files = folder / 'files.json', list(files)
    found = _look_up_digests(files, memo_path)
    if None not in found:
        return found
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # a cache that cannot be written may still be read
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold_lock(folder / 'files.lock'))  # so that one process reads a file
        found, memo, news = _look_up_digests(files, memo_path), _read_memo(memo_path), {}
        for i, path in enumerate(files):
            if found[i] is None:
                stamp = _stamp(path)
                match memo.get(str(path.absolute())):
                    case [*noted, str(digest)] if noted == stamp:  # by a version without marks
                        found[i] = digest + formats.detect_mark(path)
                    case _:
                        found[i] = file_digest(path) + formats.detect_mark(path)
                news[str(path.absolute())] = [*stamp, found[i], MARKS_COUNT]
        if news:
            with contextlib.suppress(OSError):
                write_text(memo_path, json.dumps(_read_memo(memo_path) | news))
    return found


def _look_up_digests(files: list[Path], memo_path: Path) -> list[str | None]:
    """Returns the noted digest of each file, None if it has changed or is not noted."""
    memo, found = _read_memo(memo_path), []
    for path in files:
        match memo.get(str(path.absolute())):
            case [size, changed, str(digest), str(_)] if [size, changed] == _stamp(path):
                found.append(digest)
            case _:
                found.append(None)
    return found


def _read_memo(path: Path) -> dict:
    try:
        return read_json(path)
    except (OSError, UnreadableFile):  # absent, or not ours: only time is lost
        return {}


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def file_digest(path: Path) -> str:
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def digest_bytes(*parts: bytes) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(b'%d ' % len(part) + part)
    return state.hexdigest()


def fetch_or_make(
    cache_dir: str,
    name: str,
    *,
    make: Callable,
    find_damage: Callable,
    say: Callable,
    wait: bool = True,
) -> Path:
    """Returns the folder `name` of the cache, fetched from the bucket or else made by `make`.

    Its name is a digest of its content, which never changes: a complete folder of the bucket is
    fetched, any other is uploaded. A failed upload is said, and the run goes on. Raises OSError if
    the bucket cannot be reached or read, InUse if another process fetches it and `wait` is False.
    """
    if not is_url(cache_dir):
        return make()
    path, bucket, url = root(cache_dir) / name, open_bucket(cache_dir), join_url(cache_dir, name)
    mark, is_damaged = complete_folders.read_mark(bucket, name), False
    if mark is not None and (not path.is_dir() or find_damage(path)):
        fetch = functools.partial(complete_folders.fetch, bucket, name, mark)
        with (
            hold_folder_lock(path, WAITING_MESSAGE, say, wait) as is_locked,
            explain_full_disk(path),
        ):
            say(f'data: fetching {url}, {sum(mark.files.values()) / 1e6:.1f} MB')
            with contextlib.suppress(FileNotFoundError):  # another deletes it: it is made here
                fill(path, fetch, find_damage, say, is_locked)
        if path.is_dir() and find_damage(path):
            say(f'NOTE: {url} is damaged: it is prepared again')
            is_damaged = True
    made = make()
    if is_damaged or (mark is None and complete_folders.read_mark(bucket, name) is None):
        try:
            if is_damaged:
                complete_folders.delete(bucket, name, bucket.list(name))
            # Another host that does the same now writes the same bytes.
            complete_folders.upload(bucket, made, name, secrets.token_hex(8))
        except BucketError as error:
            say(f'NOTE: {error}; the prepared data stay in {made}, on this machine alone')
    return made


def make_once(path: Path, make: Callable, find_damage: Callable, say: Callable) -> Path:
    """Returns the folder `path`, which one process fills while others wait; see `fill`."""
    if not path.is_dir() or find_damage(path):
        with (
            hold_folder_lock(path, WAITING_MESSAGE, say) as is_locked,
            explain_full_disk(path.parent),
        ):
            fill(path, make, find_damage, say, is_locked)
    return path


def fill(path: Path, make: Callable, find_damage: Callable, say: Callable, is_locked: bool) -> None:
    """Fills the folder `path` by `make`, all of it or nothing, unless it is there and intact.

    make(folder) writes a folder beside it that is renamed when done; damage(folder) says in words
    what is wrong with one, or ''. The caller holds the lock of `path`; is_locked is False if there
    are no locks: then several may fill it, and the first one stays.
    """
    if is_intact(path, find_damage, say):  # made by the process that was waited for
        return
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


def is_intact(path: Path, find_damage: Callable, say: Callable) -> bool:
    """Whether the folder is there and intact; removes one that is damaged, with a note."""
    if path.is_dir() and (reason := find_damage(path)):
        say(f'NOTE: the prepared data {path} is damaged ({reason}): it is prepared again')
        shutil.rmtree(path)
    return path.is_dir()


def discard(folder: Path, pattern: str) -> None:
    """Removes the folders that match, each under another name, so that its own is free at once."""
    for path in folder.glob(pattern):
        if path.is_dir():
            gone = path.with_name(f'{path.name}.{os.getpid()}.removed')
            with contextlib.suppress(OSError):  # another process is at it
                path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def hold_folder_lock(path: Path, message: str, say: Callable, wait: bool = True) -> Generator[bool]:
    """Holds the lock of the folder `path`. Raises InUse if it is held and `wait` is False."""
    until = math.inf if wait else 0.0
    lock = hold_lock(
        path.with_name(f'{path.name}.lock'), waiting_message=message, say=say, wait_until=until
    )
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_held = held.enter_context(lock)
        except OSError as error:
            raise OSError(
                f'prepared data cannot be kept in {path.parent}: {error.strerror}. Set '
                'data.cache_dir to a folder that can be written.'
            ) from error
        yield is_held


@contextlib.contextmanager
def explain_full_disk(folder: Path) -> Generator[None]:
    """Turns an error of a full disk, of any type, into an OSError that says what to do."""
    try:
        yield
    except Exception as error:  # TFDS and ArrayRecord raise what they like
        if not (full := describe_full_disk(error, folder)):
            raise
        raise OSError(
            f'{full} ({error}). Free some space, or set data.cache_dir to a folder on another disk.'
        ) from error
