"""Checks a training before chips are created for it, on the machine that launches it.

    python -m tpu.check_training '{"accelerator": "v6e-16", "slices": 1}' FLAGS of train.py

Reads the flags as train.py does, resolves the config, runs the checks of its parts, and lays out
its mesh over the devices of the chips. Reads no text, compiles nothing, and needs no device.
`tpu.launch` runs it in a separate process, as it imports JAX. What this machine cannot see, such as
a checkpoint to start from, is left to the hosts, with a message.
"""

from tpu.environment import prepare_environment

if __name__ == '__main__':
    prepare_environment()  # before JAX is imported

import dataclasses
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lm.config.fields import AUTO
from lm.config.recipe import Recipe
from lm.config.resolve import build_config, resolve, single_run_config, with_dtype
from lm.devices.check_mesh import check_devices
from lm.devices.mesh import check_idle_devices, make_mesh, min_devices
from lm.launch import command, distributed, tracking
from lm.launch.exit_status import BAD_INPUT
from lm.launch.terminal import quiet_libraries
from lm.model.check import check
from lm.record.checkpoint import name_checkpoint
from lm.run.start import merge_source_model
from lm.storage.buckets import is_url
from lm.study.plan.cells import split_sweep
from lm.study.train import engines
from lm.study.train.waves import WavePlan
from tpu.chips import count_slice_devices
from tpu.launchers.base import Chips


@dataclasses.dataclass(frozen=True)
class PlaceholderDevice:
    """A device that is not here, with the fields that the layout of a mesh reads."""

    id: int
    slice_index: int
    platform = device_kind = 'none'  # the order of TPUs within a mesh would follow their links


def main(argv: list[str]) -> None:
    """Prints what could not be checked. Raises ValueError for flags that the hosts would refuse."""
    chips = Chips(**json.loads(argv[1]))
    config = command.define_config()
    command.define_run()
    engines.define_flags()
    distributed.define_flags()
    tracking.define_flags()
    positional = command.parse_flags(['train.py', *argv[2:]])[1:]
    if positional:
        raise ValueError(f'flags begin with --, as in --config=PATH; got {positional}')
    config_dict = config.value.to_dict()
    print(check_training(config_dict, command.find_set_fields(config_dict), chips), end='')


def check_training(
    config: Mapping[str, Any], explicit_fields: Collection[str], chips: Chips
) -> str:
    """Checks a training for chips that do not exist yet.

    Args:
      config: nested dicts, including the sweep.
      explicit_fields: paths of the fields that the command or the config's file sets.
      chips: the chips of all hosts.

    Returns:
      A line on what could not be checked here; '' if all was checked.

    Raises:
      ValueError: for fields, parts or a mesh that the hosts would refuse, and for chips that do not
        exist.
    """
    devices = placeholder_devices(chips)
    train = build_config(single_run_config(config)).train
    for field in ('init_from', 'branch_from'):
        source = name_checkpoint(vars(train)[field])
        if source and (is_url(source) or not Path(source).exists()):
            return f'train.{field}={source} is not seen from here: the hosts check the config\n'
    config, _ = merge_source_model(config, explicit_fields)
    base, sweep, tune = split_sweep(with_dtype(config, 'bfloat16'))
    recipe = resolve(base)
    check(recipe)
    if (sweep, tune) == (None, None):
        check_mesh(recipe, devices)
        return ''
    for group in WavePlan(base, sweep, tune).first_groups:
        check(group[0].recipe)
        n_devices = min_devices(group[0].recipe.mesh)
        if devices and n_devices > len(devices):
            raise ValueError(
                f'{group[0].name} needs {n_devices} devices by its mesh, and there are '
                f'{len(devices)}.'
            )
    return ''


def placeholder_devices(chips: Chips) -> list[PlaceholderDevice]:
    """Returns one placeholder for each device of the chips; [] if their number is unknown."""
    total = chips.devices
    if chips.accelerator:
        total = count_slice_devices(chips.accelerator, chips.flag) * chips.slices
    return [PlaceholderDevice(i, i * chips.slices // total) for i in range(total)]


def check_mesh(recipe: Recipe, devices: list[PlaceholderDevice]) -> None:
    """Raises ValueError if a run cannot be laid over the devices, or would leave some idle.

    With mesh.axes=auto the hosts choose the mesh.
    """
    if devices and recipe.mesh.axes != AUTO:
        mesh = make_mesh(recipe.mesh, devices)
        check_idle_devices(recipe.mesh, mesh, len(devices))
        check_devices(recipe, mesh)


if __name__ == '__main__':
    quiet_libraries()
    try:
        main(sys.argv)
    except (ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        sys.exit(BAD_INPUT)
