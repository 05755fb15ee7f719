"""The tables and sentences of a page, as text."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.report.series import Series
from eval.report.subject import Subject
from lm.config.resolve import flatten
from lm.record.names import SUMMARY
from lm.record.run import Run
from lm.run.warnings import Detector
from lm.study.arm import UNITS as SHORT_UNITS
from lm.study.statistics import BETTER, ONE_SEED, WITHIN_NOISE, WORSE, Interval, format_seeds
from lm.study.tables.columns import columns
from lm.study.tables.comparison import Comparison, describe_lr_choice
from lm.study.tables.results import UNREADABLE, Record
from lm.study.tables.text import format_count, format_number
from lm.study.tables.variants import LR, SEEDS, has_diverged

UNITS = {'ce': 'loss, nats per token', 'bits_per_byte': 'bits per byte'}
STATUSES = ('done', 'diverged', 'failed', UNREADABLE, 'stopped', 'unfinished', 'waiting')
ABSENT = object()  # a value that was not recorded; None is one that was not finite
MOST_RUNS = 12  # that diverged, of which a page shows the last diagnostics
OVER_HEADS = {'mean': np.mean, 'least': np.min, 'largest': np.max}
# Columns of the last diagnostics: head, quantity, and over heads which of OVER_HEADS.
BY_LAYER = (
    ('entropy share', 'attention_entropy_share', 'mean'),
    ('of its lowest head', 'attention_entropy_share', 'least'),
    ('largest logit', 'attention_largest_logit', 'largest'),
    ('first token', 'attention_first_token', 'mean'),
    ('residual rms', 'residual_rms', ''),
    ('residual largest', 'residual_largest', ''),
    ('attention output rms', 'attention_output_rms', ''),
    ('mlp output rms', 'mlp_output_rms', ''),
    ('gradient norm', 'layer_grad_norm', ''),
    ('update / weight', 'update_ratio_hidden', ''),
)
MODEL_QUANTITIES = ('log_z_mean', 'logit_largest', 'update_ratio_embedding', 'update_ratio_readout')
WARNINGS = ('run', 'step', 'warning', 'layer', 'head', 'what was seen', 'known to help')
# What a paper says of its runs first: a column, or a field of the config.
FACTS = {
    'git_commit': 'git commit',
    'device': 'device',
    'parameters': 'parameters',
    'data.source': 'data',
    'data.tokenizer': 'tokenizer',
    'data.batch_size': 'batch size',
    'data.seq_len': 'tokens a row',
    'train.steps': 'steps',
}
UNSET = 'unset'  # an option that nothing reads, or that is as published
MARKS = {BETTER: '▼', WORSE: '▲', WITHIN_NOISE: '≈', ONE_SEED: '·'}


def count_statuses(records: Sequence[Record]) -> dict[str, int]:
    """Counts the runs of each status, in the order of STATUSES."""
    counts = collections.Counter(record['status'] for record in records)
    known = [status for status in STATUSES if status in counts]
    return {status: counts[status] for status in dict.fromkeys([*known, *counts])}


def shared_facts(records: Sequence[Record], sweep: Mapping[str, Any]) -> dict[str, str]:
    """Facts that the runs share, or all values that they have; and the protocol of the sweep, as
    its sweep.json names it.
    """
    found = {}
    if protocol := sweep.get('protocol'):
        options = ', '.join(f'{name} {format_number(v)}' for name, v in protocol['options'].items())
        found['protocol'] = f'{protocol["name"]} ({options})' if options else protocol['name']
    for name in FACTS:
        values = dict.fromkeys(r[columns().get(name, name)] for r in records)
        texts = [f'{v:,}' if isinstance(v, int) else v for v in values if v]
        found[FACTS[name]] = ', '.join(texts) or 'not recorded yet'
    if len(records) == 1 and records[0]['wall_sec']:  # runs beside each other share their time
        seconds = records[0]['wall_sec']
        found['wall time'] = f'{seconds / 3600:.2f} h' if seconds >= 3600 else f'{seconds:.0f} s'
    return found


def seed_columns(records: Sequence[Record]) -> list[str]:
    """The columns of the seeds that differ between runs, or the first where none does."""
    names = [columns()[path] for path in SEEDS]
    varied = [name for name in names if len({record[name] for record in records}) > 1]
    return varied or names[:1]


def finished_losses(comparison: Comparison, metric: str) -> dict[float, list[float]]:
    """lr -> the final losses of the runs that finished; [] where none did."""
    found: dict[float, list[float]] = {}
    for record in sorted(comparison.variant.records, key=lambda record: record['lr']):
        values = found.setdefault(record['lr'], [])
        if record['status'] == 'done' and record[metric] is not None:
            values.append(record[metric])
    return found


def count_diverged(comparison: Comparison) -> dict[float, int]:
    """lr -> the number of runs that diverged."""
    return collections.Counter(r['lr'] for r in comparison.variant.records if has_diverged(r))


def rank_comparisons(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons that have a difference, from the best to the worst."""
    found = [c for c in comparisons if c.difference.n and not c.variant.is_baseline]
    return sorted(found, key=lambda c: c.difference.mean)


def findings(
    subject: Subject, comparisons: Sequence[Comparison], by_rate: Sequence[Comparison]
) -> list[str]:
    """The main results in words. `by_rate`: the learning rates compared, where they alone vary."""
    ended, lines = [c for c in comparisons if c.best_lr is not None], []
    if not ended:
        return lines
    if any(values for c in ended for values in finished_losses(c, subject.metric).values()):
        best = min(ended, key=lambda c: c.loss.mean)
        which, seeds = (
            'Lowest final' if len(ended) > 1 else 'Final',
            format_count(best.loss.n, 'seed'),
        )
        lines.append(
            f'{which} validation loss: {interval_cell(best.loss)} {SHORT_UNITS[subject.metric]}, '
            f'of {best.variant.name} at learning rate {format_number(best.best_lr)}, {seeds}.'
        )
        verdicts = [c.verdict for c in by_rate or comparisons]
        if any(verdicts):
            baseline = next(c.variant for c in by_rate or comparisons if c.variant.is_baseline)
            each = ', '.join(f'{verdicts.count(v)} {v}' for v in MARKS if v in verdicts)
            lines.append(f'Against the baseline ({baseline.values_text}): {each}.')
            lines.append(describe_lr_choice(comparisons, by_rate, subject.sweep['base']))
    else:
        lines.append('Every run that has ended diverged.')
    if by_rate:  # the table has no line for what they make together
        (everything,) = comparisons
        if not math.isnan(everything.sensitivity):
            lines.append(f'Sensitivity to the learning rate: {everything.sensitivity:.4f}.')
        lines += [f'{note[0].upper()}{note[1:]}.' for note in everything.notes]
    return lines


def needed_seeds_text(comparison: Comparison) -> str:
    """'about 14 seeds', which would find what is within noise; '' for other verdicts."""
    n = comparison.seeds_needed
    return '' if n is None else format_seeds(n)


def format_p_value(p: float) -> str:
    """'p 0.012', '' without one."""
    if math.isnan(p):
        return ''
    return f'p {p:.2g}' if p >= 1e-4 else 'p < 0.0001'


def _format_fixed(value: float | None, form: str = '.4f') -> str:
    return '' if value is None or math.isnan(value) else f'{value:{form}}'


@dataclasses.dataclass(frozen=True)
class TableCell:
    """A cell of a table: `text`, and what stands below it in small print."""

    text: str
    small: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ' '.join(filter(None, (self.text, *self.small)))


@dataclasses.dataclass(frozen=True)
class TableRow:
    color: str
    cells: dict[str, TableCell]  # by the head of their column
    verdict: str
    notes: list[str]


def variant_rows(
    comparisons: Sequence[Comparison], colors: Sequence[str], name: str
) -> list[TableRow]:
    """The table of variants, without the columns that say nothing here. `name` heads the first."""
    rates = [set(c.variant.rates) for c in comparisons]
    is_hidden = {
        **dict.fromkeys(('verdict', 'difference'), len(comparisons) < 2),
        'best lr': len(set().union(*rates)) < 2 or name == 'learning rate',
        'sensitivity': all(len(own) < 2 for own in rates),
        'diverged': not any(c.diverged for c in comparisons),
        'steps': len({_format_steps(c) for c in comparisons}) < 2,
    }
    rows = []
    for c, color in zip(comparisons, colors, strict=True):
        cells = {name: TableCell(c.variant.name)} | _result_cells(c)
        shown = {head: cell for head, cell in cells.items() if not is_hidden.get(head)}
        rows.append(TableRow(color, shown, c.verdict, c.notes))
    return rows


def _result_cells(c: Comparison) -> dict[str, TableCell]:
    verdict = f'{MARKS.get(c.verdict, "")} {c.verdict}'.strip()
    is_baseline = c.variant.is_baseline
    return {
        'verdict': TableCell(
            'baseline' if is_baseline else verdict,
            tuple(filter(None, (format_p_value(c.p), needed_seeds_text(c)))),
        ),
        'difference': TableCell('') if is_baseline else interval_cell(c.difference, '+'),
        'final loss': interval_cell(c.loss),
        'bits per byte': interval_cell(c.bits_per_byte),
        'best lr': TableCell(format_number(c.best_lr)),
        'seeds': TableCell(str(c.loss.n)),
        'steps': TableCell(_format_steps(c)),
        'sensitivity': TableCell(_format_fixed(c.sensitivity)),
        'diverged': TableCell(f'{c.diverged} of {len(c.variant.records)}'),
        'tokens/s': TableCell(_format_fixed(c.tokens_per_sec, ',.0f')),
    }


def _format_steps(c: Comparison) -> str:
    found = sorted({record['steps'] for record in c.variant.records if record['steps']})
    return ', '.join(f'{steps:,}' for steps in found)


def interval_cell(interval: Interval, sign: str = '') -> TableCell:
    """'2.8900 ± 0.0248', '2.8900' without an interval, '' without a value."""
    has_half = not math.isnan(interval.half_width)
    return TableCell(
        _format_fixed(interval.mean, f'{sign}.4f'), (f'± {interval.half_width:.4f}',) * has_half
    )


def cell_row(record: Record, subject: Subject) -> dict[str, Any]:
    """A row of the table of all cells."""
    sweep = {'sweep': record['sweep'] or ''} if len(subject.folders) > 1 else {}
    return {
        'cell': record['cell'],
        **sweep,
        **(
            {'arm': record['arm'] or '', 'stage': record['stage'] or ''} if subject.ablation else {}
        ),
        **{
            columns()[path]: format_number(record[columns()[path]])
            for path in subject.sweep['axes']
        },
        'status': record['status'],
        'step': _format_fixed(record['step'], ','),
        'ce': _format_fixed(record['ce']),
        'best ce': _format_fixed(record['best_ce']),
        'bits per byte': _format_fixed(record['bits_per_byte']),
        'training ce': _format_fixed(record['train_ce']),
        'tokens/s': _format_fixed(record['tokens_per_sec'], ',.0f'),
        'wall s': _format_fixed(record['wall_sec'], ',.1f'),
        'reason': record['reason'] or '',
    }


def list_changes(
    comparisons: Sequence[Comparison], sweep: Mapping[str, Any]
) -> dict[str, list[str]]:
    """variant -> 'field: base -> here' for each config field that differs: lr, seeds and what was
    tuned aside.
    """
    base, found = flatten(sweep['base']), {}
    aside = {LR, *SEEDS, *sweep.get('tune', {}).get('fields', ())}
    for comparison in comparisons:
        lines = []
        for path, column in columns().items():
            values = dict.fromkeys(record[column] for record in comparison.variant.records)
            if path not in aside and path in base and set(values) != {base[path]}:
                here = ', '.join(format_number(value) or UNSET for value in values)
                lines.append(f'{path}: {format_number(base[path]) or UNSET} → {here}')
        found[comparison.variant.name] = lines
    return found


def rates_table(comparisons: Sequence[Comparison], metric: str) -> list[list[str]]:
    """Final losses by learning rate: a head and a row for each variant, as text."""
    losses = [finished_losses(comparison, metric) for comparison in comparisons]
    rates = sorted({lr for by_lr in losses for lr in by_lr})
    rows = [['variant', *map(format_number, rates)]]
    for comparison, by_lr in zip(comparisons, losses, strict=True):
        means = {lr: float(np.mean(values)) for lr, values in by_lr.items() if values}
        lowest, diverged = min(means.values(), default=None), count_diverged(comparison)
        cells = []
        for lr in rates:
            text = f'{means[lr]:.3f}' if lr in means else ''
            bold = f'**{text}**' if text and means[lr] == lowest else text
            cells.append(' '.join(filter(None, (bold, f'({diverged[lr]})' * (diverged[lr] > 0)))))
        rows.append([comparison.variant.name, *cells])
    return rows


def read_warnings(record: Record) -> list[dict[str, Any]]:
    """The warnings in its summary; without one, those that its rows so far give rise to. [] where
    nothing can be read.
    """
    run = Run(Path(record['workdir']))
    try:
        if (run.folder / SUMMARY).exists():
            return run.results().get('warnings') or []
        detector = Detector(run.read_recipe(), [])
        return [warning for row in run.rows() for warning in detector.detect(row)]
    except (ValueError, OSError):
        return []


def warning_rows(
    records: Sequence[Record], run_names: Mapping[str, str]
) -> list[dict[str, str | list[str]]]:
    """The table of warnings, by `WARNINGS`; what helps is a list of lines with their sources."""
    rows = []
    for record in records:
        for warning in read_warnings(record):
            values = (
                run_names[record['workdir']],
                str(warning['step']),
                warning['kind'].replace('_', ' '),
                str(warning['layer'] or ''),
                str(warning['head'] or ''),
                warning['seen'],
                [f'{line} ({source})' for line, source in warning['help']],
            )
            rows.append(dict(zip(WARNINGS, values, strict=True)))
    return rows


@dataclasses.dataclass(frozen=True)
class LastDiagnostics:
    """The last diagnostics of a run that diverged: `table` has a head and a row for each layer."""

    run: str
    reason: str
    step: int
    of_model: dict[str, str]
    table: list[list[str]]


def list_last_diagnostics(
    records: Sequence[Record], series: Mapping[str, Series], run_names: Mapping[str, str]
) -> list[LastDiagnostics]:
    """The last diagnostics of every run that diverged and recorded any of `BY_LAYER`."""
    found = []
    for record in filter(has_diverged, records):
        one, name = series[record['workdir']], run_names[record['workdir']]
        if any(quantity in one.layers for _, quantity, _ in BY_LAYER):
            found.append(_read_last_diagnostics(record, one, name))
    return found


def _read_last_diagnostics(record: Record, series: Series, name: str) -> LastDiagnostics:
    step = max(series.layers[name][0][-1] for _, name, _ in BY_LAYER if name in series.layers)

    def last_value(recorded: Mapping[str, Any], quantity: str) -> Any:
        return dict(zip(*recorded.get(quantity, ([], [])), strict=True)).get(step, ABSENT)

    columns = {}
    for head, quantity, over in BY_LAYER:
        values = last_value(series.heads if over else series.layers, quantity)
        if values is not ABSENT:
            of_layers = np.array(values, float)
            columns[head] = OVER_HEADS[over](of_layers, -1) if over else of_layers
    scalars = {
        quantity.replace('_', ' '): last_value(series.scalars, quantity)
        for quantity in MODEL_QUANTITIES
    }
    scalars = {name: _format_value(value) for name, value in scalars.items() if value is not ABSENT}
    layers = len(next(iter(columns.values()), ()))
    rows = [[str(i + 1), *(_format_value(c[i]) for c in columns.values())] for i in range(layers)]
    return LastDiagnostics(
        name, record['reason'] or '', step, scalars, [['layer', *columns], *rows]
    )


def _format_value(value: float | None) -> str:
    return 'not finite' if value is None or not math.isfinite(value) else f'{value:.3g}'
