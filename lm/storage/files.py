"""Atomic file writes, JSON files, and locks that end with their process."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import socket
import stat
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, BinaryIO

POLL_SEC = 0.1
FULL_MESSAGES = {  # by error number of a write
    errno.ENOSPC: 'the disk that holds {} is full',
    errno.EDQUOT: 'the quota of the disk that holds {} is used up',
    errno.EFBIG: 'a file in {} has reached the largest allowed file size (ulimit -f)',
}
MAX_JSON_BYTES = 1 << 28  # a sweep of 100,000 cells has a fifth of this
MAX_NESTING = 64  # of JSON; our records nest four deep
SEAL = 'sha256'  # the field of a sealed record that holds the digest of the others
NO_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class InUseError(ValueError):
    """Another process holds the lock."""


class UnreadableFile(ValueError):
    """A file is truncated, damaged, or has another kind of content."""


def discard_line(line: str) -> None:
    """Discards a line; the `say` of callers who report nothing."""


def expand_home(path: str) -> str:
    """Returns a path with a folder in place of a leading ~ or ~USER, as a shell would.

    Shells do not expand --workdir=~/x. Raises ValueError if there is no such folder.
    """
    expanded = os.path.expanduser(path)
    if path.startswith('~') and expanded == path:
        name = path.partition('/')[0]
        reason = f'there is no user {name[1:]!r}' if name != '~' else 'this user has no home folder'
        raise ValueError(
            f'{path}: {reason}. Write the whole path, or ./{path} for a folder of that name.'
        )
    return expanded


def user_cache() -> Path:
    """Returns $XDG_CACHE_HOME/evenkeel, or else ~/.cache/evenkeel.

    Raises ValueError if the user has no home folder, as in some containers.
    """
    try:
        return Path(os.environ.get('XDG_CACHE_HOME') or expand_home('~/.cache')) / 'evenkeel'
    except ValueError:
        raise ValueError(
            'there is no folder to cache data in: HOME is not set, and this user has no home '
            'folder. Set data.cache_dir, or XDG_CACHE_HOME in the environment.'
        ) from None


def describe_full_disk(error: BaseException, folder: Path | str) -> str:
    """Returns a text about a full disk or quota, for an error of a write to `folder`.

    It is '' for other errors. If the error has no number, its causes are searched for one, and then
    its text for the system's words, which libraries quote. Full device memory (RESOURCE_EXHAUSTED)
    is not a disk.
    """
    cause: BaseException | None = error
    while cause is not None:
        if code := getattr(cause, 'errno', None):
            return FULL_MESSAGES.get(code, '').format(folder)
        cause = cause.__cause__
    codes = (code for code in FULL_MESSAGES if os.strerror(code).lower() in str(error).lower())
    return FULL_MESSAGES.get(next(codes, 0), '').format(folder)


def escape_controls(text: str) -> str:
    """Returns a text with escapes such as \\x1b for characters that would move a cursor.

    Line breaks stay. A text may quote a file or a name that somebody else has written.
    """
    return ''.join(
        c if c.isprintable() or c == '\n' else c.encode('unicode_escape').decode() for c in text
    )


def first_line(error: Exception, max_chars: int | None = None) -> str:
    """Returns the first line of an error's text, cut to `max_chars` characters.

    Control characters are escaped.
    """
    return escape_controls(str(error).strip().partition('\n')[0][:max_chars])


@contextlib.contextmanager
def replace_file(path: Path) -> Generator[Path]:
    """Yields a temporary path that replaces `path` when the block ends without an error.

    The content is synced first, so that it outlasts a power cut. Each process has its own temporary
    path: several may write the same file, and the last one wins. An OSError names the file.
    """
    temporary = path.with_name(f'{path.name}.{socket.gethostname()}.{os.getpid()}.tmp')
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        # Errors of write() lack the name, and the temporary one means nothing to a user.
        if error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_output(path: Path, flag: str) -> None:
    """Raises ValueError, which names the flag, for a file that cannot be written at a path."""
    rule = f'{flag} must be a file in a folder that exists; got {path}'
    if path.is_dir():
        raise ValueError(f'{rule}, which is a folder. Add the name of a file.')
    if not path.parent.is_dir():
        raise ValueError(f'{rule}, but there is no folder {path.parent}. Create it, or correct it.')


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk, so that they outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a whole file or nothing, even if the process is killed midway."""
    with replace_file(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes an indented JSON file, atomically like `write_text`."""
    write_text(path, format_json(record))


def format_json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2) + '\n'


def seal_record(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with its digest, by which `read_json` detects changes."""
    return record | {SEAL: _digest(record)}


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, without its seal.

    Raises UnreadableFile, naming the file, if it holds no object, if a `seal_record` record was
    changed after it was written, or if it is too large, nested too deep, or not a regular file.
    """
    with open_regular(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise UnreadableFile(
            f'{path} cannot be read as JSON (it is larger than {MAX_JSON_BYTES:,} bytes)'
        )
    try:
        record = parse_json(content)
    except ValueError as error:
        raise UnreadableFile(f'{path} cannot be read as JSON ({error})') from error
    if not isinstance(record, dict):
        raise UnreadableFile(f'{path} cannot be read as JSON (it contains no object)')
    if SEAL in record and record.pop(SEAL) != _digest(record):
        raise UnreadableFile(
            f'{path} cannot be read: it was changed or damaged after it was written'
        )
    return record


def parse_json(data: bytes, **hooks: Any) -> Any:
    """Returns the value in JSON text. Raises ValueError, also if it nests too deep to use.

    hooks: keyword arguments of `json.loads`, such as parse_int.
    """
    try:
        value = json.loads(data.decode(), **hooks)
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
    # Brackets within strings are counted too, so a high count alone is no proof.
    if data.count(b'[') + data.count(b'{') > MAX_NESTING and _is_deeper(value, MAX_NESTING):
        raise ValueError(f'it is nested deeper than {MAX_NESTING} levels')
    return value


def _is_deeper(value: Any, max_depth: int) -> bool:
    """Returns whether lists and dicts nest deeper than `max_depth`."""
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return max_depth == 0 or any(_is_deeper(child, max_depth - 1) for child in children)


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises UnreadableFile unless it is regular (a pipe never ends)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableFile(f'{path} cannot be read: it is not a regular file')
    return open(descriptor, 'rb')


@contextlib.contextmanager
def hold_lock(
    path: Path,
    *,
    waiting_message: str = '',
    in_use_message: str = '',
    say: Callable[[str], None] = discard_line,
    wait_until: float = math.inf,
) -> Generator[bool]:
    """Holds the lock of a file, which is created, until the block or the process ends.

    Yields False, with a note, if the file system has no locks.

    Args:
      path: the lock file.
      waiting_message: printed once if another process holds the lock.
      in_use_message: text of the InUseError.
      say: prints a line.
      wait_until: time (`time.monotonic`) until which to wait for the lock.

    Raises:
      InUseError: if another process still holds the lock then.
    """
    # The folder may come from someone else, who may have put a link or a pipe there.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with open(descriptor, 'r+b', buffering=0) as file:
        os.utime(descriptor)  # hosts compare it to check that they see the same file
        while (is_held := _try_lock(file, path, say)) is False:
            if time.monotonic() >= wait_until:
                raise InUseError(in_use_message)
            if waiting_message:
                say(waiting_message)
            waiting_message = ''
            time.sleep(POLL_SEC)
        yield is_held is True


def is_locked(path: Path) -> bool:
    """Returns whether another process holds the lock of the file; False if there are no locks.

    The check takes the lock for a moment, so a process that tries to lock the file may have to
    retry.
    """
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _try_lock(file: IO, path: Path, say: Callable[[str], None]) -> bool | None:
    """Returns whether this process now holds the lock; None on a file system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCK_ERRNOS:
            raise
        say(
            f'NOTE: {path} cannot be locked ({error}): make sure that no other process writes '
            'to its folder'
        )
        return None
    return True
