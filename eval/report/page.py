"""Tables and plots of a run or of sweeps, finished or not, in a page that needs no network.

The same is written in Markdown beside the page (DIR/report.html); --figures adds PNG and SVG.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.charts import INK, Chart, build_environment, format_now, render_scripts, save_chart
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
from eval.report.terminal import format_arms
from eval.report.traced import trace_tables
from lm.config.resolve import flatten
from lm.record.workdir import write_text
from lm.storage.buckets import parse_local_path
from lm.study.statistics import CONFIDENCE, POWER, format_outcome
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
SUMMARY_COLUMNS = ('verdict', 'difference', 'final loss', 'best lr', 'seeds', 'diverged')


def write_report(
    workdir: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    figures: str | Path | None = None,
    baseline: str = '',
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Writes the page, its tables in Markdown beside it, and optionally figures.

    Args:
        workdir: a run or a sweep, or several to compare, the first with the baseline.
        out: path of the page. By default WORKDIR/report.html; for several,
            report-with-OTHERS.html in the first.
        figures: folder for figures; none by default.
        baseline: a variant, as the page names it, or any of its cells; the first by default.
        say: called with the main results, for a terminal.

    Returns:
        The path of the page.

    Raises:
        ValueError: if a workdir has no readable run or sweep, if the losses of several are not
            comparable (`eval.report.subject`), if no variant is called `baseline`, if a baseline is
            given for a tuned sweep, or if the page may not be written: `out` must end in .html,
            and neither it nor `figures` may be a URL.
    """
    page = parse_local_path(out, '--out', ('.html',)) if out else None
    figures = parse_local_path(figures, '--figures') if figures else None
    workdirs = [workdir] if isinstance(workdir, str | Path) else list(workdir)
    subject = read_subject(workdirs)
    series, unread = _read_all_series(subject.records)
    comparisons, by_rate = _build_comparisons(subject, baseline)
    displayed = by_rate or comparisons
    charts, choices = _draw_charts(displayed, comparisons, series, subject)
    content = _build_context(subject, comparisons, by_rate, series)
    content |= {'unread': unread, 'charts': list(charts), 'shows': choices}
    content |= {'losses': [*LOSSES, f'steps_{RATE_OF_STEPS}']}
    other_names = [folder.resolve().name for folder in subject.folders[1:]]
    name = '-'.join(['report', 'with', *other_names] if other_names else ['report']) + '.html'
    page = page or subject.folders[0] / name
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_text(page, _render(PAGE, content | {'scripts': render_scripts(charts)}))
    except PermissionError as error:
        raise ValueError(f'{page} cannot be written ({error}); pass --out=FILE') from error
    # Markdown lets HTML through, and a config may hold any text.
    text = re.sub(r'<(?=[A-Za-z/!?])', '&lt;', _render(TEXT, content))
    write_text(page.with_suffix('.md'), text.rstrip() + '\n')
    say(_format_summary(content, subject))
    if figures:
        quantities = select_figures(list(series.values()))
        files = {re.sub(r'\W+', '_', name) for name in (*quantities, RATE_OF_STEPS)}
        for name, chart in charts.items():
            if name in LOSSES or name.partition('_')[2] in files:
                save_chart(chart, figures / f'{name}.png')
                save_chart(chart, figures / f'{name}.svg')
    return page


def _format_summary(content: Mapping[str, Any], subject: Subject) -> str:
    """Returns the findings and, for a sweep, the verdict on each variant; for a run, its time."""
    if subject.ablation:
        return '\n'.join([*content['findings'], *format_arms(subject.ablation)])
    rows = [
        {name: str(cell) for name, cell in row.cells.items()} | {'notes': '; '.join(row.notes)}
        for row in content['variants']
    ]
    names = [
        n for n in (rows[0] if rows else ()) if n in (*SUMMARY_COLUMNS, content['what'], 'notes')
    ]
    table = [format_table(rows, names, 'table')] if subject.is_sweep and rows else []
    if content['time_use'] and not subject.is_sweep:
        table = [format_table(content['time_use'], list(content['time_use'][0]), 'table')]
    return '\n'.join([*content['findings'], *table])


def _build_comparisons(
    subject: Subject, baseline: str = ''
) -> tuple[list[Comparison], list[Comparison]]:
    """Returns the variants compared, and the learning rates if only these were swept.

    baseline: as in `write_report`.
    """
    if subject.ablation:
        comparisons = arms.build_comparisons(subject.ablation)
        if baseline:
            raise ValueError(
                f'--baseline={baseline}: a sweep with config.tune is always compared with its '
                f'first arm, here {comparisons[0].variant.name}. To change the baseline, put '
                'another arm first in config.sweep'
            )
        return comparisons, []
    by_rate = compare_rates(subject.records, subject.sweep) if len(subject.folders) == 1 else []
    comparisons = compare_variants(subject.variants, subject.metric)
    if baseline:
        variants = select_baseline([c.variant for c in by_rate or comparisons], baseline)
        compared = compare_variants(variants, subject.metric)
        by_rate, comparisons = (compared, comparisons) if by_rate else ([], compared)
    return comparisons, by_rate


def list_verdicts(workdirs: Sequence[str | Path], baseline: str = '') -> list[dict[str, Any]]:
    """Returns the verdict on each variant, or learning rate, as a record for programs.

    Args:
        workdirs: as in `write_report`.
        baseline: as in `write_report`.
    """
    subject = read_subject(workdirs)
    comparisons, by_rate = _build_comparisons(subject, baseline)
    return [
        {
            'variant': c.variant.name,
            'is_baseline': c.variant.is_baseline,
            'verdict': format_outcome(c.verdict) if c.verdict else None,
            'metric': subject.metric,
            'loss': c.loss.mean,
            'difference': None if c.variant.is_baseline else c.difference.mean,
            'half_width': None if c.variant.is_baseline else c.difference.half_width,
            'p': c.p,
            'seeds': c.loss.n,
            'seeds_needed': c.seeds_needed,
            'best_lr': c.best_lr,
            'diverged': c.diverged,
        }
        for c in (by_rate or comparisons if subject.is_sweep else ())
    ]


def _draw_charts(
    displayed: Sequence[Comparison],
    comparisons: Sequence[Comparison],
    series: Mapping[str, Series],
    subject: Subject,
) -> tuple[dict[str, Chart], list[dict[str, Any]]]:
    """Returns the charts of a page by name, and the choices among the charts of quantities."""
    _, fitting, by_head = select_fitting(list(series.values()))
    constants = constant_quantities(list(series.values()))
    names = [name for name in fitting if name not in constants]
    loss_charts = draw_loss_charts(displayed, comparisons, series, subject.metric)
    if subject.ablation:  # whose losses at best values are those of fresh seeds alone
        loss_charts = {n: chart for n, chart in loss_charts.items() if n == 'loss_curves'}
        if any(arm.tuning_losses for arm in subject.ablation.arms):
            loss_charts = {'tuned_losses': draw_tuned_losses(subject.ablation)} | loss_charts
    quantity_charts = draw_quantity_charts(displayed, series, names, by_head)
    choices = build_choices(names)
    for choice in choices:
        files = [re.sub(r'\W+', '_', name) for name in choice.pop('names')]
        chart_names = [f'{kind}_{file}' for file in files for kind in KINDS]
        choice['charts'] = ' '.join(name for name in chart_names if name in quantity_charts)
    return loss_charts | quantity_charts, [choice for choice in choices if choice['charts']]


def _read_all_series(records: Sequence[Record]) -> tuple[dict[str, Series], list[str]]:
    """Returns the series of each run by workdir, and the reasons why some are empty."""
    series, unread = {}, []
    for record in records:
        try:
            series[record['workdir']] = read_series(record)
        except (ValueError, OSError) as error:
            series[record['workdir']] = Series(([], []), ([], []), {})
            unread.append(f'No curves for {record["cell"]}: {error}.')
    return series, unread


def _build_context(
    subject: Subject,
    comparisons: Sequence[Comparison],
    by_rate: Sequence[Comparison],
    series: Mapping[str, Series],
) -> dict[str, Any]:
    """Returns the template variables of the page except its plots."""
    axes, base = subject.sweep['axes'], flatten(subject.sweep['base'])
    displayed, row_kind = (by_rate, RATE) if by_rate else (comparisons, VARIANT)
    if ablation := subject.ablation:
        row_kind = ARM
        paths = {path for arm in ablation.arms if arm.length == 1 for path in arm.changes}
        axes = {path: values for path, values in axes.items() if path in paths}
    colors = [style['color'].replace(INK, 'var(--ink)') for style in variant_styles(displayed)]
    all_series, run_names = list(series.values()), _name_runs(subject, displayed)
    names, fitting = quantity_names(all_series), select_fitting(all_series)[1]
    constants = constant_quantities(all_series)
    by_depth = {
        n: depth_table(build_profiles(displayed, series, n)) for n in names if n not in constants
    }
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
        'what': row_kind,
        'choice': '' if ablation else describe_lr_choice(comparisons, by_rate, base),
        'evaluations': tables.describe_evaluations(subject.records, series),
        'findings': arms.findings(ablation)
        if ablation
        else tables.findings(subject, comparisons, by_rate),
        'arms': arms.build_context(ablation, base, colors) if ablation else None,
        'variants': [] if ablation else tables.variant_rows(displayed, colors, row_kind),
        'cells': [tables.cell_row(record, subject) for record in subject.records],
        'held_out': tables.evaluation_rows(subject.records, run_names),
        'axes': {path: list(map(format_number, values)) for path, values in axes.items()},
        'combinations': _count_combinations(subject, axes),
        'apart': {
            path: list(map(format_number, values))
            for path, values in subject.base_differences.items()
        },
        'changes': tables.list_changes(displayed, subject.sweep),
        'settings': [] if by_rate else tables.settings_rows(displayed),
        'costs': [] if by_rate else tables.cost_rows(displayed),
        'time_use': tables.time_rows(subject.records),
        'time_note': tables.TIME_NOTE,
        'base': {path: format_number(value) for path, value in base.items()},
        'warnings': tables.warning_rows(subject.records, run_names),
        'lasts': tables.list_last_diagnostics(subject.records, series, run_names),
        'most_lasts': tables.MOST_RUNS,
        'traced': trace_tables(subject.records, run_names),
        'left_out': [name for name in names if name not in fitting],
        'constants': {name: format_number(value) for name, value in constants.items()},
        'by_rate': [[]] if ablation else tables.rates_table(comparisons, subject.metric),
        'by_depth': {name: lines for name, lines in by_depth.items() if len(lines) > 1},
    }


def _count_combinations(subject: Subject, axes: Mapping[str, Any]) -> int:
    """Returns the number of combinations if the sweep is a zip or a list; 0 for a full grid."""
    names = [columns()[path] for path in axes]
    combinations = {tuple(record[name] for name in names) for record in subject.records}
    return len(combinations) if is_partial_grid(combinations) else 0


def _name_runs(subject: Subject, displayed: Sequence[Comparison]) -> dict[str, str]:
    """Returns workdir -> the run's variant, rate and seeds, and its cell."""
    if not subject.is_sweep:
        return {record['workdir']: record['cell'] for record in subject.records}
    variants = {r['workdir']: c.variant.name for c in displayed for r in c.variant.records}
    varied_columns, run_names = tables.seed_columns(subject.records), {}
    for record in subject.records:
        seeds = [f'{column} {record[column]}' for column in varied_columns]
        parts = (variants.get(record['workdir'], ''), f'lr {format_number(record["lr"])}', *seeds)
        run_names[record['workdir']] = f'{", ".join(filter(None, parts))} ({record["cell"]})'
    return run_names


def _table_lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns rows with equal keys as a head and lines of values."""
    values = (
        [', '.join(value) if isinstance(value, list) else str(value) for value in row.values()]
        for row in rows
    )
    return [list(rows[0]), *values]


def _render(template: str, content: Mapping[str, Any]) -> str:
    environment = build_environment(TEMPLATES, is_html=template == PAGE)
    environment.filters |= {
        'lines': _table_lines,
        'markdown': format_markdown,
        'with_notes': lambda rows: [row.cells | {'notes': '; '.join(row.notes)} for row in rows],
    }
    return environment.get_template(template).render(content)
