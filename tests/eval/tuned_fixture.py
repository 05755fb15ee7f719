"""Writes the files that train.py leaves of a tuned sweep, with losses in closed form.

python -m tests.eval.tuned_fixture DIR     writes one with many arms, to look at its page
"""

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.config.resolve import flatten
from lm.study.arm import Ablation, Arm
from lm.study.plan.curve import PER_OCTAVE
from lm.study.plan.search import Point
from lm.study.plan.settings import Grid, Tune, parse_tune
from lm.study.verdicts import Study
from tests.eval import sweep_fixture as fixture

LR, CURVATURE = 0.01, 0.02  # centre of all arms; nats an octave^2
TOKENS, TOKENS_PER_SEC, FIRST_SEC, SEC = 409_600, 1000.0, 10.0, 2.0  # seed 0 compiles
BESIDE = 5  # runs share their time
Loss = Callable[[float, int], float]  # (octaves from the centre, seed) -> final loss


def bowl(minimum: float, best: float = 0.0, noise: float = 0.0, number: int = 0) -> Loss:
    """Returns minimum + CURVATURE (z - best)^2, with noise that is largely common to all arms."""

    def loss(z: float, seed: int) -> float:
        common = np.random.default_rng(seed).standard_normal()
        individual = np.random.default_rng(
            (number, seed, round(z * PER_OCTAVE) + 999)
        ).standard_normal()
        return minimum + CURVATURE * (z - best) ** 2 + noise * (0.8 * common + 0.6 * individual)

    return loss


def diverging(above: float, loss: Loss) -> Loss:
    """Returns the loss, but inf for octaves above the limit."""
    return lambda z, seed: math.inf if z > above else loss(z, seed)


def simulate(
    losses: Sequence[Loss], settings: Mapping[str, Any], max_runs: float = math.inf
) -> Study:
    """Returns the study of arms, after at least `max_runs` runs, or at its end."""
    tune = parse_tune(settings)
    losses_by_arm: list[dict[Point, float]] = [{} for _ in losses]
    while True:
        arms = [Arm('', {}, grid(tune), losses=arm_losses) for arm_losses in losses_by_arm]
        study = Ablation(tune, 'ce', arms).study
        if study.next_runs is None or sum(map(len, losses_by_arm)) >= max_runs:
            return study
        for arm_losses, loss, points in zip(losses_by_arm, losses, study.next_runs[1], strict=True):
            arm_losses.update(
                {p: loss(p.k[0] / PER_OCTAVE, p.seed) for p in points if p not in arm_losses}
            )


def grid(tune: Tune) -> Grid:
    return Grid({path: LR for path in tune.fields})


def write_tuned(
    folder: Path,
    losses: Mapping[str, Loss],
    settings: Mapping[str, Any],
    max_runs: float = math.inf,
    field: str = 'model.norm',
) -> Study:
    """Writes the folder of a sweep over `field` with the arms `losses`; returns its study.

    max_runs: the sweep is stopped after about this many runs. Half of the open wave has then ended,
    and the rest has not started.
    """
    study = simulate(list(losses.values()), settings, max_runs)
    tune, base = parse_tune(settings), flatten(fixture.base_config())
    cells = []
    for i, (name, stages) in enumerate(zip(losses, study.stages, strict=True)):
        for j, (point, stage) in enumerate(stages.items()):
            values = grid(tune).values(point.k)
            seeds = {'train.seed': point.seed, 'data.seed': point.seed}
            changes = {field: name} | values | seeds
            cell = hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:8]
            tuned = {'arm': i, 'k': list(point.k), 'seed': point.seed, 'stage': stage}
            differs = {path: v for path, v in changes.items() if base[path] != v}
            cell_record = {'cell': cell, 'group': i, 'changes': changes, 'differs': differs}
            cells.append(cell_record | {'tuned': tuned})
            loss = study.losses[i].get(point)
            if loss is None and max_runs < math.inf and j % 2:
                loss = list(losses.values())[i](point.k[0] / PER_OCTAVE, point.seed)
            if loss is not None:
                (folder / cell).mkdir(parents=True)
                (folder / cell / 'summary.json').write_text(json.dumps(summary(loss, point)))
    arms = [
        {'changes': {field: name}, 'centres': grid(tune).centres, 'coupled': False, 'length': 1.0}
        for name in losses
    ]
    record = dataclasses.asdict(tune) | {'metric': 'ce', 'arms': arms}
    paths = [field, *tune.fields, 'train.seed', 'data.seed']
    axes = {path: list(dict.fromkeys(cell['changes'][path] for cell in cells)) for path in paths}
    base = fixture.update_config(fixture.base_config(), {})
    sweep = {'base': base, 'axes': axes, 'cells': cells, 'tune': record}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'sweep.json').write_text(json.dumps(sweep))
    return study


def summary(loss: float, point: Point) -> dict[str, Any]:
    """Returns the summary of a run; without a loss if it diverged."""
    status, final_ce = ('done', loss) if math.isfinite(loss) else ('diverged', None)
    wall = FIRST_SEC if point.seed == 0 else SEC
    return {
        'status': status,
        'step': fixture.STEPS,
        'validation_ce': final_ce,
        'best_validation_ce': final_ce,
        'bits_per_byte': final_ce and final_ce / math.log(2),
        'ce': final_ce,
        'tokens_per_sec_mean': TOKENS_PER_SEC,
        'wall_sec': wall,
        'side_by_side': BESIDE,
        'tokens': TOKENS,
    }


if __name__ == '__main__':
    some = {
        'rmsnorm': bowl(3.0, 0.5, 0.01, 1),
        'layernorm': bowl(2.93, 2.0, 0.01, 2),
        'dyt': bowl(3.004, -1.0, 0.01, 3),
        'derf': diverging(1.0, bowl(2.9, 1.5, 0.01, 4)),
        'none': lambda z, seed: math.inf,
        'scalenorm': lambda z, seed: 3.5 - 0.02 * z,
        'batchnorm': bowl(3.05, 0.0, 0.01, 6),
        'groupnorm': lambda z, seed: math.inf if seed in (1001, 1003) else bowl(2.9)(z, seed),
        'l2norm': bowl(3.1, 1.0, 0.02, 8),
    }
    max_runs = float(sys.argv[2]) if sys.argv[2:] else math.inf
    write_tuned(Path(sys.argv[1]), some, {'optim.lr': None}, max_runs)
