"""sweep.json: the base of a sweep, and the folder of each of its cells.

{'base': a config as nested sections, 'axes': {field: [values]}, 'cells': [
    {'cell': name of the folder, 'group': number of its program or null,
     'changes': {field: value} of the sweep,
     'differs': {field: value} in which the cell's config differs from the base}]}

With config.tune there is also 'tune', its settings and arms, and in each cell 'tuned', its arm,
indices, seed and stage (`lm.study.arm`). With a protocol there is also 'protocol': its name, its
options, and the fields it sets in each cell (`lm.study.plan.protocols`).
"""

import collections
import contextlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.fields import MeshConfig
from lm.config.recipe import Recipe
from lm.config.resolve import differences, digest, to_dict, update_recipe
from lm.record.run import Run
from lm.record.upgrade import is_old, resolve_stored, resolve_stored_cell
from lm.record.workdir import (
    CONFIG,
    SWEEP,
    annotate_write_errors,
    check_no_links,
    check_path,
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
    """Creates or takes over the folder of a sweep, with its sweep.json.

    A cell that an older version began keeps the name of its folder, and so its results. If there is
    such a name, nothing is written, and the caller calls again with it. The axes may have changed
    since: cells begun earlier stay on record, without a group.

    Args:
      path: folder of the sweep.
      base: recipe that all cells start from.
      groups: all cells, by program.
      continue_changed: whether to continue runs that started from another config.
      say: prints a line.
      tune: entry of config.tune in sweep.json.
      protocol: entry of the protocol in sweep.json.

    Returns:
      {name of a cell: name of its folder}, for cells that have a folder under another name.

    Raises:
      ValueError: if the runs of the folder started from another config, unless `continue_changed`;
        and for a path that cannot hold checkpoints.
    """
    check_path(path)
    check_no_links(path)
    earlier_cells: list[Record] = []
    if (path / SWEEP).exists():
        earlier = _read_earlier(path, base, continue_changed, say)
        earlier_cells = earlier['cells']
        # A damaged sweep.json has no base (`_read_earlier`). Before any cell has begun nothing can
        # be lost, and config.tune may change at will.
        if 'base' in earlier and any((path / cell['cell']).exists() for cell in earlier_cells):
            _compare_tunes(path, earlier.get('tune'), tune, continue_changed, say)
        if names := _find_earlier_names(path, earlier_cells, groups):
            return names
    elif (path / CONFIG).exists():
        raise ValueError(f'{path} contains a single run; use another --workdir for a sweep')
    listed = [
        _cell_record(cell.name, number, cell.changes, _changed_fields(base, cell.recipe))
        | ({} if cell.arm_position is None else {'tuned': dict(cell.arm_position)})
        for number, group in enumerate(groups)
        for cell in group
    ]
    present = {cell['cell'] for cell in listed}
    left_out = [cell for cell in earlier_cells if cell['cell'] not in present]
    # Cells that are no longer part of the sweep keep neither group nor arm: their numbers now
    # belong to other groups and arms.
    listed += [
        {name: value for name, value in cell.items() if name != 'tuned'} | {'group': None}
        for cell in left_out
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
    """Returns the sweep on record; if sweep.json is damaged, only the cells that have a folder."""
    try:
        record = read_sweep(path)
    except UnreadableFile as error:
        cells = []
        for folder in sorted(recipe.parent for recipe in path.glob(f'*/{CONFIG}')):
            with contextlib.suppress(ValueError):  # damaged too: found by its name, if it is a cell
                differs = _changed_fields(base, Run(folder).read_recipe())
                cells.append(_cell_record(folder.name, None, differs, differs))
        say(f'NOTE: {error}. It will be rewritten with the {len(cells)} cells that have a folder.')
        return {'cells': cells}
    changes = drop_mesh_fields(differences(resolve_stored(record['base']), base))
    if changes and not continue_changed:
        raise ValueError(format_refusal(path, 'a sweep from another config', changes))
    return record


def _compare_tunes(
    path: Path,
    before: Record | None,
    tune: Record | None,
    continue_changed: bool,
    say: Callable[[str], None],
) -> None:
    """Prints the differences between config.tune, or an arm, and the folder's sweep.

    Raises ValueError if config.tune is dropped, unless `continue_changed`, because verdicts would
    be lost silently.
    """
    if before is None:
        if tune is not None:
            say(f'NOTE: {path} had a sweep without config.tune; the runs of its arms are reused')
        return
    if tune is None:
        if not continue_changed:
            fields = dict.fromkeys(before['fields'])
            raise ValueError(
                f'{path} contains a sweep with config.tune, but this command has none. Set it '
                f'again, as in --config.tune="{fields}", use another --workdir, or pass '
                '--continue_changed to continue without it.'
            )
        return
    tune = json.loads(json.dumps(tune))  # as it is read
    for name in sorted(tune.keys() - {'arms'}):
        if before.get(name) != tune[name]:
            say(f'NOTE: tune.{name}: {before.get(name)} -> {tune[name]}; finished runs are reused')
    arms = [
        [arm_name(arm['changes'], arm['length']) for arm in record['arms']]
        for record in (before, tune)
    ]
    for name in arms[1]:
        if name not in arms[0]:
            say(f'NOTE: arm {name} is new; it trains its waves first, then all arms continue')
    for name in arms[0]:
        if name not in arms[1]:
            say(f'NOTE: arm {name} was removed; its runs are kept but get no verdict')


def _cell_record(name: str, group: int | None, changes: Record, differs: Record) -> Record:
    """Returns the entry of a cell in sweep.json."""
    return {'cell': name, 'group': group, 'changes': changes, 'differs': differs}


def read_sweep(path: Path) -> Record:
    """Reads a sweep.json of any version in the present form. Raises UnreadableFile if damaged."""
    record = read_json(path / SWEEP)
    if not isinstance(record.get('base'), dict) or not isinstance(record.get('cells'), list):
        lacks = 'it lacks the base or the cells of a sweep'
        raise UnreadableFile(f'{path / SWEEP} cannot be read: {lacks}')
    for cell in record['cells']:
        name = cell.get('cell') if isinstance(cell, dict) else None
        # Folders of cells lie in that of the sweep, whoever wrote the list.
        is_name = isinstance(name, str) and name.isprintable() and name not in ('', '..')
        if not is_name or Path(name).name != name:
            raise UnreadableFile(
                f'{path / SWEEP} cannot be read: {name!r} is not the name of a cell'
            )
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
    """Returns {name of a cell without a folder: name of an earlier cell's folder}.

    The earlier cell has the same config up to the mesh, which does not affect the results of a run.
    Cells that differ only in their meshes keep their names.
    """
    cells = [cell for group in groups for cell in group]
    present = {cell.name for cell in cells}
    alike = collections.Counter(_meshless_digest(cell.recipe) for cell in cells)
    earlier = {}
    for folder in [cell['cell'] for cell in before if cell['cell'] not in present]:
        with contextlib.suppress(ValueError, OSError):  # never begun, or of an unknown form
            recipe = Run(path / folder).read_recipe()
            earlier[digest(recipe)] = earlier[_meshless_digest(recipe)] = folder

    def folder_name(cell: Cell) -> str:
        if (path / cell.name).exists():
            return cell.name
        renamed = earlier.get(cell.name, cell.name)
        meshless = _meshless_digest(cell.recipe)
        return earlier.get(meshless, renamed) if alike[meshless] == 1 else renamed

    return {cell.name: new_name for cell in cells if (new_name := folder_name(cell)) != cell.name}


def _meshless_digest(recipe: Recipe) -> str:
    """Returns a name that is the same for all configs that differ only in the mesh."""
    mesh = vars(MeshConfig(data=-1))
    return digest(update_recipe(recipe, {f'mesh.{axis}': size for axis, size in mesh.items()}))


def _changed_fields(base: Recipe, recipe: Recipe) -> dict[str, Any]:
    """Returns {field: value} for fields in which a recipe differs from the base."""
    return {field: value for field, (_, value) in differences(base, recipe).items()}


def _collect_axes(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns {field that cells change: its values}."""
    # Keys of dicts, as an axis may have as many values as there are cells.
    axes: dict[str, dict[Hashable, Any]] = {}
    for cell in cells:
        for field, value in cell['changes'].items():
            key = value if isinstance(value, Hashable) else repr(value)
            axes.setdefault(field, {}).setdefault(key, value)
    return {field: [*values.values()] for field, values in axes.items()}
