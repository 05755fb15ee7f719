"""Resolves a ConfigDict, which a user edits, into a Recipe, which the code reads.

`lm.config.fields` declares the fields and their types. `resolve` checks them, looks up every name
and fills in the published options of the chosen parts.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from lm.config.choice import AUTO, join_hint
from lm.config.fields import CHOICES, FIELDS, Config, is_passive
from lm.config.groups import check_settings
from lm.config.mixture import DEFAULT_SOURCE, normalize_mixture
from lm.config.other_programs import replacement_hint
from lm.config.pattern import ITEM_FIELDS, PATTERN
from lm.config.recipe import (
    SECTIONS,
    Recipe,
    build_recipe,
    parse_rows,
    sown_losses,
    update_config,
)
from lm.config.stages import drop_equal_stages
from lm.config.suggestions import MULTI_RUN_SECTIONS, field_hint
from lm.config.texts import parse_texts
from modules.choices import suggest_nearest
from modules.options import coerce_type, declared_options


def resolve(raw: Mapping[str, Any]) -> Recipe:
    """Resolves the ConfigDict of one run, or the dict of its config.json.

    'auto' becomes the name that it stands for, except for kernels, which depend on the machine. A
    pattern of equal items becomes the fields that it stands for.
    model.dtype=auto becomes the type for CPUs unless `with_dtype` has chosen another. An option
    that is None gets the default of the parts that read it, if these agree; options of norms stay
    None, because several norms may read them.

    Raises ValueError for an unknown field or name (with the nearest), a missing field, a wrong
    type, an option that no chosen part reads, and for a sweep (`lm.study.plan.cells` resolves its
    runs).
    """
    return resolve_config(build_config(raw))


def single_run_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a config, without `sweep` and `tune`."""
    return {name: section for name, section in raw.items() if name not in MULTI_RUN_SECTIONS}


def with_dtype(raw: Mapping[str, Any], dtype: str) -> Mapping[str, Any]:
    """Returns the config, as nested dicts, with `dtype` in place of model.dtype=auto.

    dtype: the dtype of matmuls on the training platform (`lm.launch.before_jax.usual_dtype`).
    """
    model = raw.get('model')
    if not isinstance(model, Mapping | ConfigDict) or model.get('dtype') != AUTO:
        return raw
    return {**raw, 'model': {**model, 'dtype': dtype}}


def build_config(raw: Mapping[str, Any]) -> Config:
    """Checks fields and types only. Fills in nothing, and looks up no name."""
    if not isinstance(raw, Mapping | ConfigDict):
        raise ValueError(f'a config must contain sections; got {raw!r}')
    for name in MULTI_RUN_SECTIONS:
        if raw.get(name) is not None:
            raise ValueError(
                f'this config describes several runs (config.{name}), but a single run is needed '
                'here'
            )
    section_fields = dataclasses.fields(Config)
    names = [*MULTI_RUN_SECTIONS, *(field.name for field in section_fields)]
    for name in raw:
        if name not in names:
            hint = suggest_nearest(name, names) or field_hint(name, FIELDS)
            raise ValueError(f'config has no field {name}.{hint}')
    sections = {f.name: _build_section(f.name, f.type, raw.get(f.name, {})) for f in section_fields}
    return Config(**sections)


def _build_section(section: str, cls: Any, raw: Any) -> Any:
    if not isinstance(raw, Mapping | ConfigDict):
        raise ValueError(f'config section {section} must contain fields; got {raw!r}')
    field_names = [field.name for field in dataclasses.fields(cls)]
    values = {}
    for name in raw:
        if name not in field_names:
            path = f'{section}.{name}'
            raise ValueError(f'config has no field {path}.{field_hint(path, FIELDS)}')
    for name in field_names:
        path = f'{section}.{name}'
        choice = FIELDS[path].choice
        if choice and choice.several and isinstance(raw.get(name), list | tuple):
            raise ValueError(join_hint(path, raw[name]))
        if name in raw:
            values[name] = coerce_type(path, raw[name], FIELDS[path].types)
        elif FIELDS[path].default is dataclasses.MISSING:
            raise ValueError(
                f'the config has no {path}. Start from configs.default.get_config(), which sets it.'
            )
    return cls(**values)


def resolve_config(config: Config) -> Recipe:
    """Resolves a config with valid types."""
    config = resolve_auto(config)
    recipe, flat, values = build_recipe(config), flatten(config), {}
    readers = recipe.readers
    for path in list_unread_options(recipe):
        raise ValueError(explain_unread(path, flat[path], config))
    check_settings(flat, readers, recipe.schedule)
    if recipe.pattern is not None and not recipe.is_mixed:  # equal blocks are no pattern
        (kind,) = recipe.kinds.values()
        if (matmul := recipe.kernels.get('matmul')) != kind.kernels.get('matmul'):
            raise ValueError(
                f'{matmul} has no effect: with {PATTERN}={recipe.model.pattern} all blocks have '
                'another matmul. Leave one of them out.'
            )
        recipe = kind
        config, flat, readers = recipe.config, flatten(recipe), recipe.readers
    for path, parts in readers.items():
        if not FIELDS[path].is_part_option:  # a setting of a group, which is set
            continue
        defaults = [declared_options(part.row)[path.split('.')[1]].default for part in parts]
        several = any(part.path in CHOICES and CHOICES[part.path].inline for part in parts)
        if flat[path] is None and not several and len(set(defaults)) == 1:
            values[path] = defaults[0]
    settled_config = update_config(config, values)  # the parts have these values already
    sections = {name: vars(settled_config)[name] for name in SECTIONS}
    return dataclasses.replace(recipe, config=settled_config, **sections)


def unresolve_fields(recipe: Recipe) -> dict[str, Any]:
    """Returns {path: value}, with None or 'auto' wherever these resolve to the value."""
    config, flat = recipe.config, flatten(recipe)
    nones = {path: None for path, field in FIELDS.items() if field.default is None}
    autos = {path: AUTO for path, choice in CHOICES.items() if choice.auto} | {'model.dtype': AUTO}
    for unset, fill in ((nones, resolve_config), (autos, resolve_auto)):
        resolved = flatten(fill(update_config(config, unset)))
        flat |= {path: unset[path] for path in unset if resolved[path] == flat[path]}
    return flat


SCALARS = {str, int, float, bool, type(None)}
# The fields of a run whose weights were made by a program and not by training.
NO_SOURCE = {'train.init_from': '', 'train.branch_from': ''}


def list_unread_options(recipe: Recipe) -> list[str]:
    """Returns the paths of options that are set although no chosen part reads them."""
    readers = recipe.readers
    return [
        path
        for path, value in flatten(recipe).items()
        if FIELDS[path].is_part_option and value is not None and path not in readers
    ]


def drop_unread_options(recipe: Recipe) -> Recipe:
    """Returns the recipe without options that no chosen part reads, such as options of a replaced
    kernel.
    """
    return update_recipe(recipe, dict.fromkeys(list_unread_options(recipe)))


def resolve_auto(config: Config) -> Config:
    """Replaces 'auto' and None in section `model` by the choice of placement and norm, and
    data.mixture and eval.texts by their normal forms. Drops stages that differ in nothing.
    """
    model = config.model
    ((_, placement, _),) = parse_rows('model.placement', model.placement)
    ((_, norm, _),) = parse_rows('model.norm', model.norm)
    needs, values = placement.needs, {}
    if model.dtype == AUTO:
        values['model.dtype'] = 'float32'
    if model.mlp == AUTO:
        values['model.mlp'] = needs.get('mlp', 'dense')
    if model.reparam == AUTO:
        values['model.reparam'] = needs.get('reparam', 'none')
    if model.final_norm == AUTO:
        values['model.final_norm'] = model.norm if placement.final_norm else 'none'
    if model.n_kv_heads is None:
        values['model.n_kv_heads'] = model.n_heads
    for path in ('model.attention_dropout', 'model.embedding_dropout'):
        if vars(model)[path.split('.')[1]] is None:
            values[path] = model.dropout
    divides = model.n_heads > 0 and model.d_model % model.n_heads == 0  # else `check` refuses it
    if model.head_dim is None and divides:
        values['model.head_dim'] = model.d_model // model.n_heads
    if model.embedding_scale is None:
        values['model.embedding_scale'] = norm.scales_embedding
    if vars(config.attention)['norm_values'] is None and 'norm_values' in needs:
        values['attention.norm_values'] = needs['norm_values']
    source = config.data.source
    is_known = source == DEFAULT_SOURCE or ':' in source
    if not is_known and (replacement := replacement_hint(source)) and not Path(source).exists():
        raise ValueError(f'data.source={source}: {replacement}.')
    if config.eval.texts is not None:
        values['eval.texts'] = repr(parse_texts(config.eval.texts))
    if config.data.mixture is not None:
        values |= normalize_mixture(config.data.mixture, config.data.source)
    config = update_config(config, values)
    return update_config(config, drop_equal_stages(config))


def explain_unread(path: str, value: Any, config: Config) -> str:
    """Returns the error for an option that no chosen part reads.

    Args:
      path: the option.
      value: its value.
      config: the config that sets it.

    Returns:
      The message, which names the rows that would read it and the rows that are chosen.
    """
    name, flat = path.split('.')[1], flatten(config)
    candidates: dict[str, list[str]] = {}
    conditions: dict[str, str] = {}  # of rows that read the option only with another option
    for field, choice in CHOICES.items():
        for row, part in choice.table.items():
            terms = sown_losses(choice, part).items() if path.startswith('loss.') else ()
            sown = [term for term, declared in terms if name in declared_options(declared)]
            reads = choice.section == path.split('.')[0] and name in declared_options(part)
            if reads or sown:
                candidates.setdefault(field, []).append(row)
            for term in sown:
                option, value_needed = part.auxiliary[term]
                conditions[row] = f'{choice.section}.{option}={value_needed}'
    is_mixed = flat[PATTERN] is not None
    fields = {PATTERN if is_mixed and field in ITEM_FIELDS else field: None for field in candidates}
    chosen = ', '.join(f'{field}={flat[field]}' for field in fields)
    first = {tuple(rows): field for field, rows in reversed(candidates.items())}
    readers = ' or '.join(f'{field}={"|".join(rows)}' for rows, field in first.items())
    readers += ''.join(f' and {condition}' for condition in conditions.values())
    return (
        f'{path}={value} is not used by this config ({chosen}), so it would have no effect. It is '
        f'used with {readers}. Leave it out, or set it to None.'
    )


def update_recipe(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Returns the recipe with resolved fields replaced, such as sizes."""
    return build_recipe(update_config(recipe.config, values))


def to_dict(config: Recipe | Config) -> dict[str, Any]:
    """Returns the fields as nested dicts: the inverse of `resolve` and of `build_config`."""
    return dataclasses.asdict(config.config if isinstance(config, Recipe) else config)


def to_json(recipe: Recipe) -> str:
    """Returns the content of config.json."""
    return json.dumps(to_dict(recipe), indent=2) + '\n'


# Fields whose default stands for a derived value. n_kv_heads is not among them: it once had no
# default, so that its value is part of the name of all runs.
DERIVED_DEFAULTS = {
    path: field.default
    for path, field in FIELDS.items()
    if not field.is_part_option and (field.default is None or field.default == AUTO)
    if path != 'model.n_kv_heads'
}


def identity(recipe: Recipe) -> dict[str, Any]:
    """Returns {path or part: value} of everything that differs from a default; it names the run.

    Fields are compared with their dataclass default, or with the value that it stands for. Options
    are compared with the default of the part that reads them. Fields that only observe a run are
    left out. An identity is therefore stable when fields or options are added, when a default is
    spelt out, and when an option moves from its section to its part's name.

    A published default must never change: a part with another default is a new row.
    """
    config = recipe.config
    defaults = flatten(resolve_auto(update_config(config, DERIVED_DEFAULTS)))
    differing = {}
    for path, value in flatten(config).items():
        if is_passive(path):
            continue
        default = defaults[path] if path in DERIVED_DEFAULTS else FIELDS[path].default
        if not FIELDS[path].is_part_option and _strip_options(path, value) != _strip_options(
            path, default
        ):
            differing[path] = _strip_options(path, value)
    if recipe.is_mixed:
        # Rows and options of items are named with their blocks, wherever the config sets them.
        differing = {path: v for path, v in differing.items() if path not in ITEM_FIELDS}
        period, _, remainder = recipe.tiles
        parts = (period, remainder, *([recipe.first_layers] if recipe.first_layers else []))
        differing[PATTERN] = [[_describe_kind(kind, recipe) for kind in kinds] for kinds in parts]
    for part in recipe.parts:
        if recipe.is_mixed and part.path in ITEM_FIELDS:
            continue
        for name, value in part.options.items():
            if value != declared_options(part.row)[name].default:
                differing[f'{part.path}={part.name}:{name}'] = value
    return differing


def _describe_kind(kind: Recipe, recipe: Recipe) -> dict[str, Any]:
    """Returns the rows of the blocks of an item, and their options that differ from defaults.

    Args:
      kind: of the blocks.
      recipe: of the model, whose placement is described elsewhere.
    """
    is_placed = kind.placement.row is not recipe.placement.row
    described: dict[str, Any] = {kind.placement.path: kind.placement.name} if is_placed else {}
    matmul = kind.kernels.get('matmul')
    if matmul != recipe.kernels.get('matmul'):
        described['kernels.matmul'] = AUTO if matmul is None else matmul.name
    for part in (kind.attention, kind.mlp, kind.position):
        described[part.path] = part.name
        for name, value in part.options.items():
            if value != declared_options(part.row)[name].default:
                described[f'{part.path}={part.name}:{name}'] = value
    return described


def _strip_options(path: str, value: Any) -> Any:
    """Returns the value of a field without inline options."""
    if path in CHOICES and CHOICES[path].inline and isinstance(value, str):
        return '+'.join(name for name, *_ in CHOICES[path].parse_rows(path, value))
    return value


def digest(recipe: Recipe) -> str:
    """Returns eight hexadecimal digits of a hash of `identity`: the name of a run's folder."""
    text = json.dumps(identity(recipe), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def flatten(config: Recipe | Config | Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """Returns {'model.d_model': 256, ...}, in declaration order."""
    if isinstance(config, Recipe):
        config = config.config
    if isinstance(config, Config):
        return {
            f'{section}.{name}': value
            for section, fields in vars(config).items()
            for name, value in vars(fields).items()
        }
    flat = {}
    for name, value in config.items():
        # To ask a number whether it is a Mapping takes longer than all the rest.
        if type(value) not in SCALARS and isinstance(value, Mapping):
            flat |= flatten(value, prefix + name + '.')
        else:
            flat[prefix + name] = value
    return flat


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Returns {'optim.lr': (old, new)} for every field that differs; {} if the identities are
    equal.
    """
    if identity(old) == identity(new):
        return {}
    old_values, new_values = flatten(old), flatten(new)
    return {
        path: (old_values[path], new_values[path])
        for path in new_values
        if old_values[path] != new_values[path] and not is_passive(path)
    }
