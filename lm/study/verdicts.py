"""An ablation with tuned arms: what its runs so far decide, and which come next.

    tune      the waves of `lm.study.plan.search`, all arms side by side
    look 1    fresh seeds of every arm at its own values; verdicts against the first arm
    look 2    as many again of the baseline and of the arms that look 1 left undecided

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
FIRST_FRESH_SEED = 1000  # number of the first seed that verdicts are of
LOOKS = (1, 2)  # times the seeds of a look


@dataclasses.dataclass(frozen=True)
class FreshResult:
    """Fresh losses of an arm at its values: of all looks it took part in."""

    losses: np.ndarray  # by seed; not finite: diverged
    verdict: Verdict | None  # None: the baseline, a length of it, or where runs diverged

    @property
    def n_diverged(self) -> int:
        """Returns how many of its runs diverged."""
        return int(np.sum(~np.isfinite(self.losses)))


@dataclasses.dataclass(frozen=True)
class Study:
    """Conclusions from the losses of all arms.

    search: settings of all arms. bounds: of each arm. losses: of each arm by point; seeds from
    FRESH on are those of verdicts. judged: which arms get a verdict; arm 0 is the baseline. seeds:
    of a look. test: of verdicts. budget: runs of an arm at most.
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
        """Returns the values of each arm, once tuning has ended."""
        return compute_picks(self.tuning)

    @property
    def tuning_runs(self) -> list[int]:
        """Returns how many runs of each arm tuning has asked for."""
        return [sum(len(w.points[i]) for w in self.tuning.waves) for i in range(len(self.losses))]

    @functools.cached_property
    def looks(self) -> list[tuple[list[list[Point]], list[FreshResult | None]]]:
        """Returns the looks so far: the points of each arm, and what is known behind them; the last
        look has runs that are missing, or there is none after it.
        """
        found: list[tuple[list[list[Point]], list[FreshResult | None]]] = []
        if self.tuning.open_wave:
            return found
        known: list[FreshResult | None] = [None] * len(self.losses)
        for times in LOOKS:
            n = times * self.seeds
            is_alive = [DIVERGED not in pick.states for pick in self.picks]
            takes_part = self._select_arms(known, n) if found else is_alive
            if not any(takes_part[1:]) and found:
                break
            points = [
                [Point(pick.k, FIRST_FRESH_SEED + i) for i in range(n)] if takes else []
                for pick, takes in zip(self.picks, takes_part, strict=True)
            ]
            if find_missing(points, self.losses):
                found.append((points, known))
                break
            known = self._add_look(points, known)
            found.append((points, known))
        return found

    def _select_arms(self, results: Sequence[FreshResult | None], n: int) -> list[bool]:
        """Whether a further look is for each arm: the undecided ones, with the baseline."""
        affordable = [runs + n <= self.budget for runs in self.tuning_runs]
        found = [
            bool(one and one.verdict and one.verdict.outcome == UNDECIDED) and can
            for one, can in zip(results, affordable, strict=True)
        ]
        found[0] = any(found) and affordable[0]
        return found if found[0] else [False] * len(found)

    def _add_look(
        self, points: Sequence[Sequence[Point]], results: Sequence[FreshResult | None]
    ) -> list[FreshResult | None]:
        """Adds the runs of one more look to what is known."""
        fresh = [
            np.array([losses[p] for p in own])
            for own, losses in zip(points, self.losses, strict=True)
        ]
        is_whole = [bool(len(own)) and bool(np.all(np.isfinite(own))) for own in fresh]
        compared = [
            i
            for i, judged in enumerate(self.is_judged)
            if i and judged and is_whole[i] and is_whole[0]
        ]
        r = self.allowances
        verdicts = {}
        if compared:
            own = [fresh[i] for i in compared]
            said = judge_arms(own, fresh[0], [r[i] for i in compared], r[0], self.test)
            verdicts = dict(zip(compared, said, strict=True))
        return [
            FreshResult(own, verdicts.get(i)) if len(own) else before
            for i, (own, before) in enumerate(zip(fresh, results, strict=True))
        ]

    @property
    def fresh_results(self) -> list[FreshResult | None]:
        """Returns what fresh seeds say of each arm so far."""
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
        """Returns the runs of each arm so far, those that come next included, and what asked for
        each.
        """
        parts = [(wave.stage, wave.points) for wave in self.tuning.waves]
        parts += [(f'look {i}', points) for i, (points, _) in enumerate(self.looks, 1)]
        found: list[dict[Point, str]] = [{} for _ in self.losses]
        for stage, points in parts:
            for own, asked in zip(found, points, strict=True):
                own.update({point: stage for point in asked if point not in own})
        return found

    def states(self, arm: int) -> tuple[str, ...]:
        """Returns what is known of an arm, in words: the states of its pick; `diverged k of n`
        where fresh seeds did, which leaves no verdict on means; and of an undecided arm what stands
        in the way of a verdict: TUNING_LIMITED where the allowance is larger than its difference,
        SEED_LIMITED where more seeds would find one.
        """
        found = list(self.picks[arm].states)
        one = self.fresh_results[arm]
        if one is None:
            return tuple(found)
        if one.n_diverged:
            found.append(f'diverged {one.n_diverged} of {len(one.losses)}')
        if one.verdict and one.verdict.outcome == UNDECIDED:
            if self._required_allowance(arm, one.verdict) > abs(one.verdict.difference):
                found.append(TUNING_LIMITED)
            needed = self.seeds_needed(arm, self.search.smallest_effect)
            if needed is not None and needed > one.verdict.n:
                found.append(SEED_LIMITED)
        return tuple(found)

    def seeds_needed(self, arm: int, smallest_effect: float) -> int | None:
        """Returns the fresh seeds that would decide an undecided arm: by its difference as it is,
        or by the smallest effect where that is larger, less the allowance. None for others, and
        where the allowance is larger than both, so that no number of seeds would do.
        """
        one = self.fresh_results[arm]
        if one is None or one.verdict is None or one.verdict.outcome != UNDECIDED:
            return None
        effect = max(abs(one.verdict.difference), smallest_effect)
        effect -= self._required_allowance(arm, one.verdict)
        undecided = sum(
            bool(c and c.verdict and c.verdict.outcome == UNDECIDED) for c in self.fresh_results
        )
        return seeds_needed(effect, one.verdict.deviation, undecided) if effect > 0 else None

    def _required_allowance(self, arm: int, verdict: Verdict) -> float:
        """The allowance that a verdict on the side of the difference has to exceed."""
        return self.allowances[arm if verdict.difference > 0 else 0]

    @property
    def allowances(self) -> list[float]:
        """Returns what tuning left open of each arm; inf at an edge."""
        return [math.inf if EDGE in pick.states else pick.allowance for pick in self.picks]
