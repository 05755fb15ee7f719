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
from lm.config.resolve import build, flatten
from lm.record.run import Run
from lm.study.arm import Ablation, Arm, arm_name
from lm.study.plan.cells import Cell, Changes, cell, cells
from lm.study.plan.protocols import applied
from lm.study.plan.search import VERSION, K, Point
from lm.study.plan.settings import SEEDS, Tune, grid, metric_of_axes, read
from lm.study.tables.text import counted


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of the runs of an arm. sets: fields that a protocol sets
    (`lm.study.plan.protocols`).
    """

    arm: Arm
    recipe: Recipe
    sets: Changes


def plan_starts(
    base: Mapping[str, Any], sweep: Any, asked: Any, sets: Sequence[Changes] = ()
) -> tuple[list[Start], Tune]:
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
    tune = read(asked)
    found = cells(base, {'list': ({},)} if sweep is None else sweep)
    swept = {path for one in found for path in one.changes}
    _check_own_values(found, tune)
    if seeds := swept & {*SEEDS}:
        raise ValueError(
            f'{seeds.pop()} is swept, and config.tune trains the seeds that its arms need; leave '
            'it out of config.sweep. tune.seeds is how many fresh ones a look of a verdict has'
        )
    sets = sets or [{}] * len(found)
    found = applied(base, found, sets)
    starts = [_start(one, tune, own) for one, own in zip(found, sets, strict=True)]
    for share, at in _at_lengths(found[0].recipe, tune.lengths).items():
        own = {path: value for path, value in sets[0].items() if path not in at}
        other = dataclasses.replace(found[0], changes=found[0].changes | at)
        starts.append(_start(*applied(base, [other], [own]), tune, own, share))
    return starts, tune


def _at_lengths(recipe: Recipe, shares: Sequence[float]) -> dict[float, Changes]:
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


def _check_own_values(found: Sequence[Cell], tune: Tune) -> None:
    """Raises ValueError for cells that have values of a tuned field for no purpose: they are
    centres of arms where the field is tuned around each arm's own value, and the arms differ in
    something else.
    """
    for path, given in tune.fields.items():
        if given is not None and any(path in one.changes for one in found):
            raise ValueError(
                f'{path} is tuned and swept: config.tune has {given!r} for all arms, and the arms '
                'of config.sweep have values of their own. Leave it out of config.sweep, or write '
                f"'{path}': None in config.tune, which searches around each arm's own value"
            )
    seen: dict[tuple, Cell] = {}
    for one in found:
        rest = tuple((p, v) for p, v in flatten(one.recipe).items() if p not in tune.fields)
        other = seen.setdefault(rest, one)
        if other is not one:
            paths = ', '.join(p for p in tune.fields if any(p in c.changes for c in (one, other)))
            raise ValueError(
                f'{paths} is tuned and swept, so that two arms differ in nothing else: '
                f'{other.changes} and {one.changes}. Leave it out of config.sweep, as each arm '
                'gets its best value, or out of config.tune'
            )


def _start(one: Cell, tune: Tune, sets: Changes, length: float = 1.0) -> Start:
    name = arm_name(one.changes)
    changes = {path: value for path, value in one.changes.items() if path not in tune.fields}
    for path in tune.fields:
        if FIELDS[path].of_parts and path not in one.recipe.readers:
            raise ValueError(
                f'tune: {path} is read by no part of {name}, whose runs would be equal; all arms '
                'are searched over the same fields. Leave the field out of config.tune, or give '
                'this arm a part that reads it'
            )
    try:
        values = grid(tune, flatten(one.recipe), one.recipe.decay.row.times_lr)
    except ValueError as error:
        raise ValueError(f'{error} (arm: {name})') from error
    return Start(Arm(arm_name(changes, length), changes, values, length), one.recipe, sets)


class ArmPlan:
    """The arms and their cells, and what the folders of these come to.

    Attributes:
      starts, tune: as `plan_starts` returns them.
      metric: the column of the losses.
      first: a cell of each arm.
      names: of folders that an earlier command began under another name than the cell's own.
    """

    def __init__(
        self, base: Mapping[str, Any], sweep: Any, asked: Any, sets: Sequence[Changes] = ()
    ):
        self.starts, self.tune = plan_starts(base, sweep, asked, sets)
        self.metric = metric_of_axes({path for arm in self.arms for path in arm.changes})
        self.names: dict[str, str] = {}
        self._start = build(base)
        self._cells: dict[tuple[int, Point], Cell] = {}
        centre = Point((0,) * len(self.tune.fields), 0)
        # What an arm does not read is refused before any is trained.
        self.first = [self.cell(i, centre, '') for i in range(len(self.starts))]

    @property
    def arms(self) -> list[Arm]:
        return [start.arm for start in self.starts]

    @property
    def steps(self) -> list[int]:
        """Returns the steps of a run of each arm."""
        return [start.recipe.train.steps for start in self.starts]

    def cell(self, arm: int, point: Point, stage: str) -> Cell:
        """Returns the run of an arm at a point: seed i adds i to the seeds of the base."""
        if (arm, point) not in self._cells:
            start = self.starts[arm]
            seeds = {path: flatten(start.recipe)[path] + point.seed for path in SEEDS}
            values = start.arm.grid.values(point.k) | seeds
            made = cell(self._start, start.arm.changes | start.sets | values, ())
            changes = start.arm.changes | values
            self._cells[arm, point] = dataclasses.replace(made, changes=changes)
        known = self._cells[arm, point]
        tuned = {'arm': arm, 'k': list(point.k), 'seed': point.seed, 'stage': stage}
        return dataclasses.replace(known, tuned=tuned, name=self.names.get(known.name, known.name))

    def cells(self, runs: Sequence[tuple[int, K, int, str]]) -> list[Cell]:
        """Returns the cells of `runs`."""
        return [self.cell(i, Point(tuple(k), seed), stage) for i, k, seed, stage in runs]

    def read(self, workdir: Path) -> Ablation:
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
            _, points = ablation.study.open or ('', [[]] * len(arms))
            ended = [
                (i, point, loss)
                for i, asked in enumerate(points)
                for point in asked
                if point not in losses[i] and (loss := self._loss(workdir, i, point)) is not None
            ]
            if not ended:
                return ablation
            for i, point, loss in ended:
                losses[i][point] = loss

    def _loss(self, workdir: Path, arm: int, point: Point) -> float | None:
        return Run(workdir / self.cell(arm, point, '').name).loss(self.metric)

    @property
    def words(self) -> str:
        """Returns how many arms there are, and how many runs of each."""
        least, usual = self.tune.least_budget, self.tune.usual_runs
        return f'{counted(len(self.starts), "arm")} of {least} runs at least, {usual} as a rule'

    def record(self) -> dict[str, Any]:
        """Returns what `sweep.json` holds of the ablation."""
        return dataclasses.asdict(self.tune) | {
            'metric': self.metric,
            'search_version': VERSION,
            'arms': [arm.record() for arm in self.arms],
        }
