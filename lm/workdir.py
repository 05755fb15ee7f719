"""The folder of a run: config.json says what it holds, and a run with another config is refused."""

import json
import os
from pathlib import Path
from typing import Any

from lm.config import Config, differences, resolve, to_json

CONFIG = 'config.json'
SUMMARY = 'summary.json'


def open_workdir(path: Path, config: Config, continue_changed: bool) -> None:
    """Makes the folder with its config.json, or checks that what it holds is a run of this config.

    Raises ValueError, listing the fields that differ, where it holds another run, unless
    `continue_changed`; OSError where it cannot be written.
    """
    stored = path / CONFIG
    if stored.exists():
        changed = differences(read_config(path), config)
        if changed and not continue_changed:
            lines = '\n'.join(
                f'  {name}: {old!r} -> {new!r}' for name, (old, new) in changed.items()
            )
            raise ValueError(
                f'{path} holds a run with another config (there -> here):\n{lines}\n'
                'Give another --workdir, or --continue_changed to go on from it with these.'
            )
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_config(path, config)
    except OSError as error:
        raise OSError(
            f'workdir {path} cannot be written ({error}); give another --workdir'
        ) from error


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
