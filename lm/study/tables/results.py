"""The records of runs and sweeps: each run's config and results as a row of the table of runs.

Functions that read a file raise ValueError with its name if its content cannot be read.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lm.config.fields import FIELDS
from lm.config.resolve import flatten
from lm.record.names import CONFIG, SWEEP
from lm.record.remote.local_copy import fetch_records
from lm.record.run import READ_ERRORS, Row, Run, annotate_errors
from lm.storage.files import replace_file
from lm.study.tables.arms import arm_and_stage, arm_names
from lm.study.tables.columns import RESULTS, Record, cast_to_column, column_types, columns, schema
from lm.study.train import ledger

TABLE = 'cells.parquet'
UNREADABLE = 'unreadable'
KEPT = 10_000  # records of runs


def _annotate_sweep_errors(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Adds the path of sweep.json, and advice, to errors of the block."""
    return annotate_errors(folder / SWEEP, 'Run the train.py command of the sweep to rewrite it')


def gather(workdir: str | Path) -> list[Record]:
    """Returns the records of a run, of all cells of a sweep, or of all runs directly below a
    folder.

    Numbers that are not known yet, or not finite, are None; so is a config field that a run of an
    older version lacks. A cell or subfolder with unreadable files gets the status `UNREADABLE`,
    with a reason that names the file. Records at a URL (`lm.storage.buckets`) are fetched first,
    and `workdir` is their local folder.

    Args:
      workdir: a folder or URL: a run, a sweep, or a folder of them.

    Returns:
      One record for each run.

    Raises:
      ValueError: if the folder holds neither run nor sweep, or if its own config.json or sweep.json
        cannot be read.
    """
    folder = fetch_records(workdir)
    if (folder / SWEEP).exists():
        return _gather_sweep(folder)
    if (folder / CONFIG).exists():
        config = _read_run_config(folder)
        try:
            return [_make_record(folder, config, Run(folder).results())]
        except (ValueError, OSError) as error:
            return [_make_record(folder, config, {'status': UNREADABLE, 'reason': str(error)})]
    subfolders = [path for path in sorted(folder.glob('*')) if has_runs(path)]
    if not subfolders:
        raise ValueError(
            f'{workdir} contains no run and no sweep: it has no {CONFIG} or {SWEEP}, and neither '
            'have its subfolders. Set --workdir to a folder that train.py wrote'
        )
    records = []
    for path in subfolders:
        try:
            records += gather(path)
        except (ValueError, OSError) as error:
            records.append(_make_record(path, {}, {'status': UNREADABLE, 'reason': str(error)}))
    return records


def gather_all(workdirs: Iterable[str | Path]) -> list[Record]:
    """Returns the records of several workdirs."""
    return [record for workdir in workdirs for record in gather(workdir)]


def has_runs(folder: Path) -> bool:
    """Whether the folder holds a run or a sweep."""
    return any((folder / name).exists() for name in (SWEEP, CONFIG))


def _gather_sweep(folder: Path) -> list[Record]:
    """Returns the records of all cells of a sweep."""
    sweep = read_sweep(folder)
    begun = any((folder / cell['cell']).exists() for cell in sweep['cells'])
    if not begun and (folder / TABLE).exists():  # the runs were deleted, their table kept
        return _read_table(folder / TABLE)
    base = flatten(sweep['base'])
    base_columns = functools.cache(lambda: _config_columns(folder, base))
    with _annotate_sweep_errors(folder):
        arms = arm_names(sweep)
        places = [arm_and_stage(cell, arms) for cell in sweep['cells']]
    return [
        _gather_cell(folder, cell, base, base_columns, place)
        for cell, place in zip(sweep['cells'], places, strict=True)
    ]


def _gather_cell(
    folder: Path,
    cell: Mapping[str, Any],
    base: Mapping[str, Any],
    base_columns: Callable[[], Record],
    membership: Row,
) -> Record:
    """Returns the record of a cell.

    Args:
      folder: the sweep's.
      cell: its entry in sweep.json.
      base: the config that the cells change.
      base_columns: returns its columns, for cells without a readable config.json.
      membership: arm and stage of the cell, if any.
    """
    path = folder / cell['cell']
    membership = {'sweep': folder.name, 'group': cell['group']} | membership
    try:
        if (path / CONFIG).exists():
            record, lacking = _read_run(path, Run(path).stamp())
            if missing := sorted(lacking.intersection(base)):
                raise ValueError(f'{path / CONFIG} cannot be read (it lacks {", ".join(missing)})')
            return record | _cast(path, membership)
        summary = Run(path).results()
    except (ValueError, OSError) as error:
        summary = {'status': UNREADABLE, 'reason': str(error)}
    with _annotate_sweep_errors(folder):
        config = base_columns() | _config_columns(path, cell['differs'])
        return _complete(config | _result_columns(path, summary)) | _cast(path, membership)


@functools.lru_cache(maxsize=KEPT)
def _read_run(path: Path, stamp: Hashable) -> tuple[Record, frozenset[str]]:
    """Returns the record of a run with a config.json, and the fields that this file lacks.

    The caller must not change them.

    Args:
      path: the run.
      stamp: `Run.stamp`, so that a record is kept until a file of the run changes.

    Raises:
      ValueError: if a file cannot be read.
    """
    config = Run(path).config
    record = _make_record(path, config, Run(path).results())
    return record, frozenset(FIELDS.keys() - config.keys())


def _make_record(path: Path, config: Mapping[str, Any], summary: Row) -> Record:
    """Returns the row of a run that is not part of a sweep."""
    return _complete(_config_columns(path, config) | _result_columns(path, summary))


def _complete(values: Record) -> Record:
    """Returns a record of all columns in their order, with None for those without a value."""
    return {name: values.get(name) for name in column_types()}


def _config_columns(path: Path, config: Mapping[str, Any]) -> Record:
    """Returns the columns of the config fields in `config`; other keys are left out."""
    names = columns()
    return _cast(path, {names[field]: value for field, value in config.items() if field in names})


def _result_columns(path: Path, summary: Row) -> Record:
    """Returns the columns of a run's results and of its folder."""
    ending = {name: summary.get(name) for name in ('status', 'reason')}
    numbers = {column: summary.get(name) for column, (name, _) in RESULTS.items()}
    return _cast(path, {'cell': path.name, 'workdir': str(path)} | ending | numbers)


def _cast(path: Path, values: Mapping[str, Any]) -> Record:
    kinds = column_types()
    return {name: cast_to_column(path, name, value, kinds[name]) for name, value in values.items()}


def to_arrow(records: Iterable[Record]) -> pa.Table:
    """Returns the records as an Arrow table."""
    return pa.Table.from_pylist(list(records), schema=schema())


def write_table(workdir: str | Path, records: Iterable[Record] | None = None) -> Path:
    """Writes the records of `gather` to WORKDIR/cells.parquet atomically, and returns its path.

    records: those of the folder, if the caller has gathered them.
    """
    path = Path(workdir) / TABLE
    table = to_arrow(gather(workdir) if records is None else records)
    with replace_file(path) as temporary:
        pq.write_table(table, temporary, write_page_checksum=True)
    return path


def _read_table(path: Path) -> list[Record]:
    """Reads the records of a sweep from its table, after the runs were deleted."""
    errors = (*READ_ERRORS, pa.ArrowException)
    advice = 'Its runs were deleted; delete this file too to train them again'
    with annotate_errors(path, advice, errors):
        rows = pq.read_table(path, page_checksum_verification=True).to_pylist()
        records = [{name: row.get(name) for name in schema().names} for row in rows]
        return to_arrow(records).to_pylist()


def read_sweep(workdir: str | Path) -> dict[str, Any]:
    """Returns the sweep.json of a sweep in the present form (`lm.study.train.ledger`).

    A single run is returned as a sweep of one cell, without axes.
    """
    folder = Path(workdir)
    if not (folder / SWEEP).exists():
        cell = {'cell': folder.name, 'group': 0, 'changes': {}, 'differs': {}}
        return {'base': _read_run_config(folder), 'axes': {}, 'cells': [cell]}
    with _annotate_sweep_errors(folder):
        sweep = ledger.read_sweep(folder)
        _check_sweep(sweep)
        return sweep


def _check_sweep(sweep: Mapping[str, Any]) -> None:
    """Raises ValueError if this is not a sweep, as when another program wrote the file."""
    kinds = {'cell': str, 'group': int | None, 'changes': dict, 'differs': dict}
    if not isinstance(sweep['base'], dict) or not isinstance(sweep['axes'], dict):
        raise ValueError('its base and its axes must be objects')
    if not isinstance(flatten(sweep['base']).get('optim.lr'), int | float):
        raise ValueError('its base has no optim.lr')
    for path, values in sweep['axes'].items():
        if path not in FIELDS or not isinstance(values, list):
            raise ValueError(f'the axis {path!r} must be a config field with a list of values')
    for cell in sweep['cells']:
        for name, kind in kinds.items():
            if not isinstance(cell[name], kind):
                raise ValueError(f'{name} of a cell is {cell[name]!r}')


def _read_run_config(folder: Path) -> Mapping[str, Any]:
    """Returns the config of a run, with values of the columns' types."""
    with annotate_errors(
        folder / CONFIG, 'Delete it, then run the train.py command of the run to rewrite it'
    ):
        config = Run(folder).config
        _make_record(folder, config, {'status': ''})  # each value is of the type of its column
        return config
