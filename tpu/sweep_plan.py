"""The plan of a sweep on a pod: runs of a device, runs at once, chip-hours."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lm.config.fields import RUN_PATHS
from lm.devices.run_axis import run_axis
from lm.run.program import runs_that_fit
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import Cell, cells, group_by_program
from lm.study.plan.protocols import Measurements, applied, protocol_of
from lm.study.plan.search import WAVE
from lm.study.train.groups import longest
from tpu.chips import Topology
from tpu.compiled_step import (
    CompiledStep,
    DoesNotFit,
    Say,
    StepEstimate,
    blueprint_of,
    compile_step,
    cost_words,
    estimate,
    memory_of,
    summary,
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

    def lines(self) -> Iterator[str]:
        for group in self.groups:
            yield (
                f'{group.name}: {group.runs} runs, {group.a_device} a device in '
                f'{summary(group.estimate)}; {group.hours:,.2f} hours'
            )
        yield (
            f'{self.runs} runs in {len(self.groups)} programs on {self.topology.words}: '
            f'{self.at_once} at once, {self.hours:,.2f} hours, {self.chip_hours:,.1f} '
            f'chip-hours{cost_words(self.price, self.chip_hours)}'
        )

    def record(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ('runs', 'at_once', 'hours', 'chip_hours')}
        groups = [vars(group) | {'estimate': group.estimate.record()} for group in self.groups]
        return {'topology': self.topology.words, **own, 'groups': groups}


@dataclasses.dataclass(frozen=True)
class TunedPlan(SweepPlan):
    """A sweep with config.tune: the runs of its groups are those of one wave.

    words: how many arms there are, and runs of each. waves: at least, and as a rule.
    """

    words: str
    waves: tuple[int, int]

    def lines(self) -> Iterator[str]:
        *own, wave = super().lines()
        yield from own
        yield f'a wave, {WAVE} runs of each arm: {wave}'
        least, most = self.waves
        hours, chip_hours = (
            f'{least * one:,.2f} to {most * one:,.2f}' for one in (self.hours, self.chip_hours)
        )
        cost = cost_words(self.price, most * self.chip_hours)
        yield (
            f'{self.words}: {least} to {most} such waves, {hours} hours, {chip_hours} chip-hours'
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
    listed, found, sets = [] if sweep is None else cells(base, sweep), [], []
    if (protocol := protocol_of(base, sweep)) is not None:
        if protocol.row.asks:
            say(f'NOTE: protocol {protocol.name} sets steps where it trains; these are as given')
        else:
            means = Measurements(one.devices[0].platform, rows=None, seconds=None)
            sets = protocol.settled(listed, means).sets
            listed = applied(base, listed, sets)
    arms = None if tune is None else ArmPlan(base, sweep, tune, sets)
    listed = listed if arms is None else arms.first * WAVE
    for group in group_by_program(listed):
        plan = _group_plan(group, one)
        say(f'{plan.name}: {plan.a_device} of {plan.runs} runs a device')
        found.append(plan)
    if arms is None:
        return SweepPlan(topology, found, price)
    runs = (arms.tune.least_budget, arms.tune.usual_runs)
    waves = tuple(math.ceil(n / WAVE) for n in runs)
    return TunedPlan(topology, found, price, arms.words, waves)


def _group_plan(group: list[Cell], one: Topology) -> GroupPlan:
    steps: dict[int, CompiledStep] = {}
    how = run_axis(group[0].recipe.config.kernels.run_axis, one.devices[0].platform)
    there = memory_of(one)

    def needed(runs):
        made = blueprint_of(longest(group), one, lambda _: None, runs)
        try:
            steps[runs] = compile_step(made, one, how, runs)
        except DoesNotFit as error:
            return error.needed
        return 0.0

    fitting = runs_that_fit(len(group), 1, there, needed)
    name = ' '.join(f'{p}={v}' for p, v in group[0].changes.items() if p not in RUN_PATHS)
    return GroupPlan(name or 'all', len(group), fitting, estimate(steps[fitting], one))
