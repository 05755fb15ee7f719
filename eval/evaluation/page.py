"""The page of an evaluation: numbers, tables and charts of each suite, and traces over steps."""

import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import altair as alt

from eval.charts import Chart, build_environment, format_now, render_scripts
from eval.console.listings import first_sentence
from eval.evaluation.suite_flags import SuiteRequest
from eval.evaluation.targets import Evaluation
from eval.evaluation.traces import NumberTrace, collect_traces, format_traces
from eval.suites.base import Table
from lm.launch.before_jax import docstring
from lm.storage.files import write_text
from lm.study.tables.text import format_number

TEMPLATES = Path(__file__).parent
MAX_NAMED = 4  # runs of a title
MAX_ROWS = 100  # of a table on the page
FEW_ROWS = 12
RUN, SERIES = 'run', 'series and run'  # columns of a table that joins several runs
WIDTH, HEIGHT, PANEL = 420, 260, 260
PER_ROW = 3


def write_evaluation_page(
    path: Path, evaluations: Sequence[Evaluation], requests: Sequence[SuiteRequest]
) -> dict[str, Chart]:
    """Writes the page.

    Args:
      path: of the HTML file.
      evaluations: of all checkpoints.
      requests: the suites, in the order of the page.

    Returns:
      The charts by the ids of their elements.
    """
    evaluations = shorten_names(evaluations)
    charts: dict[str, Chart] = {}
    traces, sections = collect_traces(evaluations), []
    for i, request in enumerate(requests):
        suite_traces = [
            trace for trace in traces if trace.suite == request.label and not trace.is_constant
        ]
        if any(len(trace.steps) > 1 for trace in suite_traces):
            charts[f'traces_{i}'] = draw_traces(suite_traces)
        parts = []
        for j, (title, table) in enumerate(collect_tables(evaluations, request.label).items()):
            name = f'table_{i}_{j}'
            if table.x and table.y:
                charts[name] = draw_table(table)
            parts.append(describe_table(title, table, name if name in charts else ''))
        sections.append(
            {
                'name': request.label,
                'about': first_sentence(docstring(request.suite.function)),
                'options': format_options(request),
                'rows': format_rows(number_rows(evaluations, traces, request.label)),
                'traces': f'traces_{i}' if f'traces_{i}' in charts else '',
                'parts': parts,
            }
        )
    content = {
        'title': format_title(evaluations),
        'made': format_now(),
        'command': shlex.join(['python', *sys.orig_argv[1:]]),
        'sections': sections,
        'steps': sorted({e.step for e in evaluations}),
    }
    page = build_environment(TEMPLATES).get_template('evaluation.html.j2')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page.render(scripts=render_scripts(charts), **content))
    return charts


def format_options(request: SuiteRequest) -> str:
    """Returns 'stride=0, documents=4': the options of a suite, without empty texts."""
    options = {name: value for name, value in request.options.items() if value != ''}
    return ', '.join(f'{name}={value}' for name, value in options.items())


def shorten_names(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Returns the evaluations with the last part of each run's path, if it is unique."""
    runs = dict.fromkeys(evaluation.run for evaluation in evaluations)
    counts = Counter(Path(run).name for run in runs)
    short = {run: Path(run).name if counts[Path(run).name] == 1 else run for run in runs}
    return [
        dataclasses.replace(evaluation, run=short[evaluation.run]) for evaluation in evaluations
    ]


def format_title(evaluations: Sequence[Evaluation]) -> str:
    runs = list(dict.fromkeys(evaluation.run for evaluation in evaluations))
    return ', '.join(runs) if len(runs) <= MAX_NAMED else f'{len(runs)} runs'


def number_rows(
    evaluations: Sequence[Evaluation], traces: Sequence[NumberTrace], label: str
) -> list[dict[str, Any]]:
    """Returns the rows of a suite's numbers: of a single checkpoint, or as in `format_traces`.

    Args:
      evaluations: of all checkpoints.
      traces: of all suites.
      label: of the suite.
    """
    if len(evaluations) == 1:
        numbers = evaluations[0].results[label].numbers
        return [{'number': name, 'value': value} for name, value in numbers.items()]
    rows = format_traces([trace for trace in traces if trace.suite == label])
    return [{name: value for name, value in row.items() if name != 'suite'} for row in rows]


def format_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns a header and the values of rows with equal keys, as text."""
    return [list(rows[0]), *([format_number(value) for value in row.values()] for row in rows)]


def collect_tables(evaluations: Sequence[Evaluation], label: str) -> dict[str, Table]:
    """Returns the tables of a suite by title, for each run's last checkpoint.

    Tables of several runs are joined, with a column for the run.
    """
    # In the order of steps, so that the last checkpoint of a run wins.
    last = {
        evaluation.run: evaluation
        for evaluation in sorted(evaluations, key=lambda evaluation: evaluation.step)
    }
    by_title: dict[str, dict[str, Table]] = {}
    for run, evaluation in last.items():
        for title, table in evaluation.results[label].tables.items():
            by_title.setdefault(title, {})[run] = table
    if len(last) == 1:
        return {title: table for title, by_run in by_title.items() for table in by_run.values()}
    return {title: _join_tables(by_run) for title, by_run in by_title.items()}


def _join_tables(tables: Mapping[str, Table]) -> Table:
    first = next(iter(tables.values()))
    names = list(dict.fromkeys(name for table in tables.values() for name in table.columns))
    columns: dict[str, list[Any]] = {RUN: []} | {name: [] for name in names}
    for run, table in tables.items():
        n = len(next(iter(table.columns.values()), ()))
        columns[RUN] += [run] * n
        for name in names:
            columns[name] += list(table.columns.get(name, [None] * n))
    if first.by:
        pairs = zip(columns[first.by], columns[RUN], strict=True)
        columns[SERIES] = [f'{format_number(value)}, {run}' for value, run in pairs]
    return Table(columns, first.x, first.y, SERIES if first.by else RUN)


def describe_table(title: str, table: Table, chart: str) -> dict[str, Any]:
    """Returns a table for the template, with at most MAX_ROWS rows.

    Args:
      title: of the table.
      table: its columns. A table of more than FEW_ROWS rows is collapsed.
      chart: id of its chart, or ''.
    """
    columns = {name: column for name, column in table.columns.items() if name != SERIES}
    rows = [[format_number(value) for value in row] for row in zip(*columns.values(), strict=True)]
    visible = rows[:MAX_ROWS]
    return {
        'title': title,
        'chart': chart,
        'rows': [list(columns), *visible],
        'left': len(rows) - len(visible),
        'folded': len(rows) > FEW_ROWS,
    }


def draw_table(table: Table) -> Chart:
    """Draws y over x: a line if x are numbers, else bars. Each value of `by` has a colour."""
    rows = [
        dict(zip(('x', 'y', 'by'), values, strict=True))
        for values in zip(
            table.columns[table.x],
            table.columns[table.y],
            table.columns[table.by] if table.by else [''] * len(table.columns[table.x]),
            strict=True,
        )
        if _is_number(values[1])
    ]
    chart: Any = alt.Chart(alt.Data(values=rows)).properties(width=WIDTH)
    y = alt.Y('y:Q', title=table.y)
    colour = _colour([row['by'] for row in rows], table.by)
    tooltips = [alt.Tooltip('by:N', title=table.by or ' ')] if table.by else []
    if all(_is_number(row['x']) for row in rows):
        x = alt.X('x:Q', title=table.x, scale=alt.Scale(zero=False, nice=False))
        tooltips += [alt.Tooltip('x:Q', title=table.x), alt.Tooltip('y:Q', title=table.y)]
        is_short = len({row['x'] for row in rows}) < 30
        curve = chart.mark_line(point=is_short).encode(
            x=x, y=y.scale(zero=False), color=colour, tooltip=tooltips
        )
        return curve.properties(height=HEIGHT, usermeta={'log': {'x': 'log x', 'y': 'log y'}})
    names = list(dict.fromkeys(row['x'] for row in rows))
    side = alt.Y('x:N', title=table.x, sort=names, axis=alt.Axis(labelLimit=300))
    tooltips += [alt.Tooltip('x:N', title=table.x), alt.Tooltip('y:Q', title=table.y)]
    bars = chart.mark_bar().encode(
        x=alt.X('y:Q', title=table.y), y=side, color=colour, tooltip=tooltips
    )
    return bars.encode(yOffset='by:N') if table.by else bars


def draw_traces(traces: Sequence[NumberTrace]) -> Chart:
    """Draws each number over the steps in its own panel, with a line for each run.

    Colours distinguish groups, if there are several, or else runs.
    """
    has_groups = len({trace.group for trace in traces}) > 1
    panels = []
    for name in dict.fromkeys(trace.number for trace in traces):
        rows = [
            {'step': step, 'value': value, 'run': run, 'line': trace.group if has_groups else run}
            for trace in traces
            if trace.number == name
            for run, value_by_step in trace.values.items()
            for step, value in value_by_step.items()
            if _is_number(value)
        ]
        y = alt.Y('value:Q', title=name, scale=alt.Scale(zero=False))
        tooltips = [alt.Tooltip('run:N'), alt.Tooltip('step:Q'), alt.Tooltip('value:Q')]
        panel: Any = alt.Chart(alt.Data(values=rows)).mark_line(point=True)
        panel = panel.encode(
            x=alt.X('step:Q', scale=alt.Scale(nice=False)),
            y=y,
            color=_colour([row['line'] for row in rows], 'line', field='line'),
            detail='run:N',
            tooltip=tooltips,
        )
        panels.append(panel.properties(width=PANEL, height=180))
    chart = alt.concat(*panels, columns=PER_ROW)
    return chart.properties(usermeta={'log': {'x': 'log steps', 'y': 'log values'}})


def _colour(values: Sequence[Any], title: str, field: str = 'by') -> alt.Color | Any:
    names = list(dict.fromkeys(values))
    legend = alt.Legend(title=None, orient='top', columns=2) if title and len(names) > 1 else None
    return alt.Color(f'{field}:N', sort=names, legend=legend)


def _is_number(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return abs(value) < float('inf')  # ty: ignore[unsupported-operator]  abs of a Real is a Real
