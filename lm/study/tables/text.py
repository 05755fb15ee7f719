"""Rows as text."""

import csv
import io
import json
from typing import Any

FORMATS = ('table', 'csv', 'markdown', 'json')


def format_number(value: Any, digits: int = 5) -> str:
    """Returns a float with so many digits, and '' for None."""
    if value is None:
        return ''
    return f'{value:.{digits}g}' if isinstance(value, float) else str(value)


def format_count(n: int, noun: str) -> str:
    """'1 run', '2 runs'."""
    return f'{n} {noun}' if n == 1 else f'{n} {noun}s'


def format_table(rows: list[dict[str, Any]], names: list[str], form: str) -> str:
    """The columns `names` of rows, in one of `FORMATS`; csv and json keep every digit."""
    if form == 'json':
        return json.dumps(rows, indent=2, default=float)  # DuckDB's sums of integers are Decimal
    if form == 'csv':
        out = io.StringIO()
        lines = ([row[name] for name in names] for row in rows)
        csv.writer(out, lineterminator='\n').writerows([names, *lines])
        return out.getvalue().rstrip('\n')
    lines = [names, *([format_number(row[name]) for name in names] for row in rows)]
    if form == 'markdown':
        return format_markdown(lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (map(str.ljust, line, widths) for line in lines)
    return '\n'.join('  '.join(line).rstrip() for line in padded)


def format_markdown(lines: list[list[str]]) -> str:
    """A Markdown table; the first line is its head."""
    head, *body = ([cell.replace('|', '\\|').replace('\n', ' ') for cell in line] for line in lines)
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in (head, ['---'] * len(head), *body))
