"""Writes what train.py would leave of a tuned sweep, with losses in closed form.

python -m tests.eval.tuned_fixture DIR     writes one with many arms, to look at the page of
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


def bowl(least: float, best: float = 0.0, noise: float = 0.0, number: int = 0) -> Loss:
    """Returns least + CURVATURE (z - best)^2, with noise that arms share for the most part."""

    def loss(z: float, seed: int) -> float:
        common = np.random.default_rng(seed).standard_normal()
        own = np.random.default_rng((number, seed, round(z * PER_OCTAVE) + 999)).standard_normal()
        return least + CURVATURE * (z - best) ** 2 + noise * (0.8 * common + 0.6 * own)

    return loss


def diverging(above: float, loss: Loss) -> Loss:
    """Returns the loss, and inf for octaves above."""
    return lambda z, seed: math.inf if z > above else loss(z, seed)


def simulate(losses: Sequence[Loss], asked: Mapping[str, Any], most: float = math.inf) -> Study:
    """Returns the study of arms by their norms, after `most` runs at least, or at its end."""
    tune = parse_tune(asked)
    known: list[dict[Point, float]] = [{} for _ in losses]
    while True:
        arms = [Arm('', {}, grid(tune), losses=own) for own in known]
        study = Ablation(tune, 'ce', arms).study
        if study.next_runs is None or sum(map(len, known)) >= most:
            return study
        for own, loss, points in zip(known, losses, study.next_runs[1], strict=True):
            own.update({p: loss(p.k[0] / PER_OCTAVE, p.seed) for p in points if p not in own})


def grid(tune: Tune) -> Grid:
    return Grid({path: LR for path in tune.fields})


def write_tuned(
    folder: Path,
    losses: Mapping[str, Loss],
    asked: Mapping[str, Any],
    most: float = math.inf,
    field: str = 'model.norm',
) -> Study:
    """Writes the folder of a sweep over `field`, with the arms `losses`; returns its study.

    most: after about so many runs the sweep was stopped: half of the wave that is open then has
    ended, and nobody has begun the others.
    """
    study = simulate(list(losses.values()), asked, most)
    tune, base = parse_tune(asked), flatten(fixture.base_config())
    cells = []
    for i, (name, own) in enumerate(zip(losses, study.stages, strict=True)):
        for j, (point, stage) in enumerate(own.items()):
            values = grid(tune).values(point.k)
            seeds = {'train.seed': point.seed, 'data.seed': point.seed}
            changes = {field: name} | values | seeds
            cell = hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:8]
            tuned = {'arm': i, 'k': list(point.k), 'seed': point.seed, 'stage': stage}
            differs = {path: v for path, v in changes.items() if base[path] != v}
            about = {'cell': cell, 'group': i, 'changes': changes, 'differs': differs}
            cells.append(about | {'tuned': tuned})
            loss = study.losses[i].get(point)
            if loss is None and most < math.inf and j % 2:
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
    base = fixture.changed(fixture.base_config(), {})
    sweep = {'base': base, 'axes': axes, 'cells': cells, 'tune': record}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'sweep.json').write_text(json.dumps(sweep))
    return study


def summary(loss: float, point: Point) -> dict[str, Any]:
    """What a run leaves; of one that diverged no loss."""
    status, known = ('done', loss) if math.isfinite(loss) else ('diverged', None)
    wall = FIRST_SEC if point.seed == 0 else SEC
    return {
        'status': status,
        'step': fixture.STEPS,
        'validation_ce': known,
        'best_validation_ce': known,
        'bits_per_byte': known and known / math.log(2),
        'ce': known,
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
    most = float(sys.argv[2]) if sys.argv[2:] else math.inf
    write_tuned(Path(sys.argv[1]), some, {'optim.lr': None}, most)
