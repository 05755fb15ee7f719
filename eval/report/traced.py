"""Tables of the time of a step: summaries of traced steps (train.profile), for a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.record.run import Run
from lm.study.tables.results import Record
from lm.study.tables.text import format_number

DIGITS = 4
MOST_ROWS = 12  # of operations; summary.json has more


def trace_tables(records: Sequence[Record], run_names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the template variables of each run with a trace: `run`, `text`, and its tables.

    A table is a list of lines, the head first. run_names: names of the runs by workdir.
    """
    tables = []
    for record in records:
        summary = Run(Path(record['workdir'])).profile
        if summary is None:
            continue  # most runs have none
        tables.append({'run': run_names[record['workdir']], **_summary_tables(summary)})
    return tables


def _summary_tables(summary: Mapping[str, Any]) -> dict[str, Any]:
    steps, runs = summary['steps'], summary['runs']
    group_text = f' of {runs} runs side by side' if runs > 1 else ''
    text = (
        f'Steps {steps[0]["step"]} to {steps[-1]["step"]}{group_text} on {summary["device"]}: '
        f'{format_number(summary["step_ms"], DIGITS)} ms per step. Devices are idle for '
        f'{summary["idle_share"]:.1%} of the time. {summary["data_wait_share"]:.1%} of the time is '
        'spent waiting for data.'
    )
    step_rows: list[tuple[str, ...]] = [('step', 'total ms', 'busy ms', 'waiting for data ms')]
    step_rows += [
        (
            str(step['step']),
            *(format_number(step[k], DIGITS) for k in ('wall_ms', 'busy_ms', 'data_wait_ms')),
        )
        for step in steps
    ]
    parts: list[tuple[str, ...]] = [('part', 'pass', 'self ms', 'share')]
    parts += [
        (part['part'] or 'other', part['pass'], *_time_cells(part, steps))
        for part in summary['parts']
    ]
    operations: list[tuple[str, ...]] = [
        ('operation', 'part', 'pass', 'calls per step', 'total ms', 'self ms', 'share')
    ]
    operations += [
        (
            operation['name'],
            operation['part'],
            operation['pass'],
            f'{operation["count"] / len(steps):.4g}',
            format_number(operation['total_ms'] / len(steps), DIGITS),
            *_time_cells(operation, steps),
        )
        for operation in summary['operations'][:MOST_ROWS]
    ]
    return {'text': text, 'tables': {'parts': parts, 'operations': operations, 'steps': step_rows}}


def _time_cells(row: Mapping[str, Any], steps: Sequence[Any]) -> tuple[str, str]:
    return format_number(row['self_ms'] / len(steps), DIGITS), f'{row["share"]:.1%}'
