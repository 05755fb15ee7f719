"""The plan of a sweep on a pod: runs per device, runs at once, chip-hours."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from lm.devices.run_axis import select_run_axis
from lm.run.program import find_max_runs
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import Cell, expand_sweep, group_by_program
from lm.study.plan.protocols import Measurements, apply_overrides, resolve_protocol
from lm.study.plan.search import WAVE
from lm.study.tables.text import format_count
from lm.study.train.groups import longest_recipe
from tpu.chips import Topology
from tpu.compiled_step import (
    CompiledStep,
    DoesNotFit,
    Say,
    StepEstimate,
    build_blueprint,
    compile_step,
    device_memory,
    estimate_step,
    format_cost,
    format_summary,
)


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Runs that share a program. a_device: number of runs that a device trains at once."""

    name: str
    runs: int
    a_device: int
    estimate: StepEstimate

    @property
    def devices(self) -> int:
        """Returns the number of devices that train the runs at once."""
        return math.ceil(self.runs / self.a_device)

    @property
    def hours(self) -> float:
        """Returns the hours that a device trains its runs."""
        return self.estimate.steps * self.estimate.step_seconds / 3600


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """The groups of a sweep on a topology. price: of a chip-hour."""

    topology: Topology
    groups: list[GroupPlan]
    price: float | None

    @property
    def runs(self) -> int:
        """Returns the number of runs."""
        return sum(group.runs for group in self.groups)

    @property
    def at_once(self) -> int:
        """Returns the number of runs that the whole topology trains at once."""
        n_free, n_runs = len(self.topology.devices), 0
        for group in self.groups:
            n_used = min(n_free, group.devices)
            n_runs += min(group.runs, n_used * group.a_device)
            n_free -= n_used
        return n_runs

    @property
    def device_hours(self) -> float:
        """Returns the device-hours of all runs."""
        return sum(group.devices * group.hours for group in self.groups)

    @property
    def chip_hours(self) -> float:
        """Returns the chip-hours of all runs."""
        return self.device_hours / (
            self.topology.chip.devices_per_chip if self.topology.chip else 1
        )

    @property
    def unit(self) -> str:
        """Returns 'chip', or 'device' for the local devices."""
        return 'chip' if self.topology.chip else 'device'

    @property
    def hours(self) -> float:
        """Returns the hours on the topology: longest waves first, each on the next free device."""
        free_hours = [0.0] * len(self.topology.devices)
        waves = [group.hours for group in self.groups for _ in range(group.devices)]
        for hours in sorted(waves, reverse=True):
            next_free = free_hours.index(min(free_hours))
            free_hours[next_free] += hours
        return max(free_hours)

    def format_lines(self) -> Iterator[str]:
        """Yields a line for each group, its kernels, then the total."""
        for group in self.groups:
            yield (
                f'{group.name}: {group.runs} runs, {group.a_device} per device; '
                f'{format_summary(group.estimate)}; {group.hours:,.2f} hours'
            )
        yield from dict.fromkeys(group.estimate.format_kernels() for group in self.groups)
        yield (
            f'{format_count(self.runs, "run")} in {format_count(len(self.groups), "program")} on '
            f'{self.topology.label}: {self.at_once} at a time, {self.hours:,.2f} hours, '
            f'{self.chip_hours:,.1f} {self.unit}-hours{format_cost(self.price, self.chip_hours)}'
        )

    def record(self) -> dict[str, Any]:
        """Returns the plan for JSON."""
        totals = {name: getattr(self, name) for name in ('runs', 'at_once', 'hours', 'chip_hours')}
        groups = [vars(group) | {'estimate': group.estimate.record()} for group in self.groups]
        return {'topology': self.topology.label, **totals, 'groups': groups}


@dataclasses.dataclass(frozen=True)
class TunedPlan(SweepPlan):
    """A sweep with config.tune: its groups have the runs of one wave.

    arms_label: the number of arms, and the runs of each. waves: least and typical number.
    """

    arms_label: str
    waves: tuple[int, int]

    def format_lines(self) -> Iterator[str]:
        """Yields a line for each group, for a wave, and for all waves."""
        *group_lines, wave_line = super().format_lines()
        yield from group_lines
        yield f'one wave, {WAVE} runs per arm: {wave_line}'
        min_waves, typical_waves = self.waves
        hours, chip_hours = (
            f'{min_waves * wave_hours:,.2f} to {typical_waves * wave_hours:,.2f}'
            for wave_hours in (self.hours, self.chip_hours)
        )
        cost = format_cost(self.price, typical_waves * self.chip_hours)
        yield (
            f'{self.arms_label}: {min_waves} to {typical_waves} waves, {hours} hours, '
            f'{chip_hours} {self.unit}-hours{cost}'
        )

    def record(self) -> dict[str, Any]:
        """Returns the plan for JSON."""
        return super().record() | {'waves': self.waves}


def plan_sweep(
    base: Mapping[str, Any],
    sweep: Any,
    topology: Topology,
    say: Say,
    price: float | None = None,
    tune: Any = None,
) -> SweepPlan:
    """Plans a sweep with each run on one device, and the most runs per device that fit.

    The program of each group of `lm.study.train.groups` is compiled until its runs fit. With
    config.tune a group has the runs of one wave. Steps follow the protocol of the sweep; if it
    needs text or measured times, the steps stay as configured.

    Args:
      base: config of the sweep, as nested dicts.
      sweep: the section `sweep`; None without it.
      topology: the devices.
      say: receives messages.
      price: price of a chip-hour, in any currency.
      tune: the section `tune`; None without it.

    Returns:
      The plan.

    Raises:
      ValueError: if a run needs several devices, or does not fit a single device.
    """
    # Runs of a sweep do not communicate: a program for one device serves all devices.
    device = dataclasses.replace(topology, devices=topology.devices[:1])
    runs, groups, overrides = [] if sweep is None else expand_sweep(base, sweep), [], []
    if (protocol := resolve_protocol(base, sweep)) is not None:
        if protocol.row.needs:
            say(
                f'NOTE: protocol {protocol.name} sets train.steps when the sweep trains; this plan '
                'uses the configured steps'
            )
        else:
            # A protocol that needs neither text nor times calls neither function.
            measurements = Measurements(
                device.devices[0].platform,
                read_rows=None,  # ty: ignore[invalid-argument-type]
                measure_seconds=None,  # ty: ignore[invalid-argument-type]
            )
            overrides = protocol.apply(runs, measurements).overrides
            runs = apply_overrides(base, runs, overrides)
    arms = None if tune is None else ArmPlan(base, sweep, tune, overrides)
    runs = runs if arms is None else arms.first_cells * WAVE
    programs = group_by_program(runs)
    for i, group in enumerate(programs, start=1):
        position = f'program {i} of {len(programs)}'
        group_plan = _plan_group(group, device, position)
        say(
            f'{position}, {group_plan.name}: {group_plan.a_device} of {group_plan.runs} runs fit a '
            'device'
        )
        groups.append(group_plan)
    if arms is None:
        return SweepPlan(topology, groups, price)
    run_counts = (arms.tune.min_budget, arms.tune.typical_runs)
    waves = cast(tuple[int, int], tuple(math.ceil(n / WAVE) for n in run_counts))
    return TunedPlan(topology, groups, price, arms.description, waves)


def _plan_group(group: list[Cell], device: Topology, position: str) -> GroupPlan:
    """Finds how many runs of a group fit a device, and estimates their step.

    Args:
      group: the runs.
      device: one device.
      position: position of the program among others, such as 'program 2 of 3', for progress.
    """
    name = ' '.join(
        f'{path}={value}'
        for path, value in group[0].changes.items()
        if path not in group[0].recipe.run_paths
    )
    steps: dict[int, CompiledStep] = {}
    run_axis = select_run_axis(group[0].recipe.config.kernels.run_axis, device.devices[0].platform)
    available = device_memory(device)

    def needed_bytes(runs):
        blueprint = build_blueprint(longest_recipe(group), device, lambda _: None, runs)
        try:
            program = ', '.join(filter(None, [position, name, format_count(runs, 'run')]))
            steps[runs] = compile_step(blueprint, device, run_axis, runs, program)
        except DoesNotFit as error:
            return error.needed
        return 0.0

    n_fitting = find_max_runs(len(group), 1, available, needed_bytes)
    return GroupPlan(name or 'all', len(group), n_fitting, estimate_step(steps[n_fitting], device))
