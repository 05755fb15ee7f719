"""Rows as text."""

import csv
import io
import json
from typing import Any

FORMATS = ('table', 'csv', 'markdown', 'json')


def number(value: Any, digits: int = 5) -> str:
    """As a person reads it: so many digits of a float, nothing for None."""
    if value is None:
        return ''
    return f'{value:.{digits}g}' if isinstance(value, float) else str(value)


def render(rows: list[dict[str, Any]], names: list[str], form: str) -> str:
    """The columns `names` of rows, in one of `FORMATS`; csv and json keep every digit."""
    if form == 'json':
        return json.dumps(rows, indent=2, default=float)  # DuckDB's sums of integers are Decimal
    if form == 'csv':
        out = io.StringIO()
        lines = ([row[name] for name in names] for row in rows)
        csv.writer(out, lineterminator='\n').writerows([names, *lines])
        return out.getvalue().rstrip('\n')
    cells = [[number(row[name]) for name in names] for row in rows]
    if form == 'markdown':
        return markdown([names, *cells])
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    lines = (zip(line, widths, strict=True) for line in (names, *cells))
    return '\n'.join('  '.join(cell.ljust(w) for cell, w in line).rstrip() for line in lines)


def markdown(lines: list[list[str]]) -> str:
    """A Markdown table; the first line is its head."""
    head, *body = ([cell.replace('|', '\\|').replace('\n', ' ') for cell in line] for line in lines)
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in (head, ['---'] * len(head), *body))
