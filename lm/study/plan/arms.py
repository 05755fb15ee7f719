"""Plans the arms of an ablation: cells of a sweep whose tuned fields get their best values.

`config.tune` (`lm.study.plan.settings`) names the fields. The runs of an arm are cells too, in
folders named by their configs. `lm.study.verdicts` derives the next runs from the ended ones, so
the same command resumes wherever it was stopped.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.fields import FIELDS
from lm.config.recipe import Recipe
from lm.config.resolve import build_config, flatten
from lm.record.run import Run
from lm.study.arm import Ablation, Arm, arm_name
from lm.study.plan.cells import Cell, Changes, expand_sweep, make_cell
from lm.study.plan.protocols import apply_overrides
from lm.study.plan.search import VERSION, K, Point
from lm.study.plan.settings import SEEDS, Tune, make_grid, parse_tune, select_metric
from lm.study.tables.text import format_count


@dataclasses.dataclass(frozen=True)
class ArmStart:
    """The start of the runs of an arm.

    Attributes:
      arm: the arm, without losses.
      recipe: its recipe before any tuned value is set.
      overrides: fields that a protocol sets (`lm.study.plan.protocols`).
    """

    arm: Arm
    recipe: Recipe
    overrides: Changes


def plan_starts(
    base: Mapping[str, Any], sweep: Any, tune_config: Any, overrides: Sequence[Changes] = ()
) -> tuple[list[ArmStart], Tune]:
    """Returns the starts of the arms, the baseline first, and the settings of config.tune.

    Args:
      base: the config that all arms start from, as nested dicts.
      sweep: config.sweep, with the arms as its cells; None: one arm.
      tune_config: config.tune.
      overrides: fields that a protocol sets in each cell of the sweep; () without a protocol.

    Returns:
      (starts, settings).

    Raises:
      ValueError: as `expand_sweep` and `lm.study.plan.settings.parse_tune` do; for a sweep over
        seeds or over a tuned field; and for an arm that does not read a tuned field.
    """
    tune = parse_tune(tune_config)
    arm_cells = expand_sweep(base, {'list': ({},)} if sweep is None else sweep)
    swept = {path for cell in arm_cells for path in cell.changes}
    _check_tuned_fields(arm_cells, tune)
    if seeds := swept & {*SEEDS}:
        raise ValueError(
            f'{seeds.pop()} must not be in config.sweep, because config.tune chooses the seeds. '
            'Leave it out; tune.seeds sets the number of fresh seeds per look'
        )
    overrides = overrides or [{}] * len(arm_cells)
    arm_cells = apply_overrides(base, arm_cells, overrides)
    starts = [
        _make_start(cell, tune, cell_overrides)
        for cell, cell_overrides in zip(arm_cells, overrides, strict=True)
    ]
    for share, changes in _length_changes(arm_cells[0].recipe, tune.lengths).items():
        length_overrides = {
            path: value for path, value in overrides[0].items() if path not in changes
        }
        at_length = dataclasses.replace(arm_cells[0], changes=arm_cells[0].changes | changes)
        starts.append(
            _make_start(
                *apply_overrides(base, [at_length], [length_overrides]),
                tune,
                length_overrides,
                share,
            )
        )
    return starts, tune


def _length_changes(recipe: Recipe, shares: Sequence[float]) -> dict[float, Changes]:
    """Returns the changes for complete runs over shares of the steps. Warm-up keeps its share of a
    run.
    """
    warmup = flatten(recipe).get('optim.warmup_steps')
    counts = {'train.steps': recipe.train.steps, 'optim.warmup_steps': warmup}
    counts = {path: n for path, n in counts.items() if n}
    total, by_share = recipe.train.steps, {}
    for share in shares:
        by_share[share] = {path: max(1, round(share * n)) for path, n in counts.items()}
        if round(share * total) < 1:
            raise ValueError(
                f'tune.lengths: {share:g} of {total} steps rounds to 0; use a larger share'
            )
    steps = [total, *(changes['train.steps'] for changes in by_share.values())]
    if len({*steps}) < len(steps):
        raise ValueError(
            f'tune.lengths must give different numbers of steps; got {list(shares)} of {total}, '
            f'which are {steps[1:]}. Leave out duplicates, and 1, which is always included.'
        )
    return by_share


def _check_tuned_fields(sweep_cells: Sequence[Cell], tune: Tune) -> None:
    """Raises ValueError for cells with superfluous values of a tuned field.

    A cell may set a tuned field if the field is tuned around each arm's own value, which is then
    the centre of the arm, and if the arms differ in another field as well.
    """
    for path, setting in tune.fields.items():
        if setting is not None and any(path in cell.changes for cell in sweep_cells):
            raise ValueError(
                f'{path} is tuned and swept: config.tune has {setting!r} for all arms, but '
                'config.sweep has a value for each arm. Leave it out of config.sweep, or set '
                f"'{path}': None in config.tune to search around each arm's value"
            )
    by_rest: dict[tuple, Cell] = {}
    for cell in sweep_cells:
        other_values = tuple(
            (p, v) for p, v in flatten(cell.recipe).items() if p not in tune.fields
        )
        twin = by_rest.setdefault(other_values, cell)
        if twin is not cell:
            paths = ', '.join(p for p in tune.fields if any(p in c.changes for c in (cell, twin)))
            raise ValueError(
                f'{paths} is tuned and swept, and two arms differ in nothing else: '
                f'{twin.changes} and {cell.changes}. Leave it out of config.sweep, because tuning '
                'finds the best value of each arm, or out of config.tune'
            )


def _make_start(cell: Cell, tune: Tune, overrides: Changes, length: float = 1.0) -> ArmStart:
    """Returns the start of an arm. length: steps over the steps of the baseline."""
    name = arm_name(cell.changes)
    changes = {path: value for path, value in cell.changes.items() if path not in tune.fields}
    for path in tune.fields:
        if FIELDS[path].is_part_option and path not in cell.recipe.readers:
            raise ValueError(
                f'tune: no part of {name} reads {path}, so all its runs would be equal. All arms '
                'are tuned over the same fields: leave this field out of config.tune, or choose a '
                'part for this arm that reads it'
            )
    try:
        arm_grid = make_grid(tune, flatten(cell.recipe), cell.recipe.decay.row.times_lr)
    except ValueError as error:
        raise ValueError(f'{error} (arm: {name})') from error
    return ArmStart(
        Arm(arm_name(changes, length), changes, arm_grid, length), cell.recipe, overrides
    )


class ArmPlan:
    """The arms, their cells, and the results in the cells' folders.

    Args:
      base: the config that all arms start from, as nested dicts.
      sweep: config.sweep.
      tune_config: config.tune.
      overrides: fields that a protocol sets in each cell of the sweep.

    Attributes:
      starts: starts of the arms, from `plan_starts`.
      tune: settings of config.tune.
      metric: the column of the losses.
      first_cells: a cell of each arm.
      folder_names: cell name -> folder name, for cells that an earlier command began under another
        name.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        sweep: Any,
        tune_config: Any,
        overrides: Sequence[Changes] = (),
    ):
        self.starts, self.tune = plan_starts(base, sweep, tune_config, overrides)
        self.metric = select_metric({path for arm in self.arms for path in arm.changes})
        self.folder_names: dict[str, str] = {}
        self._base_config = build_config(base)
        self._cells: dict[tuple[int, Point], Cell] = {}
        centre = Point((0,) * len(self.tune.fields), 0)
        # Raises an error for fields that an arm does not read before any arm is trained.
        self.first_cells = [self.make_cell(i, centre, '') for i in range(len(self.starts))]

    @property
    def arms(self) -> list[Arm]:
        """Returns the arms, without losses."""
        return [start.arm for start in self.starts]

    @property
    def steps(self) -> list[int]:
        """Returns the steps of a run of each arm."""
        return [start.recipe.train.steps for start in self.starts]

    def make_cell(self, arm: int, point: Point, stage: str) -> Cell:
        """Returns the run of an arm at a point. Seed i adds i to the seeds of the base.

        Args:
          arm: position of the arm.
          point: values and seed of the run.
          stage: stage that requests the run.

        Returns:
          The cell.
        """
        if (arm, point) not in self._cells:
            start = self.starts[arm]
            seeds = {path: flatten(start.recipe)[path] + point.seed for path in SEEDS}
            values = start.arm.grid.values(point.k) | seeds
            new_cell = make_cell(
                self._base_config, start.arm.changes | start.overrides | values, ()
            )
            changes = start.arm.changes | values
            self._cells[arm, point] = dataclasses.replace(new_cell, changes=changes)
        cell = self._cells[arm, point]
        tuned = {'arm': arm, 'k': list(point.k), 'seed': point.seed, 'stage': stage}
        return dataclasses.replace(
            cell, arm_position=tuned, name=self.folder_names.get(cell.name, cell.name)
        )

    def make_cells(self, runs: Sequence[tuple[int, K, int, str]]) -> list[Cell]:
        """Returns the cells of runs (arm, indices, seed, stage)."""
        return [self.make_cell(i, Point(tuple(k), seed), stage) for i, k, seed, stage in runs]

    def load_ablation(self, workdir: Path) -> Ablation:
        """Returns the ablation with the losses of the runs in the sweep's folder.

        Only the summaries of runs that belong to a wave are read.
        """
        losses: list[dict[Point, float]] = [{} for _ in self.starts]
        while True:
            arms = [
                dataclasses.replace(arm, losses=dict(arm_losses))
                for arm, arm_losses in zip(self.arms, losses, strict=True)
            ]
            ablation = Ablation(self.tune, self.metric, arms)
            _, points = ablation.study.next_runs or ('', [[]] * len(arms))
            ended = [
                (i, point, loss)
                for i, arm_points in enumerate(points)
                for point in arm_points
                if point not in losses[i]
                and (loss := self._read_loss(workdir, i, point)) is not None
            ]
            if not ended:
                return ablation
            for i, point, loss in ended:
                losses[i][point] = loss

    def _read_loss(self, workdir: Path, arm: int, point: Point) -> float | None:
        """Returns the loss of a run; None if it has not ended."""
        return Run(workdir / self.make_cell(arm, point, '').name).loss(self.metric)

    @property
    def description(self) -> str:
        """Returns the number of arms, and of runs of each."""
        min_runs, typical_runs = self.tune.min_budget, self.tune.typical_runs
        return (
            f'{format_count(len(self.starts), "arm")}, at least {min_runs} runs per arm (usually '
            f'{typical_runs})'
        )

    def record(self) -> dict[str, Any]:
        """Returns the ablation's entry of `sweep.json`."""
        return dataclasses.asdict(self.tune) | {
            'metric': self.metric,
            'search_version': VERSION,
            'arms': [arm.record() for arm in self.arms],
        }
