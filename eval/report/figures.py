"""Charts of losses; `eval.report.layers` draws other quantities.

The page shows them live; for papers they are written as PNG and SVG.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import altair
import numpy as np

from eval.charts import COLOURS, INK, Chart
from eval.report.series import Curve, Series, smooth, thin_curve
from eval.report.tables import (
    SHORT_UNITS,
    UNITS,
    count_diverged,
    finished_losses,
    format_p_value,
    needed_seeds_text,
    rank_comparisons,
    seed_columns,
)
from lm.study.statistics import BETTER, ONE_SEED, WITHIN_NOISE, WORSE, format_outcome
from lm.study.tables.comparison import Comparison
from lm.study.tables.text import format_number
from lm.study.tables.variants import SIZE_DEPENDENT, SIZES

alt: Any = altair  # the types of its decorated methods are lost

GREEN, ORANGE, GREY = '#009E73', '#D55E00', '#8a929a'
VERDICTS = {BETTER: GREEN, WORSE: ORANGE, WITHIN_NOISE: GREY, ONE_SEED: GREY}
DASHES = ([1, 0], [6, 3], [2, 2], [7, 2, 2, 2])
ONE_PANEL, PANELS_PER_ROW = 8, 4
LEGEND_ROWS = 5  # above a chart; a longer legend stands below it
MARGIN = 6  # pixels between the outermost points and the edge, which would cut these in half
SMOOTHING = {'none': 0.0, '1% of the steps': 0.01, '5%': 0.05}
BOUNDARY: dict[str, Any] = {'color': INK, 'strokeDash': [4, 3], 'opacity': 0.7}  # of stages
CROSS: dict[str, Any] = {
    'shape': 'cross',
    'angle': 45,
    'size': 70,
    'filled': True,
}  # of a run that diverged
SeriesByRun = Mapping[str, Series]  # by workdir
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class RunLines:
    """A run as charts show it.

    line: the name of its colour: the variant, or the seed if there is a single variant. is_best:
    whether it has its variant's best learning rate.
    """

    line: str
    record: Mapping[str, Any]
    seed: str
    is_best: bool
    series: Series

    @property
    def row(self) -> dict[str, Any]:
        """Returns the columns that all rows of the run have."""
        row = {'line': self.line, 'lr': self.record['lr'], 'seed': self.seed}
        return row | {'best': self.is_best, 'cell': self.record['cell']}


def collect_runs(comparisons: Sequence[Comparison], series: SeriesByRun) -> list[RunLines]:
    """Returns the runs of all variants, in the order of the comparisons."""
    records = [record for c in comparisons for record in c.variant.records]
    seeds, runs = seed_columns(records), []
    for c in comparisons:
        best_workdirs = {*c.display_workdirs}
        for record in c.variant.records:
            seed = ', '.join(f'{name} {record[name]}' for name in seeds)
            line = c.variant.name if len(comparisons) > 1 or len(records) == 1 else seed
            is_best = record['workdir'] in best_workdirs
            runs.append(RunLines(line, record, seed, is_best, series[record['workdir']]))
    return runs


def line_styles(are_baselines: Sequence[bool]) -> list[dict[str, Any]]:
    """Returns a colour and a dash for each line.

    The baseline has the colour of the text; the others differ in colour, then in dash.
    """
    styles = itertools.cycle({'color': c, 'dash': dash} for dash in DASHES for c in COLOURS)
    ink = {'color': INK, 'dash': DASHES[0]}
    return [ink if is_baseline else next(styles) for is_baseline in are_baselines]


def variant_styles(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Returns the colour and dash of each variant."""
    return line_styles([comparison.variant.is_baseline for comparison in comparisons])


def line_encodings(names: Sequence[str], baselines: Collection[str]) -> dict[str, Any]:
    """Returns the encodings that distinguish the lines `names`, with a legend."""
    styles = line_styles([name in baselines for name in names])
    columns = 1 if max(map(len, names), default=0) > 40 else 2 if len(names) > 3 else 3
    place = 'top' if len(names) <= columns * LEGEND_ROWS else 'bottom'
    legend = alt.Legend(title=None, symbolType='stroke', orient=place, columns=columns)
    domain = {'domain': list(names)}
    colour = alt.Scale(range=[style['color'] for style in styles], **domain)
    dash = alt.Scale(range=[style['dash'] for style in styles], **domain)
    legend = legend if len(names) > 1 else None
    return {
        'color': alt.Color('line:N', scale=colour, legend=legend),
        'strokeDash': alt.StrokeDash('line:N', scale=dash, legend=legend),
    }


def run_line_encodings(
    comparisons: Sequence[Comparison], runs: Iterable[RunLines]
) -> dict[str, Any]:
    """Returns the encodings of the lines of `runs`."""
    names = list(dict.fromkeys(run.line for run in runs))
    baselines = {c.variant.name for c in comparisons if c.variant.is_baseline}
    return line_encodings(names, baselines & {*names} or names[:1])


def draw_loss_charts(
    comparisons: Sequence[Comparison],
    by_variant: Sequence[Comparison],
    series: SeriesByRun,
    metric: str,
) -> dict[str, Chart]:
    """Draws every chart of losses with numbers.

    Args:
      comparisons: the variants, or the learning rates if only these vary.
      by_variant: the variants in any case.
      series: the recorded series by workdir.
      metric: column of the final loss.

    Returns:
      Charts by name.
    """
    charts: dict[str, Chart] = {}
    runs = collect_runs(comparisons, series)
    if rank_comparisons(comparisons):
        charts['differences'] = draw_differences(comparisons, metric)
    if any(len(c.losses) > 1 for c in by_variant):
        charts['learning_rates'] = draw_learning_rates(by_variant, metric)
        if sizes := group_by_size(by_variant):
            charts['rates_by_size'] = draw_rates_by_size(sizes, metric)
    elif any(c.losses for c in comparisons) and len(runs) > 1:
        charts['final_losses'] = draw_final_losses(comparisons, metric)
    if has_curve(runs, 'training') or has_curve(runs, 'validation'):
        charts['loss_curves'] = draw_loss_curves(comparisons, runs)
    return charts


def rate_parameter(runs: Sequence[RunLines], with_all: bool = True) -> altair.Parameter | None:
    """Returns the selector of a learning rate, for rows as in `RunLines.row`; None for a single
    rate.
    """
    rates = sorted({run.record['lr'] for run in runs if run.record['lr'] is not None})
    if len(rates) < 2 or all(run.is_best for run in runs):
        return None
    all_option = ['all'] * with_all
    options, labels = (
        ['best', *all_option, *map(str, rates)],
        ['best of each', *all_option, *map(format_number, rates)],
    )
    binding = alt.binding_select(options=options, labels=labels, name='learning rate ')
    return alt.param('rate', bind=binding, value='best')


AT_RATE = 'rate == "all" || (rate == "best" ? datum.best : toString(datum.lr) == rate)'


def zoom_parameter(name: str) -> altair.Parameter:
    """Returns the selection for dragging a chart, and zooming with shift and the wheel."""
    return alt.selection_interval(name, bind='scales', zoom='wheel![event.shiftKey]')


def tooltips(*fields: str) -> list[altair.Tooltip]:
    """Returns tooltips of fields of the rows."""
    kinds = {'line': 'N', 'seed': 'N', 'cell': 'N', 'lr': 'N'}
    return [alt.Tooltip(f'{field}:{kinds.get(field, "Q")}') for field in fields]


def has_curve(runs: Sequence[RunLines], kind: str) -> bool:
    """Whether any run has two points of its 'training' or 'validation' loss."""
    return any(len(getattr(run.series, kind)[0]) > 1 for run in runs)


def draw_loss_curves(comparisons: Sequence[Comparison], runs: Sequence[RunLines]) -> Chart:
    """Draws the training and validation curves of each run, with a cross at divergence.

    The curve of a branch leaves that of its parent, which is thin and dotted up to there. Vertical
    lines are the boundaries of stages.
    With a single variant each seed has a separate colour and name. A loss with a single point in
    every run has no panel: the page gives the number.
    """
    look, rate = run_line_encodings(comparisons, runs), rate_parameter(runs)
    pick = alt.selection_point('pick', fields=['line'], bind='legend')
    options, labels = list(range(len(SMOOTHING))), list(SMOOTHING)
    binding = alt.binding_select(options=options, labels=labels, name='smoothing ')
    smoothing = alt.param('smoothing', bind=binding, value=0)
    panels, starts = [], sorted({step for run in runs for step in run.series.stage_starts})
    for kind in filter(functools.partial(has_curve, runs), ('training', 'validation')):
        rows, earlier, ends = [], [], []
        for run in runs:
            if curve := _smoothed_row(run, kind, getattr(run.series, kind)):
                rows.append(curve)
            if before := _smoothed_row(run, kind, getattr(run.series, f'{kind}_before')):
                earlier.append(before)
            steps, values = thin_curve(getattr(run.series, kind))
            finite = [i for i, value in enumerate(values) if value is not None]
            if run.record['status'] == 'diverged' and finite:
                ends.append(run.row | {'step': steps[finite[-1]], 'loss': values[finite[-1]]})
        is_short = max(len(row['step']) for row in rows) < 12
        layers = [
            _flatten_curves(rows).mark_line(point=is_short, clip=True),
            alt.Chart(alt.Data(values=ends)).mark_point(**CROSS),
        ]
        if earlier:
            thin = _flatten_curves(earlier).mark_line(strokeWidth=1, clip=True)
            layers.append(thin.encode(strokeDash=alt.value([2, 3])))
        layers = [layer.transform_filter(AT_RATE) for layer in layers] if rate else layers
        opacity = alt.condition('datum.best', alt.value(0.85), alt.value(0.35))
        panel = alt.layer(*(layer.transform_filter(pick) for layer in layers)).encode(
            x=alt.X('step:Q', title='step', scale=alt.Scale(nice=False, padding=MARGIN)),
            y=alt.Y('loss:Q', title=f'{kind} {UNITS["ce"]}', scale=build_scale('linear')),
            detail='cell:N',
            opacity=opacity,
            tooltip=tooltips('line', 'lr', 'seed', 'cell', 'step', 'loss'),
            **look,
        )
        if starts:
            marks = alt.Chart(alt.Data(values=[{'step': step} for step in starts]))
            panel = alt.layer(panel, marks.mark_rule(**BOUNDARY).encode(x='step:Q'))
        panels.append(
            panel.properties(width=430, height=300).add_params(zoom_parameter(f'zoom_{kind}'))
        )
    panels[0] = panels[0].add_params(pick)
    chart = alt.concat(*panels, columns=2).add_params(smoothing, *filter(None, [rate]))
    return with_log(chart, x='log steps', y='log loss')


def _smoothed_row(run: RunLines, kind: str, curve: Curve) -> dict[str, Any] | None:
    """Returns a curve as a row, with a column for each of SMOOTHING; None for an empty one."""
    steps, values = thin_curve(curve)
    if not steps:
        return None
    smoothed = {
        f'y{i}': smooth((steps, values), share) for i, share in enumerate(SMOOTHING.values())
    }
    smoothed = smoothed if kind == 'training' else dict.fromkeys(smoothed, values)
    return run.row | {'step': steps} | smoothed


def _flatten_curves(rows: Rows) -> Any:
    """Returns a chart of the points of `_smoothed_row`, at the chosen smoothing."""
    columns = [f'y{i}' for i in range(len(SMOOTHING))]
    curve = alt.Chart(alt.Data(values=rows)).transform_flatten(['step', *columns])
    return curve.transform_calculate(loss='datum["y" + smoothing]')


def build_scale(kind: str, **options: Any) -> altair.Scale:
    """Returns a scale of a kind, 'linear' or 'log', that need not include 0."""
    options = {'padding': MARGIN} | options
    return alt.Scale(type=kind, **options | ({'zero': False} if kind == 'linear' else {}))


def with_log(chart: Chart, **channels: str) -> Chart:
    """Marks axes that a page may make logarithmic: labels by channel."""
    return chart.properties(usermeta={'log': channels})


def draw_learning_rates(comparisons: Sequence[Comparison], metric: str) -> Chart:
    """Draws the mean final loss over log(lr), each seed, and a band from the least to the greatest.

    Crosses on top mark runs that diverged. More than ONE_PANEL variants get a panel each, with
    the baseline in each panel.
    """
    names = [c.variant.name for c in comparisons]
    baselines = [c for c in comparisons if c.variant.is_baseline]
    rivals = [c for c in comparisons if not c.variant.is_baseline]
    panels = {'': comparisons}
    if len(comparisons) > ONE_PANEL:
        panels = {c.variant.name: [*baselines, c] for c in rivals}
    losses = [
        loss
        for c in comparisons
        for values in finished_losses(c, metric).values()
        for loss in values
    ]
    # As in the sensitivity, what is worse than no training at all is as bad as that.
    initial = max((c.initial for c in comparisons if math.isfinite(c.initial)), default=math.inf)
    low, high = min(losses, default=0.0), min(max(losses, default=1.0), 1.1 * initial)
    margin = 0.05 * (high - low) or 1.0
    points, crosses, stacked = [], [], 0
    for panel, members in panels.items():
        heights: dict[float, int] = {}
        for c in members:
            diverged = count_diverged(c)
            for lr, values in finished_losses(c, metric).items():
                row = {'panel': panel, 'line': c.variant.name, 'lr': lr}
                points += [row | {'loss': value} for value in values]
                if diverged[lr]:
                    heights[lr] = heights.get(lr, 0) + 1
                    mark = {'at': high + heights[lr] * margin, 'runs': f'{diverged[lr]} diverged'}
                    crosses.append(row | mark)
        stacked = max(stacked, *heights.values(), 0)
    top = high + (stacked + 0.5) * margin if stacked else high
    rates = sorted({rate for c in comparisons for rate in c.variant.rates if rate})
    scale = alt.Scale(type='log' if rates else 'linear', nice=False, padding=12)
    numbers = alt.Axis(values=rates, format='.3~g', grid=True)
    y = alt.Y(
        'loss:Q',
        title=f'final {UNITS[metric]}',
        scale=alt.Scale(zero=False, nice=False, domain=[low - margin / 2, top]),
    )
    x = alt.X('lr:Q', title='learning rate', scale=scale, axis=numbers)
    # A facet wants one table for all of its layers: crosses stand in it in a column of their own.
    chart = alt.Chart(alt.Data(values=points + crosses))
    line_encoding = {'x': x, **line_encodings(names, [c.variant.name for c in baselines])}
    mean, lowest = (y.aggregate(operation) for operation in ('mean', 'min'))
    tooltip = tooltips('line', 'lr', 'loss')
    encoding = {'x': x, 'color': line_encoding['color']}
    layers = [
        chart.mark_area(opacity=0.13, clip=True).encode(y=lowest, y2='max(loss):Q', **encoding),
        chart.mark_point(opacity=0.45, size=14, filled=True, clip=True).encode(
            y=y, tooltip=tooltip, **encoding
        ),
        chart.mark_line(point=alt.OverlayMarkDef(size=36), clip=True).encode(
            y=mean, **line_encoding
        ),
    ]
    if crosses:
        cross = chart.transform_filter('isValid(datum.at)').mark_point(**CROSS)
        tooltip = [*tooltips('line', 'lr'), 'runs:N']
        layers.append(cross.encode(y='at:Q', tooltip=tooltip, **encoding))
    wide, tall = (520, 320) if '' in panels else (200, 150)
    figure = alt.layer(*layers).properties(width=wide, height=tall)
    if '' not in panels:
        title = (
            f'each panel also shows the baseline, {baselines[0].variant.name}'
            if baselines
            else None
        )
        facet = alt.Facet('panel:N', title=title, sort=list(panels))
        figure = figure.facet(facet=facet, columns=PANELS_PER_ROW)
    return with_log(figure, x='log learning rate', y='log loss')


Sizes = dict[str, list[tuple[str, Comparison]]]


def group_by_size(comparisons: Sequence[Comparison]) -> Sizes:
    """Groups comparisons that differ in size alone.

    Returns:
      {text of the other choices: [(size, comparison), smallest first]}; {} if all have one size.
    """
    values = [comparison.variant.values for comparison in comparisons]
    varied = [
        name
        for name in SIZES
        if len({repr(variant_values.get(name)) for variant_values in values}) > 1
    ]
    if not varied:
        return {}
    groups: dict[str, list[Comparison]] = {}
    for comparison, variant_values in zip(comparisons, values, strict=True):
        chosen = {
            n: v
            for n, v in variant_values.items()
            if n not in (*SIZES, *SIZE_DEPENDENT) and v is not None
        }
        choice = ', '.join(f'{name} {format_number(value)}' for name, value in chosen.items())
        groups.setdefault(choice, []).append(comparison)

    def size(comparison: Comparison) -> tuple:
        return tuple(comparison.variant.values[name] for name in varied)

    def label(comparison: Comparison) -> str:
        return ', '.join(f'{name} {comparison.variant.values[name]}' for name in varied)

    return {
        choice: [(label(c), c) for c in sorted(members, key=size)]
        for choice, members in groups.items()
    }


def draw_rates_by_size(sizes: Sizes, metric: str) -> Chart:
    """Draws the loss over the learning rate: a panel for each choice, a line for each size.

    The lowest mean is ringed, a band spans the seeds. It shows whether the best rate depends on the
    size.
    """
    points, rings = [], []
    for choice, lines in sizes.items():
        for size, c in lines:
            losses = {lr: values for lr, values in finished_losses(c, metric).items() if values}
            row = {'panel': choice, 'size': size}
            points += [row | {'lr': lr, 'loss': v} for lr, values in losses.items() for v in values]
            if losses:
                best = min(losses, key=lambda lr: np.mean(losses[lr]))
                rings.append(row | {'lr': best, 'ring': float(np.mean(losses[best]))})
    labels = list(dict.fromkeys(size for lines in sizes.values() for size, _ in lines))
    rates = sorted({row['lr'] for row in points if row['lr']})
    scale = alt.Scale(type='log', nice=False, padding=12)
    numbers = alt.Axis(values=rates, format='.3~g')
    x = alt.X('lr:Q', scale=scale, title='learning rate', axis=numbers)
    y = alt.Y('loss:Q', scale=alt.Scale(zero=False), title=f'final {UNITS[metric]}')
    shades = alt.Scale(scheme='viridis', domain=labels)
    legend = alt.Legend(title=None, orient='top', columns=4, symbolType='circle')
    color = alt.Color('size:O', scale=shades, legend=legend)
    chart = alt.Chart(alt.Data(values=points + rings)).encode(x=x, color=color)
    low, mean = (y.aggregate(operation) for operation in ('min', 'mean'))
    layers = (
        chart.mark_area(opacity=0.15).encode(y=low, y2='max(loss):Q'),
        chart.mark_line(point=alt.OverlayMarkDef(size=20)).encode(y=mean),
        chart.transform_filter('isValid(datum.ring)').mark_point(size=130).encode(y='ring:Q'),
    )
    figure = alt.layer(*layers).properties(width=230, height=200)
    facet = alt.Facet('panel:N', title=None, sort=list(sizes))
    return with_log(figure.facet(facet=facet, columns=PANELS_PER_ROW), y='log loss')


def draw_final_losses(comparisons: Sequence[Comparison], metric: str) -> Chart:
    """Draws each seed's final loss and the mean with its interval, with a line for each variant.

    Runs that diverged are crosses at the loss at initialisation.
    """
    seeds, crosses, means = [], [], []
    for c in comparisons:
        row = {'line': c.variant.name}
        seeds += [
            row | {'loss': v} for values in finished_losses(c, metric).values() for v in values
        ]
        if c.diverged and math.isfinite(c.initial):
            crosses.append(row | {'loss': c.initial, 'runs': f'{c.diverged} diverged'})
        if math.isfinite(c.loss.mean):
            means.append(row | _interval_row(c.loss))
    names = [c.variant.name for c in comparisons]
    baselines = [c.variant.name for c in comparisons if c.variant.is_baseline]
    colour = line_encodings(names, baselines)['color'].legend(None)
    y = alt.Y('line:N', sort=names, title=None, axis=alt.Axis(labelLimit=420))
    scale = alt.Scale(zero=False)
    layers = [
        alt.Chart(alt.Data(values=means)).mark_rule(strokeWidth=1.5).encode(x='low:Q', x2='high:Q'),
        alt.Chart(alt.Data(values=means)).mark_point(shape='diamond', filled=True, size=80),
        alt.Chart(alt.Data(values=seeds)).mark_point(size=22, opacity=0.6),
        alt.Chart(alt.Data(values=crosses)).mark_point(**CROSS),
    ]
    title = f'final {UNITS[metric]}'
    x = alt.X('loss:Q', scale=scale, title=title)
    layers[0] = layers[0].encode(x=alt.X('low:Q', scale=scale, title=title))
    layers[1:] = [layer.encode(x=x, tooltip=tooltips('line', 'loss')) for layer in layers[1:]]
    figure = alt.layer(*layers).encode(y=y, color=colour)
    return with_log(figure.properties(width=520, height=alt.Step(26)), x='log loss')


def _interval_row(interval: Any) -> dict[str, float]:
    half = 0.0 if math.isnan(interval.half_width) else interval.half_width
    return {'loss': interval.mean, 'low': interval.mean - half, 'high': interval.mean + half}


def draw_differences(comparisons: Sequence[Comparison], metric: str) -> Chart:
    """Draws the difference and interval of each variant in the colour of its verdict, with the
    verdict.
    """
    rows: list[dict[str, Any]] = []
    for c in rank_comparisons(comparisons):
        needed = needed_seeds_text(c)
        verdict_parts = (
            format_outcome(c.verdict),
            format_p_value(c.p),
            needed,
        )
        row = {'variant': c.variant.name, 'verdict': c.verdict, 'seeds': c.difference.n}
        rows.append(
            row | _interval_row(c.difference) | {'told': ', '.join(filter(None, verdict_parts))}
        )
    names = [row['variant'] for row in rows]
    baseline = next(c.variant.name for c in comparisons if c.variant.is_baseline)
    ends = [0.0, *(row[end] for row in rows for end in ('low', 'high'))]
    margin = 0.04 * (max(ends) - min(ends)) or 1.0
    scale = alt.Scale(domain=[min(ends) - margin, max(ends) + margin], nice=False)
    title = f'difference from {baseline} ({SHORT_UNITS[metric]})'
    color = alt.Color(
        'verdict:N',
        scale=alt.Scale(domain=list(VERDICTS), range=list(VERDICTS.values())),
        legend=None,
    )
    tooltip = [alt.Tooltip('variant:N'), alt.Tooltip('loss:Q', format='+.4f', title='difference')]
    chart = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y('variant:N', sort=names, title=None, axis=alt.Axis(labelLimit=420)), color=color
    )
    point = chart.encode(
        x=alt.X('loss:Q', scale=scale, title=title),
        tooltip=[*tooltip, alt.Tooltip('seeds:Q'), alt.Tooltip('told:N', title='verdict')],
    )
    has_one_seed = alt.datum.verdict == ONE_SEED
    zero = alt.Chart(alt.Data(values=[{'loss': 0}])).mark_rule(strokeDash=[3, 3])
    word = chart.mark_text(align='left', dx=8, limit=330).encode(
        x=alt.value('width'), text='told:N'
    )
    word = word.properties(name='beside')  # which charts.js leaves out on a narrow page
    layers = (
        zero.encode(x=alt.X('loss:Q', scale=scale)),
        chart.mark_rule(strokeWidth=2).encode(
            x=alt.X('low:Q', scale=scale, title=title), x2='high:Q'
        ),
        point.transform_filter(~has_one_seed).mark_point(filled=True, size=60),
        point.transform_filter(has_one_seed).mark_point(filled=False, size=60),
        word,
    )
    return alt.layer(*layers).properties(width=300, height=alt.Step(26))
