"""The records of runs and sweeps: each run's config and results as a row of the table of runs.

Functions that read a file raise ValueError with its name if its content cannot be read.
"""

import contextlib
from collections.abc import Iterable, Mapping
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
    with _annotate_sweep_errors(folder):
        arms = arm_names(sweep)
        places = [arm_and_stage(cell, arms) for cell in sweep['cells']]
    return [
        _gather_cell(folder, cell, base | cell['differs'], place)
        for cell, place in zip(sweep['cells'], places, strict=True)
    ]


def _gather_cell(
    folder: Path, cell: Mapping[str, Any], fallback_config: Mapping[str, Any], membership: Row
) -> Record:
    """Returns the record of a cell.

    fallback_config: config from sweep.json, for a cell with an unreadable config.json. membership:
    arm and stage of the cell, if any.
    """
    path = folder / cell['cell']
    membership = {'sweep': folder.name, 'group': cell['group']} | membership
    try:
        config = Run(path).config if (path / CONFIG).exists() else fallback_config
        if missing := sorted(fallback_config.keys() & FIELDS.keys() - config.keys()):
            raise ValueError(f'{path / CONFIG} cannot be read (it lacks {", ".join(missing)})')
        return _make_record(path, config, Run(path).results(), **membership)
    except (ValueError, OSError) as error:
        with _annotate_sweep_errors(folder):
            return _make_record(
                path, fallback_config, {'status': UNREADABLE, 'reason': str(error)}, **membership
            )


def _make_record(path: Path, config: Mapping[str, Any], results: Row, **membership: Any) -> Record:
    """Returns a row of the table. membership: sweep, group, arm and stage of a cell."""
    row = {
        'cell': path.name,
        'workdir': str(path),
        'sweep': None,
        'group': None,
        'arm': None,
        'stage': None,
        **membership,
        'status': results['status'],
        'reason': results.get('reason'),
        **{column: config.get(name) for name, column in columns().items()},
        **{column: results.get(name) for column, (name, _) in RESULTS.items()},
    }
    return {name: cast_to_column(path, name, row[name], kind) for name, kind in column_types()}


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
