"""Table rows as text."""

import csv
import decimal
import io
import json
from typing import Any

from lm.record.metrics import replace_non_finite

FORMATS = ('table', 'csv', 'markdown', 'json')


def format_number(value: Any, digits: int = 5) -> str:
    """Returns a float with a number of significant digits, other values as str, and '' for None."""
    if value is None:
        return ''
    return f'{value:.{digits}g}' if isinstance(value, float) else str(value)


def format_count(n: int, noun: str) -> str:
    """Returns '1 run', '2 runs'."""
    return f'{n} {noun}' if n == 1 else f'{n} {noun}s'


def format_table(rows: list[dict[str, Any]], names: list[str], form: str) -> str:
    """Returns rows as text; csv and json keep every digit, and json has null for NaN.

    Args:
      rows: rows by column.
      names: columns to show, in order.
      form: one of FORMATS.

    Returns:
      The text, without a final newline.
    """
    if form == 'json':
        finite_rows = replace_non_finite(rows)
        return json.dumps(finite_rows, indent=2, default=_encode_value, allow_nan=False)
    if form == 'csv':
        buffer = io.StringIO()
        lines = ([row[name] for name in names] for row in rows)
        csv.writer(buffer, lineterminator='\n').writerows([names, *lines])
        return buffer.getvalue().rstrip('\n')
    lines = [names, *([format_number(row[name]) for name in names] for row in rows)]
    if form == 'markdown':
        return format_markdown(lines)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (map(str.ljust, line, widths) for line in lines)
    return '\n'.join('  '.join(line).rstrip() for line in padded)


def _encode_value(value: Any) -> float | str:
    """Returns a value that JSON lacks as a number or as text, such as a date."""
    # DuckDB's sums of integers are Decimal.
    return float(value) if isinstance(value, decimal.Decimal) else str(value)


def format_markdown(lines: list[list[str]]) -> str:
    """Returns a Markdown table; the first line is the header."""
    head, *body = ([cell.replace('|', '\\|').replace('\n', ' ') for cell in line] for line in lines)
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in (head, ['---'] * len(head), *body))
