"""Sweeps whose cells branch from several runs: config.sweep={'train.branch_from': (...)}.

Fields that neither the command nor the sweep sets follow the parent of each cell. Where all parents
agree, they move to the base of the sweep; the others are changed together with train.branch_from.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lm.config.fields import Config
from lm.config.resolve import build_config, flatten, single_run_config, update_config
from lm.run.start import check_one_source, read_parent_fields
from lm.study.plan.cells import BRANCH_FROM
from modules.options import coerce_type

LIST, ZIP = 'list', 'zip'
Changes = dict[str, Any]


def follow_parents(
    raw: Mapping[str, Any], explicit_paths: Collection[str], workdir: str | Path | None = None
) -> Mapping[str, Any]:
    """Takes the configs of the parents that a sweep names over into its base and its axes.

    Args:
      raw: the config as nested dicts, with its sweep.
      explicit_paths: paths that keep their value in `raw`.
      workdir: the folder of the sweep, for cells that have begun.

    Returns:
      The config; `raw` itself if the sweep does not change train.branch_from.

    Raises:
      ValueError: if a parent has no checkpoint.
    """
    sweep: Any = raw.get('sweep')
    sweep = {LIST: sweep} if isinstance(sweep, list | tuple) else sweep
    axis = _find_axis(sweep) if isinstance(sweep, Mapping) else None
    if axis is None:
        return raw
    start = build_config(single_run_config(raw))
    swept = {path for changes in _list_changes(sweep) for path in changes}
    unset = {*flatten(start)} - {*explicit_paths} - swept
    sources = dict.fromkeys(changes.get(BRANCH_FROM) for changes in axis)
    followed = {
        source: _read_fields(start, source, unset, workdir) if source else {} for source in sources
    }
    parents = list(followed.values())
    common = {p: v for p, v in parents[0].items() if all(f.get(p, ()) == v for f in parents)}
    base = flatten(update_config(start, common))
    axis = [
        changes | {p: v for p, v in followed[changes.get(BRANCH_FROM)].items() if v != base[p]}
        for changes in axis
    ]
    nested: dict[str, Any] = {}
    for path, value in base.items():
        section, name = path.split('.')
        nested.setdefault(section, {})[name] = value
    return {**raw, **nested, 'sweep': _replace_axis(sweep, axis, base)}


def _replace_axis(
    sweep: Mapping[str, Any], axis: list[Changes], base: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns the sweep with another axis of train.branch_from.

    Args:
      sweep: the sweep.
      axis: the changes of each entry of the axis.
      base: values of fields that only some entries change.
    """
    if BRANCH_FROM in sweep and all(set(changes) == {BRANCH_FROM} for changes in axis):
        return sweep
    zips = _entry_changes(ZIP, sweep.get(ZIP))
    if BRANCH_FROM not in sweep and not any(BRANCH_FROM in fields for fields in zips):
        return {**sweep, LIST: tuple(axis)}
    paths = dict.fromkeys(path for changes in axis for path in changes)
    columns = {p: tuple(changes.get(p, base[p]) for changes in axis) for p in paths}
    remaining = {key: values for key, values in sweep.items() if key != BRANCH_FROM}
    further = [fields for fields in zips if BRANCH_FROM not in fields]
    return {**remaining, ZIP: (*further, columns)}


def _read_fields(
    start: Config, source: str, unset: Collection[str], workdir: str | Path | None
) -> Changes:
    """Returns the fields among `unset` that a branch from `source` follows."""
    branch = update_config(start, {BRANCH_FROM: coerce_type(BRANCH_FROM, source, (str,))})
    check_one_source(branch.train)
    fields = read_parent_fields(branch, {*flatten(start)} - {*unset}, workdir)
    return {path: value for path, value in fields.items() if path in unset}


def _entry_changes(key: str, axes: Any) -> list[Mapping[str, Any]]:
    """Returns the mappings from fields to values below `zip` or `list`."""
    if key not in (ZIP, LIST):
        return []
    entries = axes if isinstance(axes, list | tuple) else [axes]
    return [changes for changes in entries if isinstance(changes, Mapping)]


def _list_changes(sweep: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns mappings whose keys are all fields of a sweep."""
    nested = [changes for key, axes in sweep.items() for changes in _entry_changes(key, axes)]
    return [{key: None for key in sweep if key not in (ZIP, LIST)}, *nested]


def _find_axis(sweep: Mapping[str, Any]) -> list[Changes] | None:
    """Returns the axis that changes train.branch_from as a list of changes; None without one."""
    if BRANCH_FROM in sweep:
        return [{BRANCH_FROM: value} for value in _as_tuple(sweep[BRANCH_FROM])]
    for fields in _entry_changes(ZIP, sweep.get(ZIP)):
        if BRANCH_FROM in fields:
            rows = zip(*map(_as_tuple, fields.values()), strict=False)
            return [dict(zip(fields, row, strict=True)) for row in rows]
    if any(BRANCH_FROM in changes for changes in _entry_changes(LIST, sweep.get(LIST))):
        return [dict(changes) for changes in _entry_changes(LIST, sweep[LIST])]
    return None


def _as_tuple(values: Any) -> tuple[Any, ...]:
    """Returns the values of an axis; one of another form is refused when the sweep is expanded."""
    return tuple(values) if isinstance(values, list | tuple) else (values,)
