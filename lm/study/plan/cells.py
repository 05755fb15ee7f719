"""Cells of a sweep: the runs that `config.sweep` describes.

    config.sweep = {
        'model.norm': ('rmsnorm', 'layernorm'),  # an axis; axes are multiplied
        'zip': {'model.d_model': (128, 256), 'optim.lr': (4e-3, 2e-3)},  # these move together
        'list': ({'loss.z_loss': 0.0}, {'loss.z_loss': 1e-4, 'optim.b2': 0.99}),  # as they stand
        'train.seed': (0, 1, 2),
    }

`zip` and `list` are axes too; a tuple of several zips is several axes. A sweep that is a tuple is
one `list`. An option that only some cells read belongs to these: the others are without it. A
`protocol` is no axis: it sets what all cells have in common (`lm.study.plan.protocols`).
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import lm.data
from lm.config.fields import AUTO, FIELDS, Config, DataConfig, is_off
from lm.config.recipe import Recipe
from lm.config.resolve import (
    build_config,
    digest,
    flatten,
    resolve_config,
    update_config,
)
from lm.config.suggestions import EXAMPLE, field_hint, sweep_flag, sweep_hint
from lm.data.in_memory import check_held_out_texts
from lm.model.base_size import unused_fields
from lm.model.check import check
from modules.choices import suggest_nearest
from modules.options import coerce_type

Changes = dict[str, Any]  # {'optim.lr': 0.003, ...}
BRANCH_FROM = 'train.branch_from'  # names a state, which is no part of a program
PROTOCOL = 'protocol'  # the key of config.sweep that is no axis
MAX_CELLS = 100_000  # resolving each takes about a millisecond


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str  # name of its folder: the digest of its config, unless an older version began it
    changes: Changes  # changes of the sweep, typed, without `ignored`
    recipe: Recipe
    ignored: tuple[str, ...] = ()  # options in its changes that only other cells read
    arm_position: Mapping[str, Any] | None = None  # arm, indices, seed and stage in an ablation


def split_sweep(raw: Any) -> tuple[dict[str, Any], Any, Any]:
    """Splits a config into (base of all runs, config.sweep or None, config.tune or None).

    An option that the base does not read becomes an axis of one value. raw: a ConfigDict or nested
    dicts.
    """
    tree = raw.to_dict() if hasattr(raw, 'to_dict') else dict(raw)
    sweep, tune = tree.pop('sweep', None), tree.pop('tune', None)
    if not sweep or not isinstance(sweep, Mapping | list | tuple):
        return tree, sweep, tune
    for path in unused_fields(build_config(tree)):
        section, name = path.split('.')
        axes = [[path in changes for changes in axis] for axis in _parse_axes(sweep)]
        if not any(map(any, axes)):
            sweep = dict(sweep) if isinstance(sweep, Mapping) else {'list': sweep}
            sweep[path] = (tree[section][name],)
        elif not any(map(all, axes)):
            continue  # refused later: only some cells set it, and the others' value is unclear
        tree[section] = tree[section] | {name: None}
    return tree, sweep, tune


def expand_sweep(base: Mapping[str, Any], sweep: Any) -> list[Cell]:
    """Returns every run of the sweep, in order; the last of several axes changes fastest.

    Each cell is resolved after its changes, so that fields that are 'auto' or None in the base
    follow from them. Text is not looked for (see `check_sources`).

    Raises:
      ValueError: for an axis that is not a field (with the nearest), a value of another type or out
        of bounds, an axis without values, a field that two axes change, an option that no cell
        reads, and two cells that resolve to the same config.
    """
    start = build_config(base)
    axes, used_fields = _parse_axes(sweep), set()
    for axis in axes:
        fields = {path for changes in axis for path in changes}
        if twice := sorted(fields & used_fields):
            raise ValueError(f'two axes of the sweep change {", ".join(twice)}; use zip or list')
        used_fields |= fields
    if (number := math.prod(map(len, axes))) > MAX_CELLS:
        lengths = ' x '.join(str(len(axis)) for axis in axes)
        raise ValueError(
            f'a sweep must have at most {MAX_CELLS:,} cells; got {number:,} ({lengths}). Leave '
            'values out.'
        )
    by_name: dict[str, Cell] = {}
    listed = [_merge_changes(parts) for parts in itertools.product(*axes)]
    unread_by = [
        call_for_cell(changes, unused_fields, update_config(start, changes)) for changes in listed
    ]
    read_by_none = set(unread_by[0]).intersection(*unread_by)
    for changes, paths in zip(listed, unread_by, strict=True):
        ignored = tuple(path for path in paths if path not in read_by_none)
        cell = call_for_cell(changes, make_cell, start, changes, ignored)
        if cell.name in by_name and ignored and by_name[cell.name].changes == cell.changes:
            continue  # they differ only in ignored options
        if cell.name in by_name:
            raise ValueError(
                f'two cells of the sweep are the same run: {by_name[cell.name].changes} and '
                f'{cell.changes} resolve to equal configs. Leave one out.'
            )
        by_name[cell.name] = cell
    return list(by_name.values())


def _parse_axes(sweep: Any) -> list[list[Changes]]:
    """Returns each axis as a list of changes."""
    sweep = {'list': sweep} if isinstance(sweep, list | tuple) else sweep
    if isinstance(sweep, str):
        raise ValueError(
            '--config.sweep must be a Python literal (1e-3, not 10**-3) with names in quotes; got '
            f'{sweep!r}. {sweep_hint(sweep, FIELDS)}'
        )
    if not isinstance(sweep, Mapping):
        raise ValueError(f'sweep must map fields to values: {sweep_flag(EXAMPLE)}; got {sweep!r}')
    axes = []
    for key, values in sweep.items():
        if key == 'zip':
            zips = values if isinstance(values, list | tuple) else [values]
            axes += [_parse_zip(fields) for fields in zips]
        elif key == 'list':
            axes.append([_parse_changes(changes) for changes in _check_values(key, values)])
        elif key != PROTOCOL:
            _check_field(key)
            axes.append([{key: value} for value in _check_values(key, values)])
    if not axes:
        raise ValueError('sweep is empty; leave it None for a single run')
    return axes


def _parse_zip(fields: Any) -> list[Changes]:
    """Returns the changes of an axis of fields that move together."""
    if not isinstance(fields, Mapping) or not fields:
        raise ValueError(f'sweep zip must map fields to equally many values; got {fields!r}')
    for path in fields:
        _check_field(path)
    columns = {path: list(_check_values(path, values)) for path, values in fields.items()}
    lengths = {path: len(values) for path, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f'sweep zip must have equally many values per field; got {lengths}')
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _parse_changes(changes: Any) -> Changes:
    """Returns one entry of a `list` axis."""
    if not isinstance(changes, Mapping):
        example = '{"optim.lr": 1e-3}'
        raise ValueError(f'sweep list must contain dicts such as {example}; got {changes!r}')
    for path in changes:
        _check_field(path)
    return dict(changes)


def _check_values(key: str, values: Any) -> Iterable[Any]:
    """Returns the values of an axis. Raises ValueError if they are not a non-empty sequence."""
    is_single = isinstance(values, str | Mapping) or not hasattr(values, '__len__')
    if is_single or getattr(values, 'ndim', 1) != 1:
        raise ValueError(f'sweep axis {key} must be a tuple of values; got {values!r}')
    try:
        number = len(values)
    except OverflowError:  # of a range
        number = math.inf
    if not number:
        raise ValueError(f'sweep axis {key} has no values, so the sweep would have no cells')
    if number > MAX_CELLS:
        amount = repr(values) if isinstance(values, range) else f'{number:,}'
        raise ValueError(
            f'sweep axis {key} must have at most {MAX_CELLS:,} values; got {amount}. '
            'Leave values out.'
        )
    return values


def _check_field(path: Any) -> None:
    """Raises ValueError if there is no such config field."""
    if path not in FIELDS:
        hint = suggest_nearest(path, ('zip', 'list', PROTOCOL)) or field_hint(path, FIELDS)
        raise ValueError(f'sweep axis {path!r} is not a config field.{hint}')


def _merge_changes(parts: Iterable[Changes]) -> Changes:
    """Joins the changes of all axes, with the types of their fields."""
    changes = {path: value for part in parts for path, value in part.items()}
    if changes.get('model.dtype') == AUTO:
        raise ValueError('model.dtype=auto depends on the machine; a sweep must name the types')
    changes = {
        path: v.item() if hasattr(v, 'item') else v for path, v in changes.items()
    }  # NumPy's
    return {
        path: call_for_cell(changes, coerce_type, path, value, FIELDS[path].types)
        for path, value in changes.items()
    }


def call_for_cell[T](changes: Changes, function: Callable[..., T], *arguments: Any) -> T:
    """Calls the function, and adds the cell to the message of its ValueError.

    Args:
      changes: changes of the cell.
      function: function to call.
      *arguments: its arguments.

    Returns:
      The function's value.
    """
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f'sweep cell {changes}: {error}') from error


def make_cell(start: Config, changes: Changes, ignored: Sequence[str]) -> Cell:
    """Resolves the run of some changes, without the options `ignored`.

    Args:
      start: config of the base.
      changes: changes from it.
      ignored: options among the changes that the run does not read.

    Returns:
      The cell.

    Raises:
      ValueError: as `lm.model.check.check` does.
    """
    recipe = resolve_config(update_config(start, changes | dict.fromkeys(ignored)))
    check(recipe)
    read_changes = {path: value for path, value in changes.items() if path not in ignored}
    return Cell(digest(recipe), read_changes, recipe, tuple(ignored))


def check_sources(cells: Iterable[Cell]) -> None:
    """Looks for the text of cells, once for each source, as a look takes 30 ms.

    Plans, and boards made from records, need no text. Raises ValueError, with the cell, as
    `lm.data.check` does.
    """
    first: dict[tuple[DataConfig, str | None], Cell] = {}
    for cell in cells:
        first.setdefault((cell.recipe.data, cell.recipe.eval.texts), cell)
    for (fields, _), cell in first.items():
        call_for_cell(cell.changes, lm.data.check, fields)
        call_for_cell(cell.changes, check_held_out_texts, cell.recipe)


def describe_ignored(cells: Sequence[Cell]) -> list[str]:
    """Returns a line for each option that only some cells read, with the number of these cells."""
    counts = collections.Counter(path for cell in cells for path in cell.ignored)
    return [
        f'{len(cells) - n} of {len(cells)} cells read {path}; the others leave it out'
        for path, n in counts.items()
    ]


def group_by_program(cells: list[Cell]) -> list[list[Cell]]:
    """Groups cells that one program can train together.

    These differ only in `Recipe.run_paths`, and there only by numbers: a field that is
    None or off is not part of the program. They may be branches of several runs.
    """
    by_program: dict[tuple, list[Cell]] = {}
    for cell in cells:
        by_program.setdefault(program_key(cell), []).append(cell)
    return list(by_program.values())


def program_key(cell: Cell) -> tuple[tuple[str, Any], ...]:
    """Returns the fields that are compiled into the program of a cell; equal for cells of one
    group.
    """
    # The steps of stages are compiled into the schedule.
    compiled = {'train.steps'} if cell.recipe.train.stages is not None else set()
    return tuple(
        (path, value)
        for path, value in flatten(cell.recipe).items()
        if path != BRANCH_FROM
        and (path not in cell.recipe.run_paths or path in compiled or is_off(path, value))
    )
