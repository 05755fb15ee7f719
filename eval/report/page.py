"""Tables and plots of a run or of sweeps, finished or not, in one page that needs no network.

Next to the page (DIR/report.html) lies the same in Markdown; --figures adds PNG and SVG for papers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.charts import Chart, build_environment, format_now, render_scripts, save_chart
from eval.report import arms, tables
from eval.report.arm_charts import draw_tuned_losses
from eval.report.figures import draw_loss_charts, variant_styles
from eval.report.layers import RATE as RATE_OF_STEPS
from eval.report.layers import build_profiles, depth_table, draw_quantity_charts
from eval.report.series import (
    Series,
    build_choices,
    constant_quantities,
    quantity_names,
    read_series,
    select_figures,
    select_fitting,
)
from eval.report.subject import Subject, read_subject
from eval.report.traced import trace_tables
from lm.config.resolve import flatten
from lm.record.workdir import write_text
from lm.storage.buckets import parse_local_path
from lm.study.statistics import CONFIDENCE, POWER
from lm.study.tables.columns import columns
from lm.study.tables.comparison import (
    Comparison,
    compare_rates,
    compare_variants,
    describe_lr_choice,
)
from lm.study.tables.results import Record
from lm.study.tables.text import format_markdown, format_number, format_table
from lm.study.tables.variants import is_partial_grid, select_baseline

TEMPLATES = Path(__file__).parent
LOSSES = (
    *('tuned_losses', 'differences', 'learning_rates', 'rates_by_size', 'final_losses'),
    'loss_curves',
)
KINDS = ('steps', 'depth', 'layers', 'heads')  # of charts of a quantity
VARIANT, RATE, ARM = 'variant', 'learning rate', 'arm'
PAGE, TEXT = 'report.html.j2', 'report.md.j2'
SUMMARY_COLUMNS = (  # columns
    *('verdict', 'difference', 'final loss', 'tuned loss', 'best lr', 'seeds', 'diverged', 'runs'),
    'state',
)


def write_report(
    workdir: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    figures: str | Path | None = None,
    baseline: str = '',
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Writes the page to `out`, the tables in Markdown beside it, and figures to the folder
    `figures` where that is given; returns the page's path.

    Args:
        workdir: a run or a sweep, or several to compare, the first with the baseline.
        out: WORKDIR/report.html by default; of several, report-with-OTHERS.html in the first.
        baseline: a variant, as the page names it, or one of its cells; the first by default.
        say: is told the main results, for a terminal.

    Raises ValueError where a workdir holds neither a run nor a sweep, or what cannot be read, and
    where the losses of several do not compare (`eval.report.subject`), no variant has the name
    `baseline`, or one is asked for in a tuned sweep.
    """
    several = [workdir] if isinstance(workdir, str | Path) else list(workdir)
    subject = read_subject(several)
    series, unread = _read_all_series(subject.records)
    comparisons, by_rate = _build_comparisons(subject)
    if baseline and subject.ablation:
        raise ValueError(
            f'--baseline={baseline}: runs of a sweep with config.tune follow from its verdicts '
            f'against its first arm, {comparisons[0].variant.name}; another has to come first in '
            'config.sweep'
        )
    if baseline:
        asked = select_baseline([c.variant for c in by_rate or comparisons], baseline)
        again = compare_variants(asked, subject.metric)
        by_rate, comparisons = (again, comparisons) if by_rate else ([], again)
    shown = by_rate or comparisons
    charts, shows = _draw_charts(shown, comparisons, series, subject)
    content = _build_context(subject, comparisons, by_rate, series)
    content |= {'unread': unread, 'charts': list(charts), 'shows': shows}
    content |= {'losses': [*LOSSES, f'steps_{RATE_OF_STEPS}']}
    others = [folder.resolve().name for folder in subject.folders[1:]]
    name = '-'.join(['report', 'with', *others] if others else ['report']) + '.html'
    page = parse_local_path(out, '--out') if out else subject.folders[0] / name
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, _render(PAGE, content | {'scripts': render_scripts(charts)}))
    # Markdown lets HTML through, and a config may hold any text.
    text = re.sub(r'<(?=[A-Za-z/!?])', '&lt;', _render(TEXT, content))
    write_text(page.with_suffix('.md'), text.rstrip() + '\n')
    say(_format_summary(content, subject.is_sweep))
    if figures:
        kept = select_figures(list(series.values()))
        files = {re.sub(r'\W+', '_', name) for name in (*kept, RATE_OF_STEPS)}
        for name, chart in charts.items():
            if name in LOSSES or name.partition('_')[2] in files:
                save_chart(chart, Path(figures) / f'{name}.png')
                save_chart(chart, Path(figures) / f'{name}.svg')
    return page


def _format_summary(content: Mapping[str, Any], is_sweep: bool) -> str:
    """Returns the findings and, of a sweep, the verdict on each variant."""
    told = content['arms']['rows'] if content['arms'] else content['variants']
    rows = [
        {name: str(cell) for name, cell in row.cells.items()} | {'notes': '; '.join(row.notes)}
        for row in told
    ]
    names = [
        n for n in (rows[0] if rows else ()) if n in (*SUMMARY_COLUMNS, content['what'], 'notes')
    ]
    table = [format_table(rows, names, 'table')] if is_sweep and rows else []
    return '\n'.join([*content['findings'], *table])


def _build_comparisons(subject: Subject) -> tuple[list[Comparison], list[Comparison]]:
    """Returns the variants compared, and the learning rates where these alone were swept."""
    if subject.ablation:
        return arms.build_comparisons(subject.ablation), []
    by_rate = compare_rates(subject.records, subject.sweep) if len(subject.folders) == 1 else []
    return compare_variants(subject.variants, subject.metric), by_rate


def _draw_charts(
    shown: Sequence[Comparison],
    comparisons: Sequence[Comparison],
    series: Mapping[str, Series],
    subject: Subject,
) -> tuple[dict[str, Chart], list[dict[str, Any]]]:
    """Returns the charts of a page by name, and the choices among those of quantities."""
    _, fitting, by_head = select_fitting(list(series.values()))
    still = constant_quantities(list(series.values()))
    names = [name for name in fitting if name not in still]
    of_losses = draw_loss_charts(shown, comparisons, series, subject.metric)
    if subject.ablation:  # whose losses at best values are those of fresh seeds alone
        of_losses = {n: chart for n, chart in of_losses.items() if n == 'loss_curves'}
        if any(arm.tuning_losses for arm in subject.ablation.arms):
            of_losses = {'tuned_losses': draw_tuned_losses(subject.ablation)} | of_losses
    of_quantities = draw_quantity_charts(shown, series, names, by_head)
    offered = build_choices(names)
    for choice in offered:
        files = [re.sub(r'\W+', '_', name) for name in choice.pop('names')]
        every = [f'{kind}_{file}' for file in files for kind in KINDS]
        choice['charts'] = ' '.join(name for name in every if name in of_quantities)
    return of_losses | of_quantities, [choice for choice in offered if choice['charts']]


def _read_all_series(records: Sequence[Record]) -> tuple[dict[str, Series], list[str]]:
    """The series of each run, by workdir; and the reasons why some are empty."""
    series, unread = {}, []
    for record in records:
        try:
            series[record['workdir']] = read_series(record)
        except (ValueError, OSError) as error:
            series[record['workdir']] = Series(([], []), ([], []), {})
            unread.append(f'No curves of {record["cell"]}: {error}.')
    return series, unread


def _build_context(
    subject: Subject,
    comparisons: Sequence[Comparison],
    by_rate: Sequence[Comparison],
    series: Mapping[str, Series],
) -> dict[str, Any]:
    """Everything on the page but its plots."""
    axes, base = subject.sweep['axes'], flatten(subject.sweep['base'])
    shown, what = (by_rate, RATE) if by_rate else (comparisons, VARIANT)
    if tuned := subject.ablation:
        what = ARM
        kept = {path for arm in tuned.arms if arm.length == 1 for path in arm.changes}
        axes = {path: values for path, values in axes.items() if path in kept}
    colors = [look['color'] for look in variant_styles(shown)]
    every, named = list(series.values()), _name_runs(subject, shown)
    names, fitting = quantity_names(every), select_fitting(every)[1]
    still = constant_quantities(every)
    by_depth = {n: depth_table(build_profiles(shown, series, n)) for n in names if n not in still}
    return {
        'title': subject.title,
        'workdir': ','.join(map(str, subject.folders)),
        'is_sweep': subject.is_sweep,
        'made': format_now(),
        'statuses': tables.count_statuses(subject.records),
        'facts': tables.shared_facts(subject.records, subject.sweep),
        'unit': tables.UNITS[subject.metric],
        'confidence': f'{CONFIDENCE:.0%}',
        'level': f'{1 - CONFIDENCE:.2g}',
        'power': f'{POWER:.0%}',
        'what': what,
        'choice': '' if tuned else describe_lr_choice(comparisons, by_rate, base),
        'findings': arms.findings(tuned)
        if tuned
        else tables.findings(subject, comparisons, by_rate),
        'arms': arms.build_context(tuned, base, colors) if tuned else None,
        'variants': [] if tuned else tables.variant_rows(shown, colors, what),
        'cells': [tables.cell_row(record, subject) for record in subject.records],
        'axes': {path: list(map(format_number, values)) for path, values in axes.items()},
        'combinations': _count_combinations(subject, axes),
        'apart': {
            path: list(map(format_number, values))
            for path, values in subject.base_differences.items()
        },
        'changes': tables.list_changes(shown, subject.sweep),
        'base': {path: format_number(value) for path, value in base.items()},
        'warnings': tables.warning_rows(subject.records, named),
        'lasts': tables.list_last_diagnostics(subject.records, series, named),
        'most_lasts': tables.MOST_RUNS,
        'traced': trace_tables(subject.records, named),
        'left_out': [name for name in names if name not in fitting],
        'constants': {name: format_number(value) for name, value in still.items()},
        'by_rate': [[]] if tuned else tables.rates_table(comparisons, subject.metric),
        'by_depth': {name: lines for name, lines in by_depth.items() if len(lines) > 1},
    }


def _count_combinations(subject: Subject, axes: Mapping[str, Any]) -> int:
    """Returns how many combinations of values a zip or a list makes; 0 where all are combined."""
    names = [columns()[path] for path in axes]
    found = {tuple(record[name] for name in names) for record in subject.records}
    return len(found) if is_partial_grid(found) else 0


def _name_runs(subject: Subject, shown: Sequence[Comparison]) -> dict[str, str]:
    """workdir -> what makes the run, and its cell."""
    if not subject.is_sweep:
        return {record['workdir']: record['cell'] for record in subject.records}
    variants = {r['workdir']: c.variant.name for c in shown for r in c.variant.records}
    varied, found = tables.seed_columns(subject.records), {}
    for record in subject.records:
        seeds = [f'{column} {record[column]}' for column in varied]
        parts = (variants.get(record['workdir'], ''), f'lr {format_number(record["lr"])}', *seeds)
        found[record['workdir']] = f'{", ".join(filter(None, parts))} ({record["cell"]})'
    return found


def _table_lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows with equal keys as a head and their values."""
    values = ([', '.join(v) if isinstance(v, list) else str(v) for v in r.values()] for r in rows)
    return [list(rows[0]), *values]


def _render(template: str, content: Mapping[str, Any]) -> str:
    found = build_environment(TEMPLATES, is_html=template == PAGE)
    found.filters |= {
        'lines': _table_lines,
        'markdown': format_markdown,
        'with_notes': lambda rows: [r.cells | {'notes': '; '.join(r.notes)} for r in rows],
    }
    return found.get_template(template).render(content)
