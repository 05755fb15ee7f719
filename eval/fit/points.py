"""The points that a law is fitted to: numbers of runs, from their folders or from a table."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from eval.fit.laws import LOSS, MOMENTUM, Columns, Law, N, peak_step
from lm.record.run import Run
from lm.run.tables import schedule_fractions
from lm.study.tables import sql
from lm.study.tables.results import gather, to_arrow
from modules.choices import suggest_nearest

Row = dict[str, Any]
TABLE, RUN, STEP, RATE, HELD_OUT = 'runs', 'run', 'step', 'lr', 'is_held_out'
MOST_LISTED = 20  # columns
MAX_STEP = 10**8  # in tables: the learning rate at each step takes 8 bytes
FEW_RUNS = 5  # below which the runs of a law of curves are resampled in blocks
BLOCKS = 10  # of a run's points, each in one piece, since neighbours err alike


@dataclasses.dataclass(frozen=True)
class Points:
    """Points of runs.

    runs [points]: the name of each point's run. figure_columns: columns of the figures' x axes.
    """

    runs: np.ndarray
    columns: Columns
    target: np.ndarray
    size: np.ndarray
    figure_columns: Columns
    is_held_out: np.ndarray  # [points]: held out by a condition
    left_out: list[str]

    def arrays(self) -> dict[str, Any]:
        """Returns the fields with an entry for each point."""
        return {name: value for name, value in vars(self).items() if name != 'left_out'}

    def take(self, index: np.ndarray) -> 'Points':
        """Returns some of the points."""
        return Points(**jax.tree.map(lambda x: x[index], self.arrays()), left_out=self.left_out)


@dataclasses.dataclass(frozen=True)
class PointOptions:
    """loss and score: names of columns. where and held_out: SQL conditions on runs."""

    loss: str
    score: str = 'score'
    where: str = ''
    held_out: str = ''
    momentum: float = MOMENTUM


def select_rows(table: pa.Table, options: PointOptions) -> list[Row]:
    """Returns the rows that fulfil `where`, with HELD_OUT: whether they fulfil `held_out`."""
    held_out, where = (
        options.held_out or 'false',
        f' where {options.where}' if options.where else '',
    )
    select = f'select *, coalesce(({held_out}), false) as {HELD_OUT} from {TABLE}{where}'
    return sql.list_rows(sql.run_query(select, {TABLE: table}))


def points_from_table(law: Law, path: Path, options: PointOptions) -> Points:
    """Reads the points of a CSV or Parquet file.

    Args:
      law: the law to fit.
      path: the file.
      options: columns and conditions.

    Raises:
      ValueError: if the file is neither, or lacks rows or columns.
    """
    try:
        table = (pa.parquet.read_table if path.suffix == '.parquet' else pa.csv.read_csv)(path)
    except pa.ArrowException as error:
        reason = ' '.join(str(error).split())
        raise ValueError(f'{path} cannot be read as CSV or Parquet ({reason})') from error
    if not table.num_rows:
        raise ValueError(f'{path} has no rows')
    rows = select_rows(table, options)
    if law.curve is None:
        named = [row | {RUN: str(row.get(RUN, f'row {i + 1}'))} for i, row in enumerate(rows)]
        return points_from_runs(law, named, options, [])
    check_columns(law, rows, (RUN, STEP, RATE, options.loss))
    curves: dict[str, list[Row]] = {}
    for row in rows:
        curves.setdefault(str(row[RUN]), []).append(row)
    curves_with_rates = []
    for name, run_rows in curves.items():
        check_steps(name, [row[STEP] for row in run_rows])
        known_rates = sorted((row[STEP], row[RATE]) for row in run_rows if is_number(row[RATE]))
        if not known_rates:
            raise ValueError(f'{name} needs {RATE}, its learning rate, in at least one row')
        steps = np.arange(1, max(row[STEP] for row in run_rows) + 1)
        curves_with_rates.append(
            (run_rows[0] | {RUN: name}, np.interp(steps, *np.array(known_rates, float).T), run_rows)
        )
    return points_from_curves(law, curves_with_rates, options, [])


def check_steps(run: str, steps: Sequence[Any]) -> None:
    """Raises ValueError unless the steps of a run in a table are integers that differ."""
    for step in steps:
        if type(step) is not int or not 1 <= step <= MAX_STEP:
            raise ValueError(
                f'{run}: {STEP} must be an integer from 1 to {MAX_STEP:,}; got {step!r}'
            )
    step, number = collections.Counter(steps).most_common(1)[0]
    if number > 1:
        raise ValueError(
            f'{run}: each {STEP} must be in one row; got {STEP} {step} in {number} rows. Join them.'
        )


def points_from_workdir(law: Law, workdir: str | Path, options: PointOptions) -> Points:
    """Reads the points of finished runs; `left_out` gives the reasons for leaving out others.

    Args:
      law: the law to fit.
      workdir: a sweep, a folder of runs, or a URL.
      options: columns and conditions.
    """
    rows = select_rows(to_arrow(gather(workdir)), options)
    counts = collections.Counter(row['cell'] for row in rows)
    rows = [
        row | {RUN: row['cell'] if counts[row['cell']] == 1 else row['workdir']} for row in rows
    ]
    left_out = [f'{row[RUN]}: {row["status"]}' for row in rows if row['status'] != 'done']
    ended = [row for row in rows if row['status'] == 'done']
    if law.curve is None:
        return points_from_runs(law, ended, options, left_out)
    curves = []
    for row in ended:
        run = Run(Path(row['workdir']))
        recipe = run.read_recipe()
        rates = recipe.optim.lr * schedule_fractions(recipe, np.arange(1, recipe.train.steps + 1))
        curves.append((row, rates, run.rows()))
    return points_from_curves(law, curves, options, left_out)


def check_columns(law: Law, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Raises ValueError for a column that no row has.

    Args:
      law: the law that needs the columns.
      rows: rows of runs.
      names: the columns.
    """
    present = dict.fromkeys(name for row in rows for name in row if name != HELD_OUT)
    for name in names:
        if rows and name not in present:
            listed = f'; the columns are {", ".join(present)}.'
            listed = listed if len(present) < MOST_LISTED else '.'
            raise ValueError(
                f'{law.name} needs a column {name!r}{listed}{suggest_nearest(name, present)}'
            )


def is_number(value: Any, above: float = -math.inf) -> bool:
    """Whether a value is a finite number above a bound."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and value > above


def points_from_runs(
    law: Law, rows: Sequence[Row], options: PointOptions, left_out: list[str]
) -> Points:
    """Returns a point for each run.

    Args:
      law: the law to fit.
      rows: a row for each run.
      options: columns and conditions.
      left_out: reasons so far why runs are left out.
    """
    columns = {name: options.loss if name == LOSS else name for name in law.columns}
    target = options.loss if law.target == LOSS else options.score
    check_columns(law, rows, (*columns.values(), target))
    left_out, complete = list(left_out), []
    for row in rows:
        lowest = dict.fromkeys(columns.values(), 0.0)
        lowest[target] = 0.0 if law.target == LOSS else -math.inf
        bad = [name for name, lower in lowest.items() if not is_number(row[name], lower)]
        left_out += [f'{row[RUN]}: {name} is {row[name]}' for name in bad[:1]]
        complete += [] if bad else [row]
    values = {
        name: np.array([row[column] for row in complete], float) for name, column in columns.items()
    }
    return Points(
        runs=np.array([row[RUN] for row in complete]),
        columns=values,
        target=np.array([row[target] for row in complete], float),
        size=law.size(values),
        figure_columns=values,
        is_held_out=np.array([row[HELD_OUT] for row in complete], bool),
        left_out=left_out,
    )


def points_from_curves(
    law: Law,
    curves: Sequence[tuple[Row, np.ndarray, Sequence[Row]]],
    options: PointOptions,
    left_out: list[str],
) -> Points:
    """Returns the points along loss curves. The size of a point is the number of steps of its run.

    Args:
      law: the law to fit.
      curves: for each run its row, the rate at each step, and rows with `step` and the loss.
      options: columns and conditions.
      left_out: reasons so far why runs are left out.

    Raises:
      ValueError: if no run has the loss, or if runs are of several models.
    """
    assert law.curve is not None, law.name
    left_out, parts = list(left_out), []
    for row, rates, recorded in curves:
        name, first = row[RUN], peak_step(rates)
        if not rates.max() > 0:
            left_out.append(f'{name}: {RATE} is {rates.max()}')
            continue
        losses = {r[STEP]: r[options.loss] for r in recorded if options.loss in r}
        usable = {s: v for s, v in losses.items() if is_number(v, 0.0) and first <= s <= len(rates)}
        if broken := [s for s, v in losses.items() if v is not None and not is_number(v, 0.0)]:
            left_out.append(
                f'{len(broken)} steps of {name}: {options.loss} is not a positive number'
            )
        if not usable:
            left_out.append(f'{name}: no {options.loss} after {first} steps of warmup')
            continue
        steps = np.array(sorted(usable))
        is_named = any(r.get(HELD_OUT) for r in (row, *recorded))
        part = Points(
            runs=np.array([name] * len(steps)),
            columns=law.curve(rates, steps, options.momentum),
            target=np.array([usable[step] for step in steps], float),
            size=np.full(len(steps), float(len(rates))),
            figure_columns={STEP: steps.astype(float)},
            is_held_out=np.full(len(steps), is_named),
            left_out=[],
        )
        parts.append(part)
    sizes = {row[N] for row, _, _ in curves if is_number(row.get(N))}
    if len(sizes) > 1:
        listed = ', '.join(f'{size:,}' for size in sorted(sizes))
        raise ValueError(
            f'{law.name} fits runs of a single model; these have {listed} parameters. Select one '
            f'size, such as --where="parameters = {min(sizes)}"'
        )
    if not parts:
        raise ValueError(
            f'{law.name} has nothing to fit: no run has {options.loss}' + format_left_out(left_out)
        )
    arrays = jax.tree.map(
        lambda *columns: np.concatenate(columns), *(part.arrays() for part in parts)
    )
    return Points(**arrays, left_out=left_out)


def format_left_out(left_out: Sequence[str]) -> str:
    """Returns the first reasons in parentheses."""
    ending = f' and {len(left_out) - 3} more' if len(left_out) > 3 else ''
    return f' (skipped: {"; ".join(left_out[:3])}{ending})' if left_out else ''


def resampling_groups(points: Points, law: Law) -> tuple[np.ndarray, str]:
    """Returns an id for each point, equal for points resampled together, and a group's name."""
    names, run = np.unique(points.runs, return_inverse=True)
    if law.curve is None or len(names) >= FEW_RUNS:
        return run, 'runs'
    block = np.empty(len(run), int)
    for i in range(len(names)):
        (indices,) = np.nonzero(run == i)
        block[indices] = np.arange(len(indices)) * BLOCKS // len(indices)
    return run * BLOCKS + block, f'{BLOCKS} blocks per run'


def split_held_out(points: Points, law: Law, share: float, by_name: bool) -> tuple[Points, Points]:
    """Splits points into those to fit and those held out. Runs of equal size stay together.

    Args:
      points: all points.
      law: the law to fit.
      share: share of the largest runs to hold out, if not by name.
      by_name: whether to hold out the runs that a condition names.

    Raises:
      ValueError: if too few points are left: laws need more runs than constants, laws of curves
        more points.
    """
    names, first = np.unique(points.runs, return_index=True)
    is_held_out = points.is_held_out
    if by_name and len(is_held_out) and not is_held_out.any():
        listed = ', '.join(names[:5]) + (', ...' if len(names) > 5 else '')
        raise ValueError(
            f'--hold_out_where matches none of the runs ({listed}). Correct it or leave it out.'
        )
    if not by_name:
        count = max(round(share * len(names)), 1) if share and len(names) else 0
        largest = np.sort(points.size[first])[::-1]
        is_held_out = (
            points.size >= largest[count - 1] if count else np.zeros(len(points.runs), bool)
        )
    if is_held_out.all() and len(is_held_out):
        raise ValueError(
            f'all {len(names)} runs would be held out: they have the same size, or all match the '
            'condition. Set another --hold_out_where, or --hold_out=0.'
        )
    fitted, unit = points.take(~is_held_out), 'runs' if law.curve is None else 'points'
    if len(fitted.target) <= len(law.constants):
        raise ValueError(
            f'{law.name} has {len(law.constants)} constants, so it needs at least '
            f'{len(law.constants) + 1} {unit} to fit, besides {int(is_held_out.sum())} held out; '
            f'got {len(is_held_out)} in total' + format_left_out(points.left_out)
        )
    for name, column in fitted.columns.items():
        if law.min_distinct > (different := len(np.unique(column))):
            raise ValueError(
                f'{law.name} needs at least {law.min_distinct} different values of {name} to '
                f'determine its constants; the {len(fitted.target)} runs to fit have {different}'
            )
    for name in ('S2', 'fall'):
        if name in fitted.columns and not fitted.columns[name].any():
            raise ValueError(
                f'{law.name} needs a run whose learning rate falls; it is constant in all runs to '
                'fit'
            )
    return fitted, points.take(is_held_out)
