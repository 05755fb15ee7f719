"""Final losses by learning rate."""

from collections.abc import Sequence

import numpy as np

from eval.compare import Comparison
from eval.text import number
from eval.variants import has_diverged

CAPTION = (
    'Mean over the seeds that finished; in parentheses how many diverged. The lowest of a row is '
    'bold.'
)


def finished(comparison: Comparison, metric: str) -> dict[float, list[float]]:
    """lr -> the final losses of the runs that finished; [] where none did."""
    found: dict[float, list[float]] = {}
    for record in sorted(comparison.variant.records, key=lambda record: record['lr']):
        values = found.setdefault(record['lr'], [])
        if record['status'] == 'done' and record[metric] is not None:
            values.append(record[metric])
    return found


def table(comparisons: Sequence[Comparison], metric: str) -> list[list[str]]:
    """A head and a row for each variant, as text."""
    losses = [finished(comparison, metric) for comparison in comparisons]
    rates = sorted({lr for by_lr in losses for lr in by_lr})
    rows = [['variant', *map(number, rates)]]
    for comparison, by_lr in zip(comparisons, losses, strict=True):
        means = {lr: float(np.mean(values)) for lr, values in by_lr.items() if values}
        lowest = min(means.values(), default=None)
        cells = [_cell(means.get(lr), lowest, _diverged(comparison, lr)) for lr in rates]
        rows.append([comparison.variant.name, *cells])
    return rows


def _diverged(comparison: Comparison, lr: float) -> int:
    return sum(map(has_diverged, comparison.variant.at(lr)))


def _cell(mean: float | None, lowest: float | None, diverged: int) -> str:
    text = '' if mean is None else f'{mean:.3f}'
    if mean is not None and mean == lowest:
        text = f'**{text}**'
    return ' '.join(part for part in (text, f'({diverged})' if diverged else '') if part)
