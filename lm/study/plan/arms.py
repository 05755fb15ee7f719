"""Plans the arms of an ablation: cells of a sweep whose tuned fields get their best values.

`config.tune` (`lm.study.plan.settings`) names the fields. An arm's runs are cells too, in folders
named by their configs; which of them come next follows from those that have ended
(`lm.study.verdicts`), so that the same command goes on wherever it was stopped.
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
    """The start of the runs of an arm. sets: fields that a protocol sets
    (`lm.study.plan.protocols`).
    """

    arm: Arm
    recipe: Recipe
    overrides: Changes


def plan_starts(
    base: Mapping[str, Any], sweep: Any, tune_config: Any, overrides: Sequence[Changes] = ()
) -> tuple[list[ArmStart], Tune]:
    """Returns where the arms start, the baseline first, and what config.tune asks for.

    Args:
      base: the config that all start from, as nested dicts.
      sweep: config.sweep, whose cells are the arms; None: one arm.
      asked: config.tune.
      sets: fields that a protocol sets, of each cell of the sweep; without one, none.

    Raises:
      ValueError: as `cells` and `lm.study.plan.settings.read` do, for a sweep over seeds or over a
        tuned field, and for an arm that does not read a tuned field.
    """
    tune = parse_tune(tune_config)
    found = expand_sweep(base, {'list': ({},)} if sweep is None else sweep)
    swept = {path for one in found for path in one.changes}
    _check_tuned_fields(found, tune)
    if seeds := swept & {*SEEDS}:
        raise ValueError(
            f'{seeds.pop()} is swept, and config.tune trains the seeds that its arms need; leave '
            'it out of config.sweep. tune.seeds is how many fresh ones a look of a verdict has'
        )
    overrides = overrides or [{}] * len(found)
    found = apply_overrides(base, found, overrides)
    starts = [_make_start(one, tune, own) for one, own in zip(found, overrides, strict=True)]
    for share, at in _length_changes(found[0].recipe, tune.lengths).items():
        own = {path: value for path, value in overrides[0].items() if path not in at}
        other = dataclasses.replace(found[0], changes=found[0].changes | at)
        starts.append(_make_start(*apply_overrides(base, [other], [own]), tune, own, share))
    return starts, tune


def _length_changes(recipe: Recipe, shares: Sequence[float]) -> dict[float, Changes]:
    """Complete runs of shares of the steps: the warm-up has the same share of each."""
    warmup = flatten(recipe).get('optim.warmup_steps')
    counts = {'train.steps': recipe.train.steps, 'optim.warmup_steps': warmup}
    counts = {path: n for path, n in counts.items() if n}
    whole, found = recipe.train.steps, {}
    for share in shares:
        found[share] = {path: max(1, round(share * n)) for path, n in counts.items()}
        if round(share * whole) < 1:
            raise ValueError(f'tune.lengths: {share:g} of {whole} steps is none; give a larger one')
    steps = [whole, *(one['train.steps'] for one in found.values())]
    if len({*steps}) < len(steps):
        raise ValueError(
            f'tune.lengths must be of different numbers of steps; got {list(shares)} of {whole}, '
            f'which are {steps[1:]}. Leave out what is there twice, and 1, which there is always.'
        )
    return found


def _check_tuned_fields(sweep_cells: Sequence[Cell], tune: Tune) -> None:
    """Raises ValueError for cells that have values of a tuned field for no purpose: they are
    centres of arms where the field is tuned around each arm's own value, and the arms differ in
    something else.
    """
    for path, given in tune.fields.items():
        if given is not None and any(path in one.changes for one in sweep_cells):
            raise ValueError(
                f'{path} is tuned and swept: config.tune has {given!r} for all arms, and the arms '
                'of config.sweep have values of their own. Leave it out of config.sweep, or write '
                f"'{path}': None in config.tune, which searches around each arm's own value"
            )
    seen: dict[tuple, Cell] = {}
    for one in sweep_cells:
        rest = tuple((p, v) for p, v in flatten(one.recipe).items() if p not in tune.fields)
        other = seen.setdefault(rest, one)
        if other is not one:
            paths = ', '.join(p for p in tune.fields if any(p in c.changes for c in (one, other)))
            raise ValueError(
                f'{paths} is tuned and swept, so that two arms differ in nothing else: '
                f'{other.changes} and {one.changes}. Leave it out of config.sweep, as each arm '
                'gets its best value, or out of config.tune'
            )


def _make_start(sweep_cell: Cell, tune: Tune, overrides: Changes, length: float = 1.0) -> ArmStart:
    name = arm_name(sweep_cell.changes)
    changes = {path: value for path, value in sweep_cell.changes.items() if path not in tune.fields}
    for path in tune.fields:
        if FIELDS[path].is_part_option and path not in sweep_cell.recipe.readers:
            raise ValueError(
                f'tune: {path} is read by no part of {name}, whose runs would be equal; all arms '
                'are searched over the same fields. Leave the field out of config.tune, or give '
                'this arm a part that reads it'
            )
    try:
        values = make_grid(tune, flatten(sweep_cell.recipe), sweep_cell.recipe.decay.row.times_lr)
    except ValueError as error:
        raise ValueError(f'{error} (arm: {name})') from error
    return ArmStart(
        Arm(arm_name(changes, length), changes, values, length), sweep_cell.recipe, overrides
    )


class ArmPlan:
    """The arms and their cells, and what the folders of these come to.

    Attributes:
      starts, tune: as `plan_starts` returns them.
      metric: the column of the losses.
      first: a cell of each arm.
      names: of folders that an earlier command began under another name than the cell's own.
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
        # What an arm does not read is refused before any is trained.
        self.first_cells = [self.make_cell(i, centre, '') for i in range(len(self.starts))]

    @property
    def arms(self) -> list[Arm]:
        return [start.arm for start in self.starts]

    @property
    def steps(self) -> list[int]:
        """Returns the steps of a run of each arm."""
        return [start.recipe.train.steps for start in self.starts]

    def make_cell(self, arm: int, point: Point, stage: str) -> Cell:
        """Returns the run of an arm at a point: seed i adds i to the seeds of the base."""
        if (arm, point) not in self._cells:
            start = self.starts[arm]
            seeds = {path: flatten(start.recipe)[path] + point.seed for path in SEEDS}
            values = start.arm.grid.values(point.k) | seeds
            made = make_cell(self._base_config, start.arm.changes | start.overrides | values, ())
            changes = start.arm.changes | values
            self._cells[arm, point] = dataclasses.replace(made, changes=changes)
        known = self._cells[arm, point]
        tuned = {'arm': arm, 'k': list(point.k), 'seed': point.seed, 'stage': stage}
        return dataclasses.replace(
            known, arm_position=tuned, name=self.folder_names.get(known.name, known.name)
        )

    def make_cells(self, runs: Sequence[tuple[int, K, int, str]]) -> list[Cell]:
        """Returns the cells of `runs`."""
        return [self.make_cell(i, Point(tuple(k), seed), stage) for i, k, seed, stage in runs]

    def load_ablation(self, workdir: Path) -> Ablation:
        """Returns what the runs in the folder of the sweep say. Their summaries are read as far as
        the waves have come: what belongs to none says nothing.
        """
        losses: list[dict[Point, float]] = [{} for _ in self.starts]
        while True:
            arms = [
                dataclasses.replace(arm, losses=dict(known))
                for arm, known in zip(self.arms, losses, strict=True)
            ]
            ablation = Ablation(self.tune, self.metric, arms)
            _, points = ablation.study.next_runs or ('', [[]] * len(arms))
            ended = [
                (i, point, loss)
                for i, asked in enumerate(points)
                for point in asked
                if point not in losses[i]
                and (loss := self._read_loss(workdir, i, point)) is not None
            ]
            if not ended:
                return ablation
            for i, point, loss in ended:
                losses[i][point] = loss

    def _read_loss(self, workdir: Path, arm: int, point: Point) -> float | None:
        return Run(workdir / self.make_cell(arm, point, '').name).loss(self.metric)

    @property
    def description(self) -> str:
        """Returns how many arms there are, and how many runs of each."""
        least, usual = self.tune.min_budget, self.tune.typical_runs
        return (
            f'{format_count(len(self.starts), "arm")} of {least} runs at least, {usual} as a rule'
        )

    def record(self) -> dict[str, Any]:
        """Returns what `sweep.json` holds of the ablation."""
        return dataclasses.asdict(self.tune) | {
            'metric': self.metric,
            'search_version': VERSION,
            'arms': [arm.record() for arm in self.arms],
        }
