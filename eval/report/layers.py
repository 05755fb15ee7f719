"""Quantities recorded besides losses: tables by depth, and figures for papers over steps, layers
and both.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from eval.compare import Comparison
from eval.report.figures import ONE_PANEL, PANELS_PER_ROW, All, Draw, line_styles, panels, styles
from eval.report.series import FEW, HeatMap, Series, drawn, mean_map
from eval.tables.text import number

DEPTH = 'n_layers'  # the column in which variants that make one line differ
HEAD = 'variant,layers,step,first,middle,last,last / first,over seeds,most / least,exponent'
RATE = 'learning_rate'
WIDEST_OF_TWO = 32  # characters of a name that fits beside another


@dataclasses.dataclass(frozen=True)
class Profile:
    """A quantity of one variant by layer, mean over seeds, nan where there is no number.

    line: the variant's name without its number of layers, which is `layers`.
    values: step -> [layers], of the first and the last recorded step.
    ratios: step -> last layer over first, of each seed.
    """

    line: str
    is_baseline: bool
    layers: int
    values: dict[int, np.ndarray]
    ratios: dict[int, list[float]]


def maps_of(comparison: Comparison, series: Mapping[str, Series], name: str) -> list[HeatMap]:
    """The quantity `name` of each run that is shown and has it."""
    each = (series[workdir].layers.get(name) for workdir in comparison.shown)
    return [one for one in each if one is not None]


def profiles(
    comparisons: Sequence[Comparison], series: Mapping[str, Series], name: str
) -> list[Profile]:
    """The quantity `name` of each variant that has numbers of it."""
    found = []
    for comparison in comparisons:
        maps = maps_of(comparison, series, name)
        means = list(zip(*mean_map(maps), strict=True))
        ends = {step: np.array(v, float) for step, v in (*means[:1], *means[-1:])}
        if any(np.isfinite(values_L).any() for values_L in ends.values()):
            by_step = [dict(zip(*one, strict=True)) for one in maps]
            ratios = {step: [ratio(np.array(r[step], float)) for r in by_step] for step in ends}
            line, is_baseline = line_of(comparison), comparison.variant.is_baseline
            found.append(Profile(line, is_baseline, len(means[0][1]), ends, ratios))
    return found


def line_of(comparison: Comparison) -> str:
    """The variant's name beside others of its number of layers."""
    variant = comparison.variant
    if DEPTH not in variant.values:
        return variant.name
    values = variant.values.items()
    parts = [f'{column} {number(value)}' for column, value in values if column != DEPTH]
    name = ', '.join(parts) or 'all runs'
    return f'{name} ({variant.sweep})' if variant.sweep else name


def ratio(values_L: np.ndarray) -> float:
    """Last layer over first; nan where one is missing or the first is 0."""
    return float(values_L[-1] / values_L[0]) if values_L[0] else math.nan


def exponent(values_L: np.ndarray) -> float:
    """p of the power law v = c l^p, the least squares line through log v over log l, l from 1.

    nan with fewer than two layers, or where a value is missing or not positive.
    """
    if len(values_L) < 2 or not (values_L > 0).all() or not np.isfinite(values_L).all():
        return math.nan
    layers_L = np.arange(1, len(values_L) + 1)
    return float(np.polyfit(np.log(layers_L), np.log(values_L), 1)[0])


def table(found: Sequence[Profile]) -> list[list[str]]:
    """A head and a row for each profile and step, as text."""
    rows = (_row(profile, step) for profile in found for step in profile.values)
    return [HEAD.split(','), *rows]


def _row(profile: Profile, step: int) -> list[str]:
    values_L, least = profile.values[step], profile.values[step].min()
    middle = values_L[(len(values_L) - 1) // 2]
    numbers = (values_L[0], middle, values_L[-1], ratio(values_L))
    seeds = [r for r in profile.ratios[step] if math.isfinite(r)]
    spread = f'{_short(min(seeds))} to {_short(max(seeds))}' if len(seeds) > 1 else ''
    ends = _short(values_L.max() / least if least > 0 else math.nan)
    power, names = _short(exponent(values_L), '+.2f'), (profile.line, str(profile.layers))
    return [*names, str(step), *map(_short, numbers), spread, ends, power]


def _short(value: float, form: str = '.3g') -> str:
    return '' if math.isnan(value) else f'{value:{form}}'


def figures_of_quantities(comparisons: Sequence[Comparison], series: All) -> dict[str, Draw]:
    """Every figure of quantities that there are numbers for, by name (`series.drawn`)."""
    found: dict[str, Draw] = {}
    for name in drawn(series.values()):
        each = {c.variant.name: mean_map(maps_of(c, series, name)) for c in comparisons}
        maps = {n: one for n, one in each.items() if np.isfinite(np.array(one[1], float)).any()}
        if maps:
            file, lines = re.sub(r'\W+', '_', name), profiles(comparisons, series, name)
            found['layers_' + file] = functools.partial(layer_maps, maps=maps, name=name)
            found['depth_' + file] = functools.partial(by_depth, found=lines, name=name)
    for name in drawable(comparisons, series):
        draw = functools.partial(over_steps, comparisons=comparisons, series=series, name=name)
        found['steps_' + name] = draw
    return found


def layer_maps(figure: Figure, maps: Mapping[str, HeatMap], name: str) -> None:
    """One quantity over steps and depth, all variants on one scale of colours: logarithmic where
    all values are positive.
    """
    few = len(maps) <= ONE_PANEL
    per_row, cell, font = (3, (2.4, 2.0), 8) if few else (PANELS_PER_ROW, (1.5, 1.4), 6)
    grid = panels(figure, len(maps), per_row, cell, (0.8, 0.3))
    arrays = {variant: np.array(values, float).T for variant, (_, values) in maps.items()}
    low = min(np.nanmin(values_LS) for values_LS in arrays.values())
    high = max(np.nanmax(values_LS) for values_LS in arrays.values())
    scale = LogNorm(low, high) if low > 0 else Normalize(low, high)
    for axes, (variant, values_LS) in zip(grid, arrays.items(), strict=True):
        steps, depths = maps[variant][0], range(1, len(values_LS) + 1)
        mesh = axes.pcolormesh(steps, depths, values_LS, shading='nearest', norm=scale)
        axes.set_title(variant.replace(', ', '\n'), fontsize=font)
        axes.grid(False)
    aspect = 20 * -(-len(maps) // per_row)
    figure.colorbar(mesh, ax=grid, label=name.replace('_', ' '), aspect=aspect, fraction=0.05)
    figure.supxlabel('step', fontsize=8)
    figure.supylabel('layer, from 1', fontsize=8)


def by_depth(figure: Figure, found: Sequence[Profile], name: str) -> None:
    """One quantity over the layers, a line for each variant: a row of panels for each number of
    layers, with the first recorded step on the left and the last on the right.
    """
    depths = sorted({profile.layers for profile in found})
    ends = max(len(profile.values) for profile in found)
    lines = dict.fromkeys(profile.line for profile in found)
    of_baselines = {profile.line for profile in found if profile.is_baseline}
    looks = dict(zip(lines, line_styles([line in of_baselines for line in lines]), strict=True))
    tall = max(0.5 + 1.9 * len(depths), 0.17 * len(lines))  # enough for the legend
    figure.set_size_inches(1.5 + 2.7 * ends, tall)
    grid = figure.subplots(len(depths), ends, squeeze=False, sharex='row', sharey='col')
    for row, layers in zip(grid, depths, strict=True):
        here = [profile for profile in found if profile.layers == layers]
        for axes, end in zip(row, (0, -1), strict=False):
            for profile in here:
                look, y_L = looks[profile.line], list(profile.values.values())[end]
                dash, marker = look['dash'], 'o' if layers == 1 else None
                axes.plot(range(1, layers + 1), y_L, ls=dash, marker=marker, color=look['color'])
            steps = {list(profile.values)[end] for profile in here}
            when = f'step {steps.pop()}' if len(steps) == 1 else ('first step', 'last step')[end]
            axes.set_title(f'{layers} layers, {when}', fontsize=8)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    values = np.concatenate([values_L for p in found for values_L in p.values.values()])
    if (values[np.isfinite(values)] > 0).all():
        for axes in grid[0]:  # the others of its column share it
            axes.set_yscale('log')
    for axes in grid[-1]:
        axes.set_xlabel('layer, from 1')
    figure.supylabel(name.replace('_', ' '), fontsize=8)
    if len(lines) > 1:
        keys = [Line2D([], [], color=look['color'], ls=look['dash']) for look in looks.values()]
        figure.legend(keys, list(looks), loc='outside right center', handlelength=3)


def drawable(comparisons: Sequence[Comparison], series: All) -> list[str]:
    """The few quantities that matter, and RATE, of which some run that is shown has numbers."""
    runs = [series[workdir] for comparison in comparisons for workdir in comparison.shown]
    return [name for name in (*FEW, RATE) if any(len(_lines(one, name)[0]) for one in runs)]


def over_steps(figure: Figure, comparisons: Sequence[Comparison], series: All, name: str) -> None:
    """A line for each run of each variant, at its best learning rate: the mean over layers, with a
    band from the least to the greatest layer. Logarithmic where all values are positive and the
    greatest is a hundred times the least.
    """
    figure.set_size_inches(4.6, 3.4)
    axes, ends = figure.subplots(), []
    for comparison, look in zip(comparisons, styles(comparisons), strict=True):
        for i, workdir in enumerate(comparison.shown):
            steps_S, values_SL = _lines(series[workdir], name)
            if not len(steps_S):
                continue
            label = {} if i else {'label': comparison.variant.name}
            style = {'color': look['color'], 'ls': look['dash'], 'alpha': 0.8} | label
            axes.plot(steps_S, values_SL.mean(1), **style)
            low, high = values_SL.min(1), values_SL.max(1)
            axes.fill_between(steps_S, low, high, color=look['color'], alpha=0.1, lw=0)
            ends += [low.min(), high.max()]
    if min(ends) > 0 and max(ends) > 100 * min(ends):
        axes.set_yscale('log')
    axes.set(xlabel='step', ylabel=name.replace('_', ' '))
    if len(comparisons) > 1:
        longest = max(len(comparison.variant.name) for comparison in comparisons)
        columns = 2 if longest <= WIDEST_OF_TWO else 1
        figure.legend(loc='outside upper center', ncols=columns, fontsize=7)


def _lines(one: Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    """[S] steps and [S, L] values, of the steps at which all layers have one; one column for a
    quantity of the whole model.
    """
    of_model = one.rates if name == RATE else one.scalars.get(name)
    steps, values = of_model or one.layers.get(name) or ([], [])
    values_SL = np.array(values, float).reshape(len(steps), -1 if steps else 0)
    kept_S = np.isfinite(values_SL).all(1)
    return np.array(steps)[kept_S], values_SL[kept_S]
