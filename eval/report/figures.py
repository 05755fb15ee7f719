"""Figures of losses for papers, as PNG and SVG; `eval.report.layers` has other quantities."""

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from eval.compare import BETTER, ONE_SEED, WITHIN_NOISE, WORSE, Comparison
from eval.report.series import Series
from eval.report.tables import UNITS, compared, finished, seed_columns, SHORT_UNITS
from eval.tables.text import number
from eval.tables.variants import has_diverged

BASELINE = '#333333'
# Okabe and Ito's colours, told apart by the colour-blind, without their yellow, too light on white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#7A5195')
VERDICTS = {BETTER: '#00765a', WORSE: '#b84d00', WITHIN_NOISE: '#646b73', ONE_SEED: '#9aa2aa'}
DASHES = ('solid', 'dashed', 'dotted', 'dashdot')
ONE_PANEL, PANELS_PER_ROW = 8, 5
FEW_RATES = 4  # whose numbers have room side by side
SIZES = ('d_model', 'n_layers')
SIZES_PER_ROW = 4
# What a size brings along: no choice of its own.
WITH_SIZE = (*SIZES, 'd_ff', 'n_heads', 'n_kv_heads', 'scaling_base_width', 'scaling_base_depth')
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
Draw = Callable[[Figure], Any]


def styles(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """A colour and a dash for each variant (`line_styles`)."""
    return line_styles([comparison.variant.is_baseline for comparison in comparisons])


def line_styles(are_baselines: Sequence[bool]) -> list[dict[str, str]]:
    """A colour and a dash for each line: the baseline is dark, the others differ in colour, then in
    dash.
    """
    dark = {'color': BASELINE, 'dash': 'solid'}
    others = itertools.cycle({'color': c, 'dash': dash} for dash in DASHES for c in COLOURS)
    return [dark if is_baseline else next(others) for is_baseline in are_baselines]


def save(folder: Path, drawn: Mapping[str, Draw]) -> list[Path]:
    """Draws each figure and writes it as FOLDER/NAME.png and .svg; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, draw in drawn.items():
            figure = Figure(layout='constrained')
            draw(figure)
            for kind, metadata in (('png', {}), ('svg', {'Date': None})):
                paths.append(folder / f'{name}.{kind}')
                figure.savefig(paths[-1], metadata=metadata)
    return paths


def figures_of_losses(
    comparisons: Sequence[Comparison], by_variant: Sequence[Comparison], series: All, metric: str
) -> dict[str, Draw]:
    """Every figure of losses that there are numbers for, by name.

    by_variant: the same comparisons; where they are of learning rates, those of the variants.
    """
    found: dict[str, Draw] = {}
    if any(one.training[0] for one in series.values()):
        found['loss_curves'] = lambda figure: loss_curves(figure, comparisons, series)
    if any(len(c.losses) > 1 for c in by_variant):
        found['learning_rates'] = lambda figure: learning_rates(figure, by_variant, metric)
        if by_size(by_variant):
            found['rates_by_size'] = lambda f: rates_by_size(f, by_size(by_variant), metric)
    if compared(comparisons):
        found['differences'] = lambda figure: differences(figure, comparisons, metric)
    return found


def panels(
    figure: Figure, count: int, per_row: int, cell: tuple[float, float], margin: tuple[float, float]
) -> list[Axes]:
    """`count` axes that share their scales, in rows. cell, margin: width and height in inches."""
    columns, rows = min(count, per_row), math.ceil(count / per_row)
    figure.set_size_inches(cell[0] * columns + margin[0], cell[1] * rows + margin[1])
    grid = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes in grid[count:]:
        axes.remove()
    return grid[:count]


def loss_curves(figure: Figure, comparisons: Sequence[Comparison], series: All) -> None:
    """Each seed's curve, each variant at its best learning rate. Where there is one variant alone,
    its seeds have a colour and a name each.
    """
    figure.set_size_inches(7.0, 3.0)
    left, right = figure.subplots(1, 2)
    lines = [(comparison.variant.name, comparison.shown) for comparison in comparisons]
    looks = styles(comparisons)
    if len(comparisons) == 1:
        (only,) = comparisons
        runs = [record for record in only.variant.records if record['workdir'] in only.shown]
        seeds = [', '.join(f'{name} {run[name]}' for name in seed_columns(runs)) for run in runs]
        lines = [(label, [run['workdir']]) for label, run in zip(seeds, runs, strict=True)]
        looks = line_styles([i == 0 for i in range(len(lines))])
    for (label, workdirs), style in zip(lines, looks, strict=True):
        for i, workdir in enumerate(workdirs):
            one = series[workdir]
            for axes, (steps, values) in ((left, one.training), (right, one.validation)):
                look = {'ls': style['dash'], 'color': style['color'], 'alpha': 0.7}
                look |= {'label': label} if not i and axes is left else {}
                marker = 'o' if len(values) == 1 else None
                axes.plot(steps, np.array(values, float), marker=marker, ms=3, **look)
    for axes, what in ((left, 'training loss'), (right, 'validation loss')):
        axes.set(xlabel='step', ylabel=f'{what}, nats per token')
    _legend(figure, left)


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


def _rate_axis(axes: Axes, comparisons: Iterable[Comparison] = ()) -> None:
    """Logarithmic; marked at the learning rates that were tried, where these are few."""
    rates = sorted({rate for c in comparisons for rate in c.variant.rates if rate})
    axes.set_xscale('log')
    axes.xaxis.set_minor_formatter(NullFormatter())
    if 0 < len(rates) <= FEW_RATES:
        axes.set_xticks(rates, [number(rate) for rate in rates])


def _mean_and_band(
    axes: Axes, comparison: Comparison, metric: str, color: Any, **look: Any
) -> tuple[list[float], list[float]]:
    """Draws the mean over seeds and a band between them; returns the learning rates and means."""
    done = {lr: values for lr, values in finished(comparison, metric).items() if values}
    rates, means = list(done), [float(np.mean(values)) for values in done.values()]
    low, high = ([end(values) for values in done.values()] for end in (min, max))
    axes.fill_between(rates, low, high, color=color, alpha=0.15, lw=0)
    axes.plot(rates, means, color=color, marker='o', **look)
    return rates, means


def _learning_rate_line(
    axes: Axes,
    comparison: Comparison,
    look: Mapping[str, str],
    metric: str,
    crosses: collections.Counter,
) -> None:
    """`crosses` counts those that stand at a learning rate already."""
    colour, label = look['color'], comparison.variant.name
    _mean_and_band(axes, comparison, metric, colour, ls=look['dash'], ms=3, label=label)
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
    grid = panels(figure, len(others), PANELS_PER_ROW, (1.5, 1.45), (0, 0.3))
    for axes, own in zip(grid, others, strict=True):
        crosses = collections.Counter()
        for comparison, look in [*baselines, own]:
            _learning_rate_line(axes, comparison, look, metric, crosses)
        axes.set_title(own[0].variant.name.replace(', ', '\n'), fontsize=6)
        _rate_axis(axes, comparisons)
        axes.margins(y=0.15)
    for axes in grid[-PANELS_PER_ROW:]:  # lowest of its column
        axes.tick_params(labelbottom=True)
    # As in the sensitivity, what is worse than no training at all is as bad as that.
    top = 1.1 * max(comparison.initial for comparison in comparisons)
    if math.isfinite(top) and grid[0].get_ylim()[1] > top:
        grid[0].set_ylim(top=top)
    names = ', '.join(comparison.variant.name for comparison, _ in baselines)
    figure.supxlabel(f'learning rate; dark: {names}' if names else 'learning rate', fontsize=8)
    figure.supylabel(f'final {UNITS[metric]}', fontsize=8)


Sizes = dict[str, list[tuple[str, Comparison]]]


def by_size(comparisons: Sequence[Comparison]) -> Sizes:
    """{what is chosen besides the size: [(size, its runs)]}, smallest first; {} where there is one
    size alone.
    """
    values = [comparison.variant.values for comparison in comparisons]
    varied = [name for name in SIZES if len({repr(one.get(name)) for one in values}) > 1]
    if not varied:
        return {}
    found: dict[str, list[Comparison]] = {}
    for comparison, one in zip(comparisons, values, strict=True):
        chosen = {n: v for n, v in one.items() if n not in WITH_SIZE and v is not None}
        others = '\n'.join(f'{name} {number(value)}' for name, value in chosen.items())
        found.setdefault(others, []).append(comparison)

    def size(comparison: Comparison) -> tuple:
        return tuple(comparison.variant.values[name] for name in varied)

    def label(comparison: Comparison) -> str:
        return ', '.join(f'{name} {comparison.variant.values[name]}' for name in varied)

    return {others: [(label(c), c) for c in sorted(own, key=size)] for others, own in found.items()}


def rates_by_size(figure: Figure, sizes: Sizes, metric: str) -> None:
    """A panel for each choice, a line for each size, its lowest mean ringed; a band from the least
    to the greatest seed. It shows whether the best learning rate moves with the size.
    """
    grid = panels(figure, len(sizes), SIZES_PER_ROW, (2.0, 2.1), (0.6, 0.5))
    labels = list(dict.fromkeys(label for lines in sizes.values() for label, _ in lines))
    shades = matplotlib.colormaps['viridis'](np.linspace(0, 0.85, len(labels)))
    shade = dict(zip(labels, shades, strict=True))
    for axes, (others, lines) in zip(grid, sizes.items(), strict=True):
        for label, comparison in lines:
            rates, means = _mean_and_band(axes, comparison, metric, shade[label], ms=2.5)
            if means:
                best = int(np.argmin(means))
                ring = {'marker': 'o', 'ms': 7, 'mfc': 'none', 'mec': shade[label]}
                axes.plot(rates[best], means[best], **ring)
        axes.set_title(others, fontsize=7)
        _rate_axis(axes)
    handles = [Line2D([], [], color=shade[label], label=label) for label in labels]
    figure.legend(handles=handles, loc='outside upper center', ncols=len(labels), fontsize=7)
    figure.supxlabel('learning rate', fontsize=8)
    figure.supylabel(f'final {UNITS[metric]}', fontsize=8)


def differences(figure: Figure, comparisons: Sequence[Comparison], metric: str) -> None:
    """A line for each variant: its difference and interval in the colour of its verdict."""
    found = compared(comparisons)
    names = [f'{c.variant.name}: {c.verdict}' for c in found]
    figure.set_size_inches(3.5 + 0.06 * max(map(len, names)), 0.7 + 0.25 * len(found))
    axes = figure.subplots()
    axes.axvline(0, color=BASELINE, lw=0.8)
    for i, c in enumerate(found):
        half = 0.0 if math.isnan(c.difference.half) else c.difference.half
        look = {'color': VERDICTS[c.verdict], 'mfc': 'white' if c.verdict == ONE_SEED else None}
        axes.errorbar(c.difference.mean, i, xerr=half, fmt='o', ms=4, capsize=2, **look)
    axes.set_yticks(range(len(found)), names)
    axes.invert_yaxis()
    baseline = next(c.variant.name for c in comparisons if c.variant.is_baseline)
    axes.set(xlabel=f'difference from {baseline}, {SHORT_UNITS[metric]}')


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        rows = math.ceil(len(labels) / 2)
        if rows > 4:  # or the axes would have no room left
            figure.set_figheight(figure.get_figheight() + 0.17 * (rows - 4))
        font = 8 if len(labels) <= ONE_PANEL else 6  # beside each other in the width of the figure
        figure.legend(handles, labels, loc='outside upper center', ncols=2, fontsize=font)
