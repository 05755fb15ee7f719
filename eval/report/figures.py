"""Figures for papers, as PNG and SVG. They need no display."""

import collections
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter

from eval.columns import columns
from eval.compare import Comparison
from eval.report import differences
from eval.report.depth import Profile, profiles, shown
from eval.report.over_steps import drawable, over_steps
from eval.report.quantities import drawn as drawn_quantities
from eval.report.rates import finished
from eval.report.series import HeatMap, Series, mean_map
from eval.report.sizes import by_size, rates_by_size
from eval.report.tables import UNITS
from eval.text import number
from eval.variants import SEEDS, has_diverged

BASELINE = '#333333'
# Okabe and Ito's colours, told apart by the colour-blind, without their yellow, too light on white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#7A5195')
DASHES = ('solid', 'dashed', 'dotted', 'dashdot')
ONE_PANEL, PANELS_PER_ROW = 8, 5
FEW_RATES = 4  # whose numbers have room side by side
STYLE = {
    'font.size': 8,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.color': '#e6e6e6',
    'axes.axisbelow': True,
    'legend.frameon': False,
    'lines.linewidth': 1.3,
    'savefig.dpi': 200,
    'svg.fonttype': 'none',  # text stays text
    'svg.hashsalt': 'evenkeel',  # the same figure gives the same file
}
All = Mapping[str, Series]  # by workdir


def styles(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """A colour and a dash for each variant (`line_styles`)."""
    return line_styles([comparison.variant.is_baseline for comparison in comparisons])


def line_styles(are_baselines: Sequence[bool]) -> list[dict[str, str]]:
    """A colour and a dash for each line: the baseline is dark, the others differ in colour, then in
    dash.
    """
    found, others = [], 0
    for is_baseline in are_baselines:
        if is_baseline:
            found.append({'color': BASELINE, 'dash': 'solid'})
            continue
        dash = DASHES[others // len(COLOURS) % len(DASHES)]
        found.append({'color': COLOURS[others % len(COLOURS)], 'dash': dash})
        others += 1
    return found


def write_figures(
    folder: Path,
    comparisons: Sequence[Comparison],
    by_variant: Sequence[Comparison],
    series: All,
    metric: str,
) -> list[Path]:
    """Writes every figure that there are numbers for to the folder; returns the files. Of what
    layers recorded: `eval.report.quantities.drawn`.

    by_variant: the same, but where the learning rates are compared: what they are rates of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Callable[[Figure], None]] = {}
    if any(one.training[0] for one in series.values()):
        drawn['loss_curves'] = lambda figure: loss_curves(figure, comparisons, series)
    if any(len(c.losses) > 1 for c in by_variant):
        drawn['learning_rates'] = lambda figure: learning_rates(figure, by_variant, metric)
        if panels := by_size(by_variant):
            drawn['rates_by_size'] = lambda figure: rates_by_size(figure, panels, metric)
    if differences.compared(comparisons):
        unit = UNITS[metric].removeprefix('loss, ')
        drawn['differences'] = lambda figure: differences.draw(figure, comparisons, unit)
    for name in drawn_quantities(series.values()):
        if maps := variant_maps(comparisons, series, name):
            file = re.sub(r'\W+', '_', name)
            drawn['layers_' + file] = functools.partial(layer_maps, maps=maps, name=name)
            found = profiles(comparisons, series, name)
            drawn['depth_' + file] = functools.partial(by_depth, found=found, name=name)
    looks = styles(comparisons)
    for name in drawable(comparisons, series):
        draw = functools.partial(over_steps, comparisons=comparisons, looks=looks, series=series)
        drawn['steps_' + name] = functools.partial(draw, name=name)
    paths = []
    with matplotlib.rc_context(STYLE):
        for file, draw in drawn.items():
            figure = Figure(layout='constrained')
            FigureCanvasAgg(figure)
            draw(figure)
            for kind, metadata in (('png', {}), ('svg', {'Date': None})):
                paths.append(folder / f'{file}.{kind}')
                figure.savefig(paths[-1], metadata=metadata)
    return paths


def loss_curves(figure: Figure, comparisons: Sequence[Comparison], series: All) -> None:
    """Each seed's curve, each variant at its best learning rate. Where there is one variant alone,
    its seeds have a colour and a name each.
    """
    figure.set_size_inches(7.0, 3.0)
    left, right = figure.subplots(1, 2)
    lines = [(comparison.variant.name, shown(comparison)) for comparison in comparisons]
    looks = styles(comparisons)
    if len(comparisons) == 1:
        lines = _by_seed(*comparisons)
        looks = line_styles([i == 0 for i in range(len(lines))])
    for (label, workdirs), style in zip(lines, looks, strict=True):
        for i, workdir in enumerate(workdirs):
            one = series[workdir]
            for axes, (steps, values) in ((left, one.training), (right, one.validation)):
                y = [math.nan if value is None else value for value in values]
                look = {'ls': style['dash'], 'color': style['color'], 'alpha': 0.7}
                look |= {'label': label} if not i and axes is left else {}
                axes.plot(steps, y, marker='o' if len(y) == 1 else None, ms=3, **look)
    for axes, what in ((left, 'training loss'), (right, 'validation loss')):
        axes.set(xlabel='step', ylabel=f'{what}, nats per token')
    _legend(figure, left)


def _by_seed(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """A name and the workdir of each run that is shown."""
    workdirs, records = shown(comparison), comparison.variant.records
    runs = [record for record in records if record['workdir'] in workdirs]
    names = [columns()[path] for path in SEEDS]
    varied = [name for name in names if len({run[name] for run in runs}) > 1]
    return [(', '.join(f'{name} {run[name]}' for name in varied), [run['workdir']]) for run in runs]


def learning_rates(figure: Figure, comparisons: Sequence[Comparison], metric: str) -> None:
    """Mean final loss over log(lr), with a band from the least to the greatest seed.

    Crosses on top where a run diverged. More variants than ONE_PANEL have a panel each, with the
    baseline in each.
    """
    looks = styles(comparisons)
    if len(comparisons) > ONE_PANEL:
        _learning_rate_panels(figure, comparisons, looks, metric)
        return
    figure.set_size_inches(4.6, 3.6)
    axes, crosses = figure.subplots(), collections.Counter()
    for comparison, look in zip(comparisons, looks, strict=True):
        _learning_rate_line(axes, comparison, look, metric, crosses)
    axes.set(xlabel='learning rate', ylabel=f'final {UNITS[metric]}')
    _rate_axis(axes, comparisons)
    axes.margins(y=0.05 + 0.07 * max(crosses.values(), default=0))
    _legend(figure, axes)


def _rate_axis(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """Logarithmic; marked at the learning rates that were tried, where these are few."""
    rates = sorted({r['lr'] for c in comparisons for r in c.variant.records if r['lr']})
    axes.set_xscale('log')
    axes.xaxis.set_minor_formatter(NullFormatter())
    if len(rates) <= FEW_RATES:
        axes.set_xticks(rates, [number(rate) for rate in rates])


def _learning_rate_line(
    axes: Axes,
    comparison: Comparison,
    look: Mapping[str, str],
    metric: str,
    crosses: collections.Counter,
) -> None:
    """`crosses` counts those that stand at a learning rate already."""
    done = finished(comparison, metric)
    rates = [lr for lr, values in done.items() if values]
    low, high = ([end(done[lr]) for lr in rates] for end in (min, max))
    means = [np.mean(done[lr]) for lr in rates]
    colour, label = look['color'], comparison.variant.name
    axes.fill_between(rates, low, high, color=colour, alpha=0.15, lw=0)
    axes.plot(rates, means, color=colour, ls=look['dash'], marker='o', ms=3, label=label)
    for lr in {r['lr'] for r in comparison.variant.records if has_diverged(r)}:
        crosses[lr] += 1
        place = axes.get_xaxis_transform()
        axes.plot(lr, 1.02 - 0.05 * crosses[lr], 'x', color=colour, ms=4, transform=place)


def _learning_rate_panels(
    figure: Figure, comparisons: Sequence[Comparison], looks: Sequence[dict], metric: str
) -> None:
    pairs = list(zip(comparisons, looks, strict=True))
    baselines = [pair for pair in pairs if pair[0].variant.is_baseline]
    others = [pair for pair in pairs if not pair[0].variant.is_baseline]
    rows = math.ceil(len(others) / PANELS_PER_ROW)
    figure.set_size_inches(1.5 * PANELS_PER_ROW, 1.45 * rows + 0.3)
    grid = list(figure.subplots(rows, PANELS_PER_ROW, squeeze=False, sharex=True, sharey=True).flat)
    for axes, own in zip(grid, others, strict=False):
        crosses = collections.Counter()
        for comparison, look in [*baselines, own]:
            _learning_rate_line(axes, comparison, look, metric, crosses)
        axes.set_title(own[0].variant.name.replace(', ', '\n'), fontsize=6)
        _rate_axis(axes, comparisons)
        axes.margins(y=0.15)
    for axes in grid[max(0, len(others) - PANELS_PER_ROW) : len(others)]:  # lowest of its column
        axes.tick_params(labelbottom=True)
    for axes in grid[len(others) :]:
        axes.remove()
    # As in the sensitivity, what is worse than no training at all is as bad as that.
    top = 1.1 * max(comparison.initial for comparison in comparisons)
    if math.isfinite(top) and grid[0].get_ylim()[1] > top:
        grid[0].set_ylim(top=top)
    names = ', '.join(comparison.variant.name for comparison, _ in baselines)
    figure.supxlabel(f'learning rate; dark: {names}' if names else 'learning rate', fontsize=8)
    figure.supylabel(f'final {UNITS[metric]}', fontsize=8)


def variant_maps(comparisons: Sequence[Comparison], series: All, name: str) -> dict[str, HeatMap]:
    """A quantity of each variant that has it, at its best learning rate, mean over seeds."""
    found = {}
    for comparison in comparisons:
        recorded = [series[w].layers[name] for w in shown(comparison) if name in series[w].layers]
        steps, values = mean_map(recorded) if recorded else ([], [])
        if np.isfinite(np.array(values, float)).any():
            found[comparison.variant.name] = steps, values
    return found


def layer_maps(figure: Figure, maps: Mapping[str, HeatMap], name: str) -> None:
    """One quantity over steps and depth, all variants on one scale of colours: logarithmic where
    all values are positive.
    """
    per_row = min(3 if len(maps) <= ONE_PANEL else PANELS_PER_ROW, len(maps))
    rows = math.ceil(len(maps) / per_row)
    width, height, font = (2.4, 2.0, 8) if len(maps) <= ONE_PANEL else (1.5, 1.4, 6)
    figure.set_size_inches(width * per_row + 0.8, height * rows + 0.3)
    grid = list(figure.subplots(rows, per_row, squeeze=False, sharex=True, sharey=True).flat)
    arrays = {variant: np.array(values, float).T for variant, (_, values) in maps.items()}
    low = min(np.nanmin(values_LS) for values_LS in arrays.values())
    high = max(np.nanmax(values_LS) for values_LS in arrays.values())
    scale = LogNorm(low, high) if low > 0 else Normalize(low, high)
    for axes, (variant, values_LS) in zip(grid, arrays.items(), strict=False):
        steps, depths = maps[variant][0], range(1, len(values_LS) + 1)
        mesh = axes.pcolormesh(steps, depths, values_LS, shading='nearest', norm=scale)
        axes.set_title(variant.replace(', ', '\n'), fontsize=font)
        axes.grid(False)
    for axes in grid[len(maps) :]:
        axes.remove()
    label = name.replace('_', ' ')
    figure.colorbar(mesh, ax=grid[: len(maps)], label=label, aspect=20 * rows, fraction=0.05)
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


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        rows = math.ceil(len(labels) / 2)
        if rows > 4:  # or the axes would have no room left
            figure.set_figheight(figure.get_figheight() + 0.17 * (rows - 4))
        font = 8 if len(labels) <= ONE_PANEL else 6  # beside each other in the width of the figure
        figure.legend(handles, labels, loc='outside upper center', ncols=2, fontsize=font)
