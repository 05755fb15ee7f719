"""The points that a law is fitted to: numbers of runs, from their folders or from a table."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
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

Row = Mapping[str, Any]
TABLE, RUN, STEP, RATE, HELD_OUT = 'runs', 'run', 'step', 'lr', 'is_held_out'
MOST_LISTED = 20  # columns
FEW_RUNS = 5  # below which the runs of a law of curves are resampled in blocks
BLOCKS = 10  # of a run's points, each in one piece, since neighbours err alike


@dataclasses.dataclass(frozen=True)
class Points:
    """runs [points]: the name of each one's run; at: columns that the figures are over."""

    runs: np.ndarray
    columns: Columns
    target: np.ndarray
    size: np.ndarray
    figure_columns: Columns
    is_held_out: np.ndarray  # [points]: held out by a condition
    left_out: list[str]

    def arrays(self) -> dict[str, Any]:
        """Everything that has an entry for each point."""
        return {name: value for name, value in vars(self).items() if name != 'left_out'}

    def take(self, index: np.ndarray) -> 'Points':
        return Points(**jax.tree.map(lambda x: x[index], self.arrays()), left_out=self.left_out)


@dataclasses.dataclass(frozen=True)
class PointOptions:
    """loss and score: names of columns. where and held_out: conditions in SQL on runs."""

    loss: str
    score: str = 'score'
    where: str = ''
    held_out: str = ''
    momentum: float = MOMENTUM


def select_rows(table: pa.Table, options: PointOptions) -> list[Row]:
    """The rows for which `where` holds in SQL, with HELD_OUT: whether `held_out` does."""
    held, where = options.held_out or 'false', f' where {options.where}' if options.where else ''
    select = f'select *, coalesce(({held}), false) as {HELD_OUT} from {TABLE}{where}'
    return sql.run_query(select, {TABLE: table}).to_pylist()


def points_from_table(law: Law, path: Path, options: PointOptions) -> Points:
    """The points of a CSV or Parquet file. Raises ValueError where it is neither."""
    try:
        table = (pa.parquet.read_table if path.suffix == '.parquet' else pa.csv.read_csv)(path)
    except pa.ArrowException as error:
        reason = ' '.join(str(error).split())
        raise ValueError(f'{path} is no table in CSV or Parquet ({reason})') from error
    if not table.num_rows:
        raise ValueError('the table has no rows')
    rows = select_rows(table, options)
    if law.curve is None:
        named = [row | {RUN: str(row.get(RUN, f'row {i + 1}'))} for i, row in enumerate(rows)]
        return points_from_runs(law, named, options, [])
    check_columns(law, rows, (RUN, STEP, RATE, options.loss))
    curves: dict[str, list[Row]] = {}
    for row in rows:
        curves.setdefault(str(row[RUN]), []).append(row)
    found = []
    for name, own in curves.items():
        for row in own:
            if type(row[STEP]) is not int or row[STEP] < 1:
                raise ValueError(f'{name} has a row of {STEP} {row[STEP]!r}; they count from 1')
        known = sorted((row[STEP], row[RATE]) for row in own if is_number(row[RATE]))
        if not known:
            raise ValueError(f'{name} has no {RATE} in any row')
        every = np.arange(1, max(row[STEP] for row in own) + 1)
        found.append((own[0] | {RUN: name}, np.interp(every, *np.array(known, float).T), own))
    return points_from_curves(law, found, options, [])


def points_from_workdir(law: Law, workdir: str | Path, options: PointOptions) -> Points:
    """The points of runs that have ended; `left_out` says why the others are left out."""
    rows = select_rows(to_arrow(gather(workdir)), options)
    often = collections.Counter(row['cell'] for row in rows)
    rows = [row | {RUN: row['cell'] if often[row['cell']] == 1 else row['workdir']} for row in rows]
    left_out = [f'{row[RUN]}: {row["status"]}' for row in rows if row['status'] != 'done']
    ended = [row for row in rows if row['status'] == 'done']
    if law.curve is None:
        return points_from_runs(law, ended, options, left_out)
    found = []
    for row in ended:
        run = Run(Path(row['workdir']))
        recipe = run.read_recipe()
        every = recipe.optim.lr * schedule_fractions(recipe, np.arange(1, recipe.train.steps + 1))
        found.append((row, every, run.rows()))
    return points_from_curves(law, found, options, left_out)


def check_columns(law: Law, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Raises ValueError for a column that no row has."""
    there = dict.fromkeys(name for row in rows for name in row if name != HELD_OUT)
    for name in names:
        if rows and name not in there:
            listed = f'; there are {", ".join(there)}.' if len(there) < MOST_LISTED else '.'
            raise ValueError(
                f'{law.name} needs a column {name!r}{listed}{suggest_nearest(name, there)}'
            )


def is_number(value: Any, above: float = -math.inf) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and value > above


def points_from_runs(
    law: Law, rows: Sequence[Row], options: PointOptions, left_out: list[str]
) -> Points:
    """One point a run."""
    columns = {name: options.loss if name == LOSS else name for name in law.columns}
    target = options.loss if law.target == LOSS else options.score
    check_columns(law, rows, (*columns.values(), target))
    left_out, kept = list(left_out), []
    for row in rows:
        lowest = dict.fromkeys(columns.values(), 0.0)
        lowest[target] = 0.0 if law.target == LOSS else -math.inf
        bad = [name for name, least in lowest.items() if not is_number(row[name], least)]
        left_out += [f'{row[RUN]}: its {name} is {row[name]}' for name in bad[:1]]
        kept += [] if bad else [row]
    values = {name: np.array([row[c] for row in kept], float) for name, c in columns.items()}
    return Points(
        runs=np.array([row[RUN] for row in kept]),
        columns=values,
        target=np.array([row[target] for row in kept], float),
        size=law.size(values),
        figure_columns=values,
        is_held_out=np.array([row[HELD_OUT] for row in kept], bool),
        left_out=left_out,
    )


def points_from_curves(
    law: Law,
    curves: Sequence[tuple[Row, np.ndarray, Sequence[Row]]],
    options: PointOptions,
    left_out: list[str],
) -> Points:
    """The losses along runs (row, rate at each step, rows with `step` and the loss). The size of a
    point is its run's number of steps.
    """
    left_out, parts = list(left_out), []
    for row, rates, recorded in curves:
        name, first = row[RUN], peak_step(rates)
        if not rates.max() > 0:
            left_out.append(f'{name}: its {RATE} is {rates.max()}')
            continue
        losses = {r[STEP]: r[options.loss] for r in recorded if options.loss in r}
        seen = {s: v for s, v in losses.items() if is_number(v, 0.0) and first <= s <= len(rates)}
        if broken := [s for s, v in losses.items() if v is not None and not is_number(v, 0.0)]:
            left_out.append(f'{name}, {len(broken)} steps: its {options.loss} is no loss')
        if not seen:
            left_out.append(f'{name}: no {options.loss} behind the warm-up, of {first} steps')
            continue
        steps = np.array(sorted(seen))
        is_named = any(r.get(HELD_OUT) for r in (row, *recorded))
        own = Points(
            runs=np.array([name] * len(steps)),
            columns=law.curve(rates, steps, options.momentum),
            target=np.array([seen[step] for step in steps], float),
            size=np.full(len(steps), float(len(rates))),
            figure_columns={STEP: steps.astype(float)},
            is_held_out=np.full(len(steps), is_named),
            left_out=[],
        )
        parts.append(own)
    sizes = {row[N] for row, _, _ in curves if is_number(row.get(N))}
    if len(sizes) > 1:
        listed = ', '.join(f'{size:,}' for size in sorted(sizes))
        raise ValueError(
            f'{law.name} is of one model, and these have {listed} parameters. Choose runs, such as '
            f'--where="parameters = {min(sizes)}"'
        )
    if not parts:
        raise ValueError(f'{law.name}: no run has a {options.loss}' + format_left_out(left_out))
    arrays = jax.tree.map(lambda *each: np.concatenate(each), *(part.arrays() for part in parts))
    return Points(**arrays, left_out=left_out)


def format_left_out(left_out: Sequence[str]) -> str:
    """The first reasons of those left out, in parentheses."""
    more = f' and {len(left_out) - 3} more' if len(left_out) > 3 else ''
    return f' (left out: {"; ".join(left_out[:3])}{more})' if left_out else ''


def resampling_groups(points: Points, law: Law) -> tuple[np.ndarray, str]:
    """A number for each point, shared by points that are resampled together, and the word for
    these groups.
    """
    names, run = np.unique(points.runs, return_inverse=True)
    if law.curve is None or len(names) >= FEW_RUNS:
        return run, 'runs'
    place = np.empty(len(run), int)
    for i in range(len(names)):
        (own,) = np.nonzero(run == i)
        place[own] = np.arange(len(own)) * BLOCKS // len(own)
    return run * BLOCKS + place, f'blocks of a run, {BLOCKS} each'


def split_held_out(points: Points, law: Law, share: float, by_name: bool) -> tuple[Points, Points]:
    """Points to fit and points held out: the named ones, or else the largest `share` of the runs.

    Runs of one size go together. Raises ValueError where too few are left to fit: laws need more
    runs than constants, those of curves more points.
    """
    names, first = np.unique(points.runs, return_index=True)
    held = points.is_held_out
    if by_name and len(held) and not held.any():
        listed = ', '.join(names[:5]) + (', ...' if len(names) > 5 else '')
        raise ValueError(
            f'--hold_out_where holds for none of the runs ({listed}). Correct it, or leave it out'
        )
    if not by_name:
        count = max(round(share * len(names)), 1) if share and len(names) else 0
        largest = np.sort(points.size[first])[::-1]
        held = points.size >= largest[count - 1] if count else np.zeros(len(points.runs), bool)
    if held.all() and len(held):
        raise ValueError(
            f'all {len(names)} runs would be held out: none is larger than the others, or the '
            'condition holds for all. Say which by --hold_out_where, or --hold_out=0'
        )
    fitted, what = points.take(~held), 'runs' if law.curve is None else 'points'
    if len(fitted.target) <= len(law.constants):
        raise ValueError(
            f'{law.name} has {len(law.constants)} constants and needs more {what} than that to be '
            f'fitted to, besides those held out: {len(law.constants) + 1} + {int(held.sum())}, got '
            f'{len(held)}' + format_left_out(points.left_out)
        )
    for name, column in fitted.columns.items():
        if law.min_distinct > (different := len(np.unique(column))):
            raise ValueError(
                f'{law.name} needs {law.min_distinct} different {name}, or its constants are not '
                f'determined; the {len(fitted.target)} runs to fit have {different}'
            )
    for name in ('S2', 'fall'):
        if name in fitted.columns and not fitted.columns[name].any():
            raise ValueError(
                f'{law.name} needs a run whose learning rate falls; those to fit hold it constant'
            )
    return fitted, points.take(held)
