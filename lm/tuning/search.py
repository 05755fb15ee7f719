"""The values that each arm of an ablation trains at next: waves of runs, from what has ended alone.

Waves follow from the settings and from the losses of earlier waves; nothing is drawn. `replay`
makes them again: where a loss of a wave is missing, that wave is what has to be trained, whatever
else has ended and in whatever order. All arms get as many runs in each wave, and share its stage:

    scan     octaves around the centre, one seed
    extend   while the best value is at an edge: further octaves, and repeats of the best two
    line     of several fields: octaves along one of them in turn, in two cycles
    refine   half octaves on both sides of the best, and repeats of it and of its neighbours
    repeat   while the allowance is more than half the smallest effect that matters

An arm that needs less than the others in a wave gets further seeds near its best value.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lm.tuning.curve import (
    HALF,
    OCTAVE,
    Means,
    Spread,
    allowance,
    as_good,
    is_convex,
    means_of,
    spread,
    vertex,
)

SCAN = (-2, -1, 0, 1, 2)  # octaves
WAVE = 5  # runs of an arm that are most useful at once
EXTENSIONS = 4  # waves in one stage
REFINEMENTS = 3  # waves, where the best value moves meanwhile
REPEATS = 2  # waves that an arm asks for
CYCLES = 2  # over several fields
STEPS = (OCTAVE, OCTAVE + HALF, OCTAVE + HALF)  # of a line along the first, second, third field
FLAT = 3  # octaves: a wider set of values that are as good says that the field hardly matters

LOCATED, FLAT_STATE, EDGE, CLIFF = 'located', 'flat', 'edge', 'cliff'
NOT_CONVEX, DIVERGED = 'not convex', 'diverged everywhere'

K = tuple[int, ...]  # the place of a value: an index for each tuned field


class Point(NamedTuple):
    """A run of an arm: the place of its values, and the number of its seed."""

    k: K
    seed: int


Losses = Mapping[Point, float]  # not finite: diverged


@dataclasses.dataclass(frozen=True)
class Search:
    """Settings that the waves follow from, besides losses.

    fields: how many are tuned. scans: the octaves of the first line along each of them.
    bounds: lowest and highest index of each that may be tried. smallest_effect: of losses, that
    matters. most_runs: of an arm; a wave that would exceed it is not begun.
    """

    fields: int = 1
    scans: tuple[tuple[int, ...], ...] = (SCAN,)
    bounds: tuple[tuple[float, float], ...] = ((-math.inf, math.inf),)
    smallest_effect: float = 0.01
    most_runs: float = math.inf


class Wave(NamedTuple):
    """Runs of all arms that are trained together; those of `missing` have not ended yet."""

    stage: str
    points: list[list[Point]]  # by arm
    missing: list[list[Point]]


@dataclasses.dataclass
class Line:
    """The values of an arm along one field, through `centre`."""

    centre: K
    along: int = 0
    known: dict[Point, float] = dataclasses.field(default_factory=dict)  # of the arm, on all lines

    def place(self, index: int) -> K:
        """Returns the place of an index along the line."""
        return (*self.centre[: self.along], index, *self.centre[self.along + 1 :])

    def by_index(self) -> dict[int, list[float]]:
        """Returns the losses of each index of the line, by seed."""
        found: dict[int, list[float]] = {}
        for k, seed in sorted(self.known):
            if self.place(k[self.along]) == k:
                found.setdefault(k[self.along], []).append(self.known[Point(k, seed)])
        return found

    @property
    def means(self) -> Means:
        return means_of(self.by_index())

    @property
    def is_dead(self) -> bool:
        """Whether all runs of the line diverged."""
        return bool(self.known) and not len(self.means.finite.k)

    def next_seeds(self, indices: Sequence[int]) -> list[Point]:
        """Returns a run of each index, with seeds that it has not had; an index may come twice."""
        counts = collections.Counter({i: len(x) for i, x in self.by_index().items()})
        found = []
        for index in indices:
            found.append(Point(self.place(index), counts[index]))
            counts[index] += 1
        return found


@dataclasses.dataclass(frozen=True)
class Replay:
    """Waves that have been made again: the last one is `open` if runs of it are missing."""

    waves: list[Wave]
    lines: list[Line]  # the last of each arm
    earlier: list[list[Line]]  # along other fields, the last of each
    open: Wave | None

    @property
    def spread(self) -> Spread:
        """Returns the spread over seeds, pooled over all arms and values."""
        return spread([x for line in self.lines for x in samples(line.known)])


def samples(known: Losses) -> list[list[float]]:
    """Returns the losses of each place, by seed."""
    found: dict[K, list[float]] = {}
    for k, seed in sorted(known):
        found.setdefault(k, []).append(known[Point(k, seed)])
    return list(found.values())


def replay(arms: Sequence[Losses], searches: Sequence[Search]) -> Replay:
    """Makes the waves again, up to the first that has not wholly ended.

    Args:
      arms: the losses of each arm. What belongs to no wave is not read.
      searches: what the waves of each arm follow from; they differ in their bounds alone.
    """
    tuner = _Tuner([Line((0,) * searches[0].fields) for _ in arms], searches)
    waves: list[Wave] = []
    for stage, points in tuner.waves():
        missing = [
            [p for p in own if p not in losses] for own, losses in zip(points, arms, strict=True)
        ]
        waves.append(Wave(stage, points, missing))
        if any(missing):
            return Replay(waves, tuner.lines, tuner.earlier, waves[-1])
        for line, own, losses in zip(tuner.lines, points, arms, strict=True):
            line.known.update({p: losses[p] for p in own})
    return Replay(waves, tuner.lines, tuner.earlier, None)


class _Tuner:
    """Proposes waves; whoever takes one adds its losses to `lines` before the next."""

    def __init__(self, lines: list[Line], searches: Sequence[Search]):
        self.lines, self.search = lines, searches[0]
        self.bounds = [one.bounds for one in searches]
        self.earlier: list[list[Line]] = [[] for _ in lines]
        self.runs = 0  # of each arm

    def waves(self) -> Iterator[tuple[str, list[list[Point]]]]:
        for stage, along in self._stages():
            self._turn(along)
            asked = [collections.Counter() for _ in self.lines]
            while True:
                wants = [
                    self._wanted(stage, *one)
                    for one in zip(self.lines, self.bounds, asked, strict=True)
                ]
                width = max(len(points) for _, points in wants)
                if not width:
                    break
                if self.runs + width > self.search.most_runs:
                    return
                self.runs += width
                for count, (kind, _) in zip(asked, wants, strict=True):
                    count[kind] += 1
                kinds = [kind for kind, points in wants if points]
                yield (
                    'extend' if 'extend' in kinds else stage,
                    [
                        [] if line.is_dead and not own else filled(line, own, width)
                        for line, (_, own) in zip(self.lines, wants, strict=True)
                    ],
                )

    def _stages(self) -> Iterator[tuple[str, int]]:
        """Stages, and the field that each is along."""
        if self.search.fields > 1:
            for cycle in range(CYCLES):
                for along in range(self.search.fields):
                    yield ('line' if cycle else 'scan'), along
        else:
            yield 'scan', 0
        yield 'refine', 0
        yield 'repeat', 0

    def _turn(self, along: int) -> None:
        """Turns lines to another field, at the minimum along the last one."""
        s = spread([x for line in self.lines for x in samples(line.known)]).s
        for i, line in enumerate(self.lines):
            if line.along == along:
                continue
            self.earlier[i] = [one for one in self.earlier[i] if one.along != line.along]
            self.earlier[i].append(Line(line.centre, line.along, dict(line.known)))
            at = 0 if line.is_dead else vertex(line.means, s)
            self.lines[i] = Line(line.place(at), along, line.known)

    def _wanted(
        self,
        stage: str,
        line: Line,
        bounds: Sequence[tuple[float, float]],
        asked: collections.Counter,
    ) -> tuple[str, list[Point]]:
        """The kind and the points of what an arm needs in this stage; none if it needs nothing."""
        lowest, highest = bounds[line.along]
        here, means = line.centre[line.along], line.means
        if stage in ('scan', 'line'):
            octaves = self.search.scans[line.along] if self._is_first(stage, line) else (-1, 0, 1)
            step = OCTAVE if self._is_first(stage, line) else STEPS[line.along]
            indices = [here + i * step for i in octaves]
            new = [i for i in indices if i not in means.k and lowest <= i <= highest]
            if new and not asked[stage]:
                return stage, line.next_seeds(new)
        side = edge(means)
        if side and asked['extend'] < EXTENSIONS:
            points = extension(line, side, lowest, highest)
            if points:
                return 'extend', points
        if line.is_dead:
            return '', []
        best = int(means.k[means.best])
        if stage == 'refine' and asked[stage] < REFINEMENTS:
            halves = [i for i in (best - HALF, best + HALF) if i not in means.k]
            halves = [i for i in halves if lowest <= i <= highest]
            if halves:
                return stage, refinement(line, halves)
        if stage == 'repeat' and asked[stage] < REPEATS:
            s = spread([x for one in self.lines for x in samples(one.known)]).s
            if allowance(means, s) > self.search.smallest_effect / 2:
                return stage, filled(line, [], WAVE)
        return '', []

    def _is_first(self, stage: str, line: Line) -> bool:
        return stage == 'scan' and (line.along == 0 or len(self.search.scans[line.along]) > 3)


def edge(means: Means) -> int:
    """Returns -1 or 1 where the best value is the lowest or highest tried, -1 where all diverged;
    else 0.
    """
    if not len(means.finite.k):
        return -1
    return -1 if means.best == 0 else 1 if means.best == len(means.k) - 1 else 0


def extension(line: Line, side: int, lowest: float, highest: float) -> list[Point]:
    """Returns three octaves beyond an edge, and repeats of the best value and its neighbour."""
    means = line.means
    outermost = int(means.k[0] if side < 0 else means.k[-1])
    outward = [outermost + side * i * OCTAVE for i in (1, 2, 3)]
    outward = [i for i in outward if lowest <= i <= highest]
    if not outward or line.is_dead:
        return line.next_seeds(outward)
    near = means.finite
    neighbour = near.best - side
    inner = [int(near.k[i]) for i in (near.best, neighbour) if 0 <= i < len(near.k)]
    return line.next_seeds([*outward, *inner])


def refinement(line: Line, halves: Sequence[int]) -> list[Point]:
    """Returns half octaves, and repeats of the best value and of those an octave off."""
    means = line.means
    best = int(means.k[means.best])
    finite = {int(k) for k in means.finite.k}
    repeated = [i for i in (best, best - OCTAVE, best + OCTAVE) if i in finite]
    return line.next_seeds([*halves, *repeated])


def filled(line: Line, points: Sequence[Point], width: int) -> list[Point]:
    """Adds further seeds of the five values nearest to the best, fewest seeds first, to `width`."""
    means, points = line.means, list(points)
    known = means.finite
    if not len(known.k):
        return points
    distance = np.abs(known.k - known.k[known.best])
    near = [int(k) for k in known.k[np.argsort(distance, kind='stable')[:WAVE]]]
    counts = {k: int(known.n[list(known.k).index(k)]) for k in near}
    for point in points:
        if line.place(point.k[line.along]) == point.k and point.k[line.along] in counts:
            counts[point.k[line.along]] += 1
    while len(points) < width:
        index = min(near, key=lambda k: (counts[k], near.index(k)))
        points.append(Point(line.place(index), counts[index]))
        counts[index] += 1
    return points


@dataclasses.dataclass(frozen=True)
class Pick:
    """The values of an arm, and what is known of them.

    k: their place. allowance: loss that other seeds could choose better by, at a quantile.
    as_good: lowest and highest index of the first field that are not significantly worse.
    states: of LOCATED, FLAT_STATE, EDGE, CLIFF, NOT_CONVEX, DIVERGED.
    """

    k: K
    allowance: float
    as_good: tuple[float, float]
    states: tuple[str, ...]


def picks(found: Replay) -> list[Pick]:
    """Returns the pick of each arm, once its waves have ended."""
    own = found.spread
    return [_pick(*one, own) for one in zip(found.lines, found.earlier, strict=True)]


def _pick(line: Line, earlier: Sequence[Line], own: Spread) -> Pick:
    means = line.means
    if line.is_dead or not len(means.k):
        return Pick(line.centre, math.inf, (-math.inf, math.inf), (DIVERGED,))
    k = vertex(means, own.s)
    low, high = as_good(means, own)
    beyond = means.k[~np.isfinite(means.mean)]
    every = [means, *(one.means for one in earlier if not one.is_dead)]
    states = []
    if any(edge(one) for one in every):
        states.append(EDGE)
    if np.any(np.abs(beyond - k) <= OCTAVE):
        states.append(CLIFF)
    if high - low > FLAT * OCTAVE:
        states.append(FLAT_STATE)
    if not is_convex(means, own.s):
        states.append(NOT_CONVEX)
    allowed = sum(allowance(one, own.s) for one in every)
    return Pick(line.place(k), allowed, (low, high), tuple(states) or (LOCATED,))
