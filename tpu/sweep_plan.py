"""The plan of a sweep on a pod: runs of a device, runs at once, chip-hours."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lm.config.fields import RUN_PATHS
from lm.devices.run_axis import select_run_axis
from lm.run.program import find_max_runs
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import Cell, expand_sweep, group_by_program
from lm.study.plan.protocols import Measurements, apply_overrides, resolve_protocol
from lm.study.plan.search import WAVE
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
        return math.ceil(self.runs / self.a_device)

    @property
    def hours(self) -> float:
        """Hours that a device trains its runs."""
        return self.estimate.steps * self.estimate.step_seconds / 3600


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    topology: Topology
    groups: list[GroupPlan]
    price: float | None

    @property
    def runs(self) -> int:
        return sum(group.runs for group in self.groups)

    @property
    def at_once(self) -> int:
        """Number of runs that the whole topology trains side by side."""
        left, found = len(self.topology.devices), 0
        for group in self.groups:
            used = min(left, group.devices)
            found += min(group.runs, used * group.a_device)
            left -= used
        return found

    @property
    def device_hours(self) -> float:
        return sum(group.devices * group.hours for group in self.groups)

    @property
    def chip_hours(self) -> float:
        return self.device_hours / (self.topology.chip.devices_a_chip if self.topology.chip else 1)

    @property
    def hours(self) -> float:
        """Hours on the topology: the longest waves start first, each on the next free device."""
        free = [0.0] * len(self.topology.devices)
        waves = [group.hours for group in self.groups for _ in range(group.devices)]
        for hours in sorted(waves, reverse=True):
            first = free.index(min(free))
            free[first] += hours
        return max(free)

    def format_lines(self) -> Iterator[str]:
        for group in self.groups:
            yield (
                f'{group.name}: {group.runs} runs, {group.a_device} a device in '
                f'{format_summary(group.estimate)}; {group.hours:,.2f} hours'
            )
        yield (
            f'{self.runs} runs in {len(self.groups)} programs on {self.topology.label}: '
            f'{self.at_once} at once, {self.hours:,.2f} hours, {self.chip_hours:,.1f} '
            f'chip-hours{format_cost(self.price, self.chip_hours)}'
        )

    def record(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ('runs', 'at_once', 'hours', 'chip_hours')}
        groups = [vars(group) | {'estimate': group.estimate.record()} for group in self.groups]
        return {'topology': self.topology.label, **own, 'groups': groups}


@dataclasses.dataclass(frozen=True)
class TunedPlan(SweepPlan):
    """A sweep with config.tune: the runs of its groups are those of one wave.

    words: how many arms there are, and runs of each. waves: at least, and as a rule.
    """

    arms_label: str
    waves: tuple[int, int]

    def format_lines(self) -> Iterator[str]:
        *own, wave = super().format_lines()
        yield from own
        yield f'a wave, {WAVE} runs of each arm: {wave}'
        least, most = self.waves
        hours, chip_hours = (
            f'{least * one:,.2f} to {most * one:,.2f}' for one in (self.hours, self.chip_hours)
        )
        cost = format_cost(self.price, most * self.chip_hours)
        yield (
            f'{self.arms_label}: {least} to {most} such waves, {hours} hours, {chip_hours} chip-hours'
            f'{cost}'
        )

    def record(self) -> dict[str, Any]:
        return super().record() | {'waves': self.waves}


def plan_sweep(
    base: Mapping[str, Any],
    sweep: Any,
    topology: Topology,
    say: Say,
    price: float | None = None,
    tune: Any = None,
) -> SweepPlan:
    """Plans each run on one device, with as many side by side as fit: compiles the program of each
    group of `lm.study.train.groups` until its runs fit. With config.tune a group has the runs of
    one wave. Raises ValueError for runs that ask for several devices, and where one does not fit.

    Steps are those that the protocol of the sweep sets. One that asks for text or for measured
    times is left to where it trains.
    """
    one = dataclasses.replace(topology, devices=topology.devices[:1])
    listed, found, sets = [] if sweep is None else expand_sweep(base, sweep), [], []
    if (protocol := resolve_protocol(base, sweep)) is not None:
        if protocol.row.needs:
            say(f'NOTE: protocol {protocol.name} sets steps where it trains; these are as given')
        else:
            means = Measurements(one.devices[0].platform, read_rows=None, measure_seconds=None)
            sets = protocol.apply(listed, means).overrides
            listed = apply_overrides(base, listed, sets)
    arms = None if tune is None else ArmPlan(base, sweep, tune, sets)
    listed = listed if arms is None else arms.first_cells * WAVE
    for group in group_by_program(listed):
        plan = _plan_group(group, one)
        say(f'{plan.name}: {plan.a_device} of {plan.runs} runs a device')
        found.append(plan)
    if arms is None:
        return SweepPlan(topology, found, price)
    runs = (arms.tune.min_budget, arms.tune.typical_runs)
    waves = tuple(math.ceil(n / WAVE) for n in runs)
    return TunedPlan(topology, found, price, arms.description, waves)


def _plan_group(group: list[Cell], device: Topology) -> GroupPlan:
    steps: dict[int, CompiledStep] = {}
    how = select_run_axis(group[0].recipe.config.kernels.run_axis, device.devices[0].platform)
    there = device_memory(device)

    def excess_bytes(runs):
        made = build_blueprint(longest_recipe(group), device, lambda _: None, runs)
        try:
            steps[runs] = compile_step(made, device, how, runs)
        except DoesNotFit as error:
            return error.needed
        return 0.0

    fitting = find_max_runs(len(group), 1, there, excess_bytes)
    name = ' '.join(f'{p}={v}' for p, v in group[0].changes.items() if p not in RUN_PATHS)
    return GroupPlan(name or 'all', len(group), fitting, estimate_step(steps[fitting], device))
