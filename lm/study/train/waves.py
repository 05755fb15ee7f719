"""The waves of a sweep: the cells that train next, once those before have ended.

A sweep without `config.tune` is a single wave. With it the next wave follows from the losses in the
folder alone (`lm.study.arm`), so that the same command goes on wherever it was stopped. `sets` are
the fields that a protocol sets, of each cell of the sweep (`lm.study.plan.protocols`).
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.launch.distributed import from_first, is_first
from lm.study.arm import Ablation
from lm.study.plan.cells import Cell, Changes, cells, find_text, group_by_program
from lm.study.plan.protocols import applied
from lm.study.train import words
from lm.study.train.throughput import key_of

Groups = list[list[Cell]]


class Wave(NamedTuple):
    """Cells that train together, none at the end, and those of all waves so far; by program."""

    groups: Groups
    every: Groups

    @property
    def cells(self) -> list[Cell]:
        return list(itertools.chain(*self.groups))

    def renamed(self, every: Groups) -> 'Wave':
        """Returns the wave with the names that its cells have in the folder of the sweep."""
        both = zip(itertools.chain(*self.every), itertools.chain(*every), strict=True)
        now = {before.name: cell for before, cell in both}
        return Wave([[now[cell.name] for cell in group] for group in self.groups], every)


class Plain:
    """A sweep whose cells are known from the start."""

    is_tuned = False
    record: dict[str, Any] | None = None

    def __init__(self, base: Mapping[str, Any], sweep: Any, sets: Sequence[Changes] = ()):
        found = cells(base, sweep)
        find_text(found)
        self.first = group_by_program(applied(base, found, sets) if sets else found)

    def wave(self, folder: Path) -> Wave:
        """Returns the one wave that there is."""
        del folder
        return Wave(self.first, self.first)

    def rename(self, every: Groups) -> bool:
        """Takes the names that cells have in the folder; returns whether the wave changes by it."""
        del every
        return False

    def caption(self, wave: Wave) -> str:
        """Says how large the sweep is."""
        return words.counted(sum(map(len, wave.every)), 'cell')


class Tuned:
    """A sweep whose cells are the arms of an ablation.

    first: a cell of each arm. record: what sweep.json holds of it. sec: seconds of a step and run
    by `key_of` a cell, empty where it has not been measured.
    """

    is_tuned = True

    def __init__(
        self, base: Mapping[str, Any], sweep: Any, tune: Any, sets: Sequence[Changes] = ()
    ):
        self.ablation = Ablation(base, sweep, tune, sets)
        find_text(self.ablation.first)
        self.first = group_by_program(self.ablation.first)
        self.record = self.ablation.record()
        self.sec: dict[str, float] = {}

    def wave(self, folder: Path) -> Wave:
        """Returns the wave that comes next: what process 0 finds in the folder decides it."""
        found = from_first(self._runs(folder) if is_first() else None)
        every = self.ablation.cells([run for run, _ in found])
        new = [cell for cell, (_, is_new) in zip(every, found, strict=True) if is_new]
        return Wave(group_by_program(new), group_by_program(every))

    def _runs(self, folder: Path) -> list[tuple[tuple, bool]]:
        """Each run so far, and whether it is one of the next wave."""
        study = self.ablation.study(folder)
        stage, points = study.open or ('', [[]] * len(study.losses))
        return [
            ((arm, *point, asked_by), point in points[arm] and asked_by == stage)
            for arm, own in enumerate(study.stages)
            for point, asked_by in own.items()
        ]

    def rename(self, every: Groups) -> bool:
        """Takes the names that cells have in the folder; returns whether the wave changes by it, as
        runs have ended under names of an earlier command.
        """
        return any([self.ablation.rename(cell) for cell in itertools.chain(*every)])

    def caption(self, wave: Wave) -> str:
        """Says how large the sweep is so far."""
        n = sum(map(len, wave.every)) - len(wave.cells)
        arms = words.counted(len(self.ablation.arms), 'arm')
        return f'{arms}, {words.counted(n, "cell")} trained'

    @property
    def step_sec(self) -> list[float | None]:
        """Returns the seconds of a step and run of each arm; None for one that was not measured."""
        return [self.sec.get(key_of(cell)) for cell in self.ablation.first]

    def take_pace(self, wave: Wave, sec: float) -> None:
        """Takes the seconds of a step and run from a wave that took `sec` in all, where they could
        not be measured: all programs count as equally fast.
        """
        steps = sum(cell.recipe.train.steps for cell in wave.cells)
        if not self.sec and steps:
            self.sec = {key_of(cell): sec / steps for cell in self.ablation.first}

    def costs(self) -> list[str]:
        """Says what all of it takes."""
        return words.costs(self.ablation, self.step_sec)

    def announced(self, folder: Path) -> list[str]:
        """Says which wave comes next."""
        return words.announced(self.ablation, self.ablation.study(folder), self.step_sec)

    def states(self, folder: Path) -> list[str]:
        """Says what is known of each arm."""
        return words.states(self.ablation, self.ablation.study(folder))

    def spent(self, folder: Path) -> list[str]:
        """Says what each arm has taken."""
        return words.spent(self.ablation, self.ablation.study(folder), folder)
