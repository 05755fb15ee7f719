"""The next values of each arm of an ablation: waves of runs that follow only from ended runs.

Waves follow from the settings and from the losses of earlier waves, without random choices.
`replay_waves` recomputes them. The first wave with a missing loss is trained next. It does not
matter what else has ended, or in which order. All arms get the same number of runs in each wave,
and share its stage:

    scan     octaves around the centre, one seed
    extend   while the best value is at an edge: further octaves, and repeats of the best two; from
             the second time on only if the best is significantly better than its neighbour
    line     of several fields: steps along one of them in turn, in two cycles
    refine   half octaves on both sides of the best, and repeats of it and of its neighbours
    repeat   while the allowance is more than half the smallest effect that matters

An arm that needs fewer runs than the others in a wave gets further seeds near its best value. An
arm that diverges at every value gets no more runs, while the others continue.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lm.study.plan import surface
from lm.study.plan.curve import (
    HALF_OCTAVE,
    OCTAVE,
    Means,
    Spread,
    compute_allowance,
    compute_means,
    find_vertex,
    find_worse,
    is_all_finite,
    is_convex,
    mean_loss,
    near_best_range,
    pool_spread,
)

VERSION = 1  # one more where the same losses would ask for other runs
SCAN = tuple(i * OCTAVE for i in (-2, -1, 0, 1, 2))  # of the first field, around its centre
STEPS = (
    OCTAVE,
    OCTAVE + HALF_OCTAVE,
    OCTAVE + HALF_OCTAVE,
)  # of a line along the first, second, third field
WAVE = 5  # runs of an arm that are most useful at once
EXTENSIONS = 4  # waves beyond the edges of one line
REFINEMENTS = 3  # waves that do not extend, where the best value moves meanwhile
REPEATS = 2  # waves that do not extend
CYCLES = 2  # over several fields
FLAT_OCTAVES = 3  # a wider set of values that are as good says that the field hardly matters

LOCATED, FLAT, EDGE, CLIFF = 'located', 'flat', 'edge', 'cliff'
EXTEND = 'extend'
NOT_CONVEX, NOT_REFINED, DIVERGED = 'not convex', 'not refined', 'diverged everywhere'

K = tuple[int, ...]  # a place: the index of each tuned field's value
Bounds = Sequence[tuple[float, float]]  # lowest and highest index of each field of an arm
UNBOUNDED = (-math.inf, math.inf)


class Point(NamedTuple):
    """A run of an arm: the indices of its values, and the number of its seed."""

    k: K
    seed: int


Losses = Mapping[Point, float]  # losses of an arm; not finite if a run diverged


@dataclasses.dataclass(frozen=True)
class Search:
    """Settings that determine the waves, together with losses and bounds.

    Attributes:
      scans: indices of the first line along each tuned field, around its centre.
      smallest_effect: difference of losses that matters.
      max_runs: maximal number of runs of an arm; a wave that would exceed it is not begun.
    """

    scans: tuple[tuple[int, ...], ...] = (SCAN,)
    smallest_effect: float = 0.01
    max_runs: float = math.inf

    @property
    def n_fields(self) -> int:
        """Returns the number of tuned fields."""
        return len(self.scans)


class SearchWave(NamedTuple):
    """Runs of all arms that train together; those in `missing` have not ended yet."""

    stage: str
    points: list[list[Point]]  # by arm
    missing: list[list[Point]]


class LineSearch:
    """The ended runs of an arm, and the line along the field that is searched at present.

    Attributes:
      bounds: lowest and highest index of each field.
      losses: losses of each tried place, by seed.
      centre: a place on the line.
      field_index: field of the line; its places differ from `centre` only in this field.
      means: means along the line.
      extensions: number of waves beyond its edges.
      earlier_means: means of the last line along each other field.
    """

    def __init__(self, bounds: Bounds):
        self.bounds, self.losses = bounds, {}
        self.centre, self.field_index, self.extensions = (0,) * len(bounds), 0, 0
        self.earlier_means: dict[int, Means] = {}
        self.means = compute_means({})

    @property
    def is_dead(self) -> bool:
        """Whether all runs diverged."""
        return bool(self.losses) and not any(map(is_all_finite, self.losses.values()))

    @property
    def best_index(self) -> int:
        """The index of the lowest mean of the line."""
        return int(self.means.k[self.means.best_position])

    def place_at(self, index: int) -> K:
        """Returns the place at an index along the line."""
        return (*self.centre[: self.field_index], index, *self.centre[self.field_index + 1 :])

    def add(self, losses: Sequence[tuple[Point, float]]) -> None:
        """Adds runs that have ended, in order of seeds at each place."""
        for point, loss in losses:
            self.losses.setdefault(point.k, []).append(loss)
        self._update_means()

    def switch_field(self, field_index: int, s: float) -> None:
        """Moves the line to another field, through the minimum along the present field."""
        if field_index == self.field_index:
            return
        self.earlier_means[self.field_index] = self.means
        self.centre = self.find_minimum(s)
        self.field_index, self.extensions = field_index, EXTENSIONS if self.is_dead else 0
        self._update_means()

    def find_minimum(self, s: float) -> K:
        """Returns the place of the minimum.

        This is the minimum of the surface over several fields if it has one, else of the line. For
        a line without runs it is the centre, and for a line with only diverged runs the best place
        of all lines.
        """
        if not len(self.means.k):
            place = self.centre
        elif not len(self.means.finite.k):
            place = self.best_place
        else:
            place = self.place_at(find_vertex(self.means, s))
        finite = {k: x for k, x in self.losses.items() if is_all_finite(x)}
        if len(self.bounds) == 1 or not finite:
            return place
        steps = STEPS[: len(self.bounds)]
        moved = surface.find_minimum(finite, place, steps) or place
        return tuple(
            int(min(max(k, low), high)) for k, (low, high) in zip(moved, self.bounds, strict=True)
        )

    @property
    def means_by_field(self) -> dict[int, Means]:
        """The means along each field that has been searched."""
        return self.earlier_means | ({self.field_index: self.means} if len(self.means.k) else {})

    def allowed_indices(self, indices: Iterable[int]) -> list[int]:
        """Returns the indices of the line that its bounds allow."""
        lowest, highest = self.bounds[self.field_index]
        return [i for i in indices if lowest <= i <= highest]

    def untried_indices(self, indices: Iterable[int]) -> list[int]:
        """Returns the allowed indices that have not been tried."""
        return [i for i in self.allowed_indices(indices) if i not in self.means.k]

    def propose_runs(self, indices: Sequence[int]) -> list[Point]:
        """Returns a run with a new seed at each index; an index may occur twice."""
        counts = collections.Counter({k: len(x) for k, x in self.losses.items()})
        points = []
        for k in map(self.place_at, indices):
            points.append(Point(k, counts[k]))
            counts[k] += 1
        return points

    def fill_wave(self, points: Sequence[Point], width: int) -> list[Point]:
        """Adds further seeds of the WAVE values nearest to the best, fewest seeds first."""
        points = list(points)
        while len(points) < width:
            counts = collections.Counter(p.k for p in points)
            n = {k: len(self.losses.get(k, ())) + counts[k] for k in self._nearest_places}
            points.append(min((Point(k, n[k]) for k in n), key=lambda point: point.seed))
        return points

    @property
    def _nearest_places(self) -> list[K]:
        """The places of the line nearest to its best place, without diverged runs."""
        finite = self.means.finite
        if not len(finite.k):
            return [self.best_place]
        # A stable sort keeps ties in ascending order, so that replays propose the same runs.
        distance = np.abs(finite.k - finite.k[finite.best_position])
        return [self.place_at(int(k)) for k in finite.k[np.argsort(distance, kind='stable')[:WAVE]]]

    @property
    def best_place(self) -> K:
        """The place of the lowest mean of all lines; the centre if every place diverged."""
        if self.is_dead or not self.losses:
            return self.centre
        return min(sorted(self.losses), key=lambda k: mean_loss(self.losses[k]))

    def _update_means(self) -> None:
        """Recomputes the means of the line."""
        along = self.field_index
        on_line = {k[along]: x for k, x in self.losses.items() if self.place_at(k[along]) == k}
        self.means = compute_means(on_line)


@dataclasses.dataclass(frozen=True)
class Replay:
    """Recomputed waves; `open_wave` is the last wave if it has missing runs.

    is_refined: whether the refinement of the best values has ended.
    """

    waves: list[SearchWave]
    arms: list[LineSearch]
    open_wave: SearchWave | None
    is_refined: bool

    @property
    def spread(self) -> Spread:
        """Returns the spread over seeds, pooled over all arms and values."""
        return pool_arm_spread(self.arms)


def pool_arm_spread(arms: Sequence[LineSearch]) -> Spread:
    """Returns the spread over seeds, pooled over all values of all arms."""
    return pool_spread(x for arm in arms for x in arm.losses.values())


def replay_waves(losses: Sequence[Losses], search: Search, bounds: Sequence[Bounds]) -> Replay:
    """Recomputes the waves, up to the first with missing runs.

    Args:
      losses: losses of each arm; points outside all waves are ignored.
      search: settings of the waves.
      bounds: bounds of each arm.

    Returns:
      The waves, and the state of each arm.
    """
    tuner = _Tuner([LineSearch(arm_bounds) for arm_bounds in bounds], search)
    waves: list[SearchWave] = []
    for stage, points in tuner.propose_waves():
        waves.append(SearchWave(stage, points, find_missing(points, losses)))
        if waves[-1].missing:
            return Replay(waves, tuner.arms, waves[-1], tuner.is_refined)
        for arm, arm_points, ended in zip(tuner.arms, points, losses, strict=True):
            arm.add([(p, ended[p]) for p in arm_points])
    return Replay(waves, tuner.arms, None, tuner.is_refined)


def find_missing(points: Sequence[Sequence[Point]], losses: Sequence[Losses]) -> list[list[Point]]:
    """Returns the points without a loss, by arm; [] if there are none."""
    missing = [
        [p for p in arm_points if p not in arm_losses]
        for arm_points, arm_losses in zip(points, losses, strict=True)
    ]
    return missing if any(missing) else []


class _Tuner:
    """Proposes waves. The losses of a wave are added to `arms` before the next wave is
    requested.
    """

    def __init__(self, arms: list[LineSearch], search: Search):
        self.arms, self.search = arms, search
        self.n_runs = 0  # of each arm that goes on
        self.is_refined = False

    def propose_waves(self) -> Iterator[tuple[str, list[list[Point]]]]:
        """Yields (stage, points of each arm)."""
        for stage, along in self._stages():
            s = pool_arm_spread(self.arms).s
            for arm in self.arms:
                arm.switch_field(along, s)
            counts = [0] * len(self.arms)  # waves in which an arm did not extend
            while True:
                seed_spread = pool_arm_spread(self.arms)
                proposals = [
                    self._propose_points(stage, *arm_and_count, seed_spread)
                    for arm_and_count in zip(self.arms, counts, strict=True)
                ]
                width = max(len(points) for _, points in proposals)
                if not width:
                    break
                if self.n_runs + width > self.search.max_runs:
                    return
                self.n_runs += width
                for arm, (kind, _) in zip(self.arms, proposals, strict=True):
                    arm.extensions += kind == EXTEND
                counts = [
                    n + (kind != EXTEND) for n, (kind, _) in zip(counts, proposals, strict=True)
                ]
                kinds = {kind for kind, points in proposals if points}
                yield (
                    EXTEND if EXTEND in kinds else stage,
                    [
                        points if arm.is_dead else arm.fill_wave(points, width)
                        for arm, (_, points) in zip(self.arms, proposals, strict=True)
                    ],
                )
            self.is_refined |= stage == 'refine'

    def _stages(self) -> Iterator[tuple[str, int]]:
        """Yields the stages, with the field of each."""
        fields = range(self.search.n_fields)
        yield from (('scan', along) for along in fields)
        if self.search.n_fields > 1:
            yield from (('line', along) for _ in range(CYCLES - 1) for along in fields)
        yield 'refine', 0
        yield 'repeat', 0

    def _propose_points(
        self, stage: str, arm: LineSearch, n_waves: int, seed_spread: Spread
    ) -> tuple[str, list[Point]]:
        """Returns the kind and the points that an arm needs in this stage; [] if none.

        n_waves: number of earlier waves of this stage that did not extend.
        """
        centre = arm.centre[arm.field_index]
        if stage in ('scan', 'line') and not n_waves and not arm.is_dead:
            step = STEPS[arm.field_index]
            offsets = self.search.scans[arm.field_index] if stage == 'scan' else (-step, 0, step)
            if indices := arm.untried_indices([centre + i for i in offsets]):
                return stage, arm.propose_runs(indices)
        if points := self._propose_extension(arm, seed_spread):
            return EXTEND, points
        if arm.is_dead:
            return stage, []
        if stage == 'refine' and n_waves < REFINEMENTS:
            return stage, propose_refinement(arm)
        threshold = self.search.smallest_effect / 2
        if (
            stage == 'repeat'
            and n_waves < REPEATS
            and compute_allowance(arm.means, seed_spread) > threshold
        ):
            return stage, arm.fill_wave([], WAVE)
        return stage, []

    def _propose_extension(self, arm: LineSearch, seed_spread: Spread) -> list[Point]:
        """Returns further steps beyond an edge that has the best value; [] without one, at a bound,
        and after EXTENSIONS waves.

        With one field: three octaves, and repeats of the best value and its neighbour. From the
        second time on only repeats, unless the best is significantly better than its neighbour,
        because noise grows with the learning rate and some of many noisy runs are low by chance.
        With several fields, which make many lines: one step, then two, and so on.
        """
        side, means = edge_side(arm.means), arm.means
        if not side or arm.extensions == EXTENSIONS:
            return []
        lowest, highest = arm.bounds[arm.field_index]
        outermost = int(means.k[0] if side < 0 else means.k[-1])
        is_single = self.search.n_fields == 1
        count = 3 if is_single else 1 + arm.extensions
        steps = [outermost + side * i * STEPS[arm.field_index] for i in range(1, count + 1)]
        outward = arm.untried_indices(sorted({int(min(max(i, lowest), highest)) for i in steps}))
        inner = [
            i for i in (means.best_position, means.best_position - side) if 0 <= i < len(means.k)
        ]
        inner = [i for i in inner if math.isfinite(means.mean[i])]
        if not outward or not is_single:
            return arm.propose_runs(outward)
        is_significant = len(inner) < 2 or find_worse(means, seed_spread)[inner[1]]
        extensions = outward if is_significant or not arm.extensions else []
        return arm.propose_runs([*extensions, *(int(means.k[i]) for i in inner)])


def edge_side(means: Means) -> int:
    """Returns -1 or 1 if the best value is the lowest or highest tried, -1 if all diverged; else
    0.
    """
    if not np.any(np.isfinite(means.mean)):
        return -1 if len(means.k) else 0
    return -1 if means.best_position == 0 else 1 if means.best_position == len(means.k) - 1 else 0


def propose_refinement(arm: LineSearch) -> list[Point]:
    """Returns half octaves around the best value, and repeats of the best and of values an octave
    off.

    Returns [] if the half octaves have been tried. On a line without runs all of these are new.
    """
    if not len(arm.means.k):
        centre = arm.centre[arm.field_index]
        return arm.propose_runs(
            arm.allowed_indices(
                [centre + i for i in (-OCTAVE, -HALF_OCTAVE, 0, HALF_OCTAVE, OCTAVE)]
            )
        )
    halves = arm.untried_indices([arm.best_index - HALF_OCTAVE, arm.best_index + HALF_OCTAVE])
    finite = {int(k) for k in arm.means.finite.k}
    repeated = [
        i for i in (arm.best_index, arm.best_index - OCTAVE, arm.best_index + OCTAVE) if i in finite
    ]
    return arm.propose_runs([*halves, *repeated]) if halves else []


@dataclasses.dataclass(frozen=True)
class Pick:
    """The best values of an arm, and their uncertainty.

    Attributes:
      k: indices of the values.
      allowance: loss by which a choice with other seeds could be better, at a quantile; inf if
        unknown.
      near_best: lowest and highest index of the first field that is not significantly worse.
      states: LOCATED, or the reasons why the values are not located.
    """

    k: K
    allowance: float
    near_best: tuple[float, float]
    states: tuple[str, ...]


def compute_picks(replayed: Replay) -> list[Pick]:
    """Returns the pick of each arm from the waves so far."""
    seed_spread = replayed.spread
    return [_compute_pick(arm, seed_spread, replayed.is_refined) for arm in replayed.arms]


def _compute_pick(arm: LineSearch, seed_spread: Spread, is_refined: bool) -> Pick:
    """Returns the pick of one arm."""
    k = arm.find_minimum(seed_spread.s)
    if arm.is_dead or not arm.losses:
        return Pick(k, math.inf, UNBOUNDED, (DIVERGED if arm.is_dead else NOT_REFINED,))
    lines = {along: means for along, means in arm.means_by_field.items() if len(means.finite.k)}
    first = lines.get(0)
    low, high = near_best_range(first, seed_spread) if first else UNBOUNDED
    diverged = [place for place, x in arm.losses.items() if not is_all_finite(x)]
    holds_by_state = {
        NOT_REFINED: not is_refined,
        EDGE: any(map(edge_side, lines.values())),
        CLIFF: any(max(map(abs, np.subtract(k, diverged_k))) <= OCTAVE for diverged_k in diverged),
        FLAT: first is not None and _is_flat(first, low, high, seed_spread),
        NOT_CONVEX: not all(is_convex(means, seed_spread.s) for means in lines.values()),
    }
    states = tuple(state for state, holds in holds_by_state.items() if holds)
    allowed = [compute_allowance(means, seed_spread) for means in lines.values()]
    is_whole = len(lines) == len(arm.bounds)
    return Pick(k, sum(allowed) if is_whole else math.inf, (low, high), states or (LOCATED,))


def _is_flat(means: Means, low: float, high: float, seed_spread: Spread) -> bool:
    """Whether the values that are not worse than the best span many octaves, among those tried."""
    tried = min(high, int(means.k[-1])) - max(low, int(means.k[0]))
    return seed_spread.freedom > 0 and tried > FLAT_OCTAVES * OCTAVE
