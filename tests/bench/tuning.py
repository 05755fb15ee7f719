"""Validates tuning on simulated ablations: `python -m tests.bench.tuning [--studies=200]`.

A study has a baseline and four arms; effects, curves, noise and optima are known, so that verdicts
can be checked. It passes if intervals cover at least .92 of the true differences, at most .08 of
the studies have any false verdict, the regret of the chosen values is at most .25 deviations over
seeds, and at most 1% of the arms end at an edge if the noise is at most half of the curvature. For
one study in fifty the ledger is also grown as runs end in any order and are killed; the waves must
be the same.
"""

import argparse
import concurrent.futures
import functools
import itertools
import math
import multiprocessing
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.study.plan.curve import PER_OCTAVE
from lm.study.plan.search import (
    EDGE,
    SCAN,
    STEPS,
    UNBOUNDED,
    Point,
    Search,
    compute_picks,
    replay_waves,
)
from lm.study.statistics import BETTER, HOLM, UNDECIDED, WORSE
from lm.study.verdicts import FIRST_FRESH_SEED, Study

CURVATURE = 0.010  # nats an octave^2: median of 160 published curves
EFFECT = 2.5  # deviations over seeds, of two of the arms
OFFSET = 3.0  # octaves: the largest distance of an optimum from the centre
SEEDS = 5  # of a look
MIN_COVERAGE, MAX_FAMILY, MAX_REGRET, MAX_EDGES = 0.92, 0.08, 0.25, 0.01
SIGMAS = (0.15, 0.5, 2.0)  # times CURVATURE
REPLAYED = 50  # one study in this many is replayed
OPTIMIZERS = Path('configs/studies/results/optimizers.md')

Curve = Callable[[float], float]  # octaves from the optimum -> loss above its minimum


def quadratic(z: float) -> float:
    return CURVATURE * z**2


def slanted_curve(z: float) -> float:
    """A fit to published curves."""
    return 0.0086 * abs(z) ** 1.64 if z < 0 else 0.0136 * z**2.03


def diverging(z: float) -> float:
    return math.inf if z > 1.3 else slanted_curve(z)


def cliff(z: float) -> float:
    return math.inf if z > 1.75 else CURVATURE * max(0.0, abs(z) - 0.75) ** 2


def published_curve(number: int) -> Curve:
    """Draws a curve with the statistics of 160 published ones.

    Curvature .006, .010, .021 at quantiles of 10%, 50%, 90%; steeper on the right in 74%, by 1.56
    in the median; not unimodal in 31%.
    """
    rng = np.random.default_rng((number, 1))
    curvature = CURVATURE * math.exp(0.49 * rng.standard_normal())
    slant = math.exp((0.44 + 0.69 * rng.standard_normal()) / 2)
    bump = rng.uniform(0.0015, 0.006) if rng.uniform() < 0.31 else 0.0
    bump_z = rng.choice((-1, 1)) * rng.uniform(0.5, 2)

    def raw(z):
        side = curvature / slant * abs(z) ** 1.6 if z < 0 else curvature * slant * z**2
        return side + bump * math.exp(-(((z - bump_z) / 0.35) ** 2))

    return shift_to_zero(raw)


def shift_to_zero(raw: Curve) -> Curve:
    """Moves a curve so that its minimum is 0 at 0."""
    grid = np.arange(-256, 257) / 64
    losses = [raw(z) for z in grid]
    best_z, min_loss = grid[int(np.argmin(losses))], min(losses)
    return lambda z: max(0.0, raw(z + best_z) - min_loss)


@functools.lru_cache
def tabulated_curves() -> list[Curve]:
    """Returns curves of this project's optimizers by learning rate, interpolated monotonically."""
    from scipy.interpolate import PchipInterpolator

    text = OPTIMIZERS.read_text()
    table = [line.split('|')[2:7] for line in text.splitlines() if re.match(r'\| `\w+` \|', line)]
    rows = [[float(re.search(r'\d\.\d+', cell)[0]) for cell in line] for line in table]
    octaves = np.log2([0.001, 0.003, 0.01, 0.03, 0.1])
    curves = []
    for row in rows:
        best = int(np.argmin(row))
        if 0 < best < len(row) - 1:
            curve = PchipInterpolator(octaves - octaves[best], np.array(row) - row[best])
            curves.append(functools.partial(_extrapolate, curve))
    return curves


def _extrapolate(curve, z: float) -> float:
    """Evaluates a curve within its table, and its slope at the end beyond it."""
    inside = min(max(z, curve.x[0]), curve.x[-1])
    return float(curve(inside)) + float(curve(inside, 1)) * (z - inside)


def optimizer_curve(number: int) -> Curve:
    return tabulated_curves()[number % len(tabulated_curves())]


CURVES = {
    'quadratic': lambda number: quadratic,
    'slanted': lambda number: slanted_curve,
    'diverging': lambda number: diverging,
    'cliff': lambda number: cliff,
    'published': published_curve,
    'optimizers': optimizer_curve,
}


class TuningCase(NamedTuple):
    """A row of the table.

    sigma: noise in units of CURVATURE. rho: correlation of arms over seeds. loud: the arm with
    twice the noise. effect: in deviations.
    """

    curve: str
    sigma: float
    rho: float
    loud: int | None
    effect: float

    @property
    def seed(self) -> int:
        return zlib.crc32(repr(tuple(self)).encode()) // REPLAYED * REPLAYED


SETTINGS = (
    (0.36, None, 0.0),
    (0.36, 2, 0.0),
    (0.36, None, EFFECT),
    (0.8, None, EFFECT),
    (0.0, None, EFFECT),
    (0.36, 2, 1.0),
)
CELLS = [
    TuningCase(c, s, *setting) for setting, c, s in itertools.product(SETTINGS, CURVES, SIGMAS)
]
CELLS.sort(key=lambda cell: cell.seed)  # mixed, so that a stopped run has covered all kinds


class Runs(Mapping):
    """Losses of an arm's runs, the same for a point at every access. All have ended."""

    def __init__(self, curve: Curve, sigma: float, rho: float, shift: float, study: int, arm: int):
        self.curve, self.sigma, self.rho, self.shift = curve, sigma, rho, shift
        self.study, self.arm = study, arm
        self.optimum = np.random.default_rng((study, 0, arm)).uniform(-OFFSET, OFFSET)
        self.known: dict[Point, float] = {}

    def truth(self, k: int) -> float:
        return self.curve(k / PER_OCTAVE - self.optimum) + self.shift

    def __getitem__(self, point: Point) -> float:
        if point not in self.known:
            (k,), seed = point
            normal_AKS, fresh = _normal(self.study), (seed >= FIRST_FRESH_SEED) * 50
            common = normal_AKS[-1, 0, seed % FIRST_FRESH_SEED + fresh]
            individual = normal_AKS[self.arm, k % 64, seed % FIRST_FRESH_SEED + fresh]
            sd = self.sigma * 2 ** (max(k / PER_OCTAVE - self.optimum, 0) / 2)
            noise = math.sqrt(self.rho) * common + math.sqrt(1 - self.rho) * individual
            self.known[point] = self.truth(k) + sd * noise
        return self.known[point]

    def __contains__(self, point: object) -> bool:
        return True

    def __iter__(self) -> Iterator[Point]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


@functools.lru_cache(4)
def _normal(study: int) -> np.ndarray:
    """Returns deviates of a study by arm (and a row that all share), value and seed."""
    return np.random.default_rng((study, 2)).standard_normal((6, 64, 70))


def simulate(cell: TuningCase, number: int) -> dict:
    """Runs a study to its end; compares its conclusions with the truth."""
    sigma = cell.sigma * CURVATURE
    effects = (0, 0, 0, -cell.effect * sigma, -cell.effect * sigma)
    arms = [
        Runs(
            CURVES[cell.curve](number * 10 + i),
            sigma * (2 if i == cell.loud else 1),
            cell.rho,
            shift,
            number,
            i,
        )
        for i, shift in enumerate(effects)
    ]
    search = Search(smallest_effect=EFFECT * sigma / 2)
    study = build_study(search, arms)
    assert study.next_runs is None
    true = [arm.shift - arms[0].shift for arm in arms[1:]]
    verdicts = [c and c.verdict for c in study.fresh_results[1:]]
    outcomes = [v.outcome if v else UNDECIDED for v in verdicts]
    return {
        'covered': [v.low <= t <= v.high for v, t in zip(verdicts, true, strict=True) if v],
        'wrong': any(
            (outcome == BETTER and t >= 0) or (outcome == WORSE and t <= 0)
            for outcome, t in zip(outcomes, true, strict=True)
        ),
        'power': [outcome == BETTER for outcome, t in zip(outcomes, true, strict=True) if t < 0],
        'regret': [
            (arm.truth(p.k[0]) - arm.shift) / arm.sigma
            for arm, p in zip(arms, study.picks, strict=True)
        ],
        'edge': [EDGE in pick.states for pick in study.picks],
        'runs': study.tuning_runs[0],
        'allowance': [
            pick.allowance / arm.sigma for arm, pick in zip(arms, study.picks, strict=True)
        ],
        'lost': sum(v is None for v in verdicts),
        'replays': [] if number % REPLAYED else replay_in_random_order(study, arms, number),
    }


def build_study(search: Search, losses: Sequence[Mapping]) -> Study:
    n = len(losses)
    return Study(search, [(UNBOUNDED,)] * n, losses, [True] * n, SEEDS, HOLM)


def replay_in_random_order(whole: Study, arms: Sequence[Runs], number: int) -> list[bool]:
    """Grows the ledger of a study by runs that end in random order, killed after random counts.

    Returns for each time whether the next runs are the whole study's at that stage.
    """
    rng = np.random.default_rng((number, 3))
    stages = [wave.points for wave in whole.tuning.waves] + [points for points, _ in whole.looks]
    ledger: list[dict[Point, float]] = [{} for _ in arms]
    matches = []
    for points in stages:
        remaining = [(i, p) for i, arm in enumerate(points) for p in arm if p not in ledger[i]]
        while remaining:
            matches.append(build_study(whole.search, ledger).next_runs[1] == points)
            for _ in range(int(rng.integers(1, len(remaining) + 1))):
                i, p = remaining.pop(int(rng.integers(len(remaining))))
                ledger[i] = {p: arms[i][p], **ledger[i]}
    matches.append(build_study(whole.search, ledger).next_runs is None)
    return matches


def simulate_studies(cell: TuningCase, numbers: range) -> list[dict]:
    return [simulate(cell, number) for number in numbers]


class Surface(Mapping):
    """Losses over several fields: curvature sum_ij A_ij z_i z_j, A_ii = 1, A_ij = INTERACTION."""

    INTERACTION = 0.7
    OFFSETS = (1.5, 1.2, 1.2)

    def __init__(self, fields: int, sigma: float, number: int):
        rng = np.random.default_rng((number, fields))
        self.optimum = rng.uniform(-1, 1, fields) * self.OFFSETS[:fields]
        self.sigma, self.number = sigma, number

    def truth(self, k: tuple[int, ...]) -> float:
        z = np.array(k) / PER_OCTAVE - self.optimum
        separate = 1 - self.INTERACTION
        return CURVATURE * (separate * np.sum(z**2) + self.INTERACTION * np.sum(z) ** 2)

    def __getitem__(self, point: Point) -> float:
        rng = np.random.default_rng((self.number, point.seed, *(i + 10_000 for i in point.k)))
        return self.truth(point.k) + self.sigma * rng.standard_normal()

    def __contains__(self, point: object) -> bool:
        return True

    def __iter__(self) -> Iterator[Point]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def surfaces(fields: int, sigma: float, max_runs: float, numbers: range) -> tuple[float, float]:
    """Returns (mean regret, mean runs) of arms with several tuned fields."""
    scans = tuple((-step, 0, step) for step in STEPS[:fields]) if fields > 1 else (SCAN,)
    regret, runs = [], []
    for number in numbers:
        arm = Surface(fields, sigma, number)
        tuning = replay_waves(
            [arm], Search(scans, EFFECT * sigma / 2, max_runs), [(UNBOUNDED,) * fields]
        )
        regret.append(arm.truth(compute_picks(tuning)[0].k))
        runs.append(sum(len(wave.points[0]) for wave in tuning.waves))
    return float(np.mean(regret)), float(np.mean(runs))


def mean_value(studies: Sequence[dict], key: str) -> float:
    numbers = np.concatenate([np.ravel(study[key]) for study in studies])
    return float(np.mean(numbers)) if numbers.size else math.nan


def print_cells(results: Iterator[tuple[TuningCase, list[dict]]], start: float) -> None:
    print(
        '| curve | noise | correlation | loud arm | effect | coverage | family error | power | '
        'regret | edges | runs | allowance | no verdict |'
    )
    print('|---' * 13 + '|')
    worst = {'covered': 1.0, 'wrong': 0.0, 'regret': 0.0, 'edge': 0.0}
    replays = same = 0
    for cell, studies in results:
        means = {key: mean_value(studies, key) for key in studies[0]}
        print(
            f'| {cell.curve} | {cell.sigma} | {cell.rho} | {cell.loud or ""} | {cell.effect} '
            f'| {means["covered"]:.3f} | {means["wrong"]:.3f} | {means["power"]:.2f} '
            f'| {means["regret"]:.3f} | {means["edge"]:.3f} | {means["runs"]:.1f} '
            f'| {means["allowance"]:.2f} | {means["lost"]:.2f} |',
            flush=True,
        )
        worst['covered'] = min(worst['covered'], means['covered'])
        worst['wrong'] = max(worst['wrong'], means['wrong'])
        worst['regret'] = max(worst['regret'], means['regret'])
        worst['edge'] = max(worst['edge'], means['edge'] if cell.sigma <= 0.5 else 0.0)
        flags = [flag for study in studies for flag in study['replays']]
        replays, same = replays + len(flags), same + sum(flags)
    print(
        f'worst: coverage {worst["covered"]:.3f} (at least {MIN_COVERAGE}), family error '
        f'{worst["wrong"]:.3f} (at most {MAX_FAMILY}), regret {worst["regret"]:.3f} (at most '
        f'{MAX_REGRET}), edges {worst["edge"]:.3f} (at most {MAX_EDGES}); '
        f'{same} of {replays} proposals the same after a kill, in any order of ends; '
        f'{(time.monotonic() - start) / 60:.1f} minutes',
        flush=True,
    )
    assert same == replays


def print_fields(fields: Sequence[int], studies: int) -> None:
    print('\n| fields | noise | runs at most | runs | regret, nats / 1000 |\n' + '|---' * 5 + '|')
    for n, max_runs, sigma in itertools.product(fields, (13, 20, math.inf), SIGMAS):
        regret, runs = surfaces(n, sigma * CURVATURE, max_runs, range(studies))
        print(f'| {n} | {sigma} | {max_runs} | {runs:.1f} | {1000 * regret:.2f} |', flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--studies', type=int, default=200)
    parser.add_argument('--curves', nargs='*', default=list(CURVES), choices=CURVES)
    parser.add_argument('--fields', nargs='*', type=int, default=[1, 2, 3])
    args, start = parser.parse_args(), time.monotonic()
    spawn = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        rows = []
        for cell in (cell for cell in CELLS if cell.curve in args.curves):
            numbers = range(cell.seed, cell.seed + args.studies)
            rows.append((cell, pool.submit(simulate_studies, cell, numbers)))
        if rows:
            print_cells(((cell, row.result()) for cell, row in rows), start)
    print_fields(args.fields, args.studies)


if __name__ == '__main__':
    main()
