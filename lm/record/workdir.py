"""The folder of a run. Its config.json identifies the run.

A folder of another run is refused, and so is a second process that would train the same run.
"""

import contextlib
import os
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from lm.config.recipe import Recipe
from lm.config.resolve import differences, to_dict
from lm.launch.distributed import broadcast_from_first, gather_values, has_private_disks, is_first
from lm.record.digests import DamagedCheckpoint
from lm.record.names import CHECKPOINTS, CONFIG, LOCK, SUMMARY, SWEEP
from lm.record.run import Run
from lm.record.upgrade import resolve_stored
from lm.storage.files import InUseError as InUseError
from lm.storage.files import (
    UnreadableFile,
    format_json,
    hold_lock,
    seal_record,
    write_json,
    write_text,
)
from lm.storage.filling import check_complete

NFS_DELAY_SEC = 60.0  # NFS caches the absence of a file for so long on other hosts
PATIENCE_SEC = 20.0  # killed processes, such as Ray's workers, may take a while to end
FORBIDDEN_IN_PATHS = '[]\\'  # TensorStore interprets them as patterns and separators
MESH_PREFIX = 'mesh.'  # a run may resume on other devices: its sums change by rounding alone


def check_path(path: Path) -> None:
    """Raises ValueError if checkpoints cannot be written to `path`, or read back from it."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f'{str(path.absolute())!a} is not UTF-8, but checkpoints can only be written to UTF-8 '
            'paths. Use another --workdir.'
        ) from error
    if forbidden := sorted(set(FORBIDDEN_IN_PATHS) & set(str(path.absolute()))):
        raise ValueError(
            f'{path.absolute()} contains {" and ".join(forbidden)}, but checkpoints cannot be read '
            'from a path with one of [ ] \\. Use another --workdir.'
        )


@contextlib.contextmanager
def open_workdir(
    path: Path,
    recipe: Recipe,
    continue_changed: bool,
    say: Callable[[str], None] = print,
    wait_until: float | None = None,
    per_process: bool = False,
) -> Generator[None]:
    """Creates the folder, or checks that it holds a run of this config, and locks it for the block.

    With several processes the first does this for all, unless `per_process`. config.json is written
    when the run begins (`lm.run.journal`), so that a start that fails leaves none.

    Args:
      path: the workdir.
      recipe: the config of the run.
      continue_changed: accept a folder of a run with another config.
      say: prints a line.
      wait_until: time (`time.monotonic`) until which to wait for another process to leave the
        folder; by default PATIENCE_SEC from now.
      per_process: each process opens its own folder.

    Raises:
      ValueError: if the folder holds another run (with the fields that differ), if checkpoints
        cannot be read from the path, if an interrupted command has left the folder incomplete, or
        if hosts do not see the same folder.
      InUseError: if another process has the folder.
      OSError: if the folder cannot be written.
    """
    check_path(path)
    with contextlib.ExitStack() as stack:
        if per_process or is_first():
            if (path / SWEEP).exists():
                raise ValueError(f'{path} contains a sweep; use another --workdir for a single run')
            check_no_links(path)
            check_complete(path)
            lock = hold_lock(
                path / LOCK,
                waiting_message=f'{path} is in use by another process: waiting for it to end',
                in_use_message=(
                    f'another process is training in {path}; wait until it ends, or use another '
                    '--workdir'
                ),
                say=say,
                wait_until=time.monotonic() + PATIENCE_SEC if wait_until is None else wait_until,
            )
            with annotate_write_errors(path):
                path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock)
            previous = read_previous_config(path, say)
            differing = drop_mesh_fields(differences(previous, recipe)) if previous else {}
            if differing and not continue_changed:
                raise ValueError(format_refusal(path, 'a run with another config', differing))
        if not per_process:
            check_shared(path / LOCK)
        yield


def check_no_links(path: Path) -> None:
    """Raises ValueError if a written file is a link, which may point anywhere."""
    links = [entry for entry in path.glob('*') if entry.is_symlink() and not entry.is_dir()]
    if links:
        raise ValueError(
            f'{links[0]} is a link to {os.readlink(links[0])}, but files of a workdir must not be '
            'links. Replace the link with the file, or delete it.'
        )


def drop_mesh_fields(changed: dict[str, Any]) -> dict[str, Any]:
    """Returns the differences that make a run another run: all but the fields of the mesh."""
    return {field: values for field, values in changed.items() if not field.startswith(MESH_PREFIX)}


def read_previous_config(path: Path, say: Callable[[str], None]) -> Recipe | None:
    """Returns the config of the run in a folder; None if there is none.

    If config.json is damaged, the config is read from a checkpoint.
    """
    if not (path / CONFIG).exists():
        return None
    try:
        return Run(path).read_recipe()
    except UnreadableFile as error:
        say(f'NOTE: {error}. It will be rewritten when the run resumes.')
    from lm.record.checkpoint import read_meta  # Orbax takes half a second to import

    for step in reversed(Run(path).checkpoint_steps):
        with contextlib.suppress(DamagedCheckpoint):
            return resolve_stored(read_meta(path / CHECKPOINTS, step)['config'])
    return None


def check_shared(file: Path, flag: str = '--workdir') -> None:
    """Raises ValueError, on all processes, if a process does not see the file of process 0.

    flag: the flag that names the folder.
    """
    if has_private_disks():
        return
    # Compare times of change, as another host may have a local folder of the same name.
    mtime = broadcast_from_first(_read_mtime(file))
    deadline = time.monotonic() + NFS_DELAY_SEC
    while not (is_visible := _read_mtime(file) == mtime) and time.monotonic() < deadline:
        time.sleep(1.0)
    blind = [f'host {i}' for i, can_see in enumerate(gather_values(is_visible)) if not can_see]
    if blind:
        raise ValueError(format_not_shared(file.parent, blind, flag))


def format_not_shared(path: Path, blind: Sequence[str], flag: str = '--workdir') -> str:
    """Returns the error for a folder that some hosts do not share.

    Args:
      path: the folder on host 0.
      blind: names of the hosts that do not see it.
      flag: the flag that names the folder.
    """
    return (
        f'{path.absolute()} is not the same folder on all hosts: {", ".join(blind)} cannot see '
        f'what host 0 writes there. Use a {flag} on a disk that all hosts share.'
    )


def _read_mtime(path: Path) -> int | None:
    """Returns the modification time in whole seconds, as some network disks store no fractions."""
    with contextlib.suppress(OSError):
        return int(path.stat().st_mtime)
    return None


def format_refusal(path: Path, content: str, changed: dict[str, tuple[Any, Any]]) -> str:
    """Returns the error for a folder that holds something else.

    Args:
      path: the folder.
      content: name of its content.
      changed: {field: (value in the folder, value here)}.
    """
    lines = '\n'.join(
        f'  {name}: {before!r} -> {after!r}' for name, (before, after) in changed.items()
    )
    return (
        f'{path} contains {content} (there -> here):\n{lines}\n'
        'Use another --workdir, or pass --continue_changed to continue it with this config.'
    )


@contextlib.contextmanager
def annotate_write_errors(path: Path) -> Generator[None]:
    """Adds the name of the folder, and advice, to errors of writing."""
    try:
        yield
    except OSError as error:
        message = f'workdir {path} cannot be written ({error}); use another --workdir'
        raise OSError(message) from error


def write_config(path: Path, recipe: Recipe) -> None:
    """Writes config.json, unless the file has this content already."""
    text = format_json(seal_record(to_dict(recipe)))
    if not (path / CONFIG).is_file() or (path / CONFIG).read_bytes() != text.encode():
        write_text(path / CONFIG, text)


def record_failure(folder: Path, error: Exception, say: Callable[[str], None]) -> None:
    """Prints that a run failed, and records it in the summary if the folder can be written.

    Args:
      folder: the folder of the run.
      error: the error that ended it.
      say: prints a line.
    """
    reason = f'{type(error).__name__}: {error}'
    say(f'{folder.name} FAILED: {reason}')
    try:
        folder.mkdir(exist_ok=True)  # without parents: a sweep's folder may have been moved away
        write_json(folder / SUMMARY, seal_record({'status': 'failed', 'reason': reason}))
    except OSError as write_error:
        say(f'{folder.name}: the failure could not be recorded ({write_error})')
