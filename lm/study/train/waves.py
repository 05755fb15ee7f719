"""The waves of a sweep: the cells that train next, once the earlier cells have ended.

A sweep without `config.tune` is a single wave. With it the next wave follows only from the losses
in the folder (`lm.study.plan.arms`), so that the same command resumes wherever it was stopped.
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
from lm.study.train.costs import StudyCosts

Groups = list[list[Cell]]


class PlannedWave(NamedTuple):
    """Cells that train together, and the cells of all waves so far, both by program.

    `groups` is empty once all have ended.
    """

    groups: Groups
    all_groups: Groups

    @property
    def cells(self) -> list[Cell]:
        """Returns the cells of this wave."""
        return list(itertools.chain(*self.groups))


class WavePlan:
    """The sweep that a config describes.

    Args:
      base: the config that all cells start from, as nested dicts.
      sweep: config.sweep.
      tune: config.tune; None: all cells are known from the start.
      overrides: fields that a protocol sets in each cell of the sweep (`lm.study.plan.protocols`).

    Attributes:
      arms: the plan of the arms; None without config.tune.
      first_groups: the cells, or a cell of each arm, by program.
      folder_names: cell name -> folder name, for cells that an earlier command began under another
        name.
      costs: time of the arms' runs, as far as it is known.
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
        self.costs = StudyCosts([] if self.arms is None else self.arms.first_cells)

    @property
    def record(self) -> dict[str, Any] | None:
        """Returns the entry of the arms in sweep.json."""
        return None if self.arms is None else self.arms.record()

    def plan_wave(self, folder: Path) -> PlannedWave:
        """Returns the next wave, which follows from the content of the folder on process 0."""
        if self.arms is None:
            groups = [[self._rename_cell(cell) for cell in group] for group in self.first_groups]
            return PlannedWave(groups, groups)
        runs = broadcast_from_first(self._list_runs(folder) if is_first() else None)
        cells = self.arms.make_cells([run for run, _ in runs])
        next_cells = [cell for cell, (_, is_new) in zip(cells, runs, strict=True) if is_new]
        return PlannedWave(group_by_program(next_cells), group_by_program(cells))

    def _rename_cell(self, cell: Cell) -> Cell:
        """Returns the cell with the name of its folder."""
        return dataclasses.replace(cell, name=self.folder_names.get(cell.name, cell.name))

    def _list_runs(self, folder: Path) -> list[tuple[tuple, bool]]:
        """Returns each run so far, and whether it belongs to the next wave."""
        assert self.arms is not None  # without arms there is a single wave
        study = self.arms.load_ablation(folder).study
        stage, points = study.next_runs or ('', [[]] * len(study.losses))
        return [
            ((arm, *point, run_stage), point in points[arm] and run_stage == stage)
            for arm, stage_by_point in enumerate(study.stages)
            for point, run_stage in stage_by_point.items()
        ]

    def describe(self, wave: PlannedWave) -> str:
        """Returns the present size of the sweep as text."""
        n = sum(map(len, wave.all_groups))
        if self.arms is None:
            return format_count(n, 'cell')
        arms = format_count(len(self.arms.starts), 'arm')
        return f'{arms}, {format_count(n - len(wave.cells), "cell")} trained'
