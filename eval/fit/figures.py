"""Figures of a fit and their page: points, open diamonds for held-out points, the law as lines."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import altair
import numpy as np

from eval.charts import COLOURS, Chart, save_chart, write_page
from eval.fit.fitting import (
    FitReport,
    constant_rows,
    describe_fit,
    held_out_rows,
    is_outside,
    judge_intervals,
)
from eval.fit.laws import LOSS, SHARE, D, U
from eval.fit.points import STEP, Points
from lm.study.tables.text import format_number

alt: Any = altair  # the types of its decorated methods are lost

MOST_LINES = len(COLOURS)
FITTED, HELD_OUT, THE_LAW = 'fitted', 'held out', 'law'
LOSS_TITLE, ERROR_TITLE = 'loss (nats per token)', 'predicted / measured - 1'
COUNT = "replace(format(datum.value, '.3~s'), 'G', 'B')"  # 1.5B tokens
BY_KIND = alt.Color('what:N', title=None, legend=alt.Legend(symbolSize=50))
Columns = Mapping[str, Any]


def write_figures(folder: Path, report: FitReport) -> list[Path]:
    """Writes FOLDER/LAW.html, .png and .svg; returns their paths."""
    law = report.fit.law
    panels: dict[str, Any] = {**draw_panels(report)}
    page = folder / f'{law.name}.html'
    verdict, is_bad = judge_intervals(report)
    outside = [
        f'{row["run"]}: measured {format_number(row["measured"])}, '
        f'predicted {format_number(row["predicted"])} '
        f'({format_number(row["low"])} to {format_number(row["high"])})'
        for row in filter(is_outside, held_out_rows(report))
    ]
    write_page(
        page,
        panels,
        title=f'{law.name}: {law.equation}',
        about=f'Fit of {law.name} ({law.source})',
        verdict=verdict,
        is_bad=is_bad,
        notes=[*outside, describe_fit(report), 'Open diamonds are held-out runs.'],
        rows=constant_rows(report.fit),
        failed=0,
    )
    title = f'{law.equation}; open diamonds: held-out runs'
    figure: Any = alt.hconcat(*panels.values(), title=title).resolve_scale(color='independent')
    return [page] + [save_chart(figure, page.with_suffix(kind)) for kind in ('.png', '.svg')]


def draw_panels(report: FitReport) -> dict[str, Chart]:
    """Draws the law beside the measured points, and their relative errors or a second view."""
    if report.fit.law.curve is not None:
        return {'runs': draw_loss_curves(report), 'errors': draw_errors(report, STEP)}
    if report.fit.law.axes is not None:
        first, second = report.fit.law.axes
        return {
            first: draw_loss_over(report, first, second),
            second: draw_loss_over(report, second, first),
        }
    return {'scores': draw_scores(report), 'errors': draw_errors(report, LOSS)}


def draw_loss_over(report: FitReport, along: str, by: str) -> Chart:
    """Draws the loss over a column, with a line and a colour for each value of another column.

    Args:
      report: the fit and its points.
      along: column of the x axis.
      by: column of the colours; of more than MOST_LINES values only some have lines.
    """
    fit, values = report.fit, np.unique(all_values(report, by))
    colour = alt.Color(f'{by}:O').scale(domain=values.tolist(), range=list(COLOURS))
    if len(values) > MOST_LINES:
        values = np.geomspace(values[0], values[-1], MOST_LINES)
        shades = [COLOURS[i] for i in (0, 3, 1)]
        colour = alt.Color(f'{by}:Q').scale(type='log', range=shades, interpolate='lab')
    ends = all_values(report, along)
    line, lines = np.geomspace(ends.min(), ends.max(), 100), []
    for value in values:
        columns = {along: line, by: np.full(100, value)}
        if U in fit.law.columns:  # without repetition
            columns[U] = columns[D]
        if SHARE in fit.law.columns:  # one that runs have
            columns[SHARE] = np.full(
                100, np.quantile(all_values(report, SHARE), 0.5, method='nearest')
            )
        lines += finite_rows({along: line, 'y': fit.predict(columns), by: value})
    points = point_rows(report, lambda measured: measured.target)
    legend = alt.Legend(values=values.tolist(), labelExpr=COUNT, symbolType='stroke')
    return draw_panel(lines, points, along, LOSS_TITLE, colour.legend(legend), log=True)


def draw_loss_curves(report: FitReport) -> Chart:
    """Draws the loss along each run."""
    points = point_rows(report, lambda measured: measured.target)
    lines = point_rows(report, lambda measured: report.fit.predict(measured.columns))
    is_named = len({row['run'] for row in points}) <= MOST_LINES
    colour = alt.Color('run:N', legend=alt.Legend(symbolType='stroke') if is_named else None)
    return draw_panel(lines, points, STEP, LOSS_TITLE, colour)


def draw_scores(report: FitReport) -> Chart:
    """Draws scores over the loss."""
    ends = all_values(report, LOSS)
    line = np.linspace(ends.min(), ends.max(), 100)
    lines = finite_rows({LOSS: line, 'y': report.fit.predict({LOSS: line}), 'what': THE_LAW})
    points = point_rows(report, lambda measured: measured.target)
    return draw_panel(lines, points, LOSS, 'score', BY_KIND)


def draw_errors(report: FitReport, along: str) -> Chart:
    """Draws the relative errors of the predictions over a column."""
    ends = all_values(report, along)
    zero = finite_rows({along: np.array([ends.min(), ends.max()]), 'y': 0.0, 'what': THE_LAW})
    points = point_rows(
        report, lambda measured: report.fit.predict(measured.columns) / measured.target - 1
    )
    return draw_panel(zero, points, along, ERROR_TITLE, BY_KIND)


def all_values(report: FitReport, column: str) -> np.ndarray:
    """Returns the values of a column at all points, held-out points last."""
    return np.concatenate(
        [report.fitted_points.figure_columns[column], report.held_out_points.figure_columns[column]]
    )


def point_rows(report: FitReport, y: Callable[[Points], np.ndarray]) -> list[Columns]:
    """Returns a row for each point, fitted or held out: its run, columns, y, and its kind."""
    return [
        row
        for points, kind in ((report.fitted_points, FITTED), (report.held_out_points, HELD_OUT))
        if len(points.target)
        for row in finite_rows(
            {'run': points.runs, **points.figure_columns, 'y': y(points), 'what': kind}
        )
    ]


def finite_rows(columns: Columns) -> list[Columns]:
    """Returns a row for each finite y. A column is an array, or a single value for all rows."""
    arrays = np.broadcast_arrays(*columns.values())
    values_by_row = zip(*(column.tolist() for column in arrays), strict=True)
    rows = [dict(zip(columns, values, strict=True)) for values in values_by_row]
    return [row for row in rows if math.isfinite(row['y'])]


def draw_panel(
    lines: list[Columns],
    points: list[Columns],
    along: str,
    title: str,
    colour: altair.Color,
    log: bool = False,
) -> Chart:
    """Draws points and lines over a column.

    Args:
      lines: rows of the law.
      points: rows of measured points.
      along: column of the x axis.
      title: title of the y axis.
      colour: encoding of the colour.
      log: whether both axes are logarithmic.
    """
    scale = alt.Scale(type='log' if log else 'linear', zero=False, nice=False, padding=8)
    axis = alt.Axis(values=decade_ticks(lines, along), labelExpr=COUNT) if log else alt.Axis()
    form = '~%' if title == ERROR_TITLE else '~g'
    encoding: dict[str, Any] = {
        'x': alt.X(f'{along}:Q', scale=scale, title=along, axis=axis),
        'y': alt.Y('y:Q', scale=scale, title=title, axis=alt.Axis(format=form)),
        'color': colour,
    }
    is_held_out = alt.datum.what == HELD_OUT
    dash = alt.condition(is_held_out, alt.value([4, 3]), alt.value([1, 0]))
    law = alt.Chart(alt.Data(values=lines)).mark_line().encode(**encoding, detail='what:N')
    tooltip = [alt.Tooltip('run:N'), alt.Tooltip(f'{along}:Q'), alt.Tooltip('y:Q', title=title)]
    dots: Any = alt.Chart(alt.Data(values=points)).encode(**encoding, tooltip=tooltip)
    layers = (
        law.encode(strokeDash=dash),
        dots.transform_filter(~is_held_out).mark_point(filled=True, size=16, opacity=1),
        dots.transform_filter(is_held_out).mark_point(shape='diamond', size=36, opacity=1),
    )
    return alt.layer(*layers).properties(width=340, height=260)


def decade_ticks(lines: list[Columns], along: str) -> list[float]:
    """Returns 1 and 3 times the powers of ten along the lines."""
    xs = [row[along] for row in lines]
    powers = range(math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs))) + 1)
    return [factor * 10.0**power for power in powers for factor in (1, 3)]
