"""sweep.json: the base of a sweep, and which folder holds which of its cells.

{'base': a config as nested sections, 'axes': {field: [values]}, 'cells': [
    {'cell': name of the folder, 'group': number of its program or null,
     'changes': {field: value} as the sweep gives them,
     'differs': {field: value} in which the cell's config differs from the base}]}

With config.tune also 'tune', what it asks for and its arms, and in each cell 'tuned', its place
among these (`lm.study.arm`). With a protocol also 'protocol': its name, its options, and what it
sets in each cell (`lm.study.plan.protocols`).
"""

import collections
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.fields import MeshConfig
from lm.config.recipe import Recipe
from lm.config.resolve import differences, digest, to_dict, update_recipe
from lm.record.checkpoint import check_path
from lm.record.run import Run
from lm.record.upgrade import is_old, resolve_stored, resolve_stored_cell
from lm.record.workdir import (
    CONFIG,
    SWEEP,
    annotate_write_errors,
    check_no_links,
    drop_mesh_fields,
    format_refusal,
)
from lm.storage.files import UnreadableFile, read_json, seal_record, write_json
from lm.study.arm import arm_name
from lm.study.plan.cells import Cell

Record = dict[str, Any]


def open_sweep(
    path: Path,
    base: Recipe,
    groups: Sequence[Sequence[Cell]],
    continue_changed: bool,
    say: Callable[[str], None] = print,
    tune: Record | None = None,
    protocol: Record | None = None,
) -> dict[str, str]:
    """Makes or takes over the folder of a sweep, with its sweep.json; returns {name of a cell: of
    the folder that it has under another name}.

    A cell that was begun by an older version keeps the name of its folder, and so its results:
    where there is such a name nothing is written, and the caller asks again with it. The axes may
    have changed since: cells begun earlier stay on record, with no group. Raises ValueError where
    the runs of the folder started from another config, unless `continue_changed`, and for a path
    that cannot hold checkpoints.
    """
    check_path(path)
    check_no_links(path)
    before: list[Record] = []
    if (path / SWEEP).exists():
        earlier = _read_earlier(path, base, continue_changed, say)
        before = earlier['cells']
        if 'base' in earlier and any((path / cell['cell']).exists() for cell in before):
            _compare_tunes(path, earlier.get('tune'), tune, continue_changed, say)
        if names := _find_earlier_names(path, before, groups):
            return names
    elif (path / CONFIG).exists():
        raise ValueError(f'{path} holds a single run; give another --workdir for a sweep')
    listed = [
        _cell_record(cell.name, number, cell.changes, _changed_fields(base, cell.recipe))
        | ({} if cell.arm_position is None else {'tuned': dict(cell.arm_position)})
        for number, group in enumerate(groups)
        for cell in group
    ]
    now = {cell['cell'] for cell in listed}
    left = [cell for cell in before if cell['cell'] not in now]
    # Those that are asked for no more are of no group, and of no arm: others have its number.
    listed += [
        {name: value for name, value in cell.items() if name != 'tuned'} | {'group': None}
        for cell in left
        if (path / cell['cell']).exists()
    ]
    with annotate_write_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        record = {'base': to_dict(base), 'axes': _collect_axes(listed), 'cells': listed}
        record |= {} if tune is None else {'tune': tune}
        record |= {} if protocol is None else {'protocol': protocol}
        write_json(path / SWEEP, seal_record(record))
    return {}


def _read_earlier(
    path: Path, base: Recipe, continue_changed: bool, say: Callable[[str], None]
) -> Record:
    """The sweep on record; where sweep.json is damaged, only the cells that have a folder."""
    try:
        record = read_sweep(path)
    except UnreadableFile as error:
        found = []
        for folder in sorted(recipe.parent for recipe in path.glob(f'*/{CONFIG}')):
            with contextlib.suppress(ValueError):  # damaged too: found by its name, if it is a cell
                differs = _changed_fields(base, Run(folder).read_recipe())
                found.append(_cell_record(folder.name, None, differs, differs))
        say(f'NOTE: {error}. It is written anew, with the {len(found)} cells that have a folder.')
        return {'cells': found}
    changed = drop_mesh_fields(differences(resolve_stored(record['base']), base))
    if changed and not continue_changed:
        raise ValueError(format_refusal(path, 'a sweep from another config', changed))
    return record


def _compare_tunes(
    path: Path,
    before: Record | None,
    now: Record | None,
    continue_changed: bool,
    say: Callable[[str], None],
) -> None:
    """Says in what config.tune, or an arm, differs from the runs that the folder has. Raises
    ValueError where it is given up, unless `continue_changed`: verdicts would be lost in silence.
    """
    if before is None:
        if now is not None:
            say(f'NOTE: {path} held a sweep without config.tune: runs of its arms are taken over')
        return
    if now is None:
        if not continue_changed:
            fields = dict.fromkeys(before['fields'])
            raise ValueError(
                f'{path} holds a sweep with config.tune, and this command has none. Give it again, '
                f'such as --config.tune="{fields}", or another --workdir, or --continue_changed to '
                'go on from it without.'
            )
        return
    now = json.loads(json.dumps(now))  # as it is read
    for name in sorted(now.keys() - {'arms'}):
        if before.get(name) != now[name]:
            say(f'NOTE: tune.{name}: {before.get(name)} -> {now[name]}; runs are taken over')
    arms = [
        [arm_name(arm['changes'], arm['length']) for arm in record['arms']]
        for record in (before, now)
    ]
    for name in arms[1]:
        if name not in arms[0]:
            say(f'NOTE: arm {name} is new: it has its waves first, and then all arms go on')
    for name in arms[0]:
        if name not in arms[1]:
            say(f'NOTE: arm {name} is left out: its runs stay on record, in no verdict')


def _cell_record(name: str, group: int | None, changes: Record, differs: Record) -> Record:
    return {'cell': name, 'group': group, 'changes': changes, 'differs': differs}


def read_sweep(path: Path) -> Record:
    """Reads a sweep.json of any version in the present form. Raises Unreadable if damaged."""
    record = read_json(path / SWEEP)
    if not isinstance(record.get('base'), dict) or not isinstance(record.get('cells'), list):
        lacks = 'it lacks the base or the cells of a sweep'
        raise UnreadableFile(f'{path / SWEEP} cannot be read: {lacks}')
    for cell in record['cells']:
        name = cell.get('cell') if isinstance(cell, dict) else None
        # Folders of cells lie in that of the sweep, whoever wrote the list.
        is_name = isinstance(name, str) and name.isprintable() and name not in ('', '..')
        if not is_name or Path(name).name != name:
            raise UnreadableFile(f'{path / SWEEP} cannot be read: {name!r} is no name of a cell')
    if not is_old(record['base']):
        return record
    base, cells = resolve_stored(record['base']), []
    for cell in record['cells']:
        recipe, changes = resolve_stored_cell(record['base'], cell['changes'])
        cells.append(cell | {'changes': changes, 'differs': _changed_fields(base, recipe)})
    return record | {'base': to_dict(base), 'axes': _collect_axes(cells), 'cells': cells}


def _find_earlier_names(
    path: Path, before: Sequence[Record], groups: Sequence[Sequence[Cell]]
) -> dict[str, str]:
    """{name of a cell that has no folder: that of an earlier cell of the same config but for the
    mesh}, which is no part of what a run is. Cells that differ in their meshes alone keep their
    names.
    """
    cells = [cell for group in groups for cell in group]
    present = {cell.name for cell in cells}
    alike = collections.Counter(_meshless_digest(cell.recipe) for cell in cells)
    earlier = {}
    for old in [cell['cell'] for cell in before if cell['cell'] not in present]:
        with contextlib.suppress(ValueError, OSError):  # never begun, or of an unknown form
            recipe = Run(path / old).read_recipe()
            earlier[digest(recipe)] = earlier[_meshless_digest(recipe)] = old

    def folder_name(cell: Cell) -> str:
        if (path / cell.name).exists():
            return cell.name
        as_found = earlier.get(cell.name, cell.name)
        same = _meshless_digest(cell.recipe)
        return earlier.get(same, as_found) if alike[same] == 1 else as_found

    return {cell.name: new for cell in cells if (new := folder_name(cell)) != cell.name}


def _meshless_digest(recipe: Recipe) -> str:
    """The name that all configs have which differ in the mesh alone."""
    mesh = vars(MeshConfig(data=-1))
    return digest(update_recipe(recipe, {f'mesh.{axis}': size for axis, size in mesh.items()}))


def _changed_fields(base: Recipe, recipe: Recipe) -> dict[str, Any]:
    return {field: new for field, (_, new) in differences(base, recipe).items()}


def _collect_axes(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{field that cells change: its values}."""
    axes: dict[str, list[Any]] = {}
    for cell in cells:
        for field, value in cell['changes'].items():
            if value not in axes.setdefault(field, []):
                axes[field].append(value)
    return axes
