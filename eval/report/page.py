"""Tables and plots of a run or of sweeps, finished or not, in one page that needs no network.

python -m eval.report --workdir=DIR[,DIR] [--out=report.html] [--figures=DIR]

Next to the page (DIR/report.html) lies the same in Markdown; --figures adds PNG and SVG for papers.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from eval.compare import Comparison, compare_rates, compare_variants
from eval.report import depth, quantities, rates, tables, unstable
from eval.report import figures as plots
from eval.report.differences import compared
from eval.report.plotted import plotted, seed_columns
from eval.report.series import Series, read_series
from eval.report.subject import Subject, read_subject
from eval.runs import Record
from eval.stats import CONFIDENCE
from eval.text import markdown, number
from lm.buckets import local_path
from lm.config import flatten
from lm.record.workdir import write_text

HERE = Path(__file__).parent
SCRIPTS = ('plots.js', 'differences.js', 'layers.js', 'report.js')
VARIANT, RATE = 'variant', 'learning rate'


def report(
    workdir: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    figures: str | Path | None = None,
) -> Path:
    """Writes the page to `out`, the tables in Markdown beside it, and figures to the folder
    `figures` where that is given; returns the page's path.

    workdir: of a run or a sweep, or several to compare. The page is WORKDIR/report.html without
    `out`; that of several is report-with-OTHERS.html in the first, whose baseline it has.

    Raises ValueError where a workdir holds neither a run nor a sweep, or what cannot be read, and
    where the losses of several do not compare (`eval.report.subject`).
    """
    several = [workdir] if isinstance(workdir, str | Path) else list(workdir)
    subject = read_subject(several)
    series, unread = _series(subject.records)
    comparisons = compare_variants(subject.variants, subject.metric)
    by_rate = compare_rates(subject.records, subject.sweep) if len(several) == 1 else []
    shown = by_rate or comparisons
    styled = list(zip(shown, plots.styles(shown), strict=True))
    final = list(zip(comparisons, plots.styles(comparisons), strict=True))
    content = _content(subject, comparisons, by_rate, unread)
    content |= _unstable(subject, shown, series)
    content |= {
        'variants': tables.variant_rows(
            shown, [style['color'] for _, style in styled], RATE if by_rate else VARIANT
        ),
        'has_curves': any(one.training[0] or one.validation[0] for one in series.values()),
        'has_rates': any(one.rates[0] for one in series.values()),
        'has_layers': any(one.layers for one in series.values()),
        'left_out': _left_out(list(series.values())),
        'has_final': any(c.losses for c in comparisons) and subject.is_sweep,
        'has_differences': bool(compared(shown)),
    }
    page = local_path(out, '--out') if out else subject.folders[0] / _name(subject)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, _html(content, plotted(subject, styled, final, series)))
    more = unstable.as_tables(content['warnings'], content['lasts'])
    more |= _by_rate(comparisons, subject.metric) | _by_depth(shown, series)
    write_text(page.with_suffix('.md'), _markdown(content, more))
    if figures:
        plots.write_figures(Path(figures), shown, comparisons, series, subject.metric)
    return page


def _name(subject: Subject) -> str:
    others = [folder.resolve().name for folder in subject.folders[1:]]
    return '-'.join(['report', 'with', *others] if others else ['report']) + '.html'


def _series(records: Sequence[Record]) -> tuple[dict[str, Series], list[str]]:
    """By workdir; and why that of some is empty."""
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
    unread: Sequence[str],
) -> dict[str, Any]:
    axes, shown = subject.sweep['axes'], by_rate or comparisons
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
        'what': RATE if by_rate else VARIANT,
        'findings': tables.findings(subject, comparisons, by_rate),
        'unread': unread,
        'cells': [tables.cell_row(record, subject) for record in subject.records],
        'axes': {path: [number(v) for v in values] for path, values in axes.items()},
        'apart': {path: list(map(number, values)) for path, values in subject.apart.items()},
        'changes': tables.changes(shown, subject.sweep),
        'base': {path: number(value) for path, value in flatten(subject.sweep['base']).items()},
    }


def _unstable(
    subject: Subject, shown: Sequence[Comparison], series: Mapping[str, Series]
) -> dict[str, Any]:
    """Warnings and the last diagnostics of runs that diverged, each run by what makes it."""
    variants = {r['workdir']: c.variant.name for c in shown for r in c.variant.records}

    def named(record):
        if not subject.is_sweep:
            return record['cell']
        seeds = ', '.join(f'{column} {record[column]}' for column in seed_columns(subject))
        parts = (variants.get(record['workdir'], ''), f'lr {number(record["lr"])}', seeds)
        return f'{", ".join(filter(None, parts))} ({record["cell"]})'

    return {
        'warnings': unstable.warning_rows(subject.records, named),
        'lasts': unstable.last_of_diverged(subject.records, series, named),
        'most_lasts': unstable.MOST_RUNS,
    }


def _left_out(all_series: Sequence[Series]) -> list[str]:
    """What was recorded and has no room on the page."""
    _, kept, _ = quantities.room(all_series)
    return [name for name in quantities.recorded(all_series) if name not in kept]


Tables = dict[str, tuple[str, list[list[str]]]]  # heading -> (what it shows, head and rows)


def _by_rate(comparisons: Sequence[Comparison], metric: str) -> Tables:
    """None where there is one learning rate."""
    lines = rates.table(comparisons, metric)
    if len(lines[0]) < 3:
        return {}
    caption = f'Final validation {tables.UNITS[metric]}. {rates.CAPTION}'
    return {'By learning rate': (caption, lines)}


def _by_depth(comparisons: Sequence[Comparison], series: Mapping[str, Series]) -> Tables:
    """A table for each quantity that was recorded per layer; what they show stands at the first."""
    names, tables = quantities.recorded(list(series.values())), {}
    for name in names:
        lines = depth.table(depth.profiles(comparisons, series, name))
        if len(lines) > 1:
            caption = '' if tables else depth.CAPTION
            tables[f'By depth: {name.replace("_", " ")}'] = (caption, lines)
    return tables


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
        script=Markup('\n'.join((HERE / name).read_text() for name in SCRIPTS)),
        # A config may hold any text, also one that would end the script element.
        data=Markup(json.dumps(data, separators=(',', ':')).replace('<', '\\u003c')),
    )


def _markdown(content: Mapping[str, Any], more: Tables) -> str:
    counts = ', '.join(f'{n} {status}' for status, n in content['statuses'].items())
    parts = [f'# {content["title"]}', f'{content["made"]}: {counts or "no cells"}.']
    parts += ['\n'.join(f'- {name}: {value}' for name, value in content['facts'].items())]
    parts += [*content['findings'], *content['unread']]
    if content['apart']:
        lines = [f'- {path}: {" / ".join(values)}' for path, values in content['apart'].items()]
        parts += ['The bases of the sweeps differ:', '\n'.join(lines)]
    if content['is_sweep'] and content['variants']:
        rows = content['variants']
        lines = [[*map(str, row.cells.values()), '; '.join(row.notes)] for row in rows]
        parts += [
            '## Learning rates' if content['what'] == RATE else '## Variants',
            f'Final validation {content["unit"]}; ± is a {content["confidence"]} interval over '
            "seeds. p is that of the paired t test, corrected for the number of verdicts by Holm's "
            'procedure; the seeds beside it would settle a difference of this size.',
            markdown([[*rows[0].cells, 'notes'], *lines]),
        ]
        changes = {name: '; '.join(lines) for name, lines in content['changes'].items()}
        lines = [f'- {name}: {line or "as the base"}' for name, line in changes.items()]
        parts += ['## Config against the base', '\n'.join(lines)]
    for heading, (caption, lines) in more.items():
        parts += filter(None, [f'## {heading}', caption, markdown(lines)])
    if content['cells']:
        rows = content['cells']
        table = markdown([list(rows[0]), *(list(row.values()) for row in rows)])
        parts += ['## Cells', table]
    return '\n\n'.join(parts) + '\n'
