"""The compile cache: compiled programs on this machine's disk, which later starts read.

JAX writes and reads the entries. Their key covers the program, the versions of JAX and XLA, XLA's
flags, and the device: for a CPU the name of its type and the instructions that it has. Machines
with different CPUs may therefore share the folder, as in a home folder on NFS, and each compiles
its own entries. What a program computes does not depend on whether it was read or compiled.
"""

import atexit
import contextlib
import os
import re
import sys
import warnings
from pathlib import Path

import jax

from lm.launch.before_jax import count_virtual_devices
from lm.launch.this_host import child_host
from lm.storage.files import describe_full_disk, user_cache

FOLDER = 'programs'  # in the user's cache
# The programs of configs/default.py take 0.5 MB on a CPU, those of a GPU some ten times as much.
MAX_BYTES = 2_000_000_000
# Smaller programs compile about as fast as they are read.
MIN_COMPILE_SEC = 0.1
# Of the user; each has precedence over the default folder.
VARIABLES = ('JAX_COMPILATION_CACHE_DIR', 'JAX_ENABLE_COMPILATION_CACHE')
MIN_VARIABLE = 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'
# JAX reports an entry that it cannot read or write as a warning, with the name of the program.
FAILURE = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (.*)", re.DOTALL
)
COMPILED = '/jax/core/compile/backend_compile_duration'
WRITTEN = '/jax/compilation_cache/cache_misses'  # that are long enough to be stored
ADVICE = 'To use another folder, set JAX_COMPILATION_CACHE_DIR.'


def enable_compile_cache() -> None:
    """Makes JAX store compiled programs in the user's cache, for later starts.

    Does nothing if the user has set one of `VARIABLES`, in a job of several processes, and with
    several virtual devices of a CPU: in a program that was read, XLA does not keep the order
    between collectives. If the folder cannot be written, the first program that is compiled prints
    a note.
    """
    if any(name in os.environ for name in VARIABLES) or jax.config.jax_compilation_cache_dir:
        return
    if child_host() is not None or count_virtual_devices() > 1:
        return
    try:
        folder = user_cache() / FOLDER
        # Whoever can write entries can run code here.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f'{folder} cannot be read and written')
    except (OSError, ValueError) as error:  # ValueError: the user has no home folder
        _note_at_first_compilation(str(error))
        return
    jax.config.update('jax_compilation_cache_dir', str(folder))
    if MIN_VARIABLE not in os.environ:
        jax.config.update('jax_persistent_cache_min_compile_time_secs', MIN_COMPILE_SEC)
    _report_failures_once(folder)
    _remove_old_entries_at_exit(folder)


def _note_at_first_compilation(reason: str) -> None:
    """Prints that programs are not stored; a process that compiles nothing prints nothing."""
    has_noted = [False]

    def listen(event: str, duration_secs: float, **_) -> None:
        if event == COMPILED and duration_secs >= MIN_COMPILE_SEC and not has_noted[0]:
            has_noted[0] = True
            _print_note('compiled programs are not stored', reason)

    jax.monitoring.register_event_duration_secs_listener(listen)


def _print_note(subject: str, reason: str) -> None:
    print(
        f'NOTE: {subject}, so that each start compiles them ({reason}). {ADVICE}', file=sys.stderr
    )


def _report_failures_once(folder: Path) -> None:
    """Replaces JAX's warnings about entries by one note, and removes the entries.

    An entry is cut short if its process was killed while writing it, or the disk was full. JAX
    would try to read it at each start, and never replace it.
    """
    show, noted = warnings.showwarning, set()

    def show_warning(message, category, filename, lineno, file=None, line=None) -> None:
        match = FAILURE.match(str(message))
        if match is None:
            show(message, category, filename, lineno, file, line)
            return
        verb, program, reason = match.groups()
        remove_entries(folder, program)
        if verb == 'writing' and verb not in noted:
            reason = describe_full_disk(OSError(reason), folder) or reason
            _print_note('compiled programs could not be stored', reason)
        elif verb not in noted:
            print(
                f'NOTE: stored programs could not be read and are compiled again ({reason}).',
                file=sys.stderr,
            )
        noted.add(verb)

    warnings.showwarning = show_warning  # ty: ignore[invalid-assignment]
    warnings.filterwarnings('always', message=FAILURE.pattern)


def remove_entries(folder: Path, program: str) -> None:
    """Removes all entries of programs with a name, such as jit_train_step, from a folder."""
    for path in folder.glob('*'):
        if path.name.startswith(f'{program}-'):
            with contextlib.suppress(OSError):
                path.unlink()


def _remove_old_entries_at_exit(folder: Path) -> None:
    """Calls `remove_old_entries` at the end of a process that has written an entry."""
    has_written = [False]

    def listen(event: str, **_) -> None:
        has_written[0] |= event == WRITTEN

    def remove() -> None:
        if has_written[0]:
            remove_old_entries(folder, MAX_BYTES)

    jax.monitoring.register_event_listener(listen)
    atexit.register(remove)


def remove_old_entries(folder: Path, max_bytes: float) -> None:
    """Removes the files of a folder that were used longest ago, until the rest fits.

    Other processes may use the folder at the same time: one that misses an entry compiles it.
    JAX's own limit, jax_compilation_cache_max_size, takes a lock for each entry that is read and
    lists the whole folder for each that is written, which is slow on network disks.

    Args:
      folder: the folder; its subfolders count, where XLA stores what it has tuned for GPUs.
      max_bytes: limit on the sizes of all files.
    """
    files = []
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another process has removed it
                path = os.path.join(root, name)
                status = os.stat(path)
                # Disks store the time of access, if at all, to a day (relatime).
                files.append((max(status.st_atime, status.st_mtime), path, status.st_size))
    total = sum(size for _, _, size in files)
    for _, path, size in sorted(files):
        if total <= max_bytes:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
            total -= size
