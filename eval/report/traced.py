"""A table of where a step goes: the summaries of traced steps (train.profile), for a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.record.run import Run
from lm.study.tables.results import Record
from lm.study.tables.text import format_number

DIGITS = 4
MOST_ROWS = 12  # of operations; summary.json has more


def trace_tables(records: Sequence[Record], run_names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns what a page shows of each run that has a summary: `run`, `said`, and two tables, each
    a list of lines with its head first. named: what to call a run, by its workdir.
    """
    found = []
    for record in records:
        summary = Run(Path(record['workdir'])).profile
        if summary is None:
            continue  # most runs have none
        found.append({'run': run_names[record['workdir']], **_summary_tables(summary)})
    return found


def _summary_tables(summary: Mapping[str, Any]) -> dict[str, Any]:
    steps, runs = summary['steps'], summary['runs']
    beside = f' of {runs} runs side by side' if runs > 1 else ''
    said = (
        f'Steps {steps[0]["step"]} to {steps[-1]["step"]}{beside} on {summary["device"]}: '
        f'{format_number(summary["step_ms"], DIGITS)} ms a step. Devices are idle for '
        f'{summary["idle_share"]:.1%} of it, and {summary["data_wait_share"]:.1%} goes by waiting '
        'for data.'
    )
    of_steps = [('step', 'ms', 'ms busy', 'ms waiting for data')]
    of_steps += [
        (
            str(one['step']),
            *(format_number(one[k], DIGITS) for k in ('wall_ms', 'busy_ms', 'data_wait_ms')),
        )
        for one in steps
    ]
    parts = [('part', 'pass', 'self ms', 'share')]
    parts += [
        (one['part'] or 'other', one['pass'], *_time_cells(one, steps)) for one in summary['parts']
    ]
    operations = [('operation', 'part', 'pass', 'times', 'total ms', 'self ms', 'share')]
    operations += [
        (
            one['name'],
            one['part'],
            one['pass'],
            f'{one["count"] / len(steps):.4g}',
            format_number(one['total_ms'] / len(steps), DIGITS),
            *_time_cells(one, steps),
        )
        for one in summary['operations'][:MOST_ROWS]
    ]
    return {'said': said, 'tables': {'parts': parts, 'operations': operations, 'steps': of_steps}}


def _time_cells(row: Mapping[str, Any], steps: Sequence[Any]) -> tuple[str, str]:
    return format_number(row['self_ms'] / len(steps), DIGITS), f'{row["share"]:.1%}'
