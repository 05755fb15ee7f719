"""The arms of a tuned sweep: what each comes to at its best values, and what is not known of it.

The study that chose the runs (`lm.study.verdicts`) is made again from sweep.json and the records of
the cells. Losses are in the unit of the sweep's metric.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lm.config.resolve import flatten
from lm.record.run import final_loss
from lm.study.arm import Ablation, Arm
from lm.study.plan.curve import OCTAVE
from lm.study.plan.search import EDGE, VERSION, Point, edge_side
from lm.study.plan.settings import Grid, Tune
from lm.study.speedup import Speedup
from lm.study.statistics import (
    BETTER,
    POWER,
    UNDECIDED,
    WORSE,
    Interval,
    Verdict,
    format_seeds,
    judge_arms,
    t_interval,
)
from lm.study.tables.arms import arm_names, is_current
from lm.study.tables.columns import columns
from lm.study.tables.comparison import initial_losses
from lm.study.tables.results import Record
from lm.study.tables.variants import Variant

BASELINE, FAILED, WAITS, LENGTH = 'baseline', 'diverged', 'not yet', 'length'
PHRASES = {
    BETTER: 'is better than',
    WORSE: 'is worse than',
    UNDECIDED: 'is neither better nor worse than',
}


def read_ablation(sweep: Mapping[str, Any], records: Sequence[Record]) -> Ablation | None:
    """Returns the ablation of a sweep.json and the records of its cells; None without config.tune.

    A run that diverged has a loss of inf, and one that has not ended has none: as while it trained.
    """
    if 'tune' not in sweep:
        return None
    raw = sweep['tune']
    tune, metric = _restore_tune(raw), raw['metric']
    by_cell = {record['cell']: record for record in records}
    names, own = arm_names(sweep), [{} for _ in raw['arms']]
    for cell in sweep['cells']:
        if is_current(cell) and cell['cell'] in by_cell:
            place = cell['tuned']
            own[place['arm']][Point(tuple(place['k']), place['seed'])] = by_cell[cell['cell']]
    arms = [
        Arm(
            name=name,
            changes=one['changes'],
            grid=Grid(one['centres'], one['coupled']),
            length=one['length'],
            losses=_final_losses(of_arm, metric),
            records=of_arm,
        )
        for name, one, of_arm in zip(names, raw['arms'], own, strict=True)
    ]
    settings = {name: value for name, value in raw.items() if name not in ('arms', 'metric')}
    return Ablation(tune, metric, arms, settings)


def _restore_tune(raw: Mapping[str, Any]) -> Tune:
    """Reads config.tune back: JSON has lists where it has tuples."""
    known = {field.name for field in dataclasses.fields(Tune)}
    found = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in raw.items()
        if name in known
    }
    fields = {p: tuple(v) if isinstance(v, list) else v for p, v in raw['fields'].items()}
    return Tune(**found | {'fields': fields})


def _final_losses(records: Mapping[Point, Record], metric: str) -> dict[Point, float]:
    losses = {point: final_loss(r['status'], r[metric]) for point, r in records.items()}
    return {point: loss for point, loss in losses.items() if loss is not None}


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """An arm as a row of the table.

    said: BASELINE, BETTER, WORSE, UNDECIDED, FAILED (fresh runs diverged: `diverged` of n), LENGTH,
    or WAITS. loss: of fresh seeds that have ended; before any, of the seeds that chose the values.
    is_fresh: which of both. sensitivity: nan where not known. runs, seconds: for tuning, and by
    fresh seeds. remains: what could still change what is said, in words.
    """

    arm: Arm
    outcome: str
    verdict: Verdict | None
    loss: Interval
    is_fresh: bool
    diverged: int
    values: Mapping[str, float]
    near_best: tuple[float, float] | None
    sensitivity: float
    speedup: Speedup | None
    steps: int | None
    runs: tuple[int, int]
    seconds: tuple[float, float]
    states: tuple[str, ...]
    caveats: tuple[str, ...]


def arm_results(ablation: Ablation) -> list[ArmResult]:
    """Returns a row for each arm, the baseline first."""
    sensitivities = _sensitivities(ablation)
    return [_arm_result(ablation, i, sensitivities[i]) for i in range(len(ablation.arms))]


def _arm_result(ablation: Ablation, i: int, sensitivity: float) -> ArmResult:
    arm, study = ablation.arms[i], ablation.study
    one, pick = study.fresh_results[i], ablation.pick(i)
    fresh = [loss for loss in arm.fresh_losses.values() if math.isfinite(loss)]
    diverged = len(arm.fresh_losses) - len(fresh)
    said = WAITS
    if i == 0:
        said = BASELINE
    elif arm.length != 1:
        said = LENGTH
    elif (ablation.is_dead(i) and study.tuning.open_wave is None) or (one and one.n_diverged):
        said = FAILED
    elif one and one.verdict:
        said = one.verdict.outcome
    return ArmResult(
        arm=arm,
        outcome=said,
        verdict=one.verdict if one else None,
        loss=t_interval(fresh or _losses_at_pick(ablation, i)),
        is_fresh=bool(fresh),
        diverged=diverged,
        values=ablation.values(i),
        near_best=ablation.near_best_values(i),
        sensitivity=sensitivity,
        speedup=ablation.speedup(i),
        steps=next((record['steps'] for record in arm.records.values()), None),
        runs=ablation.count_runs(i),
        seconds=ablation.seconds_spent(i),
        states=study.states(i) if arm.losses else (),
        caveats=tuple(_list_caveats(ablation, i))
        if pick and study.tuning.open_wave is None
        else (),
    )


def _losses_at_pick(ablation: Ablation, arm: int) -> list[float]:
    """The losses at the value that was tried nearest to the pick, by the seeds that chose it."""
    pick = ablation.pick(arm)
    if pick is None:
        return []
    finite = {
        p: loss for p, loss in ablation.arms[arm].tuning_losses.items() if math.isfinite(loss)
    }
    off = {k: math.dist(k, pick.k) for k, _ in finite}
    nearest = min(sorted(off), key=off.__getitem__, default=None)
    return [loss for point, loss in finite.items() if point.k == nearest]


def _list_caveats(ablation: Ablation, i: int) -> Iterable[str]:
    """Things that could change the verdict on an arm: its range, fresh seeds, finer values."""
    study, tune = ablation.study, ablation.tune
    one, field = study.fresh_results[i], next(iter(tune.fields))
    at_edge = [
        path for j, path in enumerate(tune.fields) if edge_side(ablation.tuning_line(i, j).means)
    ]
    if at_edge and EDGE in study.picks[i].states:
        yield f'a wider range of {", ".join(at_edge)}: its best is the outermost that was tried'
    if one is None or ablation.arms[i].length != 1:
        return
    if one.n_diverged:
        yield (
            f'a smaller {field}, or a cure: {one.n_diverged} of {len(one.losses)} fresh runs diverged'
        )
    if one.verdict is None:
        return
    difference = one.verdict.difference
    limited = i if difference > 0 else 0
    open_ = study.picks[limited].allowance
    if open_ > abs(difference) and EDGE not in study.picks[limited].states:
        yield (
            f'finer values of {field} in {ablation.arms[limited].name}: its tuning leaves '
            f'{open_:.2g} open, more than the difference'
        )
    if one.verdict.outcome != UNDECIDED:
        return
    if one.verdict.n == tune.seeds and study.next_runs is None:
        yield f'a larger tune.budget, of which {tune.seeds} more fresh seeds are a part'
    seeds = study.seeds_needed(i, tune.smallest_effect)
    if seeds is not None and seeds > one.verdict.n:
        effect = max(abs(difference), tune.smallest_effect)
        many = format_seeds(seeds, 'fresh seeds')
        yield f'{many}, which would show a difference of {effect:.2g} in {POWER:.0%} of cases'
    elif seeds is not None:
        yield f'nothing, if {tune.smallest_effect:g} is what matters: its seeds would have shown it'


def _sensitivities(ablation: Ablation) -> list[float]:
    """E[min(loss, initial)] - least loss, over values an octave apart around each arm's best: as
    many octaves to each side as every arm was tried over (arXiv:2309.14322). An arm at an edge, or
    without a finite loss, has none, and leaves the others theirs.
    """
    grids = []
    for i in range(len(ablation.arms)):
        means = ablation.tuning_line(i).means
        mean = means.mean[means.k % OCTAVE == 0]
        best = int(np.argmin(mean)) if mean.size else 0
        is_inside = 0 < best < len(mean) - 1 and np.isfinite(mean[best])
        grids.append((mean, best) if is_inside else None)
    known = [grid for grid in grids if grid]
    below = min((best for _, best in known), default=0)
    above = min((len(mean) - 1 - best for mean, best in known), default=0)
    found = []
    for arm, grid in zip(ablation.arms, grids, strict=True):
        if grid is None:
            found.append(math.nan)
            continue
        mean, best = grid
        near = mean[best - below : best + above + 1]
        if not np.all(np.isfinite(near)):
            near = np.minimum(
                near, initial_losses([_make_variant(ablation, arm)], ablation.metric)[0]
            )
        found.append(float(np.mean(near) - mean[best]))
    return found


def format_verdicts(ablation: Ablation, with_caveats: bool = True) -> list[str]:
    """Returns what is said of each arm: 'muon is better than adamw: 0.110 [0.072, 0.148] nats per
    token lower over 5 fresh seeds, p = 0.0012'; with_rest: and what could still change it.
    """
    baseline = ablation.arms[0].name
    found = []
    for i, row in enumerate(arm_results(ablation)):
        name, remains = row.arm.name, '; '.join(row.caveats)
        if row.outcome in (BASELINE, LENGTH):
            continue
        if row.outcome == FAILED and not row.values:
            text = f'{name} diverged at every value that was tried'
        elif row.outcome == FAILED:
            n = len(ablation.study.fresh_results[i].losses)
            text = f'{name} diverged in {row.diverged} of {n} fresh runs at its best values'
        elif row.verdict is None:
            text = f'{name} has no verdict yet'
            if ablation.study.next_runs is None:
                text = f'{name} has no verdict, as runs of {baseline} diverged'
        else:
            text = _format_verdict(name, baseline, row.verdict, ablation.unit)
        rest = f'; what could still change it: {remains}' if remains and with_caveats else ''
        found.append(text + rest)
    return found


def _format_verdict(name: str, baseline: str, verdict: Verdict, unit: str) -> str:
    sign, way = (-1, 'lower') if verdict.difference < 0 else (1, 'higher')
    low, high = sorted((sign * verdict.low, sign * verdict.high))
    return (
        f'{name} {PHRASES[verdict.outcome]} {baseline}: {sign * verdict.difference:.3f} [{low:.3f}, {high:.3f}] '
        f'{unit} {way} over {verdict.n} fresh seeds, p = {verdict.p:.2g}'
    )


def compare_pair(ablation: Ablation, arm: int, against: int) -> Verdict | None:
    """Returns the loss of an arm less that of another over the fresh seeds that both have, with an
    infinite end of its interval where an arm at an edge could still become better; its p is of this
    pair alone. None before both have two, and where one of them diverged.
    """
    every = ablation.study.fresh_results
    if every[arm] is None or every[against] is None:
        return None
    n = min(len(every[i].losses) for i in (arm, against))
    own, other = (every[i].losses[:n] for i in (arm, against))
    if n < 2 or not np.all(np.isfinite([own, other])):
        return None
    r_own, r_other = (ablation.study.allowances[i] for i in (arm, against))
    (found,) = judge_arms([own], other, [r_own], r_other)
    low = -math.inf if math.isinf(r_own) else found.low
    high = math.inf if math.isinf(r_other) else found.high
    return dataclasses.replace(found, low=low, high=high)


def describe_progress(ablation: Ablation) -> str:
    """Returns what is being trained: 'stage look 1, of which 3 of 10 runs have ended'; '' where all
    has ended. A study that ended may be asked for more by a later version of the search.
    """
    if ablation.study.next_runs is None:
        return ''
    stage, points = ablation.study.next_runs
    asked = [(arm, p) for arm, own in zip(ablation.arms, points, strict=True) for p in own]
    ended = sum(point in arm.losses for arm, point in asked)
    going = f'stage {stage}, of which {ended} of {len(asked)} runs have ended'
    version = ablation.settings.get('search_version', VERSION)
    if version == VERSION:
        return going
    return f'{going}, as version {VERSION} of the search asks; its runs are of version {version}'


def _make_variant(ablation: Ablation, arm: Arm) -> Variant:
    own = list(arm.records.values())
    values = {columns()[path]: own[0][columns()[path]] for path in arm.changes} if own else {}
    return Variant(arm.name, values, own, arm is ablation.arms[0])


def make_variants(ablation: Ablation) -> list[Variant]:
    """Returns the arms as the variants of a page."""
    return [_make_variant(ablation, arm) for arm in ablation.arms]


def describe_run_length(ablation: Ablation, base: Mapping[str, Any]) -> str:
    """Returns how long the runs of the verdicts are: '40 steps of 256 tokens'."""
    config = base if 'train.steps' in base else flatten(base)
    steps = {r['steps'] for arm in ablation.arms if arm.is_judged for r in arm.records.values()}
    tokens = config['data.batch_size'] * config['data.seq_len']
    many = f'{min(steps):,} to {max(steps):,}' if len(steps) > 1 else f'{config["train.steps"]:,}'
    return f'{many} steps of {tokens:,} tokens'
