"""Arms of an ablation: cells of a sweep whose tuned fields get their best values, by runs.

`config.tune` (`lm.tuning.settings`) names the fields. An arm's runs are cells too, in folders named
by their configs; which of them come next follows from those that have ended (`lm.tuning.study`), so
that the same command goes on wherever it was stopped.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.recipe import Recipe
from lm.config.resolve import build, flatten
from lm.record.workdir import SUMMARY, is_final, status_of
from lm.storage.files import read_json
from lm.sweep.cells import Cell, Changes, cell, cells
from lm.tuning.search import K, Point
from lm.tuning.settings import SEEDS, Grid, Tune, grid, read
from lm.tuning.study import Study

PER_BYTE_FIELDS = {'data.tokenizer', 'data.source', 'data.mixture'}  # nats a token differ in these
METRICS = {'ce': 'validation_ce', 'bits_per_byte': 'bits_per_byte'}  # column: in summary.json
BASELINE_AT = 'baseline at {} of its steps'


@dataclasses.dataclass(frozen=True)
class Arm:
    """A cell of the sweep, without values of tuned fields.

    length: of the baseline's steps, where it is the baseline at another length; 1 otherwise.
    """

    changes: Changes
    recipe: Recipe
    grid: Grid
    length: float = 1.0

    @property
    def is_judged(self) -> bool:
        """Whether it gets a verdict; a length of the baseline is for others' speed-ups."""
        return self.length == 1.0

    @property
    def name(self) -> str:
        """The changes in words."""
        if self.length != 1.0:
            return BASELINE_AT.format(f'{self.length:g}')
        return ', '.join(f'{p}={v}' for p, v in self.changes.items()) or 'the base'

    def record(self) -> dict[str, Any]:
        """Returns what `sweep.json` holds of it."""
        found = {'changes': self.changes, 'centres': dict(self.grid.centres)}
        return found | {'coupled': self.grid.coupled, 'length': self.length}


def tuned_arms(base: Mapping[str, Any], sweep: Any, asked: Any) -> tuple[list[Arm], Tune]:
    """Returns the arms, the baseline first, and what config.tune asks for.

    Args:
      base: the config that all start from, as nested dicts.
      sweep: config.sweep, whose cells are the arms; None: one arm.
      asked: config.tune.

    Raises:
      ValueError: as `cells` and `lm.tuning.settings.read` do, for a sweep over seeds or over a
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
    arms = [_arm(one, tune) for one in found]
    for share in tune.lengths:
        (shorter,) = cells(base, {'list': (found[0].changes | _at_length(found[0].recipe, share),)})
        arms.append(dataclasses.replace(_arm(shorter, tune), length=share))
    return arms, tune


def _at_length(recipe: Recipe, share: float) -> Changes:
    """A complete run of a share of the steps: the warm-up has the same share of it."""
    counts = {'train.steps': recipe.train.steps} | {
        'optim.warmup_steps': flatten(recipe).get('optim.warmup_steps')
    }
    return {path: max(1, round(share * n)) for path, n in counts.items() if n}


def _check_own_values(found: Sequence[Cell], tune: Tune) -> None:
    """Raises ValueError for cells that have values of a tuned field for no purpose: they are
    centres of arms where the field is tuned around each arm's own value, and the arms differ in
    something else.
    """
    for path, given in tune.fields.items():
        if given is not None and any(path in one.changes for one in found):
            raise ValueError(
                f'{path} is tuned and swept: config.tune has {given!r} for all arms, and the arms '
                'of config.sweep have values of their own; give one of them up'
            )
    others = [repr(_without(one.changes, tune)) for one in found]
    if len({*others}) < len(others):
        paths = ', '.join(p for p in tune.fields if any(p in one.changes for one in found))
        raise ValueError(
            f'{paths} is tuned and swept, so that arms differ in nothing else; leave it out of '
            'config.sweep, as each arm gets its best value, or out of config.tune'
        )


def _without(changes: Changes, tune: Tune) -> Changes:
    return {path: value for path, value in changes.items() if path not in tune.fields}


def _arm(one: Cell, tune: Tune) -> Arm:
    is_coupled = one.recipe.decay.row.times_lr
    try:
        values = grid(tune, flatten(one.recipe), is_coupled)
    except ValueError as error:
        raise ValueError(f'arm {one.changes}: {error}') from error
    return Arm(_without(one.changes, tune), one.recipe, values)


def metric_of(arms: Sequence[Arm]) -> str:
    """Returns the column that arms are compared by."""
    paths = {path for arm in arms for path in arm.changes}
    return 'bits_per_byte' if PER_BYTE_FIELDS & paths else 'ce'


class Ablation:
    """The arms and their runs: which cells there are so far, and what they come to.

    Attributes:
      arms, tune: as `tuned_arms` returns them.
      metric: the column of the losses.
      first: a cell of each arm.
    """

    def __init__(self, base: Mapping[str, Any], sweep: Any, asked: Any):
        self.arms, self.tune = tuned_arms(base, sweep, asked)
        self.metric = metric_of(self.arms)
        self._start, self._checked = build(base), set()
        self._cells: dict[tuple[int, Point], Cell] = {}
        centre = Point((0,) * len(self.tune.fields), 0)
        # What an arm does not read is refused before any is trained.
        self.first = [self.cell(i, centre, '') for i in range(len(self.arms))]

    def cell(self, arm: int, point: Point, stage: str) -> Cell:
        """Returns the run of an arm at a point: seed i adds i to the seeds of the base."""
        if (arm, point) not in self._cells:
            own = self.arms[arm]
            seeds = {path: flatten(own.recipe)[path] + point.seed for path in SEEDS}
            values = own.grid.values(point.k) | seeds
            self._cells[arm, point] = cell(self._start, own.changes | values, (), self._checked)
        tuned = {'arm': arm, 'k': list(point.k), 'seed': point.seed, 'stage': stage}
        return dataclasses.replace(self._cells[arm, point], tuned=tuned)

    def study(self, workdir: Path) -> Study:
        """Returns what the runs in the folder of the sweep say."""
        losses = [_Losses(self, i, workdir) for i in range(len(self.arms))]
        return study_of(self.tune, [arm.grid for arm in self.arms], losses, self._judged)

    @property
    def _judged(self) -> list[bool]:
        return [arm.is_judged for arm in self.arms]

    def runs(self, workdir: Path) -> list[tuple[int, K, int, str]]:
        """Returns (arm, place, seed, stage) of every run so far, those that come next included."""
        staged = enumerate(self.study(workdir).stages)
        return [(i, *point, stage) for i, own in staged for point, stage in own.items()]

    def cells(self, runs: Sequence[tuple[int, K, int, str]]) -> list[Cell]:
        """Returns the cells of `runs`."""
        return [self.cell(i, Point(tuple(k), seed), stage) for i, k, seed, stage in runs]

    def record(self) -> dict[str, Any]:
        """Returns what `sweep.json` holds of the ablation."""
        return dataclasses.asdict(self.tune) | {
            'metric': self.metric,
            'arms': [arm.record() for arm in self.arms],
        }


def study_of(
    tune: Tune, grids: Sequence[Grid], losses: Sequence[Mapping], judged: Sequence[bool]
) -> Study:
    """Returns the study of arms with these grids and losses."""
    searches = [tune.search(one.bounds) for one in grids]
    budget = math.inf if tune.budget is None else tune.budget
    return Study(searches, losses, judged, tune.seeds, tune.test, budget)


class _Losses(Mapping):
    """The losses of an arm's runs that have ended, read from their folders when they are asked for;
    inf for one that diverged.
    """

    def __init__(self, ablation: Ablation, arm: int, workdir: Path):
        self._ablation, self._arm, self._workdir = ablation, arm, workdir
        self._known: dict[Point, float] = {}

    def __getitem__(self, point: Point) -> float:
        if point not in self._known:
            folder = self._workdir / self._ablation.cell(self._arm, point, '').name
            if not is_final(folder):
                raise KeyError(point)
            loss = read_json(folder / SUMMARY).get(METRICS[self._ablation.metric])
            is_finite = status_of(folder) == 'done' and loss is not None
            self._known[point] = loss if is_finite else math.inf
        return self._known[point]

    def __iter__(self) -> Iterator[Point]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
