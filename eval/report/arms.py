"""The answer of a tuned sweep: the table of its arms, and what is said above it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.report.tables import UNITS, TableCell, TableRow, format_p_value
from lm.study.arm import Ablation
from lm.study.plan.search import DIVERGED, EDGE
from lm.study.statistics import BETTER, CONFIDENCE, UNDECIDED, WORSE, t_interval
from lm.study.tables.ablation import (
    BASELINE,
    FAILED,
    LENGTH,
    WAITS,
    ArmResult,
    arm_results,
    describe_progress,
    describe_run_length,
    format_verdicts,
    make_variants,
)
from lm.study.tables.columns import columns
from lm.study.tables.comparison import Comparison, initial_losses, losses_by_lr, summarize_runs
from lm.study.tables.results import Record
from lm.study.tables.text import format_number
from lm.study.tables.variants import LR
from lm.study.verdicts import FIRST_FRESH_SEED

MARKS = {BETTER: '▼', WORSE: '▲', UNDECIDED: '≈', FAILED: '✕'}
ORDER = (BETTER, WORSE, UNDECIDED, FAILED)
VALUE_DIGITS = 3
FEW = 3  # verdicts that the answer has as sentences


def arm_rows(ablation: Ablation, colors: Sequence[str]) -> list[TableRow]:
    """Returns the table of arms, the baseline first, without columns that say nothing here."""
    every = arm_results(ablation)
    hidden = {
        'verdict': len(every) < 2,
        'difference': len(every) < 2,
        'sensitivity': all(math.isnan(row.sensitivity) for row in every),
        'speed-up': all(row.speedup is None for row in every),
        'steps': len({row.steps for row in every}) < 2,
    }
    found = []
    for row, color in zip(every, colors, strict=True):
        cells = {'arm': TableCell(row.arm.name)} | _row_cells(ablation, row)
        shown = {head: cell for head, cell in cells.items() if not hidden.get(head)}
        found.append(
            TableRow(color, shown, row.outcome, [_format_sentence(one) for one in row.caveats])
        )
    return found


def _row_cells(ablation: Ablation, row: ArmResult) -> dict[str, TableCell]:
    return {
        'verdict': _verdict_cell(row),
        'difference': _difference_cell(row),
        'tuned loss': _loss_cell(row, ablation.tune.seeds),
        **{
            f'best {path.partition(".")[2]}': TableCell(
                format_number(row.values.get(path), VALUE_DIGITS)
            )
            for path in ablation.tune.fields
        },
        f'as good {next(iter(ablation.tune.fields)).partition(".")[2]}': TableCell(
            _format_range(row.near_best)
        ),
        'sensitivity': TableCell('' if math.isnan(row.sensitivity) else f'{row.sensitivity:.3f}'),
        'speed-up': _speedup_cell(row),
        'steps': TableCell('' if row.steps is None else f'{row.steps:,}'),
        'runs': TableCell(str(sum(row.runs)), _format_counts(*row.runs)),
        'seconds': TableCell(
            f'{sum(row.seconds):,.0f}', _format_counts(*(f'{s:,.0f}' for s in row.seconds))
        ),
        'state': TableCell(', '.join(row.states) or WAITS),
    }


def _verdict_cell(row: ArmResult) -> TableCell:
    if row.outcome == FAILED:
        n = row.runs[1]
        return TableCell(
            f'{MARKS[FAILED]} {FAILED}', (f'{row.diverged} of {n} fresh' if n else 'all',)
        )
    if row.verdict is None:
        return TableCell(row.outcome)
    small = format_p_value(row.verdict.p), f'{row.verdict.n} seeds'
    return TableCell(f'{MARKS[row.outcome]} {row.outcome}', small)


def _difference_cell(row: ArmResult) -> TableCell:
    if row.verdict is None:
        return TableCell('')
    low, high = row.verdict.low, row.verdict.high
    return TableCell(f'{row.verdict.difference:+.4f}', (f'{low:+.4f} to {high:+.4f}',))


def _loss_cell(row: ArmResult, seeds: int) -> TableCell:
    """The loss over fresh seeds; until there are any that which the values were chosen by."""
    if math.isnan(row.loss.mean):
        return TableCell('')
    if not row.is_fresh:
        return TableCell(f'{row.loss.mean:.4f}', ('by the seeds that chose it',))
    half = () if math.isnan(row.loss.half_width) else (f'± {row.loss.half_width:.4f}',)
    left = (f'{row.loss.n} of {seeds} fresh seeds',) if row.loss.n + row.diverged < seeds else ()
    return TableCell(f'{row.loss.mean:.4f}', half + left)


def _speedup_cell(row: ArmResult) -> TableCell:
    if row.speedup is None:
        return TableCell('')
    low, high = row.speedup.low, row.speedup.high
    ends = (f'from {low:.3g}' * (low > 0), f'to {high:.3g}' * math.isfinite(high))
    return TableCell(str(row.speedup), tuple(filter(None, (' '.join(filter(None, ends)),))))


def _format_range(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return ''
    low, high = (format_number(float(end), VALUE_DIGITS) for end in ends)
    if ends[0] == 0:
        return 'all tried' if math.isinf(ends[1]) else f'up to {high}'
    return f'from {low}' if math.isinf(ends[1]) else f'{low} to {high}'


def _format_counts(tuning: Any, fresh: Any) -> tuple[str]:
    return (f'{tuning} + {fresh} fresh',)


def _format_sentence(text: str) -> str:
    return f'{text[0].upper()}{text[1:]}.'


def findings(ablation: Ablation) -> list[str]:
    """Returns the answer in a few lines."""
    every, lines = arm_results(ablation), []
    if going := describe_progress(ablation):
        lines.append(f'Not finished: {going}. What follows is known so far.')
    groups = {said: [row.arm.name for row in every if row.outcome == said] for said in ORDER}
    told = [f'{len(own)} {said} ({", ".join(own)})' for said, own in groups.items() if own]
    if told and len(every) <= FEW + 1:
        lines += [_format_sentence(one) for one in format_verdicts(ablation, with_caveats=False)]
    elif told:
        lines.append(f'Against {every[0].arm.name}, each at its best values: {"; ".join(told)}.')
    known = [row for row in every if row.is_fresh and row.outcome != LENGTH and not row.diverged]
    if len(known) > 1:
        best = min(known, key=lambda row: row.loss.mean)
        values = ', '.join(f'{p} {format_number(v, VALUE_DIGITS)}' for p, v in best.values.items())
        lines.append(
            f'Lowest tuned loss: {best.loss.mean:.4f} {ablation.unit}, of {best.arm.name} at '
            f'{values}.'
        )
    edges = [row.arm.name for row in every if EDGE in row.states]
    if edges:
        lines.append(
            f'At the edge of what was tried: {", ".join(edges)}. The loss there is a bound, as the '
            'best values lie further out.'
        )
    if every[0].outcome == BASELINE and DIVERGED in every[0].states:
        lines.append(f'The baseline, {every[0].arm.name}, diverged at every value tried.')
    return lines


def build_context(
    ablation: Ablation, base: Mapping[str, Any], colors: Sequence[str]
) -> dict[str, Any]:
    """Returns what the templates show of the arms."""
    rows = arm_rows(ablation, colors)
    settings = {
        name: ', '.join(f'{path} {_format_centre(value)}' for path, value in given.items())
        if name == 'fields'
        else ', '.join(map(format_number, given))
        if isinstance(given, list)
        else format_number(given)
        for name, given in ablation.settings.items()
        if given not in (None, [], '')
    }
    return {
        'rows': rows,
        'unit': UNITS[ablation.metric],
        'confidence': f'{CONFIDENCE:.0%}',
        'heads': list(rows[0].cells),
        'remains': {row.cells['arm'].text: row.notes for row in rows if row.notes},
        'sentences': [_format_sentence(one) for one in format_verdicts(ablation)],
        'settings': settings,
        'length': describe_run_length(ablation, base),
        'tried': trial_table(ablation),
        'fields': list(ablation.tune.fields),
        'test': ablation.tune.test,
        'seeds': ablation.tune.seeds,
    }


def _format_centre(value: Any) -> str:
    if value is None:
        return "around each arm's own"
    return f'from {value[0]:g} to {value[1]:g}' if isinstance(value, list) else f'around {value:g}'


def trial_table(ablation: Ablation) -> list[list[str]]:
    """Returns a head and a line for each arm and value that chose its best: mean loss and seeds."""
    rows = [['arm', *ablation.tune.fields, 'mean loss', 'seeds', 'diverged']]
    for arm in ablation.arms:
        by_place: dict[tuple[int, ...], list[float]] = {}
        for point, loss in sorted(arm.tuning_losses.items()):
            by_place.setdefault(point.k, []).append(loss)
        for k, losses in by_place.items():
            finite = [loss for loss in losses if math.isfinite(loss)]
            values = [format_number(value, VALUE_DIGITS) for value in arm.grid.values(k).values()]
            mean = f'{np.mean(finite):.4f}' if finite else ''
            lost = str(len(losses) - len(finite))
            rows.append([arm.name, *values, mean, str(len(losses)), lost])
    return rows


def build_comparisons(ablation: Ablation) -> list[Comparison]:
    """Returns the arms as what a page draws: without differences, which `results` has. Their runs
    at the chosen values are the fresh ones, if there are any yet.
    """
    found, metric, every = [], ablation.metric, make_variants(ablation)
    initials = initial_losses(every, metric)
    for row, own, initial in zip(arm_results(ablation), every, initials, strict=True):
        fresh = [r for p, r in row.arm.records.items() if p.seed >= FIRST_FRESH_SEED]
        one = Comparison(
            variant=own,
            losses=losses_by_lr(own, metric, initial),
            initial=initial,
            best_lr=row.values.get(LR),
            loss=row.loss,
            sensitivity=row.sensitivity,
            difference=t_interval([]),
            notes=[],
            chosen_records=fresh or _nearest_records(row, own.records),
            **summarize_runs(fresh, own.records),
        )
        found.append(one)
    return found


def _nearest_records(row: ArmResult, records: Sequence[Record]) -> list[Record]:
    """The runs with the values that are nearest to the chosen ones."""

    def distance(record: Record) -> float:
        pairs = ((record[columns()[path]], value) for path, value in row.values.items())
        return sum(abs(math.log(one / other)) for one, other in pairs)

    least = min(map(distance, records), default=0.0)
    return [record for record in records if distance(record) == least] if row.values else []
