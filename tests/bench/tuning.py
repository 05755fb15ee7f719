"""Validates tuning on simulated ablations: `python -m tests.bench.tuning [--studies=200]`.

A study has a baseline and four arms; effects, curves, noise and the places of the optima are known,
so that verdicts can be checked. Passes: intervals cover at least .92 of the true differences, any
false verdict in at most .08 of the studies, regret of the chosen values at most .25 deviations over
seeds, and at most 1% of the arms end at an edge where the noise is at most half of the curvature.
"""

import argparse
import math
import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from lm.tuning.curve import PER_OCTAVE
from lm.tuning.search import EDGE, Point, Search
from lm.tuning.study import Study
from lm.tuning.verdicts import BETTER, UNDECIDED, WORSE

CURVATURE = 0.010  # nats an octave^2: median of 160 published curves
EFFECT = 2.5  # deviations over seeds, of two of the arms
OFFSET = 3.0  # octaves: optima lie so far from the centre at most
LEAST_COVERAGE, MOST_FAMILY, MOST_REGRET, MOST_EDGES = 0.92, 0.08, 0.25, 0.01


def quadratic(z):
    return CURVATURE * z**2


def slanted(z):
    return 0.0086 * abs(z) ** 1.64 if z < 0 else 0.0136 * z**2.03


def diverging(z):
    return math.inf if z > 1.3 else slanted(z)


def cliff(z):
    return math.inf if z > 1.75 else CURVATURE * max(0.0, abs(z) - 0.75) ** 2


CURVES = {'quadratic': quadratic, 'slanted': slanted, 'diverging': diverging, 'cliff': cliff}
SIGMAS = (0.15, 0.5, 2.0)  # times CURVATURE
CELLS = (  # correlation of arms over seeds, the arm with twice the noise, effect
    (0.0, None, EFFECT),
    (0.36, None, EFFECT),
    (0.8, None, EFFECT),
    (0.36, None, 0.0),
    (0.36, 2, 0.0),
    (0.36, 2, 1.0),
)


class Arm:
    """Runs of one arm: the same point has the same loss, whenever it is asked for."""

    def __init__(self, curve: Callable, sigma: float, rho: float, shift: float, number: int):
        self.curve, self.sigma, self.rho, self.shift, self.number = curve, sigma, rho, shift, number
        self.optimum = np.random.default_rng((number, 0)).uniform(-OFFSET, OFFSET)

    def truth(self, k: int) -> float:
        return self.curve(k / PER_OCTAVE - self.optimum) + self.shift

    def loss(self, point: Point, study: int) -> float:
        (k,), seed = point
        z = k / PER_OCTAVE - self.optimum
        common = np.random.default_rng((study, seed)).standard_normal()
        own = np.random.default_rng((self.number, seed, k + 10_000)).standard_normal()
        sd = self.sigma * 2 ** (max(z, 0) / 2)
        return self.truth(k) + sd * (math.sqrt(self.rho) * common + math.sqrt(1 - self.rho) * own)


def simulate(curve: Callable, sigma: float, rho: float, effects, loud, number: int) -> dict:
    """Runs one study to its end; what came out, against what is true."""
    arms = [
        Arm(curve, sigma * (2 if i == loud else 1), rho, shift, number * 10 + i)
        for i, shift in enumerate(effects)
    ]
    search = Search(smallest_effect=EFFECT * sigma / 2)
    losses = [{} for _ in arms]
    while True:
        study = Study([search] * len(arms), losses, [True] * len(arms), 5, 'holm')
        if study.open is None:
            break
        for arm, own, points in zip(arms, losses, study.open[1], strict=True):
            own.update({p: arm.loss(p, number) for p in points if p not in own})
    picks = study.picks
    true = [arm.shift - arms[0].shift for arm in arms[1:]]
    verdicts = [c and c.verdict for c in study.confirmed[1:]]
    said = [v.said if v else UNDECIDED for v in verdicts]
    return {
        'covered': [v.low <= t <= v.high for v, t in zip(verdicts, true, strict=True) if v],
        'wrong': any(
            (one == BETTER and t >= 0) or (one == WORSE and t <= 0)
            for one, t in zip(said, true, strict=True)
        ),
        'power': [one == BETTER for one, t in zip(said, true, strict=True) if t < 0],
        'regret': [
            (arm.truth(p.k[0]) - arm.shift) / sigma for arm, p in zip(arms, picks, strict=True)
        ],
        'edge': [EDGE in pick.states for pick in picks],
        'runs': study.runs[0],
        'allowance': [pick.allowance / sigma for pick in picks],
        'lost': sum(v is None for v in verdicts),
    }


def rows(studies: int) -> Iterator[tuple[str, float, tuple, dict[str, float]]]:
    for name, curve in CURVES.items():
        for times in SIGMAS:
            for rho, loud, effect in CELLS:
                sigma = times * CURVATURE
                effects = (0, 0, 0, -effect * sigma, -effect * sigma)
                seed = zlib.crc32(f'{name} {times} {rho} {loud} {effect}'.encode())
                found = [
                    simulate(curve, sigma, rho, effects, loud, seed + i) for i in range(studies)
                ]
                flat = {
                    key: float(np.mean(np.concatenate([np.ravel(one[key]) for one in found])))
                    if any(np.size(one[key]) for one in found)
                    else math.nan
                    for key in found[0]
                }
                yield name, times, (rho, loud, effect), flat


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--studies', type=int, default=200)
    studies, start = parser.parse_args().studies, time.monotonic()
    print(
        'curve      sigma  rho loud effect  coverage family power regret edges  runs allowance lost'
    )
    worst = {'covered': 1.0, 'wrong': 0.0, 'regret': 0.0, 'edge': 0.0}
    for name, times, (rho, loud, effect), one in rows(studies):
        print(
            f'{name:10} {times:5} {rho:4} {loud!s:4} {effect:6}  {one["covered"]:8.3f} '
            f'{one["wrong"]:6.3f} {one["power"]:5.2f} {one["regret"]:6.3f} {one["edge"]:5.3f} '
            f'{one["runs"]:5.1f} {one["allowance"]:9.2f} {one["lost"]:4.2f}',
            flush=True,
        )
        worst['covered'] = min(worst['covered'], one['covered'])
        for key in ('wrong', 'regret'):
            worst[key] = max(worst[key], one[key])
        worst['edge'] = max(worst['edge'], one['edge'] if times <= 0.5 else 0.0)
    print(
        f'worst: coverage {worst["covered"]:.3f} (at least {LEAST_COVERAGE}), family error '
        f'{worst["wrong"]:.3f} (at most {MOST_FAMILY}), regret {worst["regret"]:.3f} (at most '
        f'{MOST_REGRET}), edges {worst["edge"]:.3f} (at most {MOST_EDGES}); '
        f'{(time.monotonic() - start) / 60:.1f} minutes'
    )


if __name__ == '__main__':
    main()
