"""Arms of an ablation: cells of a sweep whose tuned fields get their best values, by runs.

`config.tune` (`lm.study.plan.settings`) names the fields. An arm's runs are cells too, in folders
named by their configs; which of them come next follows from those that have ended
(`lm.study.verdicts`), so that the same command goes on wherever it was stopped.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.fields import FIELDS
from lm.config.recipe import Recipe
from lm.config.resolve import build, flatten
from lm.record.run import Run
from lm.record.workdir import SUMMARY
from lm.storage.files import read_json
from lm.study.plan.cells import Cell, Changes, cell, cells
from lm.study.plan.protocols import applied
from lm.study.plan.search import VERSION, K, Point
from lm.study.plan.settings import SEEDS, Grid, Tune, grid, metric_of_axes, read
from lm.study.statistics import MOST_SEEDS, seeds_needed
from lm.study.verdicts import LOOKS, Study

METRICS = {'ce': 'validation_ce', 'bits_per_byte': 'bits_per_byte'}  # column: in summary.json


@dataclasses.dataclass(frozen=True)
class Arm:
    """A cell of the sweep, without values of tuned fields.

    length: of the baseline's steps, where it is the baseline at another length; 1 otherwise. sets:
    fields that a protocol sets (`lm.study.plan.protocols`).
    """

    changes: Changes
    recipe: Recipe
    grid: Grid
    length: float = 1.0
    sets: Changes = dataclasses.field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """Whether it gets a verdict; a length of the baseline is for others' speed-ups."""
        return self.length == 1.0

    @property
    def name(self) -> str:
        """The changes in words."""
        return arm_name(self.changes, self.length)

    def record(self) -> dict[str, Any]:
        """Returns what `sweep.json` holds of it."""
        found = {'changes': self.changes, 'centres': dict(self.grid.centres)}
        return found | {'coupled': self.grid.coupled, 'length': self.length}


def tuned_arms(
    base: Mapping[str, Any], sweep: Any, asked: Any, sets: Sequence[Changes] = ()
) -> tuple[list[Arm], Tune]:
    """Returns the arms, the baseline first, and what config.tune asks for.

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
    arms = [_arm(one, tune, own) for one, own in zip(found, sets, strict=True)]
    for share, at in _at_lengths(found[0].recipe, tune.lengths).items():
        own = {path: value for path, value in sets[0].items() if path not in at}
        other = dataclasses.replace(found[0], changes=found[0].changes | at)
        arm = _arm(*applied(base, [other], [own]), tune, own)
        arms.append(dataclasses.replace(arm, length=share))
    return arms, tune


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


def _without(changes: Changes, tune: Tune) -> Changes:
    return {path: value for path, value in changes.items() if path not in tune.fields}


def arm_name(changes: Changes, length: float = 1.0) -> str:
    """Returns 'optim.name=lion', or 'the base'; 'baseline at 0.5 of its steps' at other lengths."""
    if length != 1.0:
        return f'baseline at {length:g} of its steps'
    return ', '.join(f'{path}={value}' for path, value in changes.items()) or 'the base'


def _arm(one: Cell, tune: Tune, sets: Changes) -> Arm:
    name, changes = arm_name(one.changes), _without(one.changes, tune)
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
    return Arm(changes, one.recipe, values, sets=sets)


class Ablation:
    """The arms and their runs: which cells there are so far, and what they come to.

    Attributes:
      arms, tune: as `tuned_arms` returns them.
      metric: the column of the losses.
      first: a cell of each arm.
    """

    def __init__(
        self, base: Mapping[str, Any], sweep: Any, asked: Any, sets: Sequence[Changes] = ()
    ):
        self.arms, self.tune = tuned_arms(base, sweep, asked, sets)
        self.metric = metric_of_axes({path for arm in self.arms for path in arm.changes})
        self._start = build(base)
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
            made = cell(self._start, own.changes | own.sets | values, ())
            self._cells[arm, point] = dataclasses.replace(made, changes=own.changes | values)
        tuned = {'arm': arm, 'k': list(point.k), 'seed': point.seed, 'stage': stage}
        return dataclasses.replace(self._cells[arm, point], tuned=tuned)

    def rename(self, named: Cell) -> bool:
        """Gives a run the name of its folder where an earlier command began it under another;
        returns whether that was news.
        """
        at = named.tuned['arm'], Point(tuple(named.tuned['k']), named.tuned['seed'])
        is_new = self._cells[at].name != named.name
        self._cells[at] = dataclasses.replace(self._cells[at], name=named.name)
        return is_new

    def study(self, workdir: Path) -> Study:
        """Returns what the runs in the folder of the sweep say."""
        losses = [_Losses(self, i, workdir) for i in range(len(self.arms))]
        return study_of(self.tune, [arm.grid for arm in self.arms], losses, self._judged)

    @property
    def _judged(self) -> list[bool]:
        return [arm.is_judged for arm in self.arms]

    def cells(self, runs: Sequence[tuple[int, K, int, str]]) -> list[Cell]:
        """Returns the cells of `runs`."""
        return [self.cell(i, Point(tuple(k), seed), stage) for i, k, seed, stage in runs]

    @property
    def words(self) -> str:
        """Returns how many arms there are, and how many runs of each."""
        least, usual, n = self.tune.least_budget, self.tune.usual_runs, len(self.arms)
        return f'{n} {"arms" if n > 1 else "arm"} of {least} runs at least, {usual} as a rule'

    def record(self) -> dict[str, Any]:
        """Returns what `sweep.json` holds of the ablation."""
        return dataclasses.asdict(self.tune) | {
            'metric': self.metric,
            'search_version': VERSION,
            'arms': [arm.record() for arm in self.arms],
        }


def study_of(
    tune: Tune, grids: Sequence[Grid], losses: Sequence[Mapping], judged: Sequence[bool]
) -> Study:
    """Returns the study of arms with these grids and losses."""
    bounds = [one.bounds for one in grids]
    budget = math.inf if tune.budget is None else tune.budget
    return Study(tune.search, bounds, losses, judged, tune.seeds, tune.test, budget)


def budget_words(study: Study) -> str | None:
    """Says, once tuning has ended, which budget it takes to find the smallest effect; None before,
    and where the fresh seeds suffice. The spread of a pair is that of two runs without correlation.
    """
    tests, s = sum(study.judged[1:]), study.tuned.spread.s
    if study.tuned.open or not tests or not s:
        return None
    effect, runs = study.search.smallest_effect, max(study.runs)
    looks = [n for n in (i * study.seeds for i in LOOKS) if runs + n <= study.budget]
    needed = seeds_needed(effect, math.sqrt(2) * s, tests)
    if needed <= looks[-1]:
        return None
    least = max(study.seeds, math.ceil(needed / LOOKS[-1]))
    is_limited = math.isfinite(study.budget)
    limit = f'tune.budget={study.budget}' if is_limited else f'tune.seeds={study.seeds}'
    said = (
        f'{limit} leaves {looks[-1]} fresh seeds of an arm: to find smallest_effect {effect:g} at '
        f'a spread of {s:.2g} '
    )
    if needed > MOST_SEEDS:
        return f'{said}it takes more than {MOST_SEEDS}; a larger effect, or longer runs'
    options = [f'tune.seeds={least}'] if least > study.seeds else []
    options += [f'tune.budget={runs + LOOKS[-1] * least}'] if is_limited else []
    return f'{said}it takes up to {needed}, fewer where arms vary together: {", ".join(options)}'


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
            if not Run(folder).is_final:
                raise KeyError(point)
            loss = read_json(folder / SUMMARY).get(METRICS[self._ablation.metric])
            is_finite = Run(folder).status == 'done' and loss is not None
            self._known[point] = loss if is_finite else math.inf
        return self._known[point]

    def __iter__(self) -> Iterator[Point]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
