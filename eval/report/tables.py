"""The tables and sentences of a page, as text."""

import collections
import dataclasses
import json
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
from lm.record.time_use import STEPS, Seconds, add_seconds
from lm.run.warnings import Detector
from lm.study.arm import UNITS as SHORT_UNITS
from lm.study.statistics import (
    BETTER,
    CONFIDENCE,
    ONE_SEED,
    WITHIN_NOISE,
    WORSE,
    Interval,
    format_outcome,
    format_seeds,
)
from lm.study.tables.columns import columns
from lm.study.tables.comparison import Comparison, describe_lr_choice
from lm.study.tables.parameters import compare_parameters, read_parameters
from lm.study.tables.results import UNREADABLE, Record
from lm.study.tables.text import format_count, format_number
from lm.study.tables.variants import LR, SEEDS, has_diverged
from modules.params import USES

UNITS = {'ce': 'loss (nats per token)', 'bits_per_byte': 'bits per byte'}
STATUSES = ('done', 'diverged', 'failed', UNREADABLE, 'stopped', 'unfinished', 'waiting')
ABSENT = object()  # a value that was not recorded; None is one that was not finite
MOST_RUNS = 12  # that diverged, of which a page shows the last diagnostics
OVER_HEADS = {'mean': np.mean, 'lowest': np.min, 'largest': np.max}
# Columns of the last diagnostics: header, quantity, and its reduction over heads (OVER_HEADS).
BY_LAYER = (
    ('entropy share', 'attention_entropy_share', 'mean'),
    ('entropy share, lowest head', 'attention_entropy_share', 'lowest'),
    ('largest logit', 'attention_largest_logit', 'largest'),
    ('attention to first token', 'attention_first_token', 'mean'),
    ('residual rms', 'residual_rms', ''),
    ('largest residual', 'residual_largest', ''),
    ('attention output rms', 'attention_output_rms', ''),
    ('mlp output rms', 'mlp_output_rms', ''),
    ('gradient norm', 'layer_grad_norm', ''),
    ('update / weight', 'update_ratio_hidden', ''),
)
MODEL_QUANTITIES = ('log_z_mean', 'logit_largest', 'update_ratio_embedding', 'update_ratio_readout')
WARNINGS = ('run', 'step', 'warning', 'layer', 'head', 'observation', 'what helps')
# Facts of the runs that a paper states first: column or config field -> name.
FACTS = {
    'git_commit': 'git commit',
    'device': 'device',
    'parent': 'branch of',
    'parameters': 'parameters',
    'data.source': 'data',
    'data.validation_source': 'validation data',
    'data.tokenizer': 'tokenizer',
    'data.batch_size': 'batch size',
    'data.seq_len': 'sequence length',
    'train.steps': 'steps',
}
RARE_FACTS = {'data.validation_source', 'parent'}  # left out if no run has it
TIME_PARTS = {  # of `lm.record.time_use`, where the name alone does not say it
    'start': 'start: imports, devices, weights',
    'data': 'preparing data',
    'data_wait': 'waiting for data',
    'saving': 'saving, as far as steps wait',
    'redone': 'steps done again',
    'down': 'between a stop and the next start',
}
TIME_NOTE = (
    'Seconds since the first start of each run, added up over runs. Those of runs that trained '
    'side by side are divided by their number. Goodput is the share of the steps that were kept.'
)
UNSET = 'unset'  # an option that nothing reads, or that is as published
NO_VERDICT = 'without a verdict (only one seed)'
MARKS = {BETTER: '▼', WORSE: '▲', WITHIN_NOISE: '≈', ONE_SEED: '·'}


def count_statuses(records: Sequence[Record]) -> dict[str, int]:
    """Counts the runs of each status, in the order of STATUSES."""
    counts = collections.Counter(record['status'] for record in records)
    ordered = [status for status in STATUSES if status in counts]
    return {status: counts[status] for status in dict.fromkeys([*ordered, *counts])}


def shared_facts(records: Sequence[Record], sweep: Mapping[str, Any]) -> dict[str, str]:
    """Returns facts of the runs, with all values if they differ, and the protocol in sweep.json."""
    facts = {}
    if protocol := sweep.get('protocol'):
        options = ', '.join(
            f'{name} {format_number(value)}' for name, value in protocol['options'].items()
        )
        facts['protocol'] = f'{protocol["name"]} ({options})' if options else protocol['name']
    for name in FACTS:
        values = dict.fromkeys(record[columns().get(name, name)] for record in records)
        texts = [f'{value:,}' if isinstance(value, int) else value for value in values if value]
        if texts or name not in RARE_FACTS:
            facts[FACTS[name]] = ', '.join(texts) or 'not recorded yet'
    if len(records) == 1 and records[0]['wall_sec']:  # runs beside each other share their time
        seconds = records[0]['wall_sec']
        facts['wall time'] = f'{seconds / 3600:.2f} h' if seconds >= 3600 else f'{seconds:.0f} s'
    return facts


def seed_columns(records: Sequence[Record]) -> list[str]:
    """Returns the columns of the seeds that differ between runs, or the first if none does."""
    names = [columns()[path] for path in SEEDS]
    varying = [name for name in names if len({record[name] for record in records}) > 1]
    return varying or names[:1]


def finished_losses(comparison: Comparison, metric: str) -> dict[float, list[float]]:
    """Returns lr -> the final losses of the finished runs; [] if none finished."""
    losses: dict[float, list[float]] = {}
    for record in sorted(comparison.variant.records, key=lambda record: record['lr']):
        values = losses.setdefault(record['lr'], [])
        if record['status'] == 'done' and record[metric] is not None:
            values.append(record[metric])
    return losses


def count_diverged(comparison: Comparison) -> dict[float, int]:
    """Returns lr -> the number of runs that diverged."""
    return collections.Counter(
        record['lr'] for record in comparison.variant.records if has_diverged(record)
    )


def rank_comparisons(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Returns the comparisons with a difference, from the best to the worst."""
    ranked = [c for c in comparisons if c.difference.n and not c.variant.is_baseline]
    return sorted(ranked, key=lambda c: c.difference.mean)


def findings(
    subject: Subject, comparisons: Sequence[Comparison], by_rate: Sequence[Comparison]
) -> list[str]:
    """Returns the main results in words.

    Args:
      subject: the runs and variants.
      comparisons: the variants compared.
      by_rate: the learning rates compared, if only these vary.
    """
    finished, lines = [c for c in comparisons if c.best_lr is not None], []
    if not finished:
        return lines
    if any(values for c in finished for values in finished_losses(c, subject.metric).values()):
        best = min(finished, key=lambda c: c.loss.mean)
        label = 'Lowest final' if len(finished) > 1 else 'Final'
        details = (
            *([best.variant.name] if len(finished) > 1 else []),
            f'learning rate {format_number(best.best_lr)}',
            format_count(best.loss.n, 'seed'),
        )
        lines.append(
            f'{label} validation loss: {interval_cell(best.loss)} {SHORT_UNITS[subject.metric]} '
            f'({", ".join(details)}).'
        )
        verdicts = [c.verdict for c in by_rate or comparisons]
        if any(verdicts):
            baseline = next(c.variant for c in by_rate or comparisons if c.variant.is_baseline)
            counts = ', '.join(
                f'{verdicts.count(verdict)} '
                f'{NO_VERDICT if verdict == ONE_SEED else format_outcome(verdict)}'
                for verdict in MARKS
                if verdict in verdicts
            )
            lines.append(f'Compared with the baseline ({baseline.values_text}): {counts}.')
            lines.append(describe_lr_choice(comparisons, by_rate, subject.sweep['base']))
    else:
        lines.append('All runs that have ended diverged.')
    if by_rate:  # the table has no line for what they make together
        (comparison,) = comparisons
        if not math.isnan(comparison.sensitivity):
            lines.append(f'Sensitivity to the learning rate: {comparison.sensitivity:.4f}.')
        lines += [f'{note[0].upper()}{note[1:]}.' for note in comparison.notes]
    return [*lines, *describe_branches(subject.records)]


def describe_branches(records: Sequence[Record]) -> list[str]:
    """Says whether losses and costs of branches include their parents; [] without branches."""
    parents = [record.get('parent') for record in records]
    if not any(parents):
        return []
    names = {parent: Path(parent).name for parent in dict.fromkeys(filter(None, parents))}
    subject = 'All runs' if len(records) > 1 else 'The run'
    if None in parents:
        n = len(parents) - parents.count(None)
        subject = f'{n} of {len(records)} runs'
    verb = 'continues' if subject == 'The run' or subject.startswith('1 ') else 'continue'
    lines = [
        f'{subject} {verb} {" or ".join(names.values())}: steps and tokens count those before, '
        'wall time does not.'
    ]
    if len(records) > 1 and None not in parents and len(names) == 1:
        lines.append(
            'They share those steps, so differences between seeds show only the noise of the steps '
            'since.'
        )
    return lines


def describe_evaluations(records: Sequence[Record], series: Mapping[str, Series]) -> str:
    """Returns a sentence with the validation loss of runs that were evaluated once; '' if any run
    has several evaluations, or none has one.
    """
    curves = [series[record['workdir']].validation for record in records]
    evaluated = [curve for curve in curves if curve[0]]
    if not evaluated or any(len(steps) > 1 for steps, _ in evaluated):
        return ''
    steps = {steps[0] for steps, _ in evaluated}
    at_step = f' at step {min(steps):,}' if len(steps) == 1 else ''
    if len(records) > 1:
        return f'Each run was evaluated once{at_step}; the tables list the validation losses.'
    ((_, (loss,)),) = evaluated
    text = 'not finite' if loss is None else f'{loss:.4f} {SHORT_UNITS["ce"]}'
    return f'Validation loss{at_step}, the only evaluation: {text}.'


def needed_seeds_text(comparison: Comparison) -> str:
    """Returns 'about 14 seeds needed' to detect an inconclusive difference; '' for other
    verdicts.
    """
    n = comparison.seeds_needed
    return '' if n is None else f'{format_seeds(n)} needed'


def format_p_value(p: float) -> str:
    """Returns 'p = 0.012'; '' for nan."""
    if math.isnan(p):
        return ''
    return f'p = {p:.2g}' if p >= 1e-4 else 'p < 0.0001'


def _format_fixed(value: float | None, form: str = '.4f') -> str:
    return '' if value is None or math.isnan(value) else f'{value:{form}}'


@dataclasses.dataclass(frozen=True)
class TableCell:
    """A cell of a table: `text`, and lines below it in small print.

    As text it is '2.8900 ± 0.0248', or '▼ better (p = 0.0022; 5 seeds)'.
    """

    text: str
    small: tuple[str, ...] = ()

    def __str__(self) -> str:
        notes = '; '.join(self.small)
        if not notes or notes.startswith('±'):
            return f'{self.text} {notes}'.strip()
        return f'{self.text} ({notes})'


@dataclasses.dataclass(frozen=True)
class TableRow:
    """A row of a table, with its colour and notes."""

    color: str
    cells: dict[str, TableCell]  # by the head of their column
    verdict: str
    notes: list[str]


def variant_rows(
    comparisons: Sequence[Comparison], colors: Sequence[str], name: str
) -> list[TableRow]:
    """Returns the table of variants, without columns that are empty or constant.

    Args:
      comparisons: the variants, or the learning rates if only these vary.
      colors: a colour for each.
      name: head of the first column.
    """
    rates = [set(c.variant.rates) for c in comparisons]
    is_hidden = {
        **dict.fromkeys(('verdict', 'difference'), len(comparisons) < 2),
        'best lr': len(set().union(*rates)) < 2 or name == 'learning rate',
        'sensitivity': all(len(lrs) < 2 for lrs in rates),
        'diverged': not any(c.diverged for c in comparisons),
        'steps': len({_format_steps(c) for c in comparisons}) < 2,
    }
    rows = []
    for c, color in zip(comparisons, colors, strict=True):
        cells = {name: TableCell(c.variant.name)} | _result_cells(c)
        visible = {head: cell for head, cell in cells.items() if not is_hidden.get(head)}
        rows.append(TableRow(color, visible, c.verdict, c.notes))
    return rows


def _result_cells(c: Comparison) -> dict[str, TableCell]:
    verdict = f'{MARKS.get(c.verdict, "")} {format_outcome(c.verdict)}'.strip()
    p_text = format_p_value(c.p)
    if c.verdict == WITHIN_NOISE:
        p_text += f', needs p < {1 - CONFIDENCE:.2g}'
    is_baseline = c.variant.is_baseline
    return {
        'verdict': TableCell(
            'baseline' if is_baseline else verdict,
            tuple(filter(None, (p_text, needed_seeds_text(c)))),
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
    counts = sorted({record['steps'] for record in c.variant.records if record['steps']})
    return ', '.join(f'{steps:,}' for steps in counts)


def interval_cell(interval: Interval, sign: str = '') -> TableCell:
    """Returns '2.8900 ± 0.0248', '2.8900' without an interval, '' without a value."""
    has_half = not math.isnan(interval.half_width)
    return TableCell(
        _format_fixed(interval.mean, f'{sign}.4f'), (f'± {interval.half_width:.4f}',) * has_half
    )


def cell_row(record: Record, subject: Subject) -> dict[str, Any]:
    """Returns a row of the table of all cells."""
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


def evaluation_rows(
    records: Sequence[Record], run_names: Mapping[str, str]
) -> list[dict[str, str]]:
    """Returns a row for each run with the last numbers of its held-out texts and suites.

    Args:
      records: the runs.
      run_names: the name of each, by workdir.

    Returns:
      Rows with the same heads; none if no run has such numbers.
    """
    numbers = [_read_evaluations(record) for record in records]
    heads = dict.fromkeys(head for row in numbers for head in row)
    if not heads:
        return []
    return [
        {'run': run_names[record['workdir']]}
        | {head: _format_fixed(row.get(head)) for head in heads}
        for record, row in zip(records, numbers, strict=True)
    ]


def _read_evaluations(record: Record) -> dict[str, float | None]:
    """Returns the numbers of the texts and suites of a run by their heads in a table."""
    texts, suites = (json.loads(record[name] or '{}') for name in ('texts', 'suites'))
    mean = {'mean of texts': record['texts_bits_per_byte']} if texts else {}
    return {f'text {name}': bits for name, bits in texts.items()} | mean | suites


def list_changes(
    comparisons: Sequence[Comparison], sweep: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Returns variant -> 'field: base → value' for each config field that differs.

    Learning rate, seeds and tuned fields are excluded.
    """
    base, changes = flatten(sweep['base']), {}
    excluded = {LR, *SEEDS, *sweep.get('tune', {}).get('fields', ())}
    for comparison in comparisons:
        lines = []
        for path, column in columns().items():
            values = dict.fromkeys(record[column] for record in comparison.variant.records)
            if path not in excluded and path in base and set(values) != {base[path]}:
                current = ', '.join(format_number(value) or UNSET for value in values)
                lines.append(f'{path}: {format_number(base[path]) or UNSET} → {current}')
        changes[comparison.variant.name] = lines
    return changes


def settings_rows(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """Returns the settings of parameters in which variants differ from the first, by group.

    Each variant is at its own best learning rate. Runs without a parameter table have no rows.
    """
    runs = [Run(Path(folder)) for c in comparisons for folder in c.display_workdirs[:1]]
    tables = [read_parameters(run.folder) for run in runs]
    if len(runs) < max(2, len(comparisons)) or not all(tables):
        return []
    fields = [flatten(run.read_recipe()) for run in runs]
    return [
        {'variant': comparison.variant.name} | row
        for comparison, table, run_fields in zip(comparisons, tables, fields, strict=True)
        for row in compare_parameters(tables[0], table, fields[0], run_fields)
    ]


def cost_rows(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """Returns the parameters by use, the FLOPs and the time of each variant, beside its loss.

    Runs of versions without these columns have no rows.
    """
    rows = []
    for comparison in comparisons:
        record = comparison.variant.records[0]
        if record.get('flops_per_token') is None:
            return []
        step_tokens = record['batch_size'] * record['seq_len']
        if record.get('train_stages'):
            folder = Path(comparison.display_workdirs[0])
            step_tokens = Run(folder).read_recipe().mean_batch_tokens
        rows.append(
            {
                'variant': comparison.variant.name,
                **{f'{use} parameters': f'{record[f"{use}_parameters"]:,}' for use in USES},
                'MFLOPs per token': f'{record["flops_per_token"] / 1e6:,.3g}',
                'ms per step': _format_fixed(1e3 * step_tokens / comparison.tokens_per_sec, ',.1f'),
                'loss': _format_fixed(comparison.loss.mean),
            }
        )
    return rows


def time_rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """Returns the seconds of all runs by part, the largest first, and their sum with the goodput.

    The seconds of runs that trained side by side are divided by their number. Runs without a
    summary, and those of versions without parts, are left out; [] if none is left.
    """
    total = Seconds(float)
    for record in records:
        if seconds := json.loads(record.get('seconds') or '{}'):
            sharing = record['side_by_side'] or 1
            total = add_seconds(total, {part: sec / sharing for part, sec in seconds.items()})
    elapsed = sum(total.values())
    if not elapsed:
        return []
    rows = [
        {
            'part': TIME_PARTS.get(part, part),
            'seconds': f'{sec:,.1f}',
            'share': f'{sec / elapsed:.1%}',
        }
        for part, sec in sorted(total.items(), key=lambda pair: -pair[1])
        if sec
    ]
    goodput = f'goodput {total[STEPS] / elapsed:.1%}'
    return [*rows, {'part': 'all', 'seconds': f'{elapsed:,.1f}', 'share': goodput}]


def rates_table(comparisons: Sequence[Comparison], metric: str) -> list[list[str]]:
    """Returns the final losses by learning rate: a head and a row for each variant, as text."""
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
    """Returns the warnings of a run's summary, else of its rows so far; [] if unreadable."""
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
    """Returns the table of warnings, with columns WARNINGS; what helps is a line with a source."""
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
    """The last diagnostics of a diverged run: `table` has a head and a row for each layer."""

    run: str
    reason: str
    step: int
    of_model: dict[str, str]
    table: list[list[str]]


def list_last_diagnostics(
    records: Sequence[Record], series: Mapping[str, Series], run_names: Mapping[str, str]
) -> list[LastDiagnostics]:
    """Returns the last diagnostics of every diverged run that recorded any of `BY_LAYER`.

    Args:
      records: records of the runs.
      series: recorded series by workdir.
      run_names: names of the runs by workdir.
    """
    diagnostics = []
    for record in filter(has_diverged, records):
        run_series, name = series[record['workdir']], run_names[record['workdir']]
        if any(quantity in run_series.layers for _, quantity, _ in BY_LAYER):
            diagnostics.append(_read_last_diagnostics(record, run_series, name))
    return diagnostics


def _read_last_diagnostics(record: Record, series: Series, name: str) -> LastDiagnostics:
    step = max(series.layers[name][0][-1] for _, name, _ in BY_LAYER if name in series.layers)

    def last_value(recorded: Mapping[str, Any], quantity: str) -> Any:
        return dict(zip(*recorded.get(quantity, ([], [])), strict=True)).get(step, ABSENT)

    columns = {}
    for head, quantity, reduction in BY_LAYER:
        values = last_value(series.heads if reduction else series.layers, quantity)
        if values is not ABSENT:
            values_L = np.array(values, float)
            columns[head] = OVER_HEADS[reduction](values_L, -1) if reduction else values_L
    scalars = {
        quantity.replace('_', ' '): last_value(series.scalars, quantity)
        for quantity in MODEL_QUANTITIES
    }
    scalar_texts: dict[str, str] = {
        name: _format_value(value) for name, value in scalars.items() if value is not ABSENT
    }
    layers = len(next(iter(columns.values()), ()))
    rows = [
        [str(i + 1), *(_format_value(column[i]) for column in columns.values())]
        for i in range(layers)
    ]
    return LastDiagnostics(
        name, record['reason'] or '', step, scalar_texts, [['layer', *columns], *rows]
    )


def _format_value(value: float | None) -> str:
    return 'not finite' if value is None or not math.isfinite(value) else f'{value:.3g}'
