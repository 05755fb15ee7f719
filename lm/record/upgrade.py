"""Configs of older versions, in their present form.

Until commit 0447279 options of parts stood in other sections, had values whether or not a part
read them, and nothing was filled in for 'auto'. Records of that form lack some sections.
"""

from collections.abc import Mapping
from typing import Any

from lm.config.fields import FIELDS
from lm.config.recipe import Recipe, build_recipe
from lm.config.resolve import (
    build_config,
    flatten,
    resolve,
    resolve_auto,
    resolve_config,
    update_config,
)

NEW_SECTION = 'attention'  # in every config that is written now, and in none that was then
RENAMED_FIELDS = {
    'model.norm_eps': 'norm.eps',
    'model.n_experts': 'mlp.n_experts',
    'model.experts_per_token': 'mlp.experts_per_token',
    'model.expert_capacity': 'mlp.expert_capacity',
}
# One field once was both: the share by which statistics move, and the share of them that is kept.
STATISTICS_FIELDS = ('norm.momentum', 'norm.ema_decay')


def resolve_stored(raw: Mapping[str, Any]) -> Recipe:
    """Resolves a recorded config. Raises ValueError if it has neither the present nor old form."""
    if not is_old(raw):
        return resolve(raw)
    config = resolve_auto(build_config(_unflatten(_upgrade_fields(flatten(raw)))))
    readers = build_recipe(config).readers
    unread = [path for path in FIELDS if FIELDS[path].is_part_option and path not in readers]
    return resolve_config(update_config(config, dict.fromkeys(unread)))


def is_old(raw: Mapping[str, Any]) -> bool:
    return 'model' in raw and NEW_SECTION not in raw


def resolve_stored_cell(base: Mapping, changes: Mapping[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """Returns the config and the changes of a cell of an old sweep.json, by present names."""
    recipe = resolve_stored(_unflatten(flatten(base) | changes))
    values = flatten(recipe)
    paths = [_upgrade_path(path, values) for path in changes]
    return recipe, {path: values[path] for path in paths}


def rename_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an old record by their present names, with unchanged values."""
    return {RENAMED_FIELDS.get(path, path): value for path, value in flat.items()}


def _upgrade_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    found = rename_fields(flat)
    moved, kept = STATISTICS_FIELDS
    found[kept] = found.get(moved)
    if found.get('model.placement') == 'wide':
        reparam = found['model.reparam']
        found['model.reparam'] = 'shared' if reparam == 'none' else f'shared+{reparam}'
        if found.get('model.mlp') == 'dense':  # not WideNet, and refused now
            found['model.placement'] = 'pre'
    return found


def _upgrade_path(path: str, values: Mapping[str, Any]) -> str:
    """Returns the present name of a field, in a config with these values."""
    moved, kept = STATISTICS_FIELDS
    if path == moved and values[moved] is None:
        return kept
    return RENAMED_FIELDS.get(path, path)


def _unflatten(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        section, name = path.split('.')
        tree.setdefault(section, {})[name] = value
    return tree
