"""The folder of a run. Its config.json says which run that is: a folder that holds another one is
refused, and so is a second process that would train the same run.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lm.config.recipe import Recipe
from lm.config.resolve import differences, to_json
from lm.launch.agreement import from_first, gathered, has_own_disks, is_first
from lm.record.checkpoint import FOLDER, check_path, read_meta, steps_in
from lm.record.digests import Damaged
from lm.record.upgrade import stored_config
from lm.storage.files import InUse as InUse
from lm.storage.files import Unreadable, locked, read_json, write_json, write_text

CONFIG = 'config.json'
SWEEP = 'sweep.json'
SUMMARY = 'summary.json'
LOCK = '.lock'
SEEN_SEC = 60.0  # until another host sees a new file: NFS remembers for so long what is not there
PATIENCE_SEC = 20.0  # with a process that was killed and is not gone yet, as Ray's workers are then
MESH = 'mesh.'  # on which devices a run goes on changes its sums by rounding alone
FINAL = ('done', 'diverged')  # a cell of a sweep that failed is tried again


@contextlib.contextmanager
def open_workdir(
    path: Path,
    recipe: Recipe,
    continue_changed: bool,
    say: Callable[[str], None] = print,
    wait_until: float | None = None,
) -> Iterator[None]:
    """Makes the folder, or checks that it holds a run of this config. No other job can open it
    until the block ends: of several processes the first does this, for all. Its config.json is
    written when the run begins (`lm.run.journal`), so that a start that fails leaves none.

    wait_until: how long to wait for another process to leave it, by `time.monotonic`; without it
    PATIENCE_SEC from now.

    Raises ValueError, listing the fields that differ, where it holds another run, unless
    `continue_changed`, where no checkpoint could be read from such a path, or where hosts do not
    see the same folder; InUse where another process has it; OSError where it cannot be written.
    """
    if not is_first():
        check_path(path)
        check_shared(path / LOCK)
        yield
        return
    with held_workdir(path, recipe, continue_changed, say, wait_until):
        check_shared(path / LOCK)
        yield


@contextlib.contextmanager
def held_workdir(
    path: Path,
    recipe: Recipe,
    continue_changed: bool,
    say: Callable[[str], None] = print,
    wait_until: float | None = None,
) -> Iterator[None]:
    """`open_workdir` of one process, which asks no other."""
    check_path(path)
    if (path / SWEEP).exists():
        raise ValueError(f'{path} holds a sweep; give another --workdir for a single run')
    if wait_until is None:
        wait_until = time.monotonic() + PATIENCE_SEC
    with contextlib.ExitStack() as held:
        with writable(path):
            path.mkdir(parents=True, exist_ok=True)
            held.enter_context(_held(path, say, wait_until))
        before = _config_before(path, say)
        changed = without_mesh(differences(before, recipe)) if before else {}
        if changed and not continue_changed:
            raise ValueError(refusal(path, 'a run with another config', changed))
        yield


def without_mesh(changed: dict[str, Any]) -> dict[str, Any]:
    """The fields that make a run another one."""
    return {field: both for field, both in changed.items() if not field.startswith(MESH)}


def _config_before(path: Path, say: Callable[[str], None]) -> Recipe | None:
    """That of the run in the folder; None where none has begun. Where config.json is damaged, it is
    that of the newest checkpoint whose record can be read.
    """
    if not (path / CONFIG).exists():
        return None
    try:
        return read_config(path)
    except Unreadable as error:
        say(f'NOTE: {error}. It is written anew when the run goes on.')
    for step in reversed(steps_in(path / FOLDER)):
        with contextlib.suppress(Damaged):
            return stored_config(read_meta(path / FOLDER, step)['config'])
    return None


def check_shared(file: Path) -> None:
    """Raises ValueError, on all processes, where one does not see the file that process 0 has just
    made: by its time, as another host may have a folder of the same name.
    """
    if has_own_disks():
        return
    made = from_first(_changed(file))
    deadline = time.monotonic() + SEEN_SEC
    while not (seen := _changed(file) == made) and time.monotonic() < deadline:
        time.sleep(1.0)
    blind = [f'host {i}' for i, sees in enumerate(gathered(seen)) if not sees]
    if blind:
        raise ValueError(not_shared(file.parent, blind))


def not_shared(path: Path, blind: Sequence[str]) -> str:
    return (
        f'{path.absolute()} is not the same folder on all hosts: {", ".join(blind)} cannot see '
        'what host 0 writes there. Give a --workdir on a disk that all hosts share.'
    )


def _changed(path: Path) -> int | None:
    """In whole seconds, as some network disks keep no more."""
    with contextlib.suppress(OSError):
        return int(path.stat().st_mtime)
    return None


def _held(
    path: Path, say: Callable[[str], None], wait_until: float
) -> contextlib.AbstractContextManager[bool]:
    """The lock of the folder."""
    return locked(
        path / LOCK,
        waiting=f'{path} is in use by another process: waiting for it to end',
        in_use=f'another process trains in {path}; wait for it, or give another --workdir',
        say=say,
        wait_until=wait_until,
    )


def refusal(path: Path, what: str, changed: dict[str, tuple[Any, Any]]) -> str:
    """Why a folder that holds something else is not taken."""
    lines = '\n'.join(f'  {name}: {old!r} -> {new!r}' for name, (old, new) in changed.items())
    return (
        f'{path} holds {what} (there -> here):\n{lines}\n'
        'Give another --workdir, or --continue_changed to go on from it with these.'
    )


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Errors of writing get the name of the folder, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f'workdir {path} cannot be written ({error}); give another --workdir'
        ) from error


def write_config(path: Path, recipe: Recipe) -> None:
    """Writes config.json, unless it is there as it should be."""
    text = to_json(recipe).encode()
    if not (path / CONFIG).exists() or (path / CONFIG).read_bytes() != text:
        write_text(path / CONFIG, text.decode())


def read_config(path: Path) -> Recipe:
    """The config of the run in `path`, of whatever version; ValueError where that is none, of the
    kind Unreadable where config.json is damaged.
    """
    try:
        raw = read_json(path / CONFIG)
    except FileNotFoundError as error:
        raise ValueError(f'{path} holds no run: there is no {path / CONFIG}') from error
    try:
        return stored_config(raw)
    except ValueError as error:
        raise ValueError(f'{path / CONFIG}: {error}') from error


def is_final(folder: Path) -> bool:
    """Whether the run in `folder` has ended in a way that will not change. A run whose summary is
    damaged has not: it goes on from its last checkpoint, and sums up anew.
    """
    return status_of(folder) in FINAL


def status_of(folder: Path) -> str | None:
    """What the summary of a run says; None where there is none that can be read."""
    try:
        return read_json(folder / SUMMARY).get('status')
    except (FileNotFoundError, NotADirectoryError, Unreadable):
        return None


def record_failure(folder: Path, error: Exception, say: Callable[[str], None]) -> None:
    """Says that a run failed, and writes it to the summary if the folder can be written."""
    reason = f'{type(error).__name__}: {error}'
    say(f'{folder.name} FAILED: {reason}')
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SUMMARY, {'status': 'failed', 'reason': reason})
    except OSError as another:
        say(f'{folder.name}: and that could not be recorded ({another})')
