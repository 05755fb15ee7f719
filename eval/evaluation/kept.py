"""Results of a suite as files: WORKDIR/evaluations/STEP/NAME-OPTIONS.json, sealed.

A file has the digest of the checkpoint that it is of: another checkpoint of the same step, as after
--start_over, is evaluated anew.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eval.evaluation.asked import Asked
from eval.suites.base import Result, Table
from lm.record.digests import of_record
from lm.record.machine import git_commit, versions
from lm.storage.files import Unreadable, read_json, sealed, write_text

FOLDER = 'evaluations'
NOT_FINITE = 'float'  # the only key of an object that stands for nan, inf or -inf


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: arrays are lists, and a number that is not finite, for which
    JSON has no word, is {'float': 'nan'} or 'inf' or '-inf'.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {NOT_FINITE: str(value)}
    return value


def unplain(value: Any) -> Any:
    """Returns what `plain` was given, with lists and Python's numbers."""
    if isinstance(value, dict):
        if value.keys() == {NOT_FINITE}:
            return float(value[NOT_FINITE])
        return {name: unplain(inner) for name, inner in value.items()}
    return [unplain(inner) for inner in value] if isinstance(value, list) else value


def path_of(workdir: Path, step: int, asked: Asked) -> Path:
    """Returns the file of a result."""
    return workdir / FOLDER / str(step) / f'{asked.name}-{asked.digest}.json'


def write(path: Path, asked: Asked, meta: Mapping[str, Any], result: Result) -> None:
    """Writes a result, all or nothing. Raises OSError where the folder cannot be written."""
    record = {
        'suite': asked.name,
        'options': dict(asked.options),
        'step': int(path.parent.name),
        'checkpoint': of_record(meta),
        'config': of_record(meta['config']),
        'versions': versions(),
        'git_commit': git_commit(),
        'numbers': result.numbers,
        'items': result.items,
        'tables': {
            title: {'columns': table.columns, 'x': table.x, 'y': table.y, 'by': table.by}
            for title, table in result.tables.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # A line for all: an indented one of a hundred thousand documents would be a million lines.
    write_text(path, json.dumps(sealed(plain(record)), allow_nan=False) + '\n')


def read(path: Path, asked: Asked, meta: Mapping[str, Any]) -> Result | None:
    """Returns the result in a file; None where there is none, or one of another checkpoint.

    Raises Unreadable where it is damaged.
    """
    try:
        record = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        mine = (asked.name, plain(dict(asked.options)), of_record(meta))
        if (record['suite'], record['options'], record['checkpoint']) != mine:
            return None
        found = unplain({name: record[name] for name in ('numbers', 'items', 'tables')})
        tables = {title: Table(**table) for title, table in found['tables'].items()}
        return Result(found['numbers'], found['items'], tables)
    except (KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f'{path} cannot be read: it is no result ({error!r})') from error
