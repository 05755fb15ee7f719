"""Runs as a table: one row a run, its config and its results as columns, asked in SQL.

python -m eval.runs [--workdir=DIR[,DIR]] [--format=table|csv|markdown|json] [SQL]

    python -m eval.runs "select norm, avg(ce) from runs where status = 'done' group by norm"

Table `runs` has a row for each run or cell: what it is, its config and its results
(`eval.columns`). A run of an older version has its config in the present form. Table `metrics` has
a row for each cell and recorded step, with every quantity of metrics.jsonl, those of layers as
lists; join it `using (cell)`, or `using (workdir)` where two sweeps share a cell. `ce` is the final
validation loss in `runs`, and the training batch's loss in `metrics`.
"""

import collections
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from absl import app, flags

from eval import sql
from eval.columns import RESULTS, columns, kinds_of_columns, schema, typed
from eval.results import config_of, naming, naming_sweep, results_of, rows_of, sweep_of
from eval.text import FORMATS, number, render
from lm.config import flatten
from lm.files import replacing
from lm.record.fetched import at_hand
from lm.record.workdir import CONFIG, SWEEP
from lm.run.command import run_main
from lm.sections import FIELDS

if TYPE_CHECKING:
    import pandas as pd  # takes a second to import, which train.py need not wait

TABLE = 'cells.parquet'
UNREADABLE = 'unreadable'
Record = dict[str, Any]

OVERVIEW = ('status', 'ce', 'bits_per_byte', 'best_ce', 'tokens_per_sec')


def gather(workdir: str | Path) -> list[Record]:
    """One record a cell of a sweep, one for a run, or those of all runs and sweeps directly below.

    Numbers that are not known yet, or not finite, are None; so is a config field that a run of an
    older version does not have. A cell, or what lies below the folder, whose files cannot be read
    is `UNREADABLE`, with a reason that names the file. Raises ValueError where the folder holds
    neither run nor sweep, or where its own config.json or sweep.json cannot be read. Of a URL
    (`lm.buckets`) the records are fetched, and `workdir` is where they then are.
    """
    folder = at_hand(workdir)
    if (folder / SWEEP).exists():
        return _gather_sweep(folder)
    if (folder / CONFIG).exists():
        return [_gather_run(folder)]
    below = [path for path in sorted(folder.glob('*')) if _holds_runs(path)]
    if not below:
        raise ValueError(
            f'{workdir} holds no run and no sweep: there is no {CONFIG} or {SWEEP} in it, nor in a '
            'folder below it. Give a --workdir that train.py wrote'
        )
    return [record for path in below for record in _gather_below(path)]


def _holds_runs(folder: Path) -> bool:
    return any((folder / name).exists() for name in (SWEEP, CONFIG))


def _gather_below(folder: Path) -> list[Record]:
    try:
        return gather(folder)
    except (ValueError, OSError) as error:
        return [_record(folder, {}, _unreadable(error))]


def _gather_run(folder: Path) -> Record:
    config = _config_of_run(folder)
    try:
        return _record(folder, config, results_of(folder))
    except (ValueError, OSError) as error:
        return _record(folder, config, _unreadable(error))


def _config_of_run(folder: Path) -> Mapping[str, Any]:
    with naming(folder / CONFIG, 'Delete it, and the train.py command of the run writes it anew'):
        config = config_of(folder)
        _record(folder, config, {'status': ''})  # each value is of the type of its column
        return config


def _unreadable(error: Exception) -> dict[str, Any]:
    return {'status': UNREADABLE, 'reason': str(error)}


def read_sweep(workdir: str | Path) -> dict[str, Any]:
    """The sweep.json of a sweep; of a single run, one without axes or other cells.

    Raises ValueError, naming the file, where it cannot be read or holds no sweep.
    """
    folder = Path(workdir)
    if (folder / SWEEP).exists():
        return sweep_of(folder)
    own = {'cell': folder.name, 'group': 0, 'changes': {}, 'differs': {}}
    return {'base': _config_of_run(folder), 'axes': {}, 'cells': [own]}


def _gather_sweep(folder: Path) -> list[Record]:
    sweep = read_sweep(folder)
    begun = any((folder / cell['cell']).exists() for cell in sweep['cells'])
    if not begun and (folder / TABLE).exists():  # the runs were deleted, their table kept
        return _read_table(folder / TABLE)
    base = flatten(sweep['base'])
    return [_gather_cell(folder, cell, base | cell['differs']) for cell in sweep['cells']]


def _gather_cell(folder: Path, cell: Mapping[str, Any], known: Mapping[str, Any]) -> Record:
    """`known`: the config by what sweep.json says, for a cell whose own cannot be read."""
    path = folder / cell['cell']
    place = {'sweep': folder.name, 'group': cell['group']}
    try:
        config = config_of(path) if (path / CONFIG).exists() else known
        if lost := sorted(known.keys() & FIELDS.keys() - config.keys()):
            raise ValueError(f'{path / CONFIG} cannot be read (it lacks {", ".join(lost)})')
        return _record(path, config, results_of(path), **place)
    except (ValueError, OSError) as error:
        with naming_sweep(folder):
            return _record(path, known, _unreadable(error), **place)


def _read_table(path: Path) -> list[Record]:
    with naming(path, 'The runs that it was made of are gone; delete it to train them again'):
        rows = pq.read_table(path, page_checksum_verification=True).to_pylist()
        records = [{name: row.get(name) for name in schema().names} for row in rows]
        return as_arrow(records).to_pylist()


def _record(
    path: Path,
    config: Mapping[str, Any],
    results: Mapping[str, Any],
    sweep: str | None = None,
    group: int | None = None,
) -> Record:
    known = {
        'cell': path.name,
        'workdir': str(path),
        'sweep': sweep,
        'group': group,
        'status': results['status'],
        'reason': results.get('reason'),
        **{column: config.get(name) for name, column in columns().items()},
        **{column: results.get(name) for column, (name, _) in RESULTS.items()},
    }
    return {name: typed(path, name, known[name], kind) for name, kind in kinds_of_columns()}


def as_arrow(records: Iterable[Record]) -> pa.Table:
    return pa.Table.from_pylist(list(records), schema=schema())


def write_table(workdir: str | Path) -> Path:
    """Writes what `gather` finds to WORKDIR/cells.parquet, all or nothing, and returns its path."""
    path = Path(workdir) / TABLE
    with replacing(path) as temporary:
        pq.write_table(as_arrow(gather(workdir)), temporary, write_page_checksum=True)
    return path


def frame(*workdirs: str | Path) -> 'pd.DataFrame':
    """What `gather` finds, one row a run; a column of integers with gaps is float."""
    return as_arrow(record for path in workdirs for record in gather(path)).to_pandas()


def metrics_frame(*workdirs: str | Path) -> 'pd.DataFrame':
    """cell, workdir, step, and every quantity of metrics.jsonl; one row a cell and step."""
    return _metrics([record for path in workdirs for record in gather(path)]).to_pandas()


def _metrics(records: list[Record]) -> pa.Table:
    merged: dict[tuple[str, int], dict[str, Any]] = {}
    for record in records:
        for row in rows_of(Path(record['workdir'])):
            key = record['workdir'], row['step']
            at_step = merged.setdefault(key, {n: record[n] for n in ('cell', 'workdir')})
            at_step |= {name: v for name, v in row.items() if _is_number(v)}
    known = [('cell', pa.string()), ('workdir', pa.string()), ('step', pa.int64())]
    names = dict.fromkeys(name for row in merged.values() for name in row)
    rows = list(merged.values())
    found = [(name, _numbers(name, rows)) for name in names if name not in dict(known)]
    return pa.Table.from_pylist(rows, schema=pa.schema(known + found))


def _is_number(value: Any) -> bool:
    """Or a list of numbers, or of such lists; None is where a number was not finite."""
    if isinstance(value, list):
        return all(map(_is_number, value))
    return value is None or isinstance(value, int | float)


def _numbers(name: str, rows: list[Record]) -> pa.DataType:
    """A number, or lists as deep as those that the rows have."""
    kind, value = pa.float64(), next((row[name] for row in rows if row.get(name) is not None), None)
    while isinstance(value, list):
        kind, value = pa.list_(kind), next(iter(value), None)
    return kind


def query(select: str, *workdirs: str | Path) -> pa.Table:
    """The rows of a select over tables `runs` and `metrics` (see above).

    Raises ValueError with DuckDB's message in one line, and the nearest column for an unknown one.
    """
    records = [record for path in workdirs for record in gather(path)]
    tables = {'runs': as_arrow(records)}
    if sql.mentions(select, 'metrics'):  # reads every metrics.jsonl
        tables['metrics'] = _metrics(records)
    return sql.answer(select, tables)


def swept_columns(records: Iterable[Record]) -> list[str]:
    """The config columns in which the records differ."""
    rows = list(records)
    return [name for name in columns().values() if len({repr(row[name]) for row in rows}) > 1]


def overview(records: list[Record]) -> list[Record]:
    """Of each record: its cell, in what it differs from the others of its sweep, and the main
    results.
    """
    by_sweep = collections.defaultdict(list)
    for record in records:
        by_sweep[str(Path(record['workdir']).parent)].append(record)
    rows = []
    for siblings in by_sweep.values():
        swept = swept_columns(siblings) if siblings[0]['sweep'] else []
        for row in siblings:
            caption = ' '.join(f'{name}={number(row[name])}' for name in swept)
            results = {name: row[name] for name in OVERVIEW}
            rows.append({'cell': row['cell'], 'swept': caption} | results)
    return rows


def main(argv: list[str]) -> None:
    workdirs = flags.FLAGS.workdir
    if len(argv) > 2:
        raise ValueError(f'give the SQL as one argument, in quotes; got {argv[1:]}')
    if len(argv) == 2:
        table = query(argv[1], *workdirs)
        rows, names = table.to_pylist(), table.column_names
    else:
        rows = overview([record for path in workdirs for record in gather(path)])
        names = ['cell', 'swept', *OVERVIEW]
    print(render(rows, names, flags.FLAGS.format))


if __name__ == '__main__':  # only here, since train.py imports this module and has a --workdir too
    flags.DEFINE_list('workdir', ['runs'], 'Run, sweep, or folder of them; or URLs; with commas.')
    flags.DEFINE_enum('format', 'table', FORMATS, 'How to print what was asked.')
    app.run(run_main(main))
