"""Upgrades configs of older versions to their present form.

Until commit 0447279 options of parts stood in other sections, had values whether or not a part read
them, and 'auto' was not filled in. Records of that form lack some sections.
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

NEW_SECTION = 'attention'  # present configs have this section, old ones do not
RENAMED_FIELDS = {
    'model.norm_eps': 'norm.eps',
    'model.n_experts': 'mlp.n_experts',
    'model.experts_per_token': 'mlp.experts_per_token',
    'model.expert_capacity': 'mlp.expert_capacity',
}
# One field was both once: the share by which running statistics move, and the share that remains.
STATISTICS_FIELDS = ('norm.momentum', 'norm.ema_decay')


def resolve_stored(raw: Mapping[str, Any]) -> Recipe:
    """Resolves a recorded config. Raises ValueError unless it has the present or the old form."""
    if not is_old(raw):
        return resolve(raw)
    config = resolve_auto(build_config(_unflatten(_upgrade_fields(flatten(raw)))))
    readers = build_recipe(config).readers
    unread = [path for path in FIELDS if FIELDS[path].is_part_option and path not in readers]
    return resolve_config(update_config(config, dict.fromkeys(unread)))


def is_old(raw: Mapping[str, Any]) -> bool:
    """Returns whether a recorded config has the old form."""
    return 'model' in raw and NEW_SECTION not in raw


def resolve_stored_cell(
    base: Mapping[str, Any], changes: dict[str, Any]
) -> tuple[Recipe, dict[str, Any]]:
    """Returns (recipe, changes) of a cell in an old sweep.json, by present field names."""
    recipe = resolve_stored(_unflatten(flatten(base) | changes))
    values = flatten(recipe)
    paths = [_upgrade_path(path, values) for path in changes]
    return recipe, {path: values[path] for path in paths}


def rename_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an old record by their present names, with unchanged values."""
    return {RENAMED_FIELDS.get(path, path): value for path, value in flat.items()}


def _upgrade_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    fields = rename_fields(flat)
    momentum, ema_decay = STATISTICS_FIELDS
    fields[ema_decay] = fields.get(momentum)
    if fields.get('model.placement') == 'wide':
        reparam = fields['model.reparam']
        fields['model.reparam'] = 'shared' if reparam == 'none' else f'shared+{reparam}'
        if fields.get('model.mlp') == 'dense':  # that is not WideNet, and is refused today
            fields['model.placement'] = 'pre'
    return fields


def _upgrade_path(path: str, values: Mapping[str, Any]) -> str:
    """Returns the present name of a field, in a config with these values."""
    momentum, ema_decay = STATISTICS_FIELDS
    if path == momentum and values[momentum] is None:
        return ema_decay
    return RENAMED_FIELDS.get(path, path)


def _unflatten(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        section, name = path.split('.')
        tree.setdefault(section, {})[name] = value
    return tree
