"""Figures of a fit, and a page of it: points, those held out as open diamonds, the law as lines."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from eval.charts import COLOURS, Chart, save, write_page
from eval.fit.fitting import Fitted, about, constant_rows, held_rows, is_outside, judged
from eval.fit.laws import LOSS, SHARE, D, U
from eval.fit.points import STEP, Points
from lm.study.tables.text import number

MOST_LINES = len(COLOURS)
FITTED, HELD_OUT, THE_LAW = 'fitted', 'held out', 'the law'
LOSS_TITLE, ERROR_TITLE = 'loss, nats a token', 'predicted / measured - 1'
COUNT = "replace(format(datum.value, '.3~s'), 'G', 'B')"  # 1.5B tokens
BY_KIND = alt.Color('what:N', title=None, legend=alt.Legend(symbolSize=50))
Columns = Mapping[str, Any]


def write_figures(folder: Path, found: Fitted) -> list[Path]:
    """Writes FOLDER/LAW.html, .png and .svg; returns their paths."""
    law, panels = found.fit.law, figure(found)
    page = folder / f'{law.name}.html'
    words, is_bad = judged(found)
    outside = [
        f'{row["run"]}: measured {number(row["measured"])}, predicted {number(row["predicted"])} '
        f'({number(row["low"])} to {number(row["high"])})'
        for row in filter(is_outside, held_rows(found))
    ]
    write_page(
        page,
        panels,
        title=f'{law.name}: {law.equation}',
        about=f'fit of a law, from {law.source}',
        verdict=words,
        is_bad=is_bad,
        notes=[*outside, about(found), 'Open diamonds are held out.'],
        rows=constant_rows(found.fit),
        failed=0,
    )
    title = f'{law.equation}; open diamonds: held out'
    drawn = alt.hconcat(*panels.values(), title=title).resolve_scale(color='independent')
    return [page] + [save(drawn, page.with_suffix(kind)) for kind in ('.png', '.svg')]


def figure(found: Fitted) -> dict[str, Chart]:
    """Draws what the law says beside what was measured, and their difference or another view."""
    if found.fit.law.curve is not None:
        return {'runs': along_runs(found), 'errors': relative_errors(found, STEP)}
    if found.fit.law.axes is not None:
        one, other = found.fit.law.axes
        return {one: over(found, one, other), other: over(found, other, one)}
    return {'scores': against_loss(found), 'errors': relative_errors(found, LOSS)}


def over(found: Fitted, along: str, by: str) -> Chart:
    """Loss over one column, a colour for each value of the other, with at most MOST_LINES lines."""
    fit, values = found.fit, np.unique(of_all(found, by))
    colour = alt.Color(f'{by}:O').scale(domain=values.tolist(), range=list(COLOURS))
    if len(values) > MOST_LINES:
        values = np.geomspace(values[0], values[-1], MOST_LINES)
        shades = [COLOURS[i] for i in (0, 3, 1)]
        colour = alt.Color(f'{by}:Q').scale(type='log', range=shades, interpolate='lab')
    ends = of_all(found, along)
    line, lines = np.geomspace(ends.min(), ends.max(), 100), []
    for value in values:
        at = {along: line, by: np.full(100, value)}
        if U in fit.law.columns:  # without repetition
            at[U] = at[D]
        if SHARE in fit.law.columns:  # one that runs have
            at[SHARE] = np.full(100, np.quantile(of_all(found, SHARE), 0.5, method='nearest'))
        lines += rows({along: line, 'y': fit.predict(at), by: value})
    points = seen(found, lambda measured: measured.target)
    legend = alt.Legend(values=values.tolist(), labelExpr=COUNT, symbolType='stroke')
    return panel(lines, points, along, LOSS_TITLE, colour.legend(legend), log=True)


def along_runs(found: Fitted) -> Chart:
    points = seen(found, lambda measured: measured.target)
    lines = seen(found, lambda measured: found.fit.predict(measured.columns))
    is_named = len({row['run'] for row in points}) <= MOST_LINES
    colour = alt.Color('run:N', legend=alt.Legend(symbolType='stroke') if is_named else None)
    return panel(lines, points, STEP, LOSS_TITLE, colour)


def against_loss(found: Fitted) -> Chart:
    ends = of_all(found, LOSS)
    line = np.linspace(ends.min(), ends.max(), 100)
    lines = rows({LOSS: line, 'y': found.fit.predict({LOSS: line}), 'what': THE_LAW})
    points = seen(found, lambda measured: measured.target)
    return panel(lines, points, LOSS, 'score', BY_KIND)


def relative_errors(found: Fitted, along: str) -> Chart:
    ends = of_all(found, along)
    zero = rows({along: np.array([ends.min(), ends.max()]), 'y': 0.0, 'what': THE_LAW})
    points = seen(found, lambda of: found.fit.predict(of.columns) / of.target - 1)
    return panel(zero, points, along, ERROR_TITLE, BY_KIND)


def of_all(found: Fitted, column: str) -> np.ndarray:
    return np.concatenate([found.fitted.at[column], found.held.at[column]])


def seen(found: Fitted, y: Callable[[Points], np.ndarray]) -> list[Columns]:
    """Returns a row for each point, fitted or held out: its run, its columns, y and what it is."""
    return [
        row
        for of, what in ((found.fitted, FITTED), (found.held, HELD_OUT))
        if len(of.target)
        for row in rows({'run': of.runs, **of.at, 'y': y(of), 'what': what})
    ]


def rows(columns: Columns) -> list[Columns]:
    """Returns a row for each finite y; a column is an array, or one value for all."""
    each = np.broadcast_arrays(*columns.values())
    found = zip(*(column.tolist() for column in each), strict=True)
    named = [dict(zip(columns, values, strict=True)) for values in found]
    return [row for row in named if math.isfinite(row['y'])]


def panel(
    lines: list[Columns],
    points: list[Columns],
    along: str,
    title: str,
    colour: alt.Color,
    log: bool = False,
) -> Chart:
    scale = alt.Scale(type='log' if log else 'linear', zero=False, nice=False, padding=8)
    axis = alt.Axis(values=decades(lines, along), labelExpr=COUNT) if log else alt.Axis()
    form = '~%' if title == ERROR_TITLE else '~g'
    encoding = {
        'x': alt.X(f'{along}:Q', scale=scale, title=along, axis=axis),
        'y': alt.Y('y:Q', scale=scale, title=title, axis=alt.Axis(format=form)),
        'color': colour,
    }
    held = alt.datum.what == HELD_OUT
    dash = alt.condition(held, alt.value([4, 3]), alt.value([1, 0]))
    law = alt.Chart(alt.Data(values=lines)).mark_line().encode(**encoding, detail='what:N')
    told = [alt.Tooltip('run:N'), alt.Tooltip(f'{along}:Q'), alt.Tooltip('y:Q', title=title)]
    dots = alt.Chart(alt.Data(values=points)).encode(**encoding, tooltip=told)
    layers = (
        law.encode(strokeDash=dash),
        dots.transform_filter(~held).mark_point(filled=True, size=16, opacity=1),
        dots.transform_filter(held).mark_point(shape='diamond', size=36, opacity=1),
    )
    return alt.layer(*layers).properties(width=340, height=260)


def decades(lines: list[Columns], along: str) -> list[float]:
    """Returns the powers of ten along the lines, and thrice each."""
    ends = [row[along] for row in lines]
    powers = range(math.floor(math.log10(min(ends))), math.ceil(math.log10(max(ends))) + 1)
    return [part * 10.0**power for power in powers for part in (1, 3)]
