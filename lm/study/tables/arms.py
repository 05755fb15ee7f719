"""The names of the arms of a tuned sweep, and the arm of each cell."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm.config.resolve import flatten
from lm.study.arm import BASE_ARM, arm_name
from lm.study.tables.columns import columns
from lm.study.tables.text import format_number
from lm.study.tables.variants import split_variants


def arm_names(sweep: Mapping[str, Any]) -> list[str]:
    """Returns the name of each arm of a sweep.json; [] without config.tune.

    Arms are named as `lm.study.tables.variants.split_variants` names variants.
    """
    if 'tune' not in sweep:
        return []
    arms = sweep['tune']['arms']
    judged = [i for i, arm in enumerate(arms) if arm['length'] == 1]
    axes = dict.fromkeys(path for i in judged for path in arms[i]['changes'])
    base, first = flatten(sweep['base']), {}
    for cell in sweep['cells']:
        if is_current(cell):
            first.setdefault(cell['tuned']['arm'], cell['differs'])
    records = []
    for i in judged:
        config = base | first.get(i, arms[i]['changes'])
        records.append({columns()[path]: config[path] for path in axes} | {'cell': BASE_ARM})
    arm_labels = [variant.name for variant in split_variants(records, {'axes': axes})]
    if len(arm_labels) < len(judged):  # some arms differ only in tuned fields
        arm_labels = [arm_name(arms[i]['changes'], format_value=format_number) for i in judged]
    names = dict(zip(judged, arm_labels, strict=True))
    return [names.get(i) or arm_name({}, arm['length']) for i, arm in enumerate(arms)]


def is_current(cell: Mapping[str, Any]) -> bool:
    """Whether the cell is a run of an arm of the present sweep. Cells of earlier sweeps stay on
    record.
    """
    return 'tuned' in cell and cell['group'] is not None


def arm_and_stage(cell: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Returns {'arm': name, 'stage': requesting stage}; {} for a cell without an arm."""
    if not is_current(cell):
        return {}
    return {'arm': names[cell['tuned']['arm']], 'stage': cell['tuned']['stage']}
