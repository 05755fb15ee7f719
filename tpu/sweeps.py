"""What a sweep takes of a pod: runs a chip, chips at once, chip-hours."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lm.many import run_axis
from lm.run.program import runs_that_fit
from lm.sections import RUN_PATHS
from lm.sweep.cells import Cell, cells, groups
from lm.sweep.group import longest
from tpu.compiled import DoesNotFit, Step, blueprint_of, compile_step, memory_of
from tpu.estimate import Estimate, estimate
from tpu.topology import Topology


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Runs that share a program. a_device: how many of them one device trains at once."""

    name: str
    runs: int
    a_device: int
    estimate: Estimate

    @property
    def devices(self) -> int:
        return math.ceil(self.runs / self.a_device)

    @property
    def hours(self) -> float:
        """Of one of its devices."""
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
        """Runs that the whole topology trains side by side."""
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
        chip = self.topology.chip
        return self.device_hours / (chip.devices_a_chip if chip else 1)

    @property
    def hours(self) -> float:
        """Of the topology, each device taking the next wave when it is free: the longest first."""
        free = [0.0] * len(self.topology.devices)
        waves = [group.hours for group in self.groups for _ in range(group.devices)]
        for hours in sorted(waves, reverse=True):
            first = free.index(min(free))
            free[first] += hours
        return max(free)

    def lines(self) -> Iterator[str]:
        for group in self.groups:
            found = group.estimate
            yield (
                f'{group.name}: {group.runs} runs, {group.a_device} a device in '
                f'{found.memory_needed / 2**30:.2f} of {found.memory_there / 2**30:.2f} GiB; a '
                f'step of them takes at least {1e3 * found.step_seconds:,.1f} ms, utilisation at '
                f'most {found.mfu:.1%}; {group.hours:,.2f} hours'
            )
        cost = '' if self.price is None else f', {self.price * self.chip_hours:,.0f} at its price'
        yield (
            f'{self.runs} runs in {len(self.groups)} programs on {self.topology.words}: '
            f'{self.at_once} at once, {self.hours:,.2f} hours, {self.chip_hours:,.1f} '
            f'chip-hours{cost}'
        )

    def record(self) -> dict[str, Any]:
        return {
            'topology': self.topology.words,
            'runs': self.runs,
            'at_once': self.at_once,
            'hours': self.hours,
            'chip_hours': self.chip_hours,
            'groups': [
                {
                    'name': group.name,
                    'runs': group.runs,
                    'a_device': group.a_device,
                    'estimate': group.estimate.record(),
                }
                for group in self.groups
            ],
        }


def plan_sweep(
    base: Mapping[str, Any],
    sweep: Any,
    topology: Topology,
    say: Callable[[str], None],
    price: float | None = None,
) -> SweepPlan:
    """Each run on one device, as many side by side as fit: the programs of `lm.sweep.group`, one of
    each group compiled for one run and then for as many as fit.

    Raises ValueError for runs that ask for several devices, and where one does not fit.
    """
    one = dataclasses.replace(topology, devices=topology.devices[:1])
    found = []
    for group in groups(cells(base, sweep)):
        plan = _group_plan(group, one)
        say(f'{plan.name}: {plan.a_device} of {plan.runs} runs a device')
        found.append(plan)
    return SweepPlan(topology, found, price)


def _group_plan(group: list[Cell], one: Topology) -> GroupPlan:
    steps: dict[int, Step] = {}
    how = run_axis(group[0].recipe.config.kernels.run_axis, one.devices[0].platform)
    there = memory_of(one)

    def needed(runs):
        made = blueprint_of(longest(group), one, lambda _: None, runs)
        try:
            steps[runs] = compile_step(made, one, how, runs)
        except DoesNotFit as error:
            return error.needed
        return 0.0

    wanted = len(group)
    fitting = runs_that_fit(wanted, 1, there, needed)
    name = ' '.join(f'{p}={v}' for p, v in group[0].changes.items() if p not in RUN_PATHS)
    return GroupPlan(name or 'all', wanted, fitting, estimate(steps[fitting], one))
