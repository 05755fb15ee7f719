"""The answer of a tuned sweep: the table of its arms, and the sentences above it."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.report.tables import UNITS, TableCell, TableRow, format_p_value
from lm.study.arm import Ablation
from lm.study.plan.search import DIVERGED, EDGE
from lm.study.statistics import (
    BETTER,
    CONFIDENCE,
    LEVEL,
    LOOK_CONFIDENCE,
    UNDECIDED,
    WORSE,
    format_outcome,
    t_interval,
)
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
FEW = 3  # verdicts that the summary lists as sentences
ARM, VERDICT_COLUMNS = 'arm', ('verdict', 'p', 'difference')  # columns in the terminal


def arm_rows(ablation: Ablation, colors: Sequence[str]) -> list[TableRow]:
    """Returns the table of arms, the baseline first, without columns that are empty or constant."""
    rows = arm_results(ablation)
    hidden = {
        'verdict': len(rows) < 2,
        'difference': len(rows) < 2,
        'sensitivity': all(math.isnan(row.sensitivity) for row in rows),
        'speed-up': all(row.speedup is None for row in rows),
        'steps': len({row.steps for row in rows}) < 2,
    }
    table = []
    for row, color in zip(rows, colors, strict=True):
        cells = {'arm': TableCell(row.arm.name)} | _row_cells(ablation, row)
        visible = {head: cell for head, cell in cells.items() if not hidden.get(head)}
        table.append(
            TableRow(
                color, visible, row.outcome, [_format_sentence(caveat) for caveat in row.caveats]
            )
        )
    return table


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
        _near_best_head(ablation): TableCell(_format_range(row.near_best)),
        'sensitivity': TableCell('' if math.isnan(row.sensitivity) else f'{row.sensitivity:.3f}'),
        'speed-up': _speedup_cell(row),
        'steps': TableCell('' if row.steps is None else f'{row.steps:,}'),
        'runs': TableCell(str(sum(row.runs)), _format_counts(*row.runs)),
        'seconds': TableCell(
            f'{sum(row.seconds):,.0f}', _format_counts(*(f'{s:,.0f}' for s in row.seconds))
        ),
        'state': TableCell(', '.join(row.states) or WAITS),
    }


def terminal_rows(ablation: Ablation) -> list[dict[str, str]]:
    """Returns the arms by column, each cell on one short line, the baseline first."""
    rows = []
    for row in arm_results(ablation):
        verdict, loss = row.verdict, _loss_cell(row, ablation.tune.seeds)
        rows.append(
            {
                ARM: row.arm.name,
                'verdict': _verdict_cell(row).text,
                'p': '' if verdict is None else re.sub('p (= )?', '', format_p_value(verdict.p)),
                'difference': _difference_cell(row).text,
                'tuned loss': f'{loss.text} {loss.small[0]}' if loss.small else loss.text,
                **{
                    f'best {path.partition(".")[2]}': format_number(
                        row.values.get(path), VALUE_DIGITS
                    )
                    for path in ablation.tune.fields
                },
                'runs': str(sum(row.runs)),
                'state': ', '.join(row.states) or WAITS,
            }
        )
    return rows


def _near_best_head(ablation: Ablation) -> str:
    return f'near-best {next(iter(ablation.tune.fields)).partition(".")[2]}'


def _verdict_cell(row: ArmResult) -> TableCell:
    if row.outcome == FAILED:
        n = row.runs[1]
        return TableCell(
            f'{MARKS[FAILED]} {FAILED}', (f'{row.diverged} of {n} fresh runs' if n else 'all runs',)
        )
    if row.verdict is None:
        return TableCell(row.outcome)
    p_text = format_p_value(row.verdict.p)
    if row.outcome == UNDECIDED:
        p_text += f', needs p < {LEVEL:g}'
    text = f'{MARKS[row.outcome]} {format_outcome(row.outcome)}'
    return TableCell(text, (p_text, f'{row.verdict.n} seeds'))


def _difference_cell(row: ArmResult) -> TableCell:
    if row.verdict is None:
        return TableCell('')
    low, high = row.verdict.look_interval
    return TableCell(f'{row.verdict.difference:+.4f}', (f'{low:+.4f} to {high:+.4f}',))


def _loss_cell(row: ArmResult, seeds: int) -> TableCell:
    """Returns the loss on fresh seeds; before these exist, on the seeds that chose the values."""
    if math.isnan(row.loss.mean):
        return TableCell('')
    if not row.is_fresh:
        return TableCell(f'{row.loss.mean:.4f}', ('on tuning seeds',))
    half = () if math.isnan(row.loss.half_width) else (f'± {row.loss.half_width:.4f}',)
    missing = (f'{row.loss.n} of {seeds} fresh seeds',) if row.loss.n + row.diverged < seeds else ()
    return TableCell(f'{row.loss.mean:.4f}', half + missing)


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
        return 'all values tried' if math.isinf(ends[1]) else f'{high} and below'
    return f'{low} and above' if math.isinf(ends[1]) else f'{low} to {high}'


def _format_counts(tuning: Any, fresh: Any) -> tuple[str]:
    return (f'{tuning} + {fresh} fresh',)


def _format_sentence(text: str) -> str:
    return f'{text[0].upper()}{text[1:]}.'


def has_sentences(ablation: Ablation) -> bool:
    """Returns whether `findings` states each verdict in a sentence."""
    rows = arm_results(ablation)
    return len(rows) <= FEW + 1 and any(row.outcome in ORDER for row in rows)


def findings(ablation: Ablation) -> list[str]:
    """Returns the main results in a few sentences."""
    rows, lines = arm_results(ablation), []
    if progress := describe_progress(ablation):
        lines.append(f'Not finished: {progress}. Results so far:')
    groups = {
        outcome: [row.arm.name for row in rows if row.outcome == outcome] for outcome in ORDER
    }
    counts = [
        f'{len(names)} {format_outcome(outcome)} ({", ".join(names)})'
        for outcome, names in groups.items()
        if names
    ]
    if has_sentences(ablation):
        lines += [
            _format_sentence(sentence) for sentence in format_verdicts(ablation, with_caveats=False)
        ]
    elif counts:
        lines.append(
            f'Compared with {rows[0].arm.name}, each at its best values: {"; ".join(counts)}.'
        )
    finished = [row for row in rows if row.is_fresh and row.outcome != LENGTH and not row.diverged]
    if len(finished) > 1:
        best = min(finished, key=lambda row: row.loss.mean)
        values = ', '.join(
            f'{path} {format_number(value, VALUE_DIGITS)}' for path, value in best.values.items()
        )
        lines.append(
            f'Lowest tuned loss: {best.loss.mean:.4f} {ablation.unit} ({best.arm.name}, {values}).'
        )
    edges = [row.arm.name for row in rows if EDGE in row.states]
    if edges:
        lines.append(
            f'Best at the outermost value tried: {", ".join(edges)}. Values further out may be '
            'better, so this loss is an upper bound.'
        )
    if rows[0].outcome == BASELINE and DIVERGED in rows[0].states:
        lines.append(f'The baseline, {rows[0].arm.name}, diverged at every value tried.')
    return lines


def build_context(
    ablation: Ablation, base: Mapping[str, Any], colors: Sequence[str]
) -> dict[str, Any]:
    """Returns the template variables of the arms.

    Args:
      ablation: the tuned sweep.
      base: its base config.
      colors: a colour for each arm.
    """
    rows = arm_rows(ablation, colors)
    settings = {
        name: ', '.join(f'{path} {_format_centre(value)}' for path, value in setting.items())
        if name == 'fields'
        else ', '.join(map(format_number, setting))
        if isinstance(setting, list)
        else format_number(setting)
        for name, setting in ablation.settings.items()
        if setting not in (None, [], '')
    }
    return {
        'rows': rows,
        'unit': UNITS[ablation.metric],
        'confidence': f'{CONFIDENCE:.0%}',
        'look_confidence': LOOK_CONFIDENCE,
        'level': f'{LEVEL:g}',
        'heads': list(rows[0].cells),
        'remains': {row.cells['arm'].text: row.notes for row in rows if row.notes},
        'sentences': [_format_sentence(sentence) for sentence in format_verdicts(ablation)],
        'settings': settings,
        'length': describe_run_length(ablation, base),
        'tried': trial_table(ablation),
        'fields': list(ablation.tune.fields),
        'near_best': _near_best_head(ablation),
        'test': ablation.tune.test,
        'seeds': ablation.tune.seeds,
    }


def _format_centre(value: Any) -> str:
    if value is None:
        return "around each arm's own value"
    return f'from {value[0]:g} to {value[1]:g}' if isinstance(value, list) else f'around {value:g}'


def trial_table(ablation: Ablation) -> list[list[str]]:
    """Returns a head and a line for each arm and value of the search: mean loss and seeds."""
    rows = [['arm', *ablation.tune.fields, 'mean loss', 'seeds', 'diverged']]
    for arm in ablation.arms:
        by_position: dict[tuple[int, ...], list[float]] = {}
        for point, loss in sorted(arm.tuning_losses.items()):
            by_position.setdefault(point.k, []).append(loss)
        for k, losses in by_position.items():
            finite = [loss for loss in losses if math.isfinite(loss)]
            values = [format_number(value, VALUE_DIGITS) for value in arm.grid.values(k).values()]
            mean = f'{np.mean(finite):.4f}' if finite else ''
            n_diverged = str(len(losses) - len(finite))
            rows.append([arm.name, *values, mean, str(len(losses)), n_diverged])
    return rows


def build_comparisons(ablation: Ablation) -> list[Comparison]:
    """Returns the arms as comparisons, for the charts of a page.

    They have no differences, which `arm_results` gives. The runs at the selected values are the
    fresh runs, if there are any.
    """
    comparisons, metric, variants = [], ablation.metric, make_variants(ablation)
    initials = initial_losses(variants, metric)
    for row, variant, initial in zip(arm_results(ablation), variants, initials, strict=True):
        fresh: list[Any] = [
            record for point, record in row.arm.records.items() if point.seed >= FIRST_FRESH_SEED
        ]
        comparison = Comparison(
            variant=variant,
            losses=losses_by_lr(variant, metric, initial),
            initial=initial,
            best_lr=row.values.get(LR),
            loss=row.loss,
            sensitivity=row.sensitivity,
            difference=t_interval([]),
            notes=[],
            chosen_records=fresh or _nearest_records(row, variant.records),
            **summarize_runs(fresh, variant.records),
        )
        comparisons.append(comparison)
    return comparisons


def _nearest_records(row: ArmResult, records: Sequence[Record]) -> list[Record]:
    """Returns the runs with the values nearest to the selected values."""

    def distance(record: Record) -> float:
        pairs = ((record[columns()[path]], value) for path, value in row.values.items())
        return sum(abs(math.log(tried / selected)) for tried, selected in pairs)

    nearest = min(map(distance, records), default=0.0)
    return [record for record in records if distance(record) == nearest] if row.values else []
