"""SQL queries over tables in memory, with helpful errors."""

import re
from collections.abc import Mapping

import duckdb
import pyarrow as pa

from modules.choices import suggest_nearest

MAX_SUGGESTIONS = 4  # columns that a hint lists


def run_query(query: str, tables: Mapping[str, pa.Table]) -> pa.Table:
    """Returns the rows of a select. Raises ValueError, in one line, if it returns none."""
    # A query sees the tables alone: neither files and network, nor Python variables by name.
    connection = duckdb.connect(config={'enable_external_access': False})
    connection.execute('set python_enable_replacements = false')
    for name, table in tables.items():
        connection.register(name, table)
    try:
        relation = connection.sql(query)
        if relation is None:
            raise ValueError(f'{query!r} returns no rows; write a select')
        return relation.to_arrow_table()
    except duckdb.Error as error:
        names = [name for table in tables.values() for name in table.column_names]
        raise ValueError(_explain(str(error), names)) from error


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
