"""The folder of a run. Its config.json says which run that is: a folder that holds another one is
refused, and so is a second process that would train the same run.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from lm.config import Config, differences, to_json
from lm.files import InUse as InUse
from lm.files import locked, read_json, write_json, write_text
from lm.record.upgrade import stored_config

CONFIG = 'config.json'
SWEEP = 'sweep.json'
SUMMARY = 'summary.json'
LOCK = '.lock'
PATIENCE_SEC = 20.0  # with a process that was killed and is not gone yet, as Ray's workers are then
FINAL = ('done', 'diverged')  # a cell of a sweep that failed is tried again


@contextlib.contextmanager
def open_workdir(
    path: Path,
    config: Config,
    continue_changed: bool,
    say: Callable[[str], None] = print,
    wait_until: float | None = None,
) -> Iterator[None]:
    """Makes the folder with its config.json, or checks that it holds a run of this config. No other
    process can open it until the block ends.

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
        with writable(path):
            path.mkdir(parents=True, exist_ok=True)
            held.enter_context(_held(path, say, wait_until))
        if (path / CONFIG).exists():
            changed = differences(read_config(path), config)
            if changed and not continue_changed:
                raise ValueError(refusal(path, 'a run with another config', changed))
        else:
            with writable(path):
                write_config(path, config)
        yield


def _held(
    path: Path, say: Callable[[str], None], wait_until: float
) -> contextlib.AbstractContextManager[None]:
    """The lock of the folder. Of the processes of one run the first holds it for all."""
    if jax.process_index() > 0:
        return contextlib.nullcontext()
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


def write_config(path: Path, config: Config) -> None:
    write_text(path / CONFIG, to_json(config))


def read_config(path: Path) -> Config:
    """The config of the run in `path`, of whatever version; ValueError where that is none."""
    try:
        return stored_config(json.loads((path / CONFIG).read_text()))
    except FileNotFoundError as error:
        raise ValueError(f'{path} holds no run: there is no {path / CONFIG}') from error


def is_final(folder: Path) -> bool:
    """Whether the run in `folder` has ended in a way that will not change."""
    return (folder / SUMMARY).exists() and read_json(folder / SUMMARY)['status'] in FINAL


def record_failure(folder: Path, error: Exception, say: Callable[[str], None]) -> None:
    """Says that a run failed, and writes it to the summary if the folder can be written."""
    reason = f'{type(error).__name__}: {error}'
    say(f'{folder.name} FAILED: {reason}')
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SUMMARY, {'status': 'failed', 'reason': reason})
    except OSError as another:
        say(f'{folder.name}: and that could not be recorded ({another})')
