"""SQL queries over tables in memory, with helpful errors."""

import collections
import re
from collections.abc import Mapping
from typing import Any

import duckdb
import pyarrow as pa

from modules.choices import suggest_nearest

MAX_SUGGESTIONS = 4  # columns that a hint lists


def run_query(query: str, tables: Mapping[str, pa.Table]) -> pa.Table:
    """Returns the rows of a select.

    Args:
      query: a single statement in DuckDB's SQL.
      tables: the tables that it may name.

    Raises:
      ValueError: in one line, if the query is invalid, returns no rows, or has two columns of the
        same name.
    """
    # A query sees the tables alone: neither files and network, nor Python variables by name.
    connection = duckdb.connect(config={'enable_external_access': False})
    connection.execute('set python_enable_replacements = false')
    for name, table in tables.items():
        connection.register(name, table)
    try:
        if (count := len(connection.extract_statements(query))) > 1:
            raise ValueError(
                f'the query must be one statement; got {count}, separated by semicolons. Run them '
                'one by one.'
            )
        relation = connection.sql(query)
        if relation is None:
            raise ValueError(f'{query!r} returns no rows; write a select')
        counts = collections.Counter(relation.columns)
        if repeated := next((name for name, count in counts.items() if count > 1), None):
            raise ValueError(
                f'two columns of the query are named {repeated}; rename one with AS, or name the '
                'columns instead of *'
            )
        return relation.to_arrow_table()
    except duckdb.Error as error:
        names = [name for table in tables.values() for name in table.column_names]
        raise ValueError(_explain(str(error), names)) from error


def list_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Returns the rows of a table by column. Raises ValueError for a date that Python lacks."""
    try:
        return table.to_pylist()
    except OverflowError as error:
        names = [field.name for field in table.schema if pa.types.is_temporal(field.type)]
        raise ValueError(
            f'a date or time must be of the years 1 to 9999 to be read ({error}); cast '
            f'{", ".join(names) or "it"} to varchar in the query'
        ) from error


def _explain(message: str, names: list[str]) -> str:
    """Returns DuckDB's message without its excerpt of the SQL, in one line, with a hint."""
    lines = message.split('\n\nLINE')[0].split('\n')
    text = ' '.join(line for line in lines if line and not line.startswith('Candidate bindings'))
    if 'FROM clause is missing' in text:
        return text + '; add "from runs" or "from metrics"'
    match = re.search(r'column "([^"]+)" not found|column named "([^"]+)"', text)
    if not match:
        return text
    unknown = match[1] or match[2]  # `seed` is two columns, train_seed and data_seed
    longer = dict.fromkeys(name for name in names if name.endswith(f'_{unknown.lower()}'))
    if 0 < len(longer) <= MAX_SUGGESTIONS:
        return f'{text} Did you mean {" or ".join(map(repr, longer))}?'
    return text + suggest_nearest(unknown, names)
