"""The folder of a run or a sweep: config.json or sweep.json says what it holds, and what has
another config is refused, and so is a second process that would train the same run.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import jax

from lm.config import Config, differences, resolve, to_dict, to_json
from lm.sweep.cells import Cell

CONFIG = 'config.json'
SWEEP = 'sweep.json'
SUMMARY = 'summary.json'
LOCK = '.lock'
PATIENCE_SEC = 20.0  # with a process that was killed and is not gone yet, as Ray's workers are then
POLL_SEC = 0.1
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
FINAL = ('done', 'diverged')  # a cell of a sweep that failed is tried again


class InUse(ValueError):
    """Another process trains in the folder."""


@contextlib.contextmanager
def open_workdir(
    path: Path,
    config: Config,
    continue_changed: bool,
    say: Callable[[str], None] = print,
    wait_until: float | None = None,
) -> Iterator[None]:
    """Makes the folder with its config.json, or checks that what it holds is a run of this config;
    it is this process's own until the block ends.

    wait_until: how long to wait for another process to leave it, by `time.monotonic`; without it
    PATIENCE_SEC from now.

    Raises ValueError, listing the fields that differ, where it holds another run, unless
    `continue_changed`; InUse where another process has it; OSError where it cannot be written.
    """
    if (path / SWEEP).exists():
        raise ValueError(f'{path} holds a sweep; give another --workdir for a single run')
    if wait_until is None:
        wait_until = time.monotonic() + PATIENCE_SEC
    with contextlib.ExitStack() as held:
        with _writable(path):
            path.mkdir(parents=True, exist_ok=True)
            held.enter_context(_locked(path, say, wait_until))
        if (path / CONFIG).exists():
            changed = differences(read_config(path), config)
            if changed and not continue_changed:
                raise ValueError(_refusal(path, 'a run with another config', changed))
        else:
            with _writable(path):
                write_config(path, config)
        yield


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None], wait_until: float) -> Iterator[None]:
    """The lock goes with the process, however it ends. Of the processes of one run the first has
    it for all.
    """
    if jax.process_index() > 0:
        yield
        return
    with open(path / LOCK, 'w') as file:
        free = _try_lock(file, say)
        if not free and time.monotonic() < wait_until:
            say(f'{path} is in use by another process: waiting for it to end')
        while not free:
            if time.monotonic() >= wait_until:
                raise InUse(
                    f'another process trains in {path}; wait for it, or give another --workdir'
                )
            time.sleep(POLL_SEC)
            free = _try_lock(file, say)
        yield


def _try_lock(file: IO, say: Callable[[str], None]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        say(
            f'NOTE: {file.name} cannot be locked ({error}): see to it that no other process trains '
            'in its folder'
        )
        return True


def _refusal(path: Path, what: str, changed: dict[str, tuple[Any, Any]]) -> str:
    lines = '\n'.join(f'  {name}: {old!r} -> {new!r}' for name, (old, new) in changed.items())
    return (
        f'{path} holds {what} (there -> here):\n{lines}\n'
        'Give another --workdir, or --continue_changed to go on from it with these.'
    )


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f'workdir {path} cannot be written ({error}); give another --workdir'
        ) from error


def open_sweep(path: Path, base: Config, groups: list[list[Cell]], continue_changed: bool) -> None:
    """Makes the folder of a sweep with its sweep.json, or takes up the one that is there.

    The axes may have changed since: cells begun earlier stay on record, with no group. Raises
    ValueError where the runs of the folder started from another config, unless `continue_changed`.
    """
    stored = path / SWEEP
    listed = [
        {'cell': cell.name, 'group': number, 'changes': cell.changes}
        for number, group in enumerate(groups)
        for cell in group
    ]
    if stored.exists():
        before = read_json(stored)
        changed = differences(resolve(before['base']), base)
        if changed and not continue_changed:
            raise ValueError(_refusal(path, 'a sweep from another config', changed))
        names = {cell['cell'] for cell in listed}
        listed += [
            cell | {'group': None}
            for cell in before['cells']
            if cell['cell'] not in names and (path / cell['cell']).exists()
        ]
    elif (path / CONFIG).exists():
        raise ValueError(f'{path} holds a single run; give another --workdir for a sweep')
    axes: dict[str, list[Any]] = {}
    for cell in listed:
        for field, value in cell['changes'].items():
            if value not in axes.setdefault(field, []):
                axes[field].append(value)
    record = {'base': to_dict(base), 'axes': axes, 'cells': listed}
    with _writable(path):
        path.mkdir(parents=True, exist_ok=True)
        write_json(stored, record)


def write_config(path: Path, config: Config) -> None:
    write_text(path / CONFIG, to_json(config))


def read_config(path: Path) -> Config:
    """The config of the run in `path`; ValueError where that is none."""
    try:
        return resolve(json.loads((path / CONFIG).read_text()))
    except FileNotFoundError as error:
        raise ValueError(f'{path} holds no run: there is no {path / CONFIG}') from error


def write_text(path: Path, text: str) -> None:
    """All of it or nothing, even if killed midway."""
    temporary = path.with_name(path.name + '.tmp')
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, record: dict[str, Any]) -> None:
    write_text(path, json.dumps(record, indent=2) + '\n')


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def is_final(folder: Path) -> bool:
    """Whether the run in `folder` has ended in a way that will not change."""
    return (folder / SUMMARY).exists() and read_json(folder / SUMMARY)['status'] in FINAL


def record_failure(folder: Path, error: Exception, say: Callable[[str], None]) -> None:
    """Says it, and writes it to the summary if the folder can be written."""
    reason = f'{type(error).__name__}: {error}'
    say(f'{folder.name} FAILED: {reason}')
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SUMMARY, {'status': 'failed', 'reason': reason})
    except OSError as another:
        say(f'{folder.name}: and that could not be recorded ({another})')
