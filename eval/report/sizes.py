"""Final loss over the learning rate for models of several sizes: does the best one move?"""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from eval.compare import Comparison
from eval.report.rates import finished
from eval.report.tables import UNITS
from eval.text import number

SIZES = ('d_model', 'n_layers')
# What a size brings along: no choice of its own.
WITH_SIZE = (*SIZES, 'd_ff', 'n_heads', 'n_kv_heads', 'scaling_base_width', 'scaling_base_depth')
PANELS_PER_ROW = 4


def by_size(comparisons: Sequence[Comparison]) -> dict[str, list[tuple[str, Comparison]]]:
    """{what is chosen besides the size: [(size, its runs)]}, smallest first; {} where there is one
    size alone.
    """
    values = [comparison.variant.values for comparison in comparisons]
    varied = [name for name in SIZES if len({repr(one.get(name)) for one in values}) > 1]
    if not varied:
        return {}
    found: dict[str, list[tuple[tuple, str, Comparison]]] = {}
    for comparison, one in zip(comparisons, values, strict=True):
        others = [
            f'{n} {number(v)}' for n, v in one.items() if n not in WITH_SIZE and v is not None
        ]
        sizes = tuple(one[name] for name in varied)
        label = ', '.join(f'{n} {size}' for n, size in zip(varied, sizes, strict=True))
        found.setdefault('\n'.join(others), []).append((sizes, label, comparison))
    return {
        others: [pair for _, *pair in sorted(lines, key=lambda line: line[0])]
        for others, lines in found.items()
    }


def rates_by_size(figure: Figure, panels: dict[str, list[Any]], metric: str) -> None:
    """A panel for each choice, a line for each size, its lowest mean ringed; a band from the least
    to the greatest seed.
    """
    rows = -(-len(panels) // PANELS_PER_ROW)
    columns = min(len(panels), PANELS_PER_ROW)
    figure.set_size_inches(2.0 * columns + 0.6, 2.1 * rows + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    labels = list(dict.fromkeys(label for lines in panels.values() for label, _ in lines))
    shades = matplotlib.colormaps['viridis'](np.linspace(0, 0.85, len(labels)))
    shade = dict(zip(labels, shades, strict=True))
    for axes, (others, lines) in zip(grid.flat, panels.items(), strict=False):
        for label, comparison in lines:
            by_rate = {lr: losses for lr, losses in finished(comparison, metric).items() if losses}
            rates, means = list(by_rate), [float(np.mean(losses)) for losses in by_rate.values()]
            low, high = ([end(losses) for losses in by_rate.values()] for end in (min, max))
            axes.fill_between(rates, low, high, color=shade[label], alpha=0.15, lw=0)
            axes.plot(rates, means, color=shade[label], marker='o', ms=2.5)
            if means:
                best = int(np.argmin(means))
                ring = {'marker': 'o', 'ms': 7, 'mfc': 'none', 'mec': shade[label]}
                axes.plot(rates[best], means[best], **ring)
        axes.set_title(others, fontsize=7)
        axes.set_xscale('log')
        axes.xaxis.set_minor_formatter(NullFormatter())
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    handles = [Line2D([], [], color=shade[label], label=label) for label in labels]
    figure.legend(handles=handles, loc='outside upper center', ncols=len(labels), fontsize=7)
    figure.supxlabel('learning rate', fontsize=8)
    figure.supylabel(f'final {UNITS[metric]}', fontsize=8)
