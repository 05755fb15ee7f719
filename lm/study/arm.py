"""Arms of an ablation: their changes, their runs, and their losses at their best values.

While a sweep trains, `lm.study.plan.arms` plans its arms and finds their runs by folder. A report
reads the same arms from sweep.json and the records (`lm.study.tables.ablation`).
`lm.study.verdicts` draws the conclusions for both. Losses are in the unit of the sweep's metric.
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
    """A cell of the sweep without values of tuned fields, and its runs.

    Attributes:
      name: text that identifies the arm, see `arm_name`.
      changes: fields in which the arm differs from the base, by path.
      grid: values that its tuned fields may take.
      length: steps of the arm over steps of the baseline, if it is the baseline at another length;
        else 1.
      losses: losses of ended runs by point; inf if a run diverged.
      records: records of all its cells by point.
    """

    name: str
    changes: dict[str, Any]
    grid: Grid
    length: float = 1.0
    losses: Mapping[Point, float] = dataclasses.field(default_factory=dict)
    records: Mapping[Point, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """Whether the arm gets a verdict. A length of the baseline serves the speed-ups of other
        arms.
        """
        return self.length == 1.0

    @property
    def tuning_losses(self) -> dict[Point, float]:
        """Returns the losses that choose values."""
        return {point: loss for point, loss in self.losses.items() if point.seed < FIRST_FRESH_SEED}

    @property
    def fresh_losses(self) -> dict[Point, float]:
        """Returns the losses of fresh seeds, on which verdicts rest."""
        return {
            point: loss for point, loss in self.losses.items() if point.seed >= FIRST_FRESH_SEED
        }

    def record(self) -> dict[str, Any]:
        """Returns the entry of the arm in `sweep.json`."""
        start = {'changes': self.changes, 'centres': dict(self.grid.centres)}
        return start | {'coupled': self.grid.coupled, 'length': self.length}


def arm_name(
    changes: Mapping[str, Any], length: float = 1.0, format_value: Callable[[Any], str] = str
) -> str:
    """Returns the name of an arm: 'optim.name=lion', 'the base', or 'baseline at 0.5 of its steps'.

    Args:
      changes: fields in which the arm differs from the base, by path.
      length: steps of the arm over steps of the baseline.
      format_value: function from a value to its text.

    Returns:
      The changes as text; `BASE_ARM` without changes; the length if it is not 1.
    """
    if length != 1.0:
        return f'baseline at {length:g} of its steps'
    return ', '.join(f'{path}={format_value(value)}' for path, value in changes.items()) or BASE_ARM


@dataclasses.dataclass(frozen=True)
class TuningLine:
    """Ended runs along one tuned field, with the arm's best values in all other fields.

    Attributes:
      means: mean loss by index.
      losses: losses of the seeds by index; empty for a field that the search has left.
    """

    means: Means
    losses: Mapping[int, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Ablation:
    """A tuned sweep.

    Attributes:
      tune: settings of the search.
      metric: column of the losses.
      arms: the arms, the baseline first.
      settings: config.tune as stored in sweep.json.
    """

    tune: Tune
    metric: str
    arms: Sequence[Arm]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def study(self) -> Study:
        """Returns the conclusions from the losses, and the runs that come next."""
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
        """Returns the ended runs along a field, including runs of an unfinished wave."""
        search, losses = self.study.tuning.arms[arm], {}
        if field_index != search.field_index:
            return TuningLine(search.means_by_field.get(field_index, compute_means({})), losses)
        for k, seed in sorted(self.arms[arm].tuning_losses):
            if search.place_at(k[field_index]) == k:
                losses.setdefault(k[field_index], []).append(self.arms[arm].losses[Point(k, seed)])
        return TuningLine(compute_means(losses), losses)

    def value(self, arm: int, field_index: int, index: float) -> float:
        """Returns the value of a field at an index along its line.

        Args:
          arm: position of the arm.
          field_index: position of the tuned field.
          index: eighths of an octave from the centre; need not be an integer.

        Returns:
          The value of the field.
        """
        path = list(self.tune.fields)[field_index]
        k: list[float] = list(self.study.tuning.arms[arm].centre)
        k[field_index] = index
        return self.arms[arm].grid.values(tuple(k))[path]

    def is_dead(self, arm: int) -> bool:
        """Whether every run of the arm so far has diverged."""
        return DIVERGED in self.study.picks[arm].states

    def pick(self, arm: int) -> Pick | None:
        """Returns the best values of an arm, which are provisional until tuning ends.

        Returns None before the first wave has ended, and if all runs diverged.
        """
        begun = self.study.tuning.arms[arm].losses and not self.is_dead(arm)
        return self.study.picks[arm] if begun else None

    def values(self, arm: int) -> dict[str, float]:
        """Returns the best values of an arm by field; {} without a pick."""
        pick = self.pick(arm)
        return self.arms[arm].grid.values(pick.k) if pick else {}

    def near_best_values(self, arm: int) -> tuple[float, float] | None:
        """Returns the lowest and highest value of the first field that is not worse than the best.

        An end is 0 or inf if no value tried on that side is worse.
        """
        pick = self.pick(arm)
        if pick is None:
            return None
        low, high = (end if math.isinf(end) else self.value(arm, 0, end) for end in pick.near_best)
        return max(low, 0.0), high

    def count_runs(self, arm: int) -> tuple[int, int]:
        """Returns the number of ended runs: (tuning, fresh seeds)."""
        return len(self.arms[arm].tuning_losses), len(self.arms[arm].fresh_losses)

    def seconds_spent(self, arm: int) -> tuple[float, float]:
        """Returns the seconds spent on (tuning, fresh seeds). Concurrent runs share their time."""
        records = self.arms[arm].records
        tuning, fresh = (
            sum(run_seconds(records[point]) for point in losses)
            for losses in (self.arms[arm].tuning_losses, self.arms[arm].fresh_losses)
        )
        return tuning, fresh

    def run_tokens(self, arm: int) -> float:
        """Returns the tokens of one run of the arm; nan until a run has ended."""
        tokens = [r['tokens'] for r in self.arms[arm].records.values() if r['status'] == 'done']
        return float(max(filter(None, tokens), default=math.nan))

    def speedup(self, arm: int) -> Speedup | None:
        """Returns the tokens that the baseline needs to reach an arm's loss, divided by the arm's
        tokens.

        Returns None if there are no lengths of the baseline, or too few fresh seeds
        (`lm.study.speedup`).
        """
        lengths = [i for i, a in enumerate(self.arms) if a.length != 1]
        if not lengths or self.arms[arm].length != 1 or arm == 0:
            return None
        fresh_losses = [self.arms[i].fresh_losses for i in (0, *lengths, arm)]
        seeds = sorted(set.intersection(*({p.seed for p in by_point} for by_point in fresh_losses)))
        losses = [
            [by_point[Point(next(iter(by_point)).k, seed)] for seed in seeds]
            for by_point in fresh_losses
            if by_point
        ]
        if len(losses) < len(fresh_losses):
            return None
        tokens = [self.run_tokens(i) for i in (0, *lengths, arm)]
        return speedup(dict(zip(tokens[:-1], losses, strict=False)), losses[-1], tokens[-1])


def describe_budget(study: Study) -> str | None:
    """Returns advice on the budget that can detect the smallest effect; None if none is needed.

    Returns None until tuning has ended, and if the fresh seeds suffice. The spread of a paired
    difference is estimated as if both runs were uncorrelated.
    """
    tests, s = sum(study.is_judged[1:]), study.tuning.spread.s
    if study.tuning.open_wave or not tests or not s:
        return None
    effect, runs = study.search.smallest_effect, max(study.tuning_runs)
    looks = [n for n in (i * study.seeds for i in LOOKS) if runs + n <= study.budget]
    needed = seeds_needed(effect, math.sqrt(2) * s, tests)
    if needed <= looks[-1]:
        return None
    look_seeds = max(study.seeds, math.ceil(needed / LOOKS[-1]))
    is_limited = math.isfinite(study.budget)
    limit = f'tune.budget={study.budget}' if is_limited else f'tune.seeds={study.seeds}'
    shortfall = (
        f'{limit} leaves {looks[-1]} fresh seeds per arm, but detecting smallest_effect {effect:g} '
        f'at a spread of {s:.2g} takes '
    )
    if needed > MAX_SEEDS:
        return f'{shortfall}more than {MAX_SEEDS}. Choose a larger effect, or train longer'
    options = [f'tune.seeds={look_seeds}'] if look_seeds > study.seeds else []
    options += [f'tune.budget={runs + LOOKS[-1] * look_seeds}'] if is_limited else []
    return (
        f"{shortfall}up to {needed} (fewer if the arms' losses are correlated over seeds). Set "
        f'{", ".join(options)}'
    )
