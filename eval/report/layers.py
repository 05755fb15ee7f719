"""Quantities besides losses: tables by depth, and charts over steps, layers and both."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair
import numpy as np

from eval.charts import Chart
from eval.report.figures import (
    AT_RATE,
    MARGIN,
    RunLines,
    SeriesByRun,
    build_scale,
    collect_runs,
    line_encodings,
    rate_parameter,
    run_line_encodings,
    tooltips,
    with_log,
)
from eval.report.series import HeatMap, Series, flatten_values, mean_map, select_fitting, thin_map
from lm.study.tables.comparison import Comparison

alt: Any = altair  # the types of its decorated methods are lost

DEPTH = 'n_layers'  # the column in which variants that make one line differ
HEAD = (
    *('variant', 'layers', 'step', 'first', 'middle', 'last', 'last / first', 'range over seeds'),
    *('largest / smallest', 'exponent'),
)
RATE = 'learning_rate'
MEAN = 'mean'  # over seeds
DECADE = 10  # a logarithmic axis over less has few labels


@dataclasses.dataclass(frozen=True)
class Profile:
    """A quantity of a variant by layer, mean over seeds, nan for missing numbers.

    line: the variant's name without its number of layers, which is `layers`. values: step ->
    [layers], of the last step and of the first step with a nonzero number (an update is 0 at a
    learning rate of 0). seeds: step -> [layers] of each seed.
    """

    line: str
    is_baseline: bool
    layers: int
    values: dict[int, np.ndarray]
    seeds: dict[int, list[np.ndarray]]


def shown_maps(comparison: Comparison, series: Mapping[str, Series], name: str) -> list[HeatMap]:
    """Returns a quantity of each run that is shown and has it.

    Args:
      comparison: the variant.
      series: recorded series by workdir.
      name: the quantity.
    """
    maps = (series[workdir].layers.get(name) for workdir in comparison.display_workdirs)
    return [quantity_map for quantity_map in maps if quantity_map is not None]


def build_profiles(
    comparisons: Sequence[Comparison], series: Mapping[str, Series], name: str
) -> list[Profile]:
    """Returns a quantity of each variant that recorded it.

    Args:
      comparisons: the variants.
      series: recorded series by workdir.
      name: the quantity.
    """
    profiles = []
    for comparison in comparisons:
        maps = shown_maps(comparison, series, name)
        means = [
            (step, np.array(values, float)) for step, values in zip(*mean_map(maps), strict=True)
        ]
        nonzero = [
            step_and_mean for step_and_mean in means if np.nan_to_num(step_and_mean[1]).any()
        ] or means
        ends = dict((*nonzero[:1], *means[-1:]))
        if any(np.isfinite(values_L).any() for values_L in ends.values()):
            by_step = [dict(zip(*quantity_map, strict=True)) for quantity_map in maps]
            seeds = {
                step: [np.array(values_by_step[step], float) for values_by_step in by_step]
                for step in ends
            }
            line, is_baseline = line_name(comparison), comparison.variant.is_baseline
            profiles.append(Profile(line, is_baseline, len(means[0][1]), ends, seeds))
    return profiles


def line_name(comparison: Comparison) -> str:
    """Returns the variant's name without its number of layers."""
    variant = comparison.variant
    if DEPTH not in variant.values:
        return variant.name
    parts = [text for column, text in variant.value_texts.items() if column != DEPTH]
    name = ', '.join(parts) or 'all runs'
    return f'{name} ({variant.sweep})' if variant.sweep else name


def last_over_first(values_L: np.ndarray) -> float:
    """Returns the last layer over the first; nan if either is missing or the first is 0."""
    return float(values_L[-1] / values_L[0]) if values_L[0] else math.nan


def depth_exponent(values_L: np.ndarray) -> float:
    """Returns p of the power law v = c l^p, by least squares of log v over log l, l from 1.

    nan with fewer than two layers, or if a value is missing or not positive.
    """
    if len(values_L) < 2 or not (values_L > 0).all() or not np.isfinite(values_L).all():
        return math.nan
    layers_L = np.arange(1, len(values_L) + 1)
    return float(np.polyfit(np.log(layers_L), np.log(values_L), 1)[0])


def depth_table(profiles: Sequence[Profile]) -> list[list[str]]:
    """Returns a head and a row for each profile and step, as text."""
    return [
        [*HEAD],
        *(_depth_row(profile, step) for profile in profiles for step in profile.values),
    ]


def _depth_row(profile: Profile, step: int) -> list[str]:
    values_L, lowest = profile.values[step], profile.values[step].min()
    middle = values_L[(len(values_L) - 1) // 2]
    numbers = (values_L[0], middle, values_L[-1], last_over_first(values_L))
    seeds = [r for r in map(last_over_first, profile.seeds[step]) if math.isfinite(r)]
    spread = f'{_format_short(min(seeds))} to {_format_short(max(seeds))}' if len(seeds) > 1 else ''
    ends = _format_short(values_L.max() / lowest if lowest > 0 else math.nan)
    power, names = (
        _format_short(depth_exponent(values_L), '+.2f'),
        (profile.line, str(profile.layers)),
    )
    return [*names, str(step), *map(_format_short, numbers), spread, ends, power]


def _format_short(value: float, form: str = '.3g') -> str:
    return '' if math.isnan(value) else f'{value:{form}}'


def draw_quantity_charts(
    comparisons: Sequence[Comparison],
    series: SeriesByRun,
    names: Sequence[str],
    by_head: Sequence[str],
) -> dict[str, Chart]:
    """Draws every chart with numbers of the quantities `names`, and of RATE.

    Args:
      comparisons: the variants.
      series: recorded series by workdir.
      names: the quantities.
      by_head: quantities to show for each head, too.

    Returns:
      Charts by name.
    """
    runs, steps = collect_runs(comparisons, series), select_fitting(list(series.values()))[0]
    charts: dict[str, Chart] = {}
    for name in (*names, RATE):
        file = re.sub(r'\W+', '_', name)
        is_constant = name == RATE and all(len({*run.series.rates[1]}) < 2 for run in runs)
        if not is_constant and (rows := step_rows(runs, name)):
            charts[f'steps_{file}'] = draw_over_steps(
                rows, run_line_encodings(comparisons, runs), name
            )
        if maps := list(_iterate_maps(comparisons, runs, 'layers', name, steps)):
            if lines := build_profiles(comparisons, series, name):
                charts[f'depth_{file}'] = draw_by_depth(lines, name)
            charts[f'layers_{file}'] = draw_layer_maps(maps, runs, name)
        if name in by_head and (
            maps := list(_iterate_maps(comparisons, runs, 'heads', name, steps))
        ):
            charts[f'heads_{file}'] = draw_head_maps(maps, runs, name)
    return charts


def _iterate_maps(
    comparisons: Sequence[Comparison], runs: Sequence[RunLines], kind: str, name: str, steps: int
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yields (variant, learning rate and seed; map thinned to `steps`): the mean over seeds of each
    rate, then each seed if there are several.
    """
    by_workdir = {run.record['workdir']: run for run in runs}
    for c in comparisons:
        for lr in c.variant.rates:
            lr_runs = [by_workdir[record['workdir']] for record in c.variant.records_at(lr)]
            lr_runs = [run for run in lr_runs if name in getattr(run.series, kind)]
            maps = [getattr(run.series, kind)[name] for run in lr_runs]
            row = {'line': c.variant.name, 'lr': lr, 'best': any(run.is_best for run in lr_runs)}
            mean = mean_map(maps)
            if any(value is not None for value in flatten_values(mean[1])):
                yield row | {'seed': MEAN}, thin_map(mean, steps)
            for run, map_of_run in zip(lr_runs, maps, strict=True) if len(maps) > 1 else ():
                yield row | {'seed': run.seed}, thin_map(map_of_run, steps)


def _draw_heat_map(
    rows: list[dict], runs: Sequence[RunLines], name: str, y: altair.Y, size: tuple
) -> Chart:
    """Draws `rows` over steps, all variants on the same colour scale.

    The scale is logarithmic if all values are positive. A reader selects learning rate and seed.
    """
    rate, seeds = rate_parameter(runs, with_all=False), list(dict.fromkeys(r['seed'] for r in rows))
    seed = alt.param('seed', bind=alt.binding_select(options=seeds, name='seed '), value=MEAN)
    values = [value for row in rows for value in row['y'] if value is not None]
    kind = 'log' if min(values) > 0 else 'linear'
    scale = alt.Scale(type=kind, scheme='viridis', nice=False)
    title = name.replace('_', ' ')
    # The colours of the rows that are shown: Vega alone may label a single power of ten.
    ends = "domain('color')"
    middle = f'sqrt({ends}[0] * {ends}[1])' if kind == 'log' else f'lerp({ends}, 0.5)'
    labels = alt.ExprRef(f'[{ends}[0], {middle}, {ends}[1]]')
    legend = alt.Legend(title=title, gradientLength=size[1], format='.3~g', values=labels)
    chart = alt.Chart(alt.Data(values=rows)).transform_filter(AT_RATE if rate else 'datum.best')
    chart = chart.transform_filter('datum.seed == seed') if len(seeds) > 1 else chart
    chart = chart.transform_flatten(['step', 'y']).transform_filter('isValid(datum.y)')
    axis = alt.Axis(labelAngle=0, labelOverlap='greedy', ticks=False)
    tooltip = [*tooltips('line', 'lr', 'seed', 'layer', 'step'), alt.Tooltip('y:Q', title='value')]
    if 'head' in rows[0]:
        tooltip.insert(4, alt.Tooltip('head:Q'))
    chart = chart.mark_rect().encode(
        x=alt.X('step:O', title='step', axis=axis),
        y=y,
        color=alt.Color('y:Q', scale=scale, legend=legend),
        tooltip=tooltip,
    )
    names = list(dict.fromkeys(row['line'] for row in rows))
    facet = alt.Facet('line:N', title=None, sort=names)
    chart = chart.properties(width=size[0], height=size[1]).facet(facet=facet, columns=3)
    params = [*filter(None, [rate]), *([seed] if len(seeds) > 1 else [])]
    return with_log(chart.add_params(*params), color='log colours')


def draw_layer_maps(maps: Sequence[tuple], runs: Sequence[RunLines], name: str) -> Chart:
    """Draws a quantity over steps and depth, all variants on the same colour scale.

    Args:
      maps: (columns of a row, map) pairs.
      runs: the runs, for the learning rates.
      name: the quantity.
    """
    rows = [
        row | {'layer': i + 1, 'step': steps, 'y': list(values)}
        for row, (steps, by_step) in maps
        for i, values in enumerate(zip(*by_step, strict=True))
    ]
    y = alt.Y('layer:O', title='layer', sort='descending')
    return _draw_heat_map(rows, runs, name, y, (260, 150))


def draw_head_maps(maps: Sequence[tuple], runs: Sequence[RunLines], name: str) -> Chart:
    """Draws a quantity over steps for each head of each layer, counted from 1.

    Args:
      maps: (columns of a row, map) pairs.
      runs: the runs, for the learning rates.
      name: the quantity.
    """
    rows = [
        row | {'layer': i + 1, 'head': n + 1, 'place': f'{i + 1}.{n + 1}', 'step': steps, 'y': y}
        for row, (steps, by_step) in maps
        for i in range(len(by_step[0]))
        for n, y in enumerate(
            map(list, zip(*(heads_by_layer[i] for heads_by_layer in by_step), strict=True))
        )
    ]
    places = list(dict.fromkeys(row['place'] for row in rows))
    y = alt.Y('place:N', title='layer.head', sort=places[::-1])
    return _draw_heat_map(rows, runs, name, y, (260, min(480, max(150, 9 * len(places)))))


def build_axis(kind: str, values: Sequence[float]) -> altair.Axis:
    """Returns the axis of values on a scale of a kind, 'linear' or 'log'.

    Logarithmic ones are labelled at powers of 10, and below two decades also at 2 and 5 times
    these. Vega would label whichever ticks are left after every second one is dropped.
    """
    if kind == 'linear':
        return alt.Axis()
    digits = '1' if max(values) > DECADE**2 * min(values) else '125'
    digit = 'slice(format(datum.value, ".0e"), 0, 1)'
    label = f'indexof("{digits}", {digit}) < 0 ? "" : format(datum.value, "~g")'
    return alt.Axis(labelExpr=label, labelOverlap=False)


def draw_by_depth(profiles: Sequence[Profile], name: str) -> Chart:
    """Draws a quantity over the layers: a line for each variant and thin lines for its seeds.

    There is a row of panels for each number of layers, with the first recorded step on the left and
    the last on the right.
    """
    rows, panels = [], {}
    ends = max(len(profile.values) for profile in profiles)
    for profile in sorted(profiles, key=lambda profile: profile.layers):
        peers = [peer for peer in profiles if peer.layers == profile.layers]
        for end, step in zip(range(-ends, 0), profile.values, strict=False):
            steps = {list(peer.values)[end] for peer in peers if len(peer.values) == ends}
            when = f'step {step}' if len(steps) == 1 else ('last step', 'first step')[end + 1]
            panel = f'{profile.layers} layers, {when}'
            panels[panel] = None
            values_by_seed = {MEAN: profile.values[step]} | dict(enumerate(profile.seeds[step]))
            for seed, values_L in values_by_seed.items():
                row = {'line': profile.line, 'panel': panel, 'seed': str(seed)}
                finite = [(i + 1, float(v)) for i, v in enumerate(values_L) if math.isfinite(v)]
                rows += [row | {'layer': layer, 'y': value} for layer, value in finite]
    names = list(dict.fromkeys(profile.line for profile in profiles))
    look = line_encodings(names, {profile.line for profile in profiles if profile.is_baseline})
    values = [row['y'] for row in rows]
    kind = 'log' if 0 < DECADE * min(values) <= max(values) else 'linear'
    scale = build_scale(kind, nice=False)
    y = alt.Y('y:Q', title=name.replace('_', ' '), scale=scale, axis=build_axis(kind, values))
    layers = list(range(1, max(profile.layers for profile in profiles) + 1))
    x = alt.X('layer:Q', title='layer', axis=alt.Axis(values=layers, format='d'))
    chart = alt.Chart(alt.Data(values=rows)).encode(
        x=x, y=y, tooltip=tooltips('line', 'layer', 'y')
    )
    is_mean = alt.datum.seed == MEAN
    seeds = chart.transform_filter(~is_mean).mark_line(strokeWidth=0.7, opacity=0.6)
    means = chart.transform_filter(is_mean).mark_line(point=alt.OverlayMarkDef(size=24))
    figure = alt.layer(seeds.encode(detail='seed:N', **look), means.encode(**look))
    facet = alt.Facet('panel:N', title=None, sort=list(panels))
    figure = figure.properties(width=330, height=190).facet(facet=facet, columns=ends)
    return with_log(figure.resolve_scale(x='independent'), y='log scale')


def step_rows(runs: Sequence[RunLines], name: str) -> list[dict]:
    """Returns the mean, least and greatest over layers at each step of runs at their best rate."""
    rows = []
    for run in runs:
        steps_S, values_SL = _finite_values(run.series, name)
        if run.is_best and len(steps_S):
            low, high, mean = values_SL.min(1), values_SL.max(1), values_SL.mean(1)
            columns = {'step': steps_S, 'y': mean, 'low': low, 'high': high}
            rows.append(run.row | {key: value.tolist() for key, value in columns.items()})
    return rows


def draw_over_steps(rows: list[dict], look: dict[str, Any], name: str) -> Chart:
    """Draws the mean over layers over steps, thin lines for seeds, and a band over the layers.

    The scale is logarithmic if all values are positive and the greatest exceeds the least a
    hundredfold.

    Args:
      rows: rows of `step_rows`.
      look: encodings of the lines.
      name: the quantity.
    """
    low, high = min(min(row['low']) for row in rows), max(max(row['high']) for row in rows)
    kind = 'log' if 0 < 100 * low < high else 'linear'
    axis = build_axis(kind, [low, high])
    y = alt.Y('y:Q', title=name.replace('_', ' '), scale=build_scale(kind), axis=axis)
    flattened = alt.Chart(alt.Data(values=rows)).transform_flatten(['step', 'y', 'low', 'high'])
    x = alt.X('step:Q', title='step', scale=alt.Scale(nice=False, padding=MARGIN))
    chart = flattened.encode(x=x)
    encoding = {'color': look['color']}
    tooltip = tooltips('line', 'lr', 'seed', 'cell', 'step', 'y')
    band = chart.mark_area(opacity=0.1).encode(y=alt.Y('min(low):Q'), y2='max(high):Q', **encoding)
    runs = chart.mark_line(strokeWidth=0.8, opacity=0.6)
    means = chart.mark_line(point=len(rows[0]['step']) < 12).encode(y=y.aggregate('mean'), **look)
    layers = [band, runs.encode(y=y, detail='cell:N', tooltip=tooltip, **look), means]
    has_layers = any(row['low'] != row['high'] for row in rows)
    shown_layers = layers if has_layers else layers[1:]
    return with_log(alt.layer(*shown_layers).properties(width=430, height=220), y='log scale')


def _finite_values(series: Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps [S] with a number for all layers, and their values [S, L].

    A quantity of the whole model has a single column.
    """
    model_values = series.rates if name == RATE else series.scalars.get(name)
    steps, values = model_values or series.layers.get(name) or ([], [])
    values_SL = np.array(values, float).reshape(len(steps), -1 if steps else 0)
    is_finite_S = np.isfinite(values_SL).all(1)
    return np.array(steps)[is_finite_S], values_SL[is_finite_S]
