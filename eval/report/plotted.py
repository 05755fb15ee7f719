"""What the page's script draws; numbers rounded, curves thinned."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eval.columns import columns
from eval.compare import Comparison
from eval.report import differences, quantities, rates
from eval.report.figures import line_styles
from eval.report.series import RATE_POINTS, Series, thin_curve, thin_map
from eval.report.subject import Subject
from eval.report.tables import UNITS, lost
from eval.runs import Record
from eval.variants import SEEDS

DIGITS = 5  # of the numbers that figures show
Styled = Sequence[tuple[Comparison, Mapping[str, str]]]  # with colour and dash


def plotted(
    subject: Subject, shown: Styled, final: Styled, series: Mapping[str, Series]
) -> dict[str, Any]:
    """`shown`: the variants of the curves; `final`: those whose final losses are drawn over the
    learning rate, which is one where the learning rates are the variants.
    """
    room = quantities.room(list(series.values()))
    cells = [
        _cell(record, i, series[record['workdir']], room, subject)
        for i, (comparison, _) in enumerate(shown)
        for record in comparison.variant.records
    ]
    if len(shown) == 1 < len(cells):  # a colour for each run, since there are no variants
        looks = line_styles([i == 0 for i in range(len(cells))])
        cells = [cell | look for cell, look in zip(cells, looks, strict=True)]
    return {
        'unit': UNITS[subject.metric],
        'variants': [_variant(c, style, subject.metric) for c, style in shown],
        'final': [_variant(c, style, subject.metric) for c, style in final],
        'differences': _rounded(differences.data([c for c, _ in shown])),
        'baseline': next((c.variant.name for c, _ in shown if c.variant.is_baseline), ''),
        'quantities': quantities.choices(room[1]),
        'cells': cells,
    }


def _variant(c: Comparison, style: Mapping[str, str], metric: str) -> dict[str, Any]:
    done, diverged = rates.finished(c, metric), lost(c)
    points = [{'lr': lr, 'done': done[lr], 'diverged': diverged[lr]} for lr in done]
    drawn = {'mean': c.loss.mean, 'half': c.loss.half, 'initial': c.initial}
    drawn |= {'name': c.variant.name, 'best_lr': c.best_lr, 'points': points, **style}
    return _rounded(drawn)


def _cell(
    record: Record,
    variant: int,
    one: Series,
    room: tuple[int, list[str], list[str]],
    subject: Subject,
) -> dict[str, Any]:
    steps, names, by_head = room

    def shown(found, names):
        return {name: _rounded(thin_map(found[name], steps)) for name in names if name in found}

    return {
        'cell': record['cell'],
        'variant': variant,
        'lr': record['lr'],
        'seed': ', '.join(f'{name} {record[name]}' for name in seed_columns(subject)),
        'status': record['status'],
        'training': _rounded(thin_curve(one.training)),
        'validation': _rounded(thin_curve(one.validation)),
        'rates': _rounded(thin_curve(one.rates, RATE_POINTS)),
        'layers': shown(one.layers, names),
        'heads': shown(one.heads, by_head),
        'scalars': shown(one.scalars, names),
    }


def seed_columns(subject: Subject) -> list[str]:
    """The columns of the seeds that differ between runs, or the first where none does."""
    names = [columns()[path] for path in SEEDS]
    varied = [name for name in names if len({record[name] for record in subject.records}) > 1]
    return varied or names[:1]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f'{value:.{DIGITS}g}') if math.isfinite(value) else None
    return value
