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
from matplotlib.figure import Figure

from eval.compare import Comparison, has_diverged
from eval.series import Map, Series, mean_map

BASELINE = '#333333'
# Okabe and Ito's colours, told apart by the colour-blind, without their yellow, too light on white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#7A5195')
DASHES = ('solid', 'dashed', 'dotted', 'dashdot')
UNITS = {'ce': 'loss, nats per token', 'bits_per_byte': 'bits per byte'}
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
    """A colour and a dash for each variant: the baseline is dark, the others differ in colour, then
    in dash.
    """
    found, others = [], 0
    for comparison in comparisons:
        if comparison.variant.is_baseline:
            found.append({'color': BASELINE, 'dash': 'solid'})
            continue
        dash = DASHES[others // len(COLOURS) % len(DASHES)]
        found.append({'color': COLOURS[others % len(COLOURS)], 'dash': dash})
        others += 1
    return found


def write_figures(
    folder: Path, comparisons: Sequence[Comparison], series: All, metric: str
) -> list[Path]:
    """Writes every figure that there are numbers for to the folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    ended = [c for c in comparisons if c.best_lr is not None]
    drawn: dict[str, Callable[[Figure], None]] = {}
    if any(one.training[0] for one in series.values()):
        drawn['loss_curves'] = lambda figure: loss_curves(figure, comparisons, series)
    if any(len(c.losses) > 1 for c in ended):
        drawn['learning_rates'] = lambda figure: learning_rates(figure, comparisons, metric)
    if any(c.difference.n and not c.variant.is_baseline for c in ended):
        drawn['differences'] = lambda figure: differences(figure, comparisons, metric)
    for name in dict.fromkeys(name for one in series.values() for name in one.layers):
        if maps := variant_maps(comparisons, series, name):
            file = 'layers_' + re.sub(r'\W+', '_', name)
            drawn[file] = functools.partial(layer_maps, maps=maps, name=name)
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


def shown(comparison: Comparison) -> list[str]:
    """The workdirs of the variant at its best learning rate, or all while none has ended."""
    best = comparison.best_lr
    records = comparison.variant.at(best) if best is not None else comparison.variant.records
    return [record['workdir'] for record in records]


def loss_curves(figure: Figure, comparisons: Sequence[Comparison], series: All) -> None:
    """Each seed's curve, each variant at its best learning rate."""
    figure.set_size_inches(7.0, 3.0)
    left, right = figure.subplots(1, 2)
    for comparison, style in zip(comparisons, styles(comparisons), strict=True):
        label = comparison.variant.name
        for workdir in shown(comparison):
            one = series[workdir]
            for axes, (steps, values) in ((left, one.training), (right, one.validation)):
                y = [math.nan if value is None else value for value in values]
                axes.plot(steps, y, ls=style['dash'], color=style['color'], alpha=0.7, label=label)
                label = None
    for axes, what in ((left, 'training loss'), (right, 'validation loss')):
        axes.set(xlabel='step', ylabel=f'{what}, nats per token')
    _legend(figure, left)


def learning_rates(figure: Figure, comparisons: Sequence[Comparison], metric: str) -> None:
    """Mean final loss over log(lr), with a band from the least to the greatest seed.

    Crosses on top where a run diverged.
    """
    figure.set_size_inches(4.6, 3.6)
    axes, crosses = figure.subplots(), collections.Counter()
    for comparison, style in zip(comparisons, styles(comparisons), strict=True):
        done = finished(comparison, metric)
        rates = [lr for lr, values in done.items() if values]
        low, high = ([end(done[lr]) for lr in rates] for end in (min, max))
        means = [np.mean(done[lr]) for lr in rates]
        colour, label = style['color'], comparison.variant.name
        axes.fill_between(rates, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(rates, means, color=colour, ls=style['dash'], marker='o', ms=3, label=label)
        for lr in {r['lr'] for r in comparison.variant.records if has_diverged(r)}:
            crosses[lr] += 1  # below those of other variants
            place = axes.get_xaxis_transform()
            axes.plot(lr, 1.02 - 0.05 * crosses[lr], 'x', color=colour, ms=4, transform=place)
    axes.set(xscale='log', xlabel='learning rate', ylabel=f'final {UNITS[metric]}')
    axes.margins(y=0.05 + 0.07 * max(crosses.values(), default=0))
    _legend(figure, axes)


def finished(comparison: Comparison, metric: str) -> dict[float, list[float]]:
    """lr -> the final losses of the runs that finished; [] where none did."""
    found: dict[float, list[float]] = {}
    for record in sorted(comparison.variant.records, key=lambda record: record['lr']):
        values = found.setdefault(record['lr'], [])
        if record['status'] == 'done' and record[metric] is not None:
            values.append(record[metric])
    return found


def differences(figure: Figure, comparisons: Sequence[Comparison], metric: str) -> None:
    """Each variant's paired difference from the baseline with its interval."""
    compared = [c for c in comparisons if c.difference.n and not c.variant.is_baseline]
    figure.set_size_inches(6.0, 0.7 + 0.25 * len(compared))
    axes = figure.subplots()
    means = [c.difference.mean for c in compared]
    halves = [0.0 if math.isnan(c.difference.half) else c.difference.half for c in compared]
    axes.axvline(0, color=BASELINE, lw=0.8)
    axes.errorbar(means, range(len(compared)), xerr=halves, fmt='o', ms=4, capsize=2)
    axes.set_yticks(range(len(compared)), [f'{c.variant.name}: {c.verdict}' for c in compared])
    axes.invert_yaxis()
    axes.set(xlabel=f'difference from the baseline, {UNITS[metric].removeprefix("loss, ")}')


def variant_maps(comparisons: Sequence[Comparison], series: All, name: str) -> dict[str, Map]:
    """A quantity of each variant that has it, at its best learning rate, mean over seeds."""
    found = {}
    for comparison in comparisons:
        recorded = [series[w].layers[name] for w in shown(comparison) if name in series[w].layers]
        steps, values = mean_map(recorded) if recorded else ([], [])
        if np.isfinite(np.array(values, float)).any():
            found[comparison.variant.name] = steps, values
    return found


def layer_maps(figure: Figure, maps: Mapping[str, Map], name: str) -> None:
    """One quantity over steps and depth, all variants on one scale of colours."""
    per_row = min(3, len(maps))
    rows = math.ceil(len(maps) / per_row)
    figure.set_size_inches(2.4 * per_row + 0.8, 2.0 * rows + 0.3)
    grid = list(figure.subplots(rows, per_row, squeeze=False, sharex=True, sharey=True).flat)
    arrays = {variant: np.array(values, float).T for variant, (_, values) in maps.items()}
    low = min(np.nanmin(values_LS) for values_LS in arrays.values())
    high = max(np.nanmax(values_LS) for values_LS in arrays.values())
    for axes, (variant, values_LS) in zip(grid, arrays.items(), strict=False):
        steps, depths = maps[variant][0], range(len(values_LS))
        mesh = axes.pcolormesh(steps, depths, values_LS, shading='nearest', vmin=low, vmax=high)
        axes.set_title(variant, fontsize=8)
        axes.grid(False)
    for axes in grid[len(maps) :]:
        axes.remove()
    figure.colorbar(mesh, ax=grid[: len(maps)], label=name.replace('_', ' '))
    figure.supxlabel('step', fontsize=8)
    figure.supylabel('layer', fontsize=8)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(
            handles, labels, loc='outside upper center', ncols=2 if len(labels) > 1 else 1
        )
