"""The seam between a ConfigDict, which a user edits, and a Recipe, which the code reads.

The fields and their types are in `lm.config.fields`; `resolve` checks them, looks every name up, and
fills in what the chosen part's own signature has.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from lm.config.choice import AUTO, joined_by_plus
from lm.config.fields import CHOICES, FIELDS, Config
from lm.config.mixture import settled
from lm.config.recipe import Recipe, parts_of, readers_of, recipe_of, rows_at, sown_by
from lm.config.suggestions import field_hint
from modules.choices import nearest
from modules.options import options, typed


class Unread(ValueError):
    """An option is given that no chosen part reads."""


def resolve(raw: Mapping[str, Any]) -> Recipe:
    """Looks up all that a ConfigDict, or the dict of a config.json, says of one run.

    'auto' is replaced by what it stands for, but for kernels, which depend on the machine. An
    option that is None becomes the default of the parts that read it, where these agree and there
    is one place for them; the options of norms, which have several, stay None.

    Raises ValueError for a field that is unknown (with the nearest one), missing, or of another
    type; for an unknown name; for an option that no chosen part reads; and for a sweep, whose runs
    `lm.sweep.cells` resolves.
    """
    return settle(build(raw))


def build(raw: Mapping[str, Any]) -> Config:
    """Checks fields and types alone: nothing is filled in, and no names are looked up."""
    if not isinstance(raw, Mapping | ConfigDict):
        raise ValueError(f'a config holds sections; got {raw!r}')
    if raw.get('sweep') is not None:
        raise ValueError('this config describes many runs (config.sweep), and one is wanted here')
    known = dataclasses.fields(Config)
    for name in raw:
        if name != 'sweep' and name not in {field.name for field in known}:
            hint = nearest(name, (f.name for f in known)) or field_hint(name, FIELDS)
            raise ValueError(f'config has no field {name}.{hint}')
    sections = {f.name: _build_section(f.name, f.type, raw.get(f.name, {})) for f in known}
    return Config(**sections)


def _build_section(section: str, cls: type, raw: Any) -> Any:
    if not isinstance(raw, Mapping | ConfigDict):
        raise ValueError(f'config section {section} must hold fields; got {raw!r}')
    known = [field.name for field in dataclasses.fields(cls)]
    values = {}
    for name in raw:
        if name not in known:
            path = f'{section}.{name}'
            raise ValueError(f'config has no field {path}.{field_hint(path, FIELDS)}')
    for name in known:
        path = f'{section}.{name}'
        choice = FIELDS[path].choice
        if choice and choice.several and isinstance(raw.get(name), list | tuple):
            raise ValueError(joined_by_plus(path, raw[name]))
        if name in raw:
            values[name] = typed(path, raw[name], FIELDS[path].types)
        elif FIELDS[path].default is dataclasses.MISSING:
            raise ValueError(
                f'config lacks {path}; start from configs.default.get_config(), which has it'
            )
    return cls(**values)


def settle(config: Config) -> Recipe:
    """`resolve` for a config whose types are right."""
    config = without_auto(config)
    readers, flat = readers_of(parts_of(config)), flatten(config)
    for path, value in flat.items():
        if FIELDS[path].of_parts and value is not None and path not in readers:
            raise Unread(unread(path, value, config))
    values = {}
    for path, parts in readers.items():
        defaults = [options(part.row)[path.split('.')[1]].default for part in parts]
        several = any(CHOICES[part.path].inline for part in parts)
        if flat[path] is None and not several and len(set(defaults)) == 1:
            values[path] = defaults[0]
    return recipe_of(changed(config, values))


def without_auto(config: Config) -> Config:
    """What 'auto' or None stands for in the model, by its placement and its norm; data.mixture as
    it is spelt in records.
    """
    model = config.model
    ((_, placement, _),) = rows_at('model.placement', model.placement)
    ((_, norm, _),) = rows_at('model.norm', model.norm)
    needs, values = placement.needs, {}
    if model.mlp == AUTO:
        values['model.mlp'] = needs.get('mlp', 'dense')
    if model.reparam == AUTO:
        values['model.reparam'] = needs.get('reparam', 'none')
    if model.final_norm == AUTO:
        values['model.final_norm'] = model.norm if placement.final_norm else 'none'
    if model.embedding_scale is None:
        values['model.embedding_scale'] = norm.scales_embedding
    if config.attention.norm_values is None and 'norm_values' in needs:
        values['attention.norm_values'] = needs['norm_values']
    if config.data.mixture is not None:
        values |= settled(config.data.mixture, config.data.source)
    return changed(config, values)


def unread(path: str, value: Any, config: Config) -> str:
    """Why an option is refused: who would read it, and what was chosen instead."""
    name, flat = path.split('.')[1], flatten(config)
    would: dict[str, list[str]] = {}
    for field, choice in CHOICES.items():
        for row, part in choice.table.items():
            terms = sown_by(choice, part).values()
            reads = choice.section == path.split('.')[0] and name in options(part)
            if reads or (path.startswith('loss.') and any(name in options(t) for t in terms)):
                would.setdefault(field, []).append(row)
    chosen = ', '.join(f'{field}={flat[field]}' for field in would)
    first = {tuple(rows): field for field, rows in reversed(would.items())}
    readers = ' or '.join(f'{field}={"|".join(rows)}' for rows, field in first.items())
    return (
        f'{path}={value} is read by no part of this config ({chosen}), so that it would change '
        f'nothing. It is read with {readers}. Leave it out, or None.'
    )


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """The fields of a config with {'optim.lr': 0.01, ...} changed."""
    by_section: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section_name, name = path.split('.')
        by_section.setdefault(section_name, {})[name] = value
    sections = {
        name: dataclasses.replace(vars(config)[name], **fields)
        for name, fields in by_section.items()
    }
    return dataclasses.replace(config, **sections)


def replaced(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with fields changed whose values are settled, such as sizes."""
    return recipe_of(changed(recipe.config, values))


def to_dict(config: Recipe | Config) -> dict[str, Any]:
    """The inverse of `resolve`, or of `build`, as plain dicts."""
    return dataclasses.asdict(config.config if isinstance(config, Recipe) else config)


def to_json(recipe: Recipe) -> str:
    return json.dumps(to_dict(recipe), indent=2) + '\n'


# Fields whose dataclass default stands for another value, and that default.
LEFT_OPEN = {
    path: field.default
    for path, field in FIELDS.items()
    if not field.of_parts and (field.default is None or field.default == AUTO)
}


def identity(recipe: Recipe) -> dict[str, Any]:
    """What a resolved config says of its run, without what goes without saying.

    A field is left out that has its dataclass default, or what that stands for. Of the options of
    parts there are those that differ from the default of the part that reads them, by part. So no
    identity changes where a field or an option is added later, where a default is spelt out, or
    where an option is moved from its section to behind a name. It would change its meaning, and not
    its value, with what a default stands for or with the published default of an option: a part
    that differs in one of these is a new row.
    """
    config = recipe.config
    defaults = flatten(without_auto(changed(config, LEFT_OPEN)))
    found = {}
    for path, value in flatten(config).items():
        default = defaults[path] if path in LEFT_OPEN else FIELDS[path].default
        if not FIELDS[path].of_parts and _names(path, value) != _names(path, default):
            found[path] = _names(path, value)
    for part in recipe.parts:
        for name, value in part.options.items():
            if value != options(part.row)[name].default:
                found[f'{part.path}={part.name}:{name}'] = value
    return found


def _names(path: str, value: Any) -> Any:
    """The value of a field without the options behind a name."""
    if path in CHOICES and CHOICES[path].inline and isinstance(value, str):
        return '+'.join(name for name, *_ in CHOICES[path].parts(path, value))
    return value


def digest(recipe: Recipe) -> str:
    """Eight hexadecimal digits that name a run by the `identity` of its resolved config."""
    text = json.dumps(identity(recipe), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def flatten(config: Recipe | Config | Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """{'model.d_model': 256, ...}, in declaration order."""
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
        if isinstance(value, Mapping):
            flat |= flatten(value, prefix + name + '.')
        else:
            flat[prefix + name] = value
    return flat


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """{'optim.lr': (old value, new value)} for every field in which two resolved configs differ; {}
    where they are of one `identity`.
    """
    if identity(old) == identity(new):
        return {}
    a, b = flatten(old), flatten(new)
    return {path: (a[path], b[path]) for path in b if a[path] != b[path]}
