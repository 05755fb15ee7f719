"""The waves of a sweep: the cells that train next, once those before have ended.

A sweep without `config.tune` is a single wave. With it the next wave follows from the losses in the
folder alone (`lm.study.plan.arms`), so that the same command goes on wherever it was stopped.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.launch.distributed import broadcast_from_first, is_first
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import Cell, Changes, check_sources, expand_sweep, group_by_program
from lm.study.plan.protocols import apply_overrides
from lm.study.tables.text import format_count
from lm.study.train.throughput import program_digest

Groups = list[list[Cell]]


class PlannedWave(NamedTuple):
    """Cells that train together, none at the end, and those of all waves so far; by program."""

    groups: Groups
    all_groups: Groups

    @property
    def cells(self) -> list[Cell]:
        return list(itertools.chain(*self.groups))


class WavePlan:
    """The sweep that a config asks for.

    Args:
      base: the config that all cells start from, as nested dicts.
      sweep: config.sweep.
      tune: config.tune; None: the cells are known from the start.
      sets: fields that a protocol sets, of each cell of the sweep (`lm.study.plan.protocols`).

    Attributes:
      arms: whose runs the cells are; None without config.tune.
      first: the cells, or one of each arm, by program.
      names: of folders that an earlier command began under another name than the cell's own.
      sec: seconds of a step and run by `key_of` a cell, empty where it has not been measured.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        sweep: Any,
        tune: Any = None,
        overrides: Sequence[Changes] = (),
    ):
        self.arms = None if tune is None else ArmPlan(base, sweep, tune, overrides)
        if self.arms is None:
            first = expand_sweep(base, sweep)
            check_sources(first)
            first = apply_overrides(base, first, overrides) if overrides else first
        else:
            first = self.arms.first_cells
            check_sources(first)
        self.first_groups = group_by_program(first)
        self.folder_names: dict[str, str] = {} if self.arms is None else self.arms.folder_names
        self.sec_by_program: dict[str, float] = {}

    @property
    def record(self) -> dict[str, Any] | None:
        """Returns what sweep.json holds of the arms."""
        return None if self.arms is None else self.arms.record()

    def plan_wave(self, folder: Path) -> PlannedWave:
        """Returns the wave that comes next: what process 0 finds in the folder decides it."""
        if self.arms is None:
            every = [[self._rename_cell(cell) for cell in group] for group in self.first_groups]
            return PlannedWave(every, every)
        runs = broadcast_from_first(self._list_runs(folder) if is_first() else None)
        every = self.arms.make_cells([run for run, _ in runs])
        new = [cell for cell, (_, is_new) in zip(every, runs, strict=True) if is_new]
        return PlannedWave(group_by_program(new), group_by_program(every))

    def _rename_cell(self, cell: Cell) -> Cell:
        return dataclasses.replace(cell, name=self.folder_names.get(cell.name, cell.name))

    def _list_runs(self, folder: Path) -> list[tuple[tuple, bool]]:
        """Each run so far, and whether it is one of the next wave."""
        study = self.arms.load_ablation(folder).study
        stage, points = study.next_runs or ('', [[]] * len(study.losses))
        return [
            ((arm, *point, asked_by), point in points[arm] and asked_by == stage)
            for arm, own in enumerate(study.stages)
            for point, asked_by in own.items()
        ]

    def describe(self, wave: PlannedWave) -> str:
        """Says how large the sweep is, so far."""
        n = sum(map(len, wave.all_groups))
        if self.arms is None:
            return format_count(n, 'cell')
        arms = format_count(len(self.arms.starts), 'arm')
        return f'{arms}, {format_count(n - len(wave.cells), "cell")} trained'

    @property
    def step_sec(self) -> list[float | None]:
        """Returns the seconds of a step and run of each arm; None for one that was not measured."""
        return [self.sec_by_program.get(program_digest(cell)) for cell in self.arms.first_cells]

    def estimate_step_sec(self, wave: PlannedWave, sec: float) -> None:
        """Takes the seconds of a step and run from a wave that took `sec` in all, where they could
        not be measured: all programs count as equally fast.
        """
        steps = sum(cell.recipe.train.steps for cell in wave.cells)
        if not self.sec_by_program and steps:
            self.sec_by_program = {
                program_digest(cell): sec / steps for cell in self.arms.first_cells
            }
