"""Conclusions of a tuned ablation: what its ended runs decide, and which runs come next.

    tune      the waves of `lm.study.plan.search`, for all arms side by side
    look 1    fresh seeds of every arm at its own best values; verdicts against the first arm
    look 2    the same number again, for the baseline and the arms that look 1 left undecided

Everything follows from the settings and from the losses of complete runs.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from lm.study.plan.search import (
    DIVERGED,
    EDGE,
    Bounds,
    Losses,
    Pick,
    Point,
    Replay,
    Search,
    compute_picks,
    find_missing,
    replay_waves,
)
from lm.study.statistics import UNDECIDED, Verdict, judge_arms, seeds_needed

TUNING_LIMITED, SEED_LIMITED = 'tuning-limited', 'seed-limited'
FIRST_FRESH_SEED = 1000  # seeds below it tune; verdicts rest on seeds from it on
LOOKS = (1, 2)  # number of fresh seeds after each look, in units of Study.seeds


@dataclasses.dataclass(frozen=True)
class FreshResult:
    """Losses of an arm at its best values with the fresh seeds of all its looks."""

    losses: np.ndarray  # by seed; not finite: diverged
    verdict: Verdict | None  # None: the baseline, a length of it, or where runs diverged

    @property
    def n_diverged(self) -> int:
        """Returns the number of diverged runs."""
        return int(np.sum(~np.isfinite(self.losses)))


@dataclasses.dataclass(frozen=True)
class Study:
    """Conclusions from the losses of all arms.

    Attributes:
      search: settings of all arms.
      bounds: bounds of each arm's fields.
      losses: losses of each arm by point; seeds from FIRST_FRESH_SEED on are the fresh ones.
      is_judged: whether each arm gets a verdict; arm 0 is the baseline.
      seeds: fresh seeds of a look.
      test: test of the verdicts, HOLM or DUNNETT.
      budget: maximal number of runs of an arm.
    """

    search: Search
    bounds: Sequence[Bounds]
    losses: Sequence[Losses]
    is_judged: Sequence[bool]
    seeds: int
    test: str
    budget: float = math.inf

    @functools.cached_property
    def tuning(self) -> Replay:
        """Returns the waves of tuning."""
        return replay_waves(self.losses, self.search, self.bounds)

    @functools.cached_property
    def picks(self) -> list[Pick]:
        """Returns the best values of each arm, final once tuning has ended."""
        return compute_picks(self.tuning)

    @property
    def tuning_runs(self) -> list[int]:
        """Returns the number of runs that tuning has requested for each arm."""
        return [sum(len(w.points[i]) for w in self.tuning.waves) for i in range(len(self.losses))]

    @functools.cached_property
    def looks(self) -> list[tuple[list[list[Point]], list[FreshResult | None]]]:
        """Returns the looks so far as (points of each arm, fresh results of each arm).

        If the last look has missing runs, it has the results of the look before. Otherwise no look
        follows it.
        """
        looks: list[tuple[list[list[Point]], list[FreshResult | None]]] = []
        if self.tuning.open_wave:
            return looks
        fresh_results: list[FreshResult | None] = [None] * len(self.losses)
        for times in LOOKS:
            n = times * self.seeds
            is_alive = [DIVERGED not in pick.states for pick in self.picks]
            takes_part = self._select_arms(fresh_results, n) if looks else is_alive
            if not any(takes_part[1:]) and looks:
                break
            points = [
                [Point(pick.k, FIRST_FRESH_SEED + i) for i in range(n)] if takes else []
                for pick, takes in zip(self.picks, takes_part, strict=True)
            ]
            if find_missing(points, self.losses):
                looks.append((points, fresh_results))
                break
            fresh_results = self._add_look(points, fresh_results)
            looks.append((points, fresh_results))
        return looks

    def _select_arms(self, before: Sequence[FreshResult | None], n: int) -> list[bool]:
        """Returns whether each arm takes part in a further look: the undecided arms, with the
        baseline.
        """
        affordable = [runs + n <= self.budget for runs in self.tuning_runs]
        is_open = [
            bool(fresh and fresh.verdict and fresh.verdict.outcome == UNDECIDED) and is_affordable
            for fresh, is_affordable in zip(before, affordable, strict=True)
        ]
        is_open[0] = any(is_open) and affordable[0]
        return is_open if is_open[0] else [False] * len(is_open)

    def _add_look(
        self, points: Sequence[Sequence[Point]], before: Sequence[FreshResult | None]
    ) -> list[FreshResult | None]:
        """Adds the runs of another look to the results."""
        fresh = [
            np.array([losses[p] for p in arm_points])
            for arm_points, losses in zip(points, self.losses, strict=True)
        ]
        is_whole = [bool(len(losses)) and bool(np.all(np.isfinite(losses))) for losses in fresh]
        compared = [
            i
            for i, judged in enumerate(self.is_judged)
            if i and judged and is_whole[i] and is_whole[0]
        ]
        r = self.allowances
        verdicts = {}
        if compared:
            compared_losses = [fresh[i] for i in compared]
            outcomes = judge_arms(
                compared_losses, fresh[0], [r[i] for i in compared], r[0], self.test
            )
            verdicts = dict(zip(compared, outcomes, strict=True))
        return [
            FreshResult(losses, verdicts.get(i)) if len(losses) else earlier
            for i, (losses, earlier) in enumerate(zip(fresh, before, strict=True))
        ]

    @property
    def fresh_results(self) -> list[FreshResult | None]:
        """Returns the results of fresh seeds for each arm; None for an arm without any."""
        return self.looks[-1][1] if self.looks else [None] * len(self.losses)

    @property
    def next_runs(self) -> tuple[str, list[list[Point]]] | None:
        """Returns (stage, points of each arm) of the runs that come next; None at the end."""
        if self.tuning.open_wave:
            return self.tuning.open_wave.stage, self.tuning.open_wave.points
        if self.looks and find_missing(self.looks[-1][0], self.losses):
            return f'look {len(self.looks)}', self.looks[-1][0]
        return None

    @property
    def stages(self) -> list[dict[Point, str]]:
        """Returns {point: stage that requested it} for each arm, with the runs that come next."""
        parts = [(wave.stage, wave.points) for wave in self.tuning.waves]
        parts += [(f'look {i}', points) for i, (points, _) in enumerate(self.looks, 1)]
        stage_by_point: list[dict[Point, str]] = [{} for _ in self.losses]
        for stage, points in parts:
            for by_point, stage_points in zip(stage_by_point, points, strict=True):
                by_point.update({point: stage for point in stage_points if point not in by_point})
        return stage_by_point

    def states(self, arm: int) -> tuple[str, ...]:
        """Returns the state of an arm, in words.

        These are the states of its pick; `diverged k of n` if fresh seeds diverged, which rules out
        a verdict on means; and, for an undecided arm, what prevents a verdict: TUNING_LIMITED if
        the allowance is larger than its difference, SEED_LIMITED if more seeds would decide it.
        """
        states = list(self.picks[arm].states)
        fresh = self.fresh_results[arm]
        if fresh is None:
            return tuple(states)
        if fresh.n_diverged:
            states.append(f'diverged {fresh.n_diverged} of {len(fresh.losses)}')
        if fresh.verdict and fresh.verdict.outcome == UNDECIDED:
            if self._required_allowance(arm, fresh.verdict) > abs(fresh.verdict.difference):
                states.append(TUNING_LIMITED)
            needed = self.seeds_needed(arm, self.search.smallest_effect)
            if needed is not None and needed > fresh.verdict.n:
                states.append(SEED_LIMITED)
        return tuple(states)

    def seeds_needed(self, arm: int, smallest_effect: float) -> int | None:
        """Returns the fresh seeds that would decide an undecided arm.

        The effect to detect is the larger of its present difference and the smallest effect, less
        the allowance. Returns None for other arms, and if the allowance is larger than both, so
        that no number of seeds suffices.
        """
        fresh = self.fresh_results[arm]
        if fresh is None or fresh.verdict is None or fresh.verdict.outcome != UNDECIDED:
            return None
        effect = max(abs(fresh.verdict.difference), smallest_effect)
        effect -= self._required_allowance(arm, fresh.verdict)
        undecided = sum(
            bool(f and f.verdict and f.verdict.outcome == UNDECIDED) for f in self.fresh_results
        )
        return seeds_needed(effect, fresh.verdict.deviation, undecided) if effect > 0 else None

    def _required_allowance(self, arm: int, verdict: Verdict) -> float:
        """Returns the allowance that a verdict in the direction of the difference has to exceed."""
        return self.allowances[arm if verdict.difference > 0 else 0]

    @property
    def allowances(self) -> list[float]:
        """Returns the loss that tuning may still gain in each arm; inf at an edge."""
        return [math.inf if EDGE in pick.states else pick.allowance for pick in self.picks]
