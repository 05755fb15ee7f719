"""Results of suites as files: WORKDIR/evaluations/STEP/NAME-OPTIONS.json, sealed.

A file holds the digest of its checkpoint. A different checkpoint of the same step, as after
--start_over, is evaluated again.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eval.evaluation.suite_flags import SuiteRequest
from eval.suites.base import Suite, SuiteResult, Table
from lm.record.digests import hash_record
from lm.record.machine import git_commit, versions
from lm.record.names import EVALUATIONS
from lm.storage.files import UnreadableFile, first_line, read_json, seal_record, write_text

MAX_ERROR_LENGTH = 200  # of an error
NOT_FINITE = 'float'  # the only key of an object that represents nan, inf or -inf


def to_json(value: Any) -> Any:
    """Returns a value for JSON, with arrays as lists.

    A number that is not finite, which JSON cannot express, becomes {'float': 'nan'}, 'inf' or
    '-inf'.
    """
    if isinstance(value, Mapping):
        return {str(name): to_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return to_json(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {NOT_FINITE: str(value)}
    return value


def from_json(value: Any) -> Any:
    """Returns the argument of `to_json`, with lists and Python numbers."""
    if isinstance(value, dict):
        if value.keys() == {NOT_FINITE}:
            return float(value[NOT_FINITE])
        return {name: from_json(inner) for name, inner in value.items()}
    return [from_json(inner) for inner in value] if isinstance(value, list) else value


def result_path(workdir: Path, step: int, request: SuiteRequest) -> Path:
    """Returns the file of a result.

    Args:
      workdir: of the run.
      step: of the checkpoint.
      request: the suite and its options.
    """
    return workdir / EVALUATIONS / str(step) / f'{request.name}-{request.digest}.json'


def write_result(
    path: Path, request: SuiteRequest, meta: Mapping[str, Any], suite_result: SuiteResult
) -> None:
    """Writes a result atomically. Raises OSError if the folder is not writable.

    Args:
      path: from `result_path`.
      request: the suite and its options.
      meta: metadata of the checkpoint.
      suite_result: the result.
    """
    record = {
        'suite': request.name,
        'options': dict(request.options),
        'step': int(path.parent.name),
        'checkpoint': hash_record(meta),
        'config': hash_record(meta['config']),
        'versions': versions(),
        'git_commit': git_commit(),
        'numbers': suite_result.numbers,
        'items': suite_result.items,
        'tables': {
            title: {'columns': table.columns, 'x': table.x, 'y': table.y, 'by': table.by}
            for title, table in suite_result.tables.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # A single line: with indentation, a hundred thousand documents would be a million lines.
    write_text(path, json.dumps(seal_record(to_json(record)), allow_nan=False) + '\n')


def read_result(path: Path, request: SuiteRequest, meta: Mapping[str, Any]) -> SuiteResult | None:
    """Returns the stored result; None if it does not exist or belongs to another checkpoint.

    Args:
      path: from `result_path`.
      request: the suite and its options.
      meta: metadata of the checkpoint.

    Raises:
      UnreadableFile: if the file is damaged.
    """
    try:
        record = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        expected = (request.name, to_json(dict(request.options)), hash_record(meta))
        if (record['suite'], record['options'], record['checkpoint']) != expected:
            return None
        stored = from_json({name: record[name] for name in ('numbers', 'items', 'tables')})
        tables = {title: Table(**table) for title, table in stored['tables'].items()}
        suite_result = SuiteResult(stored['numbers'], stored['items'], tables)
        check_result(suite_result, request.suite)
        return suite_result
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        text = first_line(error, MAX_ERROR_LENGTH)
        raise UnreadableFile(f'{path} is not a valid result ({text})') from error


def check_result(suite_result: SuiteResult, suite: Suite) -> None:
    """Raises ValueError for a result that no suite can have made.

    Types are wrong, columns have different lengths, or items lack the columns that the suite
    compares.
    """
    if not isinstance(suite_result.numbers, dict) or not suite_result.numbers:
        raise ValueError('numbers must be an object with at least one number')
    for name, value in suite_result.numbers.items():
        check_name(name)
        if not is_number(value) or isinstance(value, bool):
            raise ValueError(f'numbers.{name} is not a number')
    check_columns(suite_result.items, 'items')
    for name in (suite.score, suite.weight):
        if name and not all(
            value is None or is_number(value) for value in suite_result.items[name]
        ):
            raise ValueError(f'items.{name} contains a value that is not a number')
    # Items of two results are matched by name, so that names must be unique.
    names = suite_result.items['item'] if suite.score else []
    if not all(is_scalar(name) for name in names) or len({*names}) < len(names):
        raise ValueError('items.item must contain names, each only once')
    for title, table in suite_result.tables.items():
        check_name(title)
        check_columns(table.columns, f'table {title}')
        if not table.columns:
            raise ValueError(f'table {title} has no columns')
        for name in (table.x, table.y, table.by):
            if not isinstance(name, str) or name not in ('', *table.columns):
                raise ValueError(f'table {title} charts a column that it does not have')
        for name, column in table.columns.items():
            if not all(value is None or is_scalar(value) for value in column):
                raise ValueError(f'column {name} of table {title} must contain numbers or text')
            if name == table.y and not all(value is None or is_number(value) for value in column):
                raise ValueError(f'column {name} of table {title} is charted: it must be numeric')


def check_columns(columns: Any, what: str) -> None:
    """Raises ValueError for anything but columns of equal length."""
    if not isinstance(columns, dict) or not all(
        isinstance(values, list) for values in columns.values()
    ):
        raise ValueError(f'{what} must be an object of lists')
    for name in columns:
        check_name(name)
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError(f'{what} has columns of different lengths')


def check_name(name: str) -> None:
    """Raises ValueError for a name that would move the cursor of a terminal."""
    if not name.isprintable():
        raise ValueError(f'{name!r} is not a printable name')


def is_number(value: Any) -> bool:
    """Whether a value is a number. Raises OverflowError for a number beyond float64."""
    if not isinstance(value, int | float):
        return False
    float(value)
    return True


def is_scalar(value: Any) -> bool:
    return isinstance(value, str) or is_number(value)
