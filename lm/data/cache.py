"""The cache of prepared data: its path, file digests, and folders that are made completely or not
at all.

If data.cache_dir is in object storage, a local folder stands for it: the first process to prepare
data uploads it, and others fetch it.
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
from typing import cast

from lm.data import kinds
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

PARTIAL = '.partial'  # suffix of a folder that is being written
OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)  # errors of a rename to a folder that exists
MARKS_COUNT = 'mark'  # ends the entry of a digest that includes the byte-order mark
WAITING_MESSAGE = 'data: another process is preparing the same data; waiting for it'


def root(cache_dir: str) -> Path:
    """Returns `cache_dir` as a path, the local folder of a URL, or `user_cache()` for ''."""
    if is_url(cache_dir):
        return cache_folder(cache_dir, 'data')
    return Path(expand_home(cache_dir)).absolute() if cache_dir else user_cache()


def file_digests(folder: Path, files: Iterable[Path]) -> list[str]:
    """Returns a content hash of each file; reads a file again only if its size or mtime differs.

    If a file begins with a byte-order mark, the name of its encoding is appended to the hash:
    earlier versions read the mark as text, and data that they prepared has the hash without it.
    """
    memo_path, files = folder / 'files.json', list(files)
    digests = _look_up_digests(files, memo_path)
    if None not in digests:
        return cast(list[str], digests)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a cache that cannot be written may still be read
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(
                hold_lock(folder / 'files.lock')
            )  # so that one process reads a file
        digests, memo, new_entries = _look_up_digests(files, memo_path), read_memo(memo_path), {}
        for i, path in enumerate(files):
            if digests[i] is None:
                stamp = _stamp(path)
                match memo.get(str(path.absolute())):
                    case [*noted, str(digest)] if noted == stamp:  # by a version without marks
                        digests[i] = digest + kinds.detect_mark(path)
                    case _:
                        digests[i] = file_digest(path) + kinds.detect_mark(path)
                new_entries[str(path.absolute())] = [*stamp, digests[i], MARKS_COUNT]
        if new_entries:
            with contextlib.suppress(OSError):
                write_text(memo_path, json.dumps(read_memo(memo_path) | new_entries))
    return cast(list[str], digests)


def _look_up_digests(files: list[Path], memo_path: Path) -> list[str | None]:
    """Returns the recorded digest of each file, or None if it has changed or is not recorded."""
    memo, digests = read_memo(memo_path), []
    for path in files:
        match memo.get(str(path.absolute())):
            case [size, mtime_ns, str(digest), str(_)] if [size, mtime_ns] == _stamp(path):
                digests.append(digest)
            case _:
                digests.append(None)
    return digests


def read_memo(path: Path) -> dict:
    """Returns what was noted in a file; {} for one that is absent or damaged."""
    try:
        return read_json(path)
    except (OSError, UnreadableFile):  # absent, or not ours: only time is lost
        return {}


def _stamp(path: Path) -> list[int]:
    """Returns [size, mtime in nanoseconds]."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def file_digest(path: Path) -> str:
    """Returns 32 hexadecimal digits of the BLAKE2b hash of a file."""
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def digest_bytes(*parts: bytes) -> str:
    """Returns 32 hexadecimal digits of the BLAKE2b hash of a sequence of byte strings."""
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

    The name is a digest of the content, which never changes: a complete folder in the bucket is
    fetched, any other is uploaded. A failed upload is only reported.

    Args:
      cache_dir: data.cache_dir, a folder or a URL.
      name: the name of the folder.
      make: makes the folder and returns its path.
      find_damage: describes damage of a folder; '' if it is intact.
      say: gets lines of progress.
      wait: whether to wait for another process that fetches the folder.

    Returns:
      The local folder.

    Raises:
      OSError: if the bucket cannot be reached or read.
      InUseError: if another process fetches the folder and `wait` is False.
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
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile: it is made below
                fill(path, fetch, find_damage, say, is_locked)
        if path.is_dir() and find_damage(path):
            say(f'NOTE: {url} is damaged and will be prepared again')
            is_damaged = True
    folder = make()
    if is_damaged or (mark is None and complete_folders.read_mark(bucket, name) is None):
        try:
            if is_damaged:
                complete_folders.delete(bucket, name, bucket.list(name))
            # Another host that does the same now writes the same bytes.
            complete_folders.upload(bucket, folder, name, secrets.token_hex(8))
        except BucketError as error:
            say(f'NOTE: {error}; the prepared data stay on this machine only, in {folder}')
    return folder


def make_once(path: Path, make: Callable, find_damage: Callable, say: Callable) -> Path:
    """Returns the folder `path`, which one process fills while others wait.

    Args: as in `fill`.
    """
    if not path.is_dir() or find_damage(path):
        with (
            hold_folder_lock(path, WAITING_MESSAGE, say) as is_locked,
            explain_full_disk(path.parent),
        ):
            fill(path, make, find_damage, say, is_locked)
    return path


def fill(path: Path, make: Callable, find_damage: Callable, say: Callable, is_locked: bool) -> None:
    """Fills the folder `path` completely or not at all, unless it exists and is intact.

    The caller holds the lock of `path`.

    Args:
      path: the folder.
      make: make(folder) fills an empty folder beside `path`, which is renamed when done.
      find_damage: describes damage of a folder; '' if it is intact.
      say: gets lines of progress.
      is_locked: False if the file system has no locks; then several processes may fill the folder,
        and the first one to finish wins.
    """
    if is_intact(path, find_damage, say):  # made by another process, while this one waited
        return
    # The lock excludes other processes of this host. Whether it excludes other hosts depends on the
    # network disk, so the name of the partial folder has the host in any case.
    owner = socket.gethostname() if is_locked else f'{socket.gethostname()}.{os.getpid()}'
    partial = path.with_name(f'{path.name}.{owner}{PARTIAL}')
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
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
    """Returns whether the folder exists and is intact. Removes a damaged one, with a note.

    Args: as in `fill`.
    """
    if path.is_dir() and (reason := find_damage(path)):
        say(f'NOTE: the prepared data in {path} is damaged ({reason}) and will be prepared again')
        shutil.rmtree(path)
    return path.is_dir()


def discard(folder: Path, pattern: str) -> None:
    """Removes the folders that match; each is renamed first, so that its name is free at once."""
    for path in folder.glob(pattern):
        if path.is_dir():
            removed = path.with_name(f'{path.name}.{os.getpid()}.removed')
            with contextlib.suppress(OSError):  # another process is at it
                path.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


@contextlib.contextmanager
def hold_folder_lock(path: Path, message: str, say: Callable, wait: bool = True) -> Generator[bool]:
    """Holds the lock of the folder `path`, and yields whether the file system has locks.

    Args:
      path: the folder; the lock is a file beside it.
      message: is reported when the process has to wait.
      say: gets the message.
      wait: whether to wait.

    Raises:
      InUseError: if another process holds the lock and `wait` is False.
    """
    wait_until = math.inf if wait else 0.0
    lock = hold_lock(
        path.with_name(f'{path.name}.lock'), waiting_message=message, say=say, wait_until=wait_until
    )
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_held = stack.enter_context(lock)
        except OSError as error:
            raise OSError(
                f'prepared data cannot be stored in {path.parent}: {error.strerror}. Set '
                'data.cache_dir to a writable folder.'
            ) from error
        yield is_held


@contextlib.contextmanager
def explain_full_disk(folder: Path) -> Generator[None]:
    """Turns a full-disk error of any type into an OSError that suggests a remedy."""
    try:
        yield
    except Exception as error:  # TFDS and ArrayRecord raise what they like
        if not (message := describe_full_disk(error, folder)):
            raise
        raise OSError(
            f'{message} ({error}). Free some space, or set data.cache_dir to a folder on another '
            'disk.'
        ) from error
