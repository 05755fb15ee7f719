"""Arms of an ablation: what each changes, its runs, and what they come to at its best values.

While a sweep trains its arms are planned (`lm.study.plan.arms`), and known by the folders of their
runs; a report reads them from sweep.json and the records (`lm.study.tables.ablation`). Both are the
same arms, and what follows from their losses is decided once (`lm.study.verdicts`). Losses are in
the unit of the sweep's metric.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm.record.run import run_seconds
from lm.study.plan.curve import Means, Spread, compute_means
from lm.study.plan.search import DIVERGED, Pick, Point
from lm.study.plan.settings import Grid, Tune
from lm.study.speedup import Speedup, speedup
from lm.study.statistics import MAX_SEEDS, seeds_needed
from lm.study.verdicts import FIRST_FRESH_SEED, LOOKS, Study

UNITS = {'ce': 'nats per token', 'bits_per_byte': 'bits per byte'}
BASE_ARM = 'the base'  # the arm of a config without a sweep


@dataclasses.dataclass(frozen=True)
class Arm:
    """A cell of the sweep, without values of tuned fields, and its runs.

    length: of the baseline's steps, where it is the baseline at another length; 1 otherwise.
    losses: of the runs that have ended; inf: diverged. records: of all its cells, by point.
    """

    name: str
    changes: Mapping[str, Any]
    grid: Grid
    length: float = 1.0
    losses: Mapping[Point, float] = dataclasses.field(default_factory=dict)
    records: Mapping[Point, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """Whether it gets a verdict; a length of the baseline is for others' speed-ups."""
        return self.length == 1.0

    @property
    def tuning_losses(self) -> dict[Point, float]:
        """Returns the losses that choose values."""
        return {point: loss for point, loss in self.losses.items() if point.seed < FIRST_FRESH_SEED}

    @property
    def fresh_losses(self) -> dict[Point, float]:
        """Returns the losses that verdicts are of."""
        return {
            point: loss for point, loss in self.losses.items() if point.seed >= FIRST_FRESH_SEED
        }

    def record(self) -> dict[str, Any]:
        """Returns what `sweep.json` holds of it."""
        start = {'changes': self.changes, 'centres': dict(self.grid.centres)}
        return start | {'coupled': self.grid.coupled, 'length': self.length}


def arm_name(
    changes: Mapping[str, Any], length: float = 1.0, format_value: Callable[[Any], str] = str
) -> str:
    """Returns 'optim.name=lion', or 'the base'; 'baseline at 0.5 of its steps' at other lengths.
    write: makes a text of a value.
    """
    if length != 1.0:
        return f'baseline at {length:g} of its steps'
    return ', '.join(f'{path}={format_value(value)}' for path, value in changes.items()) or BASE_ARM


@dataclasses.dataclass(frozen=True)
class TuningLine:
    """Runs along one tuned field that have ended, others at the arm's best: means by index, and
    the losses behind them by seed; of a field that was left for another the means alone.
    """

    means: Means
    losses: Mapping[int, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Ablation:
    """A tuned sweep. arms: the baseline first. settings: what config.tune asked for, as sweep.json
    holds it.
    """

    tune: Tune
    metric: str
    arms: Sequence[Arm]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def study(self) -> Study:
        """Returns what the losses decide, and which runs come next."""
        return Study(
            self.tune.search,
            [arm.grid.bounds for arm in self.arms],
            [arm.losses for arm in self.arms],
            [arm.is_judged for arm in self.arms],
            self.tune.seeds,
            self.tune.test,
            math.inf if self.tune.budget is None else self.tune.budget,
        )

    @property
    def unit(self) -> str:
        return UNITS[self.metric]

    @property
    def spread(self) -> Spread:
        return self.study.tuning.spread

    def tuning_line(self, arm: int, field_index: int = 0) -> TuningLine:
        """Returns what has ended along a field, in a wave that goes on too."""
        search, losses = self.study.tuning.arms[arm], {}
        if field_index != search.field_index:
            return TuningLine(search.means_by_field.get(field_index, compute_means({})), losses)
        for k, seed in sorted(self.arms[arm].tuning_losses):
            if search.place_at(k[field_index]) == k:
                losses.setdefault(k[field_index], []).append(self.arms[arm].losses[Point(k, seed)])
        return TuningLine(compute_means(losses), losses)

    def value(self, arm: int, field_index: int, index: float) -> float:
        """Returns the value of a field at an index along its line."""
        path, k = list(self.tune.fields)[field_index], list(self.study.tuning.arms[arm].centre)
        k[field_index] = index
        return self.arms[arm].grid.values(tuple(k))[path]

    def is_dead(self, arm: int) -> bool:
        """Whether every run of the arm so far has diverged."""
        return DIVERGED in self.study.picks[arm].states

    def pick(self, arm: int) -> Pick | None:
        """Returns the values of an arm, provisional while tuning goes on; None before any wave has
        ended, and where all runs diverged.
        """
        begun = self.study.tuning.arms[arm].losses and not self.is_dead(arm)
        return self.study.picks[arm] if begun else None

    def values(self, arm: int) -> dict[str, float]:
        """Returns the values of an arm by field; {} without a pick."""
        pick = self.pick(arm)
        return self.arms[arm].grid.values(pick.k) if pick else {}

    def near_best_values(self, arm: int) -> tuple[float, float] | None:
        """Returns the lowest and highest value of the first field that is as good as the best: 0 or
        inf where none was tried that is worse.
        """
        pick = self.pick(arm)
        if pick is None:
            return None
        low, high = (end if math.isinf(end) else self.value(arm, 0, end) for end in pick.near_best)
        return max(low, 0.0), high

    def count_runs(self, arm: int) -> tuple[int, int]:
        """Returns how many runs have ended: for tuning, and by fresh seeds."""
        return len(self.arms[arm].tuning_losses), len(self.arms[arm].fresh_losses)

    def seconds_spent(self, arm: int) -> tuple[float, float]:
        """Returns the seconds spent in tuning and in fresh seeds. Runs that train side by side
        share their time.
        """
        records = self.arms[arm].records
        tuning, fresh = (
            sum(run_seconds(records[point]) for point in losses)
            for losses in (self.arms[arm].tuning_losses, self.arms[arm].fresh_losses)
        )
        return tuning, fresh

    def run_tokens(self, arm: int) -> float:
        """Returns the tokens that a run of the arm trains on; nan before one has ended."""
        known = [r['tokens'] for r in self.arms[arm].records.values() if r['status'] == 'done']
        return float(max(filter(None, known), default=math.nan))

    def speedup(self, arm: int) -> Speedup | None:
        """Returns the tokens the baseline needs for the loss of an arm, over the arm's; None where
        there are no lengths of the baseline, or too few fresh seeds (`lm.study.speedup`).
        """
        lengths = [i for i, one in enumerate(self.arms) if one.length != 1]
        if not lengths or self.arms[arm].length != 1 or arm == 0:
            return None
        every = [self.arms[i].fresh_losses for i in (0, *lengths, arm)]
        seeds = sorted(set.intersection(*({p.seed for p in own} for own in every)))
        losses = [[own[Point(next(iter(own)).k, seed)] for seed in seeds] for own in every if own]
        if len(losses) < len(every):
            return None
        tokens = [self.run_tokens(i) for i in (0, *lengths, arm)]
        return speedup(dict(zip(tokens[:-1], losses, strict=False)), losses[-1], tokens[-1])


def describe_budget(study: Study) -> str | None:
    """Says, once tuning has ended, which budget it takes to find the smallest effect; None before,
    and where the fresh seeds suffice. The spread of a pair is that of two runs without correlation.
    """
    tests, s = sum(study.is_judged[1:]), study.tuning.spread.s
    if study.tuning.open_wave or not tests or not s:
        return None
    effect, runs = study.search.smallest_effect, max(study.tuning_runs)
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
    if needed > MAX_SEEDS:
        return f'{said}it takes more than {MAX_SEEDS}; a larger effect, or longer runs'
    options = [f'tune.seeds={least}'] if least > study.seeds else []
    options += [f'tune.budget={runs + LOOKS[-1] * least}'] if is_limited else []
    return f'{said}it takes up to {needed}, fewer where arms vary together: {", ".join(options)}'
