"""Differences between the parameter tables of two runs, by group of parameters.

They show what a comparison of two runs compares: a field of one optimizer, such as optim.b2 or
optim.lr, also reaches the groups that have no setting of their own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.groups import LR, LR_FACTOR, OPTIMIZER_OPTIONS, WEIGHT_DECAY, find_setting
from lm.record.names import PARAMETER_ROWS
from lm.storage.files import read_json
from modules.optim.groups import GROUPS, HIDDEN, group_chain

Rows = Sequence[Mapping[str, str]]
# Derived from another column.
REPEATED = ('parameter', 'group', 'horizon (steps)')
INHERITS = 'inherits'
# The settings that decide a column, by its name.
DECISIVE = {
    'lr': (LR,),
    'options': OPTIMIZER_OPTIONS,
    'decay/step': (WEIGHT_DECAY, LR),
}


def read_parameters(folder: Path) -> list[dict[str, str]]:
    """Returns the parameter table of a run; empty if it was trained by older code."""
    path = folder / PARAMETER_ROWS
    return read_json(path)['parameters'] if path.is_file() else []


def compare_parameters(
    baseline: Rows, rows: Rows, base_fields: Mapping[str, Any], fields: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Compares two parameter tables.

    Args:
      baseline: the parameter table of the baseline.
      rows: of the other run.
      base_fields: {path: value} of the config of the baseline.
      fields: of the other run.

    Returns:
      A row for each group and column that differ: `group`, `column`, both values, and in `note`
      the field that reached the group although it was changed for hidden matrices.
    """
    changed = {path for path in fields if fields[path] != base_fields.get(path)}
    tables = [{row['parameter']: row for row in table} for table in (baseline, rows)]
    groups = dict.fromkeys(row['group'] for table in (baseline, rows) for row in table)
    differing = []
    for group in groups:
        first, second = (
            {path: row for path, row in table.items() if row['group'] == group} for table in tables
        )
        if first.keys() != second.keys():
            differing.append(
                _make_row(group, 'parameters', f'{len(first)}', f'{len(second)}', 'other names')
            )
        shared = [path for path in first if path in second]
        columns = [c for c in tables[0][shared[0]] if c not in REPEATED] if shared else []
        for column in columns:
            pairs = dict.fromkeys((first[p][column], second[p].get(column, '-')) for p in shared)
            unequal = [pair for pair in pairs if pair[0] != pair[1]]
            if unequal:
                values = [_join_values([pair[i] for pair in unequal]) for i in (0, 1)]
                note = _explain_column(group, column, fields, changed)
                differing.append(_make_row(group, column, *values, note))
    return differing


def _make_row(group: str, column: str, before: str, after: str, note: str) -> dict[str, str]:
    return {'group': group, 'column': column, 'baseline': before, 'run': after, 'note': note}


def _join_values(values: Sequence[str]) -> str:
    """Returns the distinct values of a column, at most three of them."""
    distinct = list(dict.fromkeys(values))
    return '; '.join(distinct[:3]) + '; ...' * (len(distinct) > 3)


def _explain_column(group: str, column: str, fields: Mapping[str, Any], changed: set[str]) -> str:
    """Returns the changed field of the hidden matrices that a group inherits; '' for none.

    Args:
      group: HIDDEN or a row of GROUPS.
      column: of the parameter table.
      fields: {path: value} of the config.
      changed: the paths that differ from the baseline.
    """
    if group == HIDDEN:
        return ''
    paths = [find_setting(fields, group, setting)[0] for setting in DECISIVE.get(column, ())]
    settings = [f'optim.{name}_{LR_FACTOR}' for name in group_chain(group)] + paths
    if any(
        path.startswith(f'optim.{name}_') for path in settings if path in changed for name in GROUPS
    ):
        return ''
    inherited = [path for path in paths if path in changed]
    return f'{INHERITS} {inherited[0]}' if inherited else ''
