"""Lists runs, or queries them in SQL.

    python -m eval.runs [--workdir=DIR[,DIR]] [--format=FORMAT] [SQL]
    python -m eval.runs "select norm, avg(ce) from runs group by norm"

Table `runs` has one row per run or cell: its identity, config and results.
Configs of older versions are converted to the current form. Table `metrics` has
one row per cell and recorded step, with every quantity of metrics.jsonl;
quantities of layers are lists. Join it `using (cell)`, or `using (workdir)` if
two sweeps share a cell. `ce` is the final validation loss in `runs`, and the
loss of the training batch in `metrics`.
"""

from lm.launch.before_jax import prepare_streams

if __name__ == '__main__':
    prepare_streams()  # before any file is opened

import collections
import glob
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from absl import flags

from lm.launch.command import run_program
from lm.launch.path_flags import define_path
from lm.record.run import Run
from lm.storage.buckets import is_url
from lm.storage.files import first_line
from lm.study.tables import sql
from lm.study.tables.columns import columns
from lm.study.tables.results import Record, gather, gather_all, has_runs, to_arrow
from lm.study.tables.text import FORMATS, format_number, format_table

if TYPE_CHECKING:
    import pandas as pd  # takes a second to import, so only frames do

__all__ = ['frame', 'gather', 'metrics_frame', 'overview', 'query']

MOST_STEPS = 8  # of checkpoints that the overview lists
TUNE_COLUMNS = ('arm', 'stage')  # of a run in a tuned sweep
SUMMARY = (  # of a run, in what train.py and eval.report print with --json
    *('workdir', 'status', 'reason', 'arm', 'stage', 'step', 'ce', 'bits_per_byte'),
    *('best_ce', 'best_step', 'validated_step', 'train_ce', 'texts', 'suites', 'diverged_step'),
    *('tokens', 'tokens_per_sec', 'wall_sec', 'goodput', 'elapsed_sec', 'seconds'),
)
OVERVIEW = ('status', 'ce', 'bits_per_byte', 'best_ce', 'tokens_per_sec')


def frame(*workdirs: str | Path) -> 'pd.DataFrame':
    """Returns the records of `gather`, one row per run; a column of integers with gaps is float.

    Args:
      *workdirs: folders or URLs, each a run, a sweep, or a folder of them.

    Raises:
      ValueError: if a folder holds neither run nor sweep.
    """
    return to_arrow(gather_all(workdirs)).to_pandas()


def metrics_frame(*workdirs: str | Path) -> 'pd.DataFrame':
    """Returns cell, workdir, step, and every quantity of metrics.jsonl; one row per cell and step.

    Args:
      *workdirs: folders or URLs, each a run, a sweep, or a folder of them.

    Raises:
      ValueError: if a folder holds neither run nor sweep.
    """
    return _metrics_table(gather_all(workdirs)).to_pandas()


def _metrics_table(records: list[Record]) -> pa.Table:
    """Returns one row per workdir and step, with every quantity that is a number."""
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    # A step may have several rows: training, validation and diagnostics.
    for record in records:
        for row in Run(Path(record['workdir'])).rows():
            key = record['workdir'], row['step']
            at_step = merged.setdefault(key, {n: record[n] for n in ('cell', 'workdir')})
            at_step |= {name: v for name, v in row.items() if _is_number(v)}
    key_columns = [('cell', pa.string()), ('workdir', pa.string()), ('step', pa.int64())]
    names = dict.fromkeys(name for row in merged.values() for name in row)
    rows = list(merged.values())
    metric_columns = [
        (name, _column_type(name, rows)) for name in names if name not in dict(key_columns)
    ]
    try:
        return pa.Table.from_pylist(rows, schema=pa.schema(key_columns + metric_columns))
    except pa.ArrowException as error:
        raise ValueError(
            'each quantity of metrics.jsonl must be a double in all rows, or a list of equal depth '
            f'in all; got a row with another ({first_line(error)}). Correct that row, or leave its '
            'workdir out.'
        ) from error


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number, None (a number that was not finite), or a list
    of such.
    """
    if isinstance(value, list):
        return all(map(_is_number, value))
    return value is None or isinstance(value, int | float)


def _column_type(name: str, rows: list[Record]) -> pa.DataType:
    """Returns float, or lists of the depth that the rows have."""
    kind, value = pa.float64(), next((row[name] for row in rows if row.get(name) is not None), None)
    while isinstance(value, list):
        kind, value = pa.list_(kind), next(iter(value), None)
    return kind


def query(select: str, *workdirs: str | Path) -> pa.Table:
    """Runs an SQL query over the tables `runs` and `metrics`, as `python -m eval.runs` does.

    Args:
      select: a query in DuckDB's SQL.
      *workdirs: folders or URLs, each a run, a sweep, or a folder of them.

    Returns:
      The rows of the answer, an Arrow table.

    Raises:
      ValueError: with DuckDB's message on a line, and the column nearest to an unknown column.
    """
    records = gather_all(workdirs)
    tables = {'runs': to_arrow(records)}
    if re.search(r'\bmetrics\b', select, re.IGNORECASE):  # reads every metrics.jsonl
        tables['metrics'] = _metrics_table(records)
    return sql.run_query(select, tables)


def overview(records: list[Record]) -> list[Record]:
    """Returns the cell, its main results and the varying fields of its sweep, for each record.

    If any record is of a tuned sweep, also the columns `TUNE_COLUMNS`; and `parent` and
    `checkpoints` if any is of a branch, or of a run whose checkpoints stay.

    Args:
      records: as `gather` returns them.
    """
    by_sweep = collections.defaultdict(list)
    for record in records:
        by_sweep[str(Path(record['workdir']).parent)].append(record)
    is_tuned = any(record['arm'] for record in records)
    origins = {
        'parent': any(record['parent'] for record in records),
        'checkpoints': any(record['train_checkpoint_steps'] for record in records),
    }
    rows = []
    for siblings in by_sweep.values():
        names = columns().values() if siblings[0]['sweep'] else ()
        varying = [name for name in names if len({repr(row[name]) for row in siblings}) > 1]
        for row in siblings:
            caption = ' '.join(f'{name}={format_number(row[name])}' for name in varying)
            result_columns = {name: row[name] for name in OVERVIEW}
            place = {name: row[name] for name in TUNE_COLUMNS} if is_tuned else {}
            origin = {
                name: _format_origin(name, row[name])
                for name, is_here in origins.items()
                if is_here
            }
            cell = {'cell': row['cell']} | place | {'swept': caption}
            rows.append(cell | result_columns | origin)
    return rows


def summarize_runs(*workdirs: str | Path) -> list[Record]:
    """Returns the columns `SUMMARY` of each run, for programs; `texts` and `suites` as objects.

    Args:
      *workdirs: folders or URLs, each a run, a sweep, or a folder of them.

    Raises:
      ValueError: if a folder holds neither run nor sweep.
    """
    rows = [{name: record[name] for name in SUMMARY} for record in gather_all(workdirs)]
    for row in rows:
        row |= {name: json.loads(row[name] or 'null') for name in ('texts', 'suites', 'seconds')}
    return rows


def _format_origin(name: str, value: str | None) -> str | None:
    """Returns the parent as NAME@STEP, or the steps of checkpoints, the middle ones left out."""
    if value is None or name == 'parent':
        return value and Path(value).name
    steps = [str(step) for step in json.loads(value)]
    if len(steps) > MOST_STEPS:
        half = MOST_STEPS // 2
        steps = [*steps[:half], f'... ({len(steps)})', *steps[-half:]]
    return ' '.join(steps)


def expand_patterns(workdirs: Iterable[str]) -> list[str]:
    """Returns the workdirs, with a pattern such as runs/* replaced by folders that hold runs.

    Raises ValueError if a pattern matches no such folder.
    """
    expanded = []
    for workdir in workdirs:
        if '*' not in str(workdir) or is_url(str(workdir)):
            expanded.append(workdir)
            continue
        matches = [path for path in sorted(glob.glob(str(workdir))) if has_runs(Path(path))]
        if not matches:
            raise ValueError(f'--workdir={workdir} matches no folder of a run or a sweep')
        expanded += matches
    return expanded


def main(argv: list[str]) -> None:
    workdirs = expand_patterns(flags.FLAGS.workdir)
    if len(argv) > 2:
        raise ValueError(
            f'the SQL query must be one argument; got {len(argv) - 1}. Put it in quotes.'
        )
    if len(argv) == 2:
        table = query(argv[1], *workdirs)
        rows, names = sql.list_rows(table), table.column_names
    else:
        rows = overview(gather_all(workdirs))
        names = list(rows[0]) if rows else ['cell', 'swept', *OVERVIEW]
    print(format_table(rows, names, flags.FLAGS.format))


if __name__ == '__main__':  # only here: other programs that import this have a --workdir too
    text = 'Runs, sweeps, folders, patterns or URLs of them, separated by commas.'
    define_path('workdir', 'runs', text, is_list=True)
    flags.DEFINE_enum('format', 'table', FORMATS, 'Output format.')
    run_program(main)
