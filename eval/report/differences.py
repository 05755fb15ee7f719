"""Paired differences from the baseline, each with its interval."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from eval.compare import Comparison
from eval.stats import BETTER, MOST_SEEDS, ONE_SEED, WITHIN_NOISE, WORSE

COLOURS = {BETTER: '#00765a', WORSE: '#b84d00', WITHIN_NOISE: '#646b73', ONE_SEED: '#9aa2aa'}
ZERO = '#333333'


def compared(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Those that have a difference, from the best to the worst."""
    found = [c for c in comparisons if c.difference.n and not c.variant.is_baseline]
    return sorted(found, key=lambda c: c.difference.mean)


def seeds_text(comparison: Comparison) -> str:
    """'about 14 seeds', which would settle what is within noise; '' for other verdicts."""
    n = comparison.seeds_needed
    if n is None:
        return ''
    return f'about {n} seeds' if n <= MOST_SEEDS else f'more than {MOST_SEEDS} seeds'


def p_text(comparison: Comparison) -> str:
    """'p 0.012', '' without one."""
    if math.isnan(comparison.p):
        return ''
    return f'p {comparison.p:.2g}' if comparison.p >= 1e-4 else 'p < 0.0001'


def data(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """What the page's script draws."""
    return [
        {
            'name': c.variant.name,
            'mean': c.difference.mean,
            'half': c.difference.half,
            'color': COLOURS[c.verdict],
            'told': ', '.join(filter(None, (c.verdict, p_text(c), _settled(c)))),
            'seeds': c.difference.n,
        }
        for c in compared(comparisons)
    ]


def _settled(comparison: Comparison) -> str:
    text = seeds_text(comparison)
    return f'{text} would settle it' if text else ''


def draw(figure: Figure, comparisons: Sequence[Comparison], unit: str) -> None:
    """A line for each variant: its difference and interval in the colour of its verdict."""
    found = compared(comparisons)
    names = [f'{c.variant.name}: {c.verdict}' for c in found]
    figure.set_size_inches(3.5 + 0.06 * max(map(len, names)), 0.7 + 0.25 * len(found))
    axes = figure.subplots()
    axes.axvline(0, color=ZERO, lw=0.8)
    for i, c in enumerate(found):
        half = 0.0 if math.isnan(c.difference.half) else c.difference.half
        look = {'color': COLOURS[c.verdict], 'mfc': 'white' if c.verdict == ONE_SEED else None}
        axes.errorbar(c.difference.mean, i, xerr=half, fmt='o', ms=4, capsize=2, **look)
    axes.set_yticks(range(len(found)), names)
    axes.invert_yaxis()
    baseline = next(c.variant.name for c in comparisons if c.variant.is_baseline)
    axes.set(xlabel=f'difference from {baseline}, {unit}')
