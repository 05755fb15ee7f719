"""The tables and sentences of a page, as text."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from eval.columns import columns
from eval.compare import Comparison
from eval.report import rates
from eval.report.differences import p_text, seeds_text
from eval.report.subject import Subject
from eval.runs import UNREADABLE, Record
from eval.stats import BETTER, ONE_SEED, WITHIN_NOISE, WORSE, Interval
from eval.text import number
from eval.variants import LR, SEEDS, has_diverged
from lm.config import flatten

UNITS = {'ce': 'loss, nats per token', 'bits_per_byte': 'bits per byte'}
STATUSES = ('done', 'diverged', 'failed', UNREADABLE, 'stopped', 'unfinished', 'waiting')
MARKS = {BETTER: '▼', WORSE: '▲', WITHIN_NOISE: '≈', ONE_SEED: '·'}


def statuses(records: Sequence[Record]) -> dict[str, int]:
    counts = collections.Counter(record['status'] for record in records)
    known = [status for status in STATUSES if status in counts]
    return {status: counts[status] for status in dict.fromkeys([*known, *counts])}


def facts(records: Sequence[Record]) -> dict[str, str]:
    """What the runs have in common, or all that they have."""
    found = {}
    for name, column in (('git commit', 'git_commit'), ('device', 'device')):
        values = dict.fromkeys(r[column] for r in records if r[column])
        found[name] = ', '.join(values) or 'not recorded yet'
    sizes = dict.fromkeys(r['parameters'] for r in records if r['parameters'])
    found['parameters'] = ', '.join(f'{size:,}' for size in sizes) or 'not recorded yet'
    if len(records) == 1 and records[0]['wall_sec']:  # runs beside each other share their time
        seconds = records[0]['wall_sec']
        found['wall time'] = f'{seconds / 3600:.2f} h' if seconds >= 3600 else f'{seconds:.0f} s'
    return found


def findings(
    subject: Subject, comparisons: Sequence[Comparison], by_rate: Sequence[Comparison]
) -> list[str]:
    """The main results in words. `by_rate`: the learning rates compared, where they alone vary."""
    ended = [c for c in comparisons if c.best_lr is not None]
    if not ended:
        return []
    lines = []
    if any(values for c in ended for values in rates.finished(c, subject.metric).values()):
        lines.append(_lowest(ended, subject.metric))
        lines += _verdicts(by_rate or comparisons)
    else:
        lines.append('Every run that has ended diverged.')
    if by_rate:  # the table has no line for what they make together
        (everything,) = comparisons
        if not math.isnan(everything.sensitivity):
            lines.append(f'Sensitivity to the learning rate: {everything.sensitivity:.4f}.')
        lines += [f'{note[0].upper()}{note[1:]}.' for note in everything.notes]
    return lines


def _lowest(ended: Sequence[Comparison], metric: str) -> str:
    best = min(ended, key=lambda c: c.loss.mean)
    unit = UNITS[metric].removeprefix('loss, ')
    return (
        f'{"Lowest final" if len(ended) > 1 else "Final"} validation loss: '
        f'{plus_minus(best.loss)} {unit}, of {best.variant.name} at learning rate '
        f'{number(best.best_lr)}, {_count(best.loss.n, "seed")}.'
    )


def _verdicts(comparisons: Sequence[Comparison]) -> list[str]:
    counts = collections.Counter(c.verdict for c in comparisons if c.verdict)
    if not counts:
        return []
    baseline = next(c.variant.all_values for c in comparisons if c.variant.is_baseline)
    text = ', '.join(f'{counts[verdict]} {verdict}' for verdict in MARKS if counts[verdict])
    return [f'Against the baseline ({baseline}): {text}.']


def _count(n: int, what: str) -> str:
    return f'{n} {what}' if n == 1 else f'{n} {what}s'


def plus_minus(interval: Interval, sign: str = '') -> str:
    """'2.8900 ± 0.0248', '2.8900' without an interval, '' without a value."""
    return ' '.join(filter(None, _parts(interval, sign)))


def _parts(interval: Interval, sign: str = '') -> tuple[str, str]:
    if math.isnan(interval.mean):
        return '', ''
    half = '' if math.isnan(interval.half) else f'± {interval.half:.4f}'
    return f'{interval.mean:{sign}.4f}', half


def _fixed(value: float | None, form: str = '.4f') -> str:
    return '' if value is None or math.isnan(value) else f'{value:{form}}'


@dataclasses.dataclass(frozen=True)
class Cell:
    """Of a table: `text`, and what stands below it in small print."""

    text: str
    small: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ' '.join(filter(None, (self.text, *self.small)))


@dataclasses.dataclass(frozen=True)
class VariantRow:
    color: str
    cells: dict[str, Cell]  # by the head of their column
    verdict: str
    notes: list[str]


def variant_rows(
    comparisons: Sequence[Comparison], colors: Sequence[str], name: str
) -> list[VariantRow]:
    """The table of variants, without the columns that say nothing here. `name` heads the first."""
    rates_of = [{record['lr'] for record in c.variant.records} for c in comparisons]
    hidden = set()
    if len(comparisons) < 2:
        hidden |= {'verdict', 'difference'}
    if len(set().union(*rates_of)) < 2 or name == 'learning rate':
        hidden.add('best lr')
    if all(len(rates) < 2 for rates in rates_of):
        hidden.add('sensitivity')
    if not any(c.diverged for c in comparisons):
        hidden.add('diverged')
    rows = []
    for c, color in zip(comparisons, colors, strict=True):
        cells = {name: Cell(c.variant.name)} | _results(c)
        shown = {head: cell for head, cell in cells.items() if head not in hidden}
        rows.append(VariantRow(color, shown, c.verdict, c.notes))
    return rows


def _results(c: Comparison) -> dict[str, Cell]:
    verdict = f'{MARKS.get(c.verdict, "")} {c.verdict}'.strip()
    difference = ('', '') if c.variant.is_baseline else _parts(c.difference, '+')
    return {
        'verdict': Cell(
            'baseline' if c.variant.is_baseline else verdict,
            tuple(filter(None, (p_text(c), seeds_text(c)))),
        ),
        'difference': Cell(difference[0], difference[1:]),
        'final loss': _interval_cell(c.loss),
        'bits per byte': _interval_cell(c.bits_per_byte),
        'best lr': Cell(number(c.best_lr)),
        'seeds': Cell(str(c.loss.n)),
        'sensitivity': Cell(_fixed(c.sensitivity)),
        'diverged': Cell(f'{c.diverged} of {len(c.variant.records)}'),
        'tokens/s': Cell(_fixed(c.tokens_per_sec, ',.0f')),
    }


def _interval_cell(interval: Interval) -> Cell:
    text, half = _parts(interval)
    return Cell(text, (half,) if half else ())


def cell_row(record: Record, subject: Subject) -> dict[str, Any]:
    """Of the table of all cells."""
    shown = {'cell': record['cell']}
    if len(subject.folders) > 1:
        shown['sweep'] = record['sweep'] or ''
    return {
        **shown,
        **{columns()[path]: number(record[columns()[path]]) for path in subject.sweep['axes']},
        'status': record['status'],
        'step': f'{record["step"]:,}' if record['step'] is not None else '',
        'ce': _fixed(record['ce']),
        'best ce': _fixed(record['best_ce']),
        'bits per byte': _fixed(record['bits_per_byte']),
        'training ce': _fixed(record['train_ce']),
        'tokens/s': _fixed(record['tokens_per_sec'], ',.0f'),
        'wall s': _fixed(record['wall_sec'], ',.1f'),
        'reason': record['reason'] or '',
    }


def changes(comparisons: Sequence[Comparison], sweep: Mapping[str, Any]) -> dict[str, list[str]]:
    """variant -> 'field: base -> here' for each config field that differs, lr and seeds aside."""
    base, found = flatten(sweep['base']), {}
    for comparison in comparisons:
        lines = []
        for path, column in columns().items():
            values = dict.fromkeys(record[column] for record in comparison.variant.records)
            if path not in (LR, *SEEDS) and path in base and set(values) != {base[path]}:
                here = ', '.join(number(value) or 'none' for value in values)
                lines.append(f'{path}: {number(base[path])} → {here}')
        found[comparison.variant.name] = lines
    return found


def lost(comparison: Comparison) -> dict[float, int]:
    """learning rate -> how many of its runs diverged."""
    return collections.Counter(r['lr'] for r in comparison.variant.records if has_diverged(r))
