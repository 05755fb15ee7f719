"""Settings of groups of parameters: the fields optim.GROUP_SETTING, such as optim.embedding_lr.

`modules.optim.groups` has the groups. A setting that is None is that of the group's parent: of
optim.others_SETTING, and then of the section's field.
"""

import dataclasses
import functools
import sys
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from modules.optim.classic import adamw
from modules.optim.groups import GROUPS, HIDDEN, OTHERS, find_group, group_chain
from modules.optim.schedules import warmup_stable_decay
from modules.options import Option, declared_options
from modules.params import ParamSpec

OPTIMIZER, LR, LR_FACTOR, WEIGHT_DECAY = 'optimizer', 'lr', 'lr_factor', 'weight_decay'
# Settings that replace an option of the optimizer or of the schedule.
OPTIMIZER_OPTIONS = ('b1', 'b2', 'eps')
SCHEDULE_OPTIONS = ('decay_fraction', 'final_lr_fraction')


def _setting_options() -> dict[str, Option]:
    """Returns {setting: its bounds, with a description that a group completes}."""
    from_0 = functools.partial(Option, minimum=0, maximum=sys.float_info.max, traced=True)
    declared = {**declared_options(adamw), **declared_options(warmup_stable_decay)}
    replaced = {name: declared[name].option for name in OPTIMIZER_OPTIONS + SCHEDULE_OPTIONS}
    return {
        LR: from_0('peak learning rate'),
        LR_FACTOR: from_0('factor of optim.lr'),
        WEIGHT_DECAY: from_0('strength of weight decay'),
        **{
            name: dataclasses.replace(option, description=name) for name, option in replaced.items()
        },
    }


SETTINGS = _setting_options()


def group_fields() -> list[tuple[str, Any, Any]]:
    """Returns (name, annotated type, default) of each field of a group, for `make_dataclass`."""
    fields: list[tuple[str, Any, Any]] = []
    for group, (parameters, parent) in GROUPS.items():
        prefix = '' if parent == HIDDEN else f'{parent}_'
        for setting, option in SETTINGS.items():
            unset = 'unused' if setting == LR_FACTOR else f'optim.{prefix}{setting}'
            description = f'{option.description} of {parameters}; None: {unset}'
            described = dataclasses.replace(option, description=description)
            fields.append((f'{group}_{setting}', Annotated[float | None, described], None))
        if group != OTHERS:  # its optimizer is optim.others
            field = 'optim.name' if parent == HIDDEN else f'optim.{parent}'
            description = f'optimizer of {parameters}; None: {field}'
            fields.append((f'{group}_{OPTIMIZER}', Annotated[str | None, description], None))
    return fields


def add_group_fields(section: Any) -> Any:
    """Returns the dataclass `section` with the fields of all groups."""
    extended = dataclasses.make_dataclass(
        section.__name__,
        group_fields(),
        bases=(section,),
        frozen=True,
        kw_only=True,
        module=section.__module__,
    )
    extended.__doc__ = section.__doc__
    return extended


def find_setting(values: Mapping[str, Any], group: str, setting: str) -> tuple[str, Any]:
    """Returns (path, value) of the field that decides a setting of a group.

    Args:
      values: {path: value}, such as a Hyper; a missing path counts as None.
      group: HIDDEN or a row of GROUPS.
      setting: a row of SETTINGS.

    Returns:
      The first of the group and its parents that is set, or else the section's field.
    """
    for name in group_chain(group):
        path = f'optim.{name}_{setting}'
        if values.get(path) is not None:
            return path, values[path]
    path = f'optim.{setting}'
    return path, values.get(path)


def group_lr(values: Mapping[str, Any], group: str) -> Any:
    """Returns the peak learning rate of a group, before factors of the parametrisation.

    Args:
      values: {path: value}, such as a Hyper.
      group: HIDDEN or a row of GROUPS.
    """
    for name in group_chain(group):
        if (lr := values.get(f'optim.{name}_{LR}')) is not None:
            return lr
        if (factor := values.get(f'optim.{name}_{LR_FACTOR}')) is not None:
            return factor * values['optim.lr']
    return values['optim.lr']


def has_setting(values: Mapping[str, Any], spec: ParamSpec, setting: str) -> bool:
    """Whether the field of a parameter's group is set, whatever its parents have.

    Args:
      values: {path: value}.
      spec: describes the parameter.
      setting: a row of SETTINGS.
    """
    return values.get(f'optim.{find_group(spec)}_{setting}') is not None


def group_settings(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns {group: {path: value}} of the settings of groups that are set.

    values: {path: value} of all fields.
    """
    by_group = {
        group: {f'optim.{group}_{setting}': None for setting in (*SETTINGS, OPTIMIZER)}
        for group in GROUPS
    }
    return {
        group: {path: values[path] for path in paths if values.get(path) is not None}
        for group, paths in by_group.items()
    }


def check_settings(values: Mapping[str, Any], read_paths: Collection[str], schedule: Any) -> None:
    """Raises ValueError for a setting of a group that would have no effect.

    Args:
      values: {path: value} of all fields.
      read_paths: the paths of options that optimizers read.
      schedule: the part that optim.schedule names.
    """
    for group, settings in group_settings(values).items():
        rates = [f'optim.{group}_{setting}' for setting in (LR, LR_FACTOR)]
        if all(path in settings for path in rates):
            raise ValueError(
                f'{rates[0]} and {rates[1]} both set the learning rate of {GROUPS[group][0]}; got '
                f'{settings[rates[0]]:g} and {settings[rates[1]]:g}. Leave one of them out.'
            )
        for path, value in settings.items():
            setting = path.removeprefix(f'optim.{group}_')
            if setting in OPTIMIZER_OPTIONS and path not in read_paths:
                raise ValueError(
                    f'{path}={value:g} is not used, because the optimizer of {GROUPS[group][0]} '
                    f'does not have the option {setting}, or sets it after its name. Leave it out.'
                )
            if setting in SCHEDULE_OPTIONS and setting not in schedule.options:
                raise ValueError(
                    f'{path}={value:g} is not used, because {schedule} does not have the option '
                    f'{setting}. Leave it out, or choose another schedule.'
                )


def check_members(values: Mapping[str, Any], present: Collection[str], is_tied: bool) -> None:
    """Raises ValueError for a setting of a group without parameters in this model.

    Args:
      values: {path: value} of all fields.
      present: the groups of the model's parameters.
      is_tied: whether the word embedding is also the readout.
    """
    parents = {parent for group in present for parent in group_chain(group)}
    for group, settings in group_settings(values).items():
        if not settings or group in present or group in parents:
            continue
        path, value = next(iter(settings.items()))
        advice = 'Leave it out.'
        if group == 'readout' and is_tied:
            setting = path.removeprefix('optim.readout_')
            advice = (
                'With model.tie_embeddings=True one table is both embedding and readout: set '
                f'optim.embedding_{setting}.'
            )
        names = ', '.join(name for name in (HIDDEN, *GROUPS) if name in present)
        raise ValueError(
            f'{path}={value} has no effect, because this model has no parameters in the group '
            f'{group} ({GROUPS[group][0]}); it has {names}. {advice}'
        )
