"""Tables and plots of a run or a sweep, finished or not, in one page that needs no network.

python -m eval.report --workdir=DIR [--out=report.html] [--figures=DIR]

Next to the page (DIR/report.html) lies the same in Markdown; --figures adds PNG and SVG for papers.
"""

import collections
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from eval.compare import CONFIDENCE, LR, SEEDS, Comparison, Interval, compare, metric_of
from eval.report import depth, rates
from eval.report import figures as plots
from eval.report.series import Series, map_steps, read_series, thin_curve, thin_map
from eval.runs import SWEEP, Record, columns, gather, read_sweep
from eval.text import markdown, number
from lm.config import flatten
from lm.record.workdir import CONFIG, write_text

HERE = Path(__file__).parent
STATUSES = ('done', 'diverged', 'failed', 'stopped', 'unfinished', 'waiting')
MARKS = {'better': '▼', 'worse': '▲', 'within noise': '≈', 'one seed': '·'}
DIGITS = 5  # of the numbers that figures show


def report(
    workdir: str | Path, out: str | Path | None = None, figures: str | Path | None = None
) -> Path:
    """Writes the page to `out` (default WORKDIR/report.html), the tables in Markdown beside it, and
    figures to the folder `figures` where that is given; returns the page's path.

    Raises ValueError where `workdir` holds neither a run nor a sweep.
    """
    folder = Path(workdir)
    if not any((folder / name).exists() for name in (SWEEP, CONFIG)):
        raise ValueError(f'{folder} holds no run and no sweep: there is no {SWEEP} or {CONFIG}')
    records, sweep = gather(folder), read_sweep(folder)
    series = {record['workdir']: read_series(record) for record in records}
    comparisons, metric = compare(records, sweep), metric_of(sweep)
    content = {
        'title': folder.resolve().name,
        'workdir': str(folder),
        'is_sweep': (folder / SWEEP).exists(),
        'made': datetime.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M %Z'),
        'statuses': _statuses(records),
        'facts': _facts(records),
        'unit': plots.UNITS[metric],
        'confidence': f'{CONFIDENCE:.0%}',
        'findings': _findings(comparisons, metric),
        'variants': [_variant_row(c, s) for c, s in _styled(comparisons)],
        'cells': [_cell_row(record, sweep) for record in records],
        'swept': [columns()[path] for path in sweep['axes']],
        'axes': {path: [number(v) for v in values] for path, values in sweep['axes'].items()},
        'changes': _changes(comparisons, sweep),
        'base': {path: number(value) for path, value in flatten(sweep['base']).items()},
        'has_curves': any(one.training[0] or one.validation[0] for one in series.values()),
        'has_layers': any(one.layers for one in series.values()),
        'has_final': any(c.losses for c in comparisons) and (folder / SWEEP).exists(),
    }
    page = Path(out) if out else folder / 'report.html'
    page.parent.mkdir(parents=True, exist_ok=True)
    data = _data(comparisons, series, metric)
    write_text(page, _html(content, data))
    tables = _by_rate(comparisons, metric) | _by_depth(comparisons, series)
    write_text(page.with_suffix('.md'), _markdown(content, tables))
    if figures:
        plots.write_figures(Path(figures), comparisons, series, metric)
    return page


def _styled(comparisons: Sequence[Comparison]) -> list[tuple[Comparison, dict[str, str]]]:
    return list(zip(comparisons, plots.styles(comparisons), strict=True))


def _statuses(records: Sequence[Record]) -> dict[str, int]:
    counts = collections.Counter(record['status'] for record in records)
    known = [status for status in STATUSES if status in counts]
    return {status: counts[status] for status in dict.fromkeys([*known, *counts])}


def _facts(records: Sequence[Record]) -> dict[str, str]:
    """What the runs have in common, or all that they have."""
    facts = {}
    for name, column in (('git commit', 'git_commit'), ('device', 'device')):
        values = dict.fromkeys(r[column] for r in records if r[column])
        facts[name] = ', '.join(values) or 'not recorded yet'
    sizes = dict.fromkeys(r['parameters'] for r in records if r['parameters'])
    facts['parameters'] = ', '.join(f'{size:,}' for size in sizes) or 'not recorded yet'
    if len(records) == 1 and records[0]['wall_sec']:  # runs beside each other share their time
        seconds = records[0]['wall_sec']
        facts['wall time'] = f'{seconds / 3600:.2f} h' if seconds >= 3600 else f'{seconds:.0f} s'
    return facts


def _findings(comparisons: Sequence[Comparison], metric: str) -> list[str]:
    """The main results in words."""
    ended = [c for c in comparisons if c.best_lr is not None]
    if not ended:
        return []
    if not any(values for c in ended for values in rates.finished(c, metric).values()):
        return ['Every run that has ended diverged.']
    best = min(ended, key=lambda c: c.loss.mean)
    unit = plots.UNITS[metric].removeprefix('loss, ')
    lines = [
        f'{"Lowest final" if len(ended) > 1 else "Final"} validation loss: '
        f'{plus_minus(best.loss)} {unit}, of {best.variant.name} at learning rate '
        f'{number(best.best_lr)}, {_count(best.loss.n, "seed")}.'
    ]
    verdicts = collections.Counter(c.verdict for c in comparisons if c.verdict)
    if verdicts:
        baseline = next(c.variant.name for c in comparisons if c.variant.is_baseline)
        counts = ', '.join(
            f'{verdicts[verdict]} {verdict}' for verdict in MARKS if verdicts[verdict]
        )
        lines.append(f'Against the baseline ({baseline}): {counts}.')
    return lines


def _count(n: int, what: str) -> str:
    return f'{n} {what}' if n == 1 else f'{n} {what}s'


def plus_minus(interval: Interval, sign: str = '') -> str:
    """'2.8900 ± 0.0248', '2.8900' without an interval, '' without a value."""
    if math.isnan(interval.mean):
        return ''
    half = '' if math.isnan(interval.half) else f' ± {interval.half:.4f}'
    return f'{interval.mean:{sign}.4f}{half}'


def _fixed(value: float | None, form: str = '.4f') -> str:
    return '' if value is None or math.isnan(value) else f'{value:{form}}'


def _variant_row(c: Comparison, style: Mapping[str, str]) -> dict[str, Any]:
    is_baseline = c.variant.is_baseline
    return {
        'variant': c.variant.name,
        'color': style['color'],
        'is_baseline': is_baseline,
        'verdict': 'baseline' if is_baseline else c.verdict,
        'mark': MARKS.get(c.verdict, ''),
        'difference': '' if is_baseline else plus_minus(c.difference, '+'),
        'loss': plus_minus(c.loss),
        'bits_per_byte': plus_minus(c.bits_per_byte),
        'best_lr': number(c.best_lr),
        'seeds': str(c.loss.n),
        'sensitivity': _fixed(c.sensitivity),
        'diverged': f'{c.diverged} of {len(c.variant.records)}',
        'tokens_per_sec': _fixed(c.tokens_per_sec, ',.0f'),
        'notes': c.notes,
    }


def _cell_row(record: Record, sweep: Mapping[str, Any]) -> dict[str, Any]:
    shown = {
        'cell': record['cell'],
        **{columns()[path]: number(record[columns()[path]]) for path in sweep['axes']},
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
    return shown


def _changes(comparisons: Sequence[Comparison], sweep: Mapping[str, Any]) -> dict[str, list[str]]:
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


def _data(
    comparisons: Sequence[Comparison], series: Mapping[str, Series], metric: str
) -> dict[str, Any]:
    """What the page's script draws; numbers rounded, curves thinned."""
    steps = map_steps(series.values())
    variants, cells = [], []
    for i, (c, style) in enumerate(_styled(comparisons)):
        done = rates.finished(c, metric)
        diverged = collections.Counter(r['lr'] for r in c.variant.records if plots.has_diverged(r))
        points = [{'lr': lr, 'done': done[lr], 'diverged': diverged[lr]} for lr in done]
        drawn = {'mean': c.loss.mean, 'half': c.loss.half, 'initial': c.initial}
        drawn |= {'name': c.variant.name, 'best_lr': c.best_lr, 'points': points, **style}
        variants.append(_rounded(drawn))
        runs = [(record, series[record['workdir']]) for record in c.variant.records]
        cells += [_cell_data(record, i, one, steps) for record, one in runs]
    return {'unit': plots.UNITS[metric], 'variants': variants, 'cells': cells}


def _cell_data(record: Record, variant: int, one: Series, steps: int) -> dict[str, Any]:
    seeds = [f'{columns()[path]} {record[columns()[path]]}' for path in SEEDS]
    layers = {name: thin_map(recorded, steps) for name, recorded in one.layers.items()}
    return {
        'cell': record['cell'],
        'variant': variant,
        'lr': record['lr'],
        'seed': ', '.join(seeds),
        'status': record['status'],
        'training': _rounded(thin_curve(one.training)),
        'validation': _rounded(thin_curve(one.validation)),
        'layers': _rounded(layers),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f'{value:.{DIGITS}g}') if math.isfinite(value) else None
    return value


Tables = dict[str, tuple[str, list[list[str]]]]  # heading -> (what it shows, head and rows)


def _by_rate(comparisons: Sequence[Comparison], metric: str) -> Tables:
    """None where there is one learning rate."""
    lines = rates.table(comparisons, metric)
    if len(lines[0]) < 3:
        return {}
    return {'By learning rate': (f'Final validation {plots.UNITS[metric]}. {rates.CAPTION}', lines)}


def _by_depth(comparisons: Sequence[Comparison], series: Mapping[str, Series]) -> Tables:
    """A table for each quantity that was recorded per layer."""
    names = dict.fromkeys(name for one in series.values() for name in one.layers)
    tables = {name: depth.table(depth.profiles(comparisons, series, name)) for name in names}
    return {
        f'By depth: {name.replace("_", " ")}': (depth.CAPTION, lines)
        for name, lines in tables.items()
        if len(lines) > 1
    }


def _html(content: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template('report.html.j2').render(
        **content,
        plotly=Markup(get_plotlyjs()),
        script=Markup((HERE / 'report.js').read_text()),
        # A config may hold any text, also one that would end the script element.
        data=Markup(json.dumps(data, separators=(',', ':')).replace('<', '\\u003c')),
    )


def _markdown(content: Mapping[str, Any], tables: Tables) -> str:
    counts = ', '.join(f'{n} {status}' for status, n in content['statuses'].items())
    parts = [f'# {content["title"]}', f'{content["made"]}: {counts or "no cells"}.']
    parts += ['\n'.join(f'- {name}: {value}' for name, value in content['facts'].items())]
    parts += content['findings']
    if content['is_sweep'] and content['variants']:
        hidden = ('color', 'is_baseline', 'mark')
        rows = [
            {k: v for k, v in row.items() if k not in hidden} | {'notes': '; '.join(row['notes'])}
            for row in content['variants']
        ]
        parts += [
            '## Variants',
            f'Final validation {content["unit"]}; ± is a {content["confidence"]} interval over '
            'seeds.',
            markdown([list(rows[0]), *(list(row.values()) for row in rows)]),
        ]
        changes = {name: '; '.join(lines) for name, lines in content['changes'].items()}
        lines = [f'- {name}: {line or "as the base"}' for name, line in changes.items()]
        parts += ['## Config against the base', '\n'.join(lines)]
    for heading, (caption, lines) in tables.items():
        parts += [f'## {heading}', caption, markdown(lines)]
    if content['cells']:
        rows = content['cells']
        table = markdown([list(rows[0]), *(list(row.values()) for row in rows)])
        parts += ['## Cells', table]
    return '\n\n'.join(parts) + '\n'
