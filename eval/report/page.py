"""Tables and plots of a run or of sweeps, finished or not, in one page that needs no network.

Next to the page (DIR/report.html) lies the same in Markdown; --figures adds PNG and SVG for papers.
"""

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from eval.compare import CONFIDENCE, Comparison, compare_rates, compare_variants
from eval.report import tables
from eval.report.figures import VERDICTS, figures_of_losses, line_styles, save, styles
from eval.report.layers import figures_of_quantities, profiles, table
from eval.report.series import (
    RATE_POINTS,
    Series,
    choices,
    read_series,
    recorded,
    room,
    thin_curve,
    thin_map,
)
from eval.report.subject import Subject, read_subject
from eval.tables.results import Record
from eval.tables.text import markdown, number
from lm.config.resolve import flatten
from lm.record.workdir import write_text
from lm.storage.buckets import local_path

HERE = Path(__file__).parent
SCRIPTS = ('plots.js', 'differences.js', 'layers.js', 'report.js')
DIGITS = 5  # of the numbers that the page's plots show
VARIANT, RATE = 'variant', 'learning rate'
PAGE, TEXT = 'report.html.j2', 'report.md.j2'


def report(
    workdir: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    figures: str | Path | None = None,
) -> Path:
    """Writes the page to `out`, the tables in Markdown beside it, and figures to the folder
    `figures` where that is given; returns the page's path.

    Args:
        workdir: a run or a sweep, or several to compare, the first with the baseline.
        out: WORKDIR/report.html by default; of several, report-with-OTHERS.html in the first.

    Raises ValueError where a workdir holds neither a run nor a sweep, or what cannot be read, and
    where the losses of several do not compare (`eval.report.subject`).
    """
    several = [workdir] if isinstance(workdir, str | Path) else list(workdir)
    subject = read_subject(several)
    series, unread = _series(subject.records)
    comparisons = compare_variants(subject.variants, subject.metric)
    by_rate = compare_rates(subject.records, subject.sweep) if len(several) == 1 else []
    shown = by_rate or comparisons
    content = _content(subject, comparisons, by_rate, series) | {'unread': unread}
    others = [folder.resolve().name for folder in subject.folders[1:]]
    name = '-'.join(['report', 'with', *others] if others else ['report']) + '.html'
    page = local_path(out, '--out') if out else subject.folders[0] / name
    page.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(plotted(subject, shown, comparisons, series), separators=(',', ':'))
    scripts = {
        'plotly': Markup(get_plotlyjs()),
        'script': Markup('\n'.join((HERE / name).read_text() for name in SCRIPTS)),
        # A config may hold any text, also one that would end the script element.
        'data': Markup(data.replace('<', '\\u003c')),
    }
    write_text(page, _render(PAGE, content | scripts))
    # Markdown lets HTML through, and a config may hold any text.
    text = re.sub(r'<(?=[A-Za-z/!?])', '&lt;', _render(TEXT, content))
    write_text(page.with_suffix('.md'), text.rstrip() + '\n')
    if figures:
        drawn = figures_of_losses(shown, comparisons, series, subject.metric)
        save(Path(figures), drawn | figures_of_quantities(shown, series))
    return page


def _series(records: Sequence[Record]) -> tuple[dict[str, Series], list[str]]:
    """The series of each run, by workdir; and the reasons why some are empty."""
    series, unread = {}, []
    for record in records:
        try:
            series[record['workdir']] = read_series(record)
        except (ValueError, OSError) as error:
            series[record['workdir']] = Series(([], []), ([], []), {})
            unread.append(f'No curves of {record["cell"]}: {error}.')
    return series, unread


def _content(
    subject: Subject,
    comparisons: Sequence[Comparison],
    by_rate: Sequence[Comparison],
    series: Mapping[str, Series],
) -> dict[str, Any]:
    """Everything on the page but its plots."""
    axes, base = subject.sweep['axes'], flatten(subject.sweep['base'])
    shown, what = (by_rate, RATE) if by_rate else (comparisons, VARIANT)
    colors = [look['color'] for look in styles(shown)]
    every, named = list(series.values()), _names(subject, shown)
    names, fitting = recorded(every), room(every)[1]
    by_depth = {name: table(profiles(shown, series, name)) for name in names}
    return {
        'title': subject.title,
        'workdir': ','.join(map(str, subject.folders)),
        'is_sweep': subject.is_sweep,
        'made': datetime.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M %Z'),
        'statuses': tables.statuses(subject.records),
        'facts': tables.facts(subject.records),
        'unit': tables.UNITS[subject.metric],
        'confidence': f'{CONFIDENCE:.0%}',
        'level': f'{1 - CONFIDENCE:.2g}',
        'what': what,
        'findings': tables.findings(subject, comparisons, by_rate),
        'variants': tables.variant_rows(shown, colors, what),
        'cells': [tables.cell_row(record, subject) for record in subject.records],
        'axes': {path: list(map(number, values)) for path, values in axes.items()},
        'apart': {path: list(map(number, values)) for path, values in subject.apart.items()},
        'changes': tables.changes(shown, subject.sweep),
        'base': {path: number(value) for path, value in base.items()},
        'warnings': tables.warning_rows(subject.records, named),
        'lasts': tables.last_of_diverged(subject.records, series, named),
        'most_lasts': tables.MOST_RUNS,
        'has_curves': any(one.training[0] or one.validation[0] for one in every),
        'has_rates': any(one.rates[0] for one in every),
        'has_layers': any(one.layers for one in every),
        'left_out': [name for name in names if name not in fitting],
        'by_rate': tables.rates_table(comparisons, subject.metric),
        'by_depth': {name: lines for name, lines in by_depth.items() if len(lines) > 1},
        'has_final': any(c.losses for c in comparisons) and subject.is_sweep,
        'has_differences': bool(tables.compared(shown)),
    }


def _names(subject: Subject, shown: Sequence[Comparison]) -> dict[str, str]:
    """workdir -> what makes the run, and its cell."""
    if not subject.is_sweep:
        return {record['workdir']: record['cell'] for record in subject.records}
    variants = {r['workdir']: c.variant.name for c in shown for r in c.variant.records}
    varied, found = tables.seed_columns(subject.records), {}
    for record in subject.records:
        seeds = [f'{column} {record[column]}' for column in varied]
        parts = (variants.get(record['workdir'], ''), f'lr {number(record["lr"])}', *seeds)
        found[record['workdir']] = f'{", ".join(filter(None, parts))} ({record["cell"]})'
    return found


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows with equal keys as a head and their values."""
    values = ([', '.join(v) if isinstance(v, list) else str(v) for v in r.values()] for r in rows)
    return [list(rows[0]), *values]


def _render(template: str, content: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=template == PAGE,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        'lines': _lines,
        'markdown': markdown,
        'with_notes': lambda rows: [r.cells | {'notes': '; '.join(r.notes)} for r in rows],
    }
    return environment.get_template(template).render(content)


def plotted(
    subject: Subject,
    shown: Sequence[Comparison],
    final: Sequence[Comparison],
    series: Mapping[str, Series],
) -> dict[str, Any]:
    """`shown`: the variants of the curves; `final`: those whose final losses are drawn over the
    learning rate, which is one where the learning rates are the variants.
    """
    fitting = room(list(series.values()))
    seeds = tables.seed_columns(subject.records)
    cells = [
        _cell(record, series[record['workdir']], fitting, seeds) | {'variant': i}
        for i, comparison in enumerate(shown)
        for record in comparison.variant.records
    ]
    if len(shown) == 1 < len(cells):  # a colour for each run, since there are no variants
        looks = line_styles([i == 0 for i in range(len(cells))])
        cells = [cell | look for cell, look in zip(cells, looks, strict=True)]
    data = {
        'unit': tables.UNITS[subject.metric],
        'variants': _variants(shown, subject.metric),
        'final': _variants(final, subject.metric),
        'differences': [_difference(c) for c in tables.compared(shown)],
        'baseline': next((c.variant.name for c in shown if c.variant.is_baseline), ''),
        'quantities': choices(fitting[1]),
        'cells': cells,
    }
    return _rounded(data)


def _variants(comparisons: Sequence[Comparison], metric: str) -> list[dict[str, Any]]:
    found = []
    for c, look in zip(comparisons, styles(comparisons), strict=True):
        done, diverged = tables.finished(c, metric), tables.lost(c)
        points = [{'lr': lr, 'done': done[lr], 'diverged': diverged[lr]} for lr in done]
        own = {'mean': c.loss.mean, 'half': c.loss.half, 'initial': c.initial, 'points': points}
        found.append({'name': c.variant.name, 'best_lr': c.best_lr, **own, **look})
    return found


def _difference(c: Comparison) -> dict[str, Any]:
    seeds = tables.seeds_text(c)
    told = (c.verdict, tables.p_text(c), f'{seeds} would settle it' if seeds else '')
    return {
        'name': c.variant.name,
        'mean': c.difference.mean,
        'half': c.difference.half,
        'color': VERDICTS[c.verdict],
        'told': ', '.join(filter(None, told)),
        'seeds': c.difference.n,
    }


def _cell(
    record: Record, one: Series, fitting: tuple[int, list[str], list[str]], seeds: Sequence[str]
) -> dict[str, Any]:
    steps, names, by_head = fitting

    def thinned(found, names):
        return {name: thin_map(found[name], steps) for name in names if name in found}

    return {
        'cell': record['cell'],
        'lr': record['lr'],
        'seed': ', '.join(f'{name} {record[name]}' for name in seeds),
        'status': record['status'],
        'training': thin_curve(one.training),
        'validation': thin_curve(one.validation),
        'rates': thin_curve(one.rates, RATE_POINTS),
        'layers': thinned(one.layers, names),
        'heads': thinned(one.heads, by_head),
        'scalars': thinned(one.scalars, names),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f'{value:.{DIGITS}g}') if math.isfinite(value) else None
    return value
