"""The arms of a tuned sweep at their best values, with the questions that remain open.

The study that chose the runs (`lm.study.verdicts`) is recomputed from sweep.json and the records of
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
    POWER,
    UNDECIDED,
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


def read_ablation(sweep: Mapping[str, Any], records: Sequence[Record]) -> Ablation | None:
    """Returns the ablation of a sweep.json and the records of its cells; None without config.tune.

    As during training, a diverged run has a loss of inf, and a run that has not ended has none.
    """
    if 'tune' not in sweep:
        return None
    raw = sweep['tune']
    tune, metric = _restore_tune(raw), raw['metric']
    by_cell = {record['cell']: record for record in records}
    names, by_point = arm_names(sweep), [{} for _ in raw['arms']]
    for cell in sweep['cells']:
        if is_current(cell) and cell['cell'] in by_cell:
            place = cell['tuned']
            by_point[place['arm']][Point(tuple(place['k']), place['seed'])] = by_cell[cell['cell']]
    arms = [
        Arm(
            name=name,
            changes=arm['changes'],
            grid=Grid(arm['centres'], arm['coupled']),
            length=arm['length'],
            losses=_final_losses(arm_records, metric),
            records=arm_records,
        )
        for name, arm, arm_records in zip(names, raw['arms'], by_point, strict=True)
    ]
    settings = {name: value for name, value in raw.items() if name not in ('arms', 'metric')}
    return Ablation(tune, metric, arms, settings)


def _restore_tune(raw: Mapping[str, Any]) -> Tune:
    """Restores config.tune from JSON, which has lists instead of tuples."""
    names = {field.name for field in dataclasses.fields(Tune)}
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in raw.items()
        if name in names
    }
    fields = {p: tuple(v) if isinstance(v, list) else v for p, v in raw['fields'].items()}
    options['fields'] = fields
    return Tune(**options)


def _final_losses(records: Mapping[Point, Record], metric: str) -> dict[Point, float]:
    """Returns the loss of each ended run; inf if it diverged."""
    losses = {point: final_loss(r['status'], r[metric]) for point, r in records.items()}
    return {point: loss for point, loss in losses.items() if loss is not None}


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """A row of the table of arms.

    Attributes:
      arm: the arm.
      outcome: BASELINE, BETTER, WORSE, UNDECIDED, FAILED (fresh runs diverged: `diverged` of n),
        LENGTH, or WAITS.
      verdict: verdict of fresh seeds, or None.
      loss: loss of the fresh seeds that have ended; before any has, of the seeds that chose the
        values.
      is_fresh: whether `loss` is of fresh seeds.
      diverged: number of fresh runs that diverged.
      values: best value of each tuned field.
      near_best: lowest and highest value of the first field that is not worse than the best.
      sensitivity: learning-rate sensitivity; nan if unknown.
      speedup: speed-up over the baseline, or None.
      steps: steps of a run.
      runs: number of runs: (tuning, fresh seeds).
      seconds: seconds spent on (tuning, fresh seeds).
      states: states of the arm, in words.
      caveats: what could still change the outcome, in words.
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
    """Returns the row of arm i."""
    arm, study = ablation.arms[i], ablation.study
    fresh_result, pick = study.fresh_results[i], ablation.pick(i)
    fresh_losses = [loss for loss in arm.fresh_losses.values() if math.isfinite(loss)]
    diverged = len(arm.fresh_losses) - len(fresh_losses)
    outcome = WAITS
    if i == 0:
        outcome = BASELINE
    elif arm.length != 1:
        outcome = LENGTH
    elif (ablation.is_dead(i) and study.tuning.open_wave is None) or (
        fresh_result and fresh_result.n_diverged
    ):
        outcome = FAILED
    elif fresh_result and fresh_result.verdict:
        outcome = fresh_result.verdict.outcome
    return ArmResult(
        arm=arm,
        outcome=outcome,
        verdict=fresh_result.verdict if fresh_result else None,
        loss=t_interval(fresh_losses or _losses_at_pick(ablation, i)),
        is_fresh=bool(fresh_losses),
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
    """Returns the tuning losses at the tried value nearest to the pick."""
    pick = ablation.pick(arm)
    if pick is None:
        return []
    finite = {
        p: loss for p, loss in ablation.arms[arm].tuning_losses.items() if math.isfinite(loss)
    }
    distances = {k: math.dist(k, pick.k) for k, _ in finite}
    nearest = min(sorted(distances), key=distances.__getitem__, default=None)
    return [loss for point, loss in finite.items() if point.k == nearest]


def _list_caveats(ablation: Ablation, i: int) -> Iterable[str]:
    """Yields what could change the verdict on an arm: a wider range, fresh seeds, finer values."""
    study, tune = ablation.study, ablation.tune
    fresh_result, field = study.fresh_results[i], next(iter(tune.fields))
    at_edge = [
        path for j, path in enumerate(tune.fields) if edge_side(ablation.tuning_line(i, j).means)
    ]
    if at_edge and EDGE in study.picks[i].states:
        yield f'widen the range of {", ".join(at_edge)}: the best value is the outermost one tried'
    if fresh_result is None or ablation.arms[i].length != 1:
        return
    if fresh_result.n_diverged:
        yield (
            f'lower {field}, or stabilise the training: {fresh_result.n_diverged} of '
            f'{len(fresh_result.losses)} fresh runs diverged'
        )
    if fresh_result.verdict is None:
        return
    difference = fresh_result.verdict.difference
    limited = i if difference > 0 else 0
    open_ = study.picks[limited].allowance
    if open_ > abs(difference) and EDGE not in study.picks[limited].states:
        yield (
            f'tune {field} more finely in {ablation.arms[limited].name}: tuning may still gain '
            f'{open_:.2g} there, more than the difference'
        )
    if fresh_result.verdict.outcome != UNDECIDED:
        return
    if fresh_result.verdict.n == tune.seeds and study.next_runs is None:
        yield f'raise tune.budget to allow {tune.seeds} more fresh seeds'
    seeds = study.seeds_needed(i, tune.smallest_effect)
    if seeds is not None and seeds > fresh_result.verdict.n:
        effect = max(abs(difference), tune.smallest_effect)
        n_seeds = format_seeds(seeds, 'fresh seeds')
        yield f'{n_seeds} would detect a difference of {effect:.2g} in {POWER:.0%} of cases'
    elif seeds is not None:
        yield (
            f'nothing if {tune.smallest_effect:g} is the smallest difference that matters: '
            'these seeds would have detected it'
        )


def _sensitivities(ablation: Ablation) -> list[float]:
    """Returns E[min(loss, initial)] - smallest loss for each arm (arXiv:2309.14322).

    The mean is over values an octave apart around the arm's best, with the same number of octaves
    on each side for all arms: the largest that every arm has tried. An arm at an edge, or without a
    finite loss, gets nan and does not limit the others.
    """
    grids = []
    for i in range(len(ablation.arms)):
        means = ablation.tuning_line(i).means
        mean = means.mean[means.k % OCTAVE == 0]
        best = int(np.argmin(mean)) if mean.size else 0
        is_inside = 0 < best < len(mean) - 1 and np.isfinite(mean[best])
        grids.append((mean, best) if is_inside else None)
    complete = [grid for grid in grids if grid]
    below = min((best for _, best in complete), default=0)
    above = min((len(mean) - 1 - best for mean, best in complete), default=0)
    sensitivities = []
    for arm, grid in zip(ablation.arms, grids, strict=True):
        if grid is None:
            sensitivities.append(math.nan)
            continue
        mean, best = grid
        near = mean[best - below : best + above + 1]
        if not np.all(np.isfinite(near)):
            near = np.minimum(
                near, initial_losses([_make_variant(ablation, arm)], ablation.metric)[0]
            )
        sensitivities.append(float(np.mean(near) - mean[best]))
    return sensitivities


def format_verdicts(ablation: Ablation, with_caveats: bool = True) -> list[str]:
    """Returns a sentence for each arm.

    Examples are 'muon is better than adamw by 0.110 nats per token (97.3% interval 0.066 to 0.154),
    p = 0.0012, 5 fresh seeds' and 'lion vs adamw is inconclusive: p = 0.037, this look needs p <
    0.027; difference ...'. with_caveats: whether to append what could still change the verdict.
    """
    baseline = ablation.arms[0].name
    verdicts = []
    for i, row in enumerate(arm_results(ablation)):
        name, caveats = row.arm.name, '; '.join(row.caveats)
        if row.outcome in (BASELINE, LENGTH):
            continue
        if row.outcome == FAILED and not row.values:
            text = f'{name} diverged at every value tried'
        elif row.outcome == FAILED:
            fresh_result = ablation.study.fresh_results[i]
            assert fresh_result is not None  # a best value without fresh runs has not FAILED
            n = len(fresh_result.losses)
            text = f'{name} diverged in {row.diverged} of {n} fresh runs at its best values'
        elif row.verdict is None:
            text = f'{name} has no verdict yet'
            if ablation.study.next_runs is None:
                text = f'{name} has no verdict, because runs of {baseline} diverged'
        else:
            text = _format_verdict(name, baseline, row.verdict, ablation.unit)
        suffix = f'; what could still change it: {caveats}' if caveats and with_caveats else ''
        verdicts.append(text + suffix)
    return verdicts


def _format_verdict(name: str, baseline: str, verdict: Verdict, unit: str) -> str:
    """Returns the sentence of one verdict."""
    size, seeds = verdict.describe_size(unit), f'{verdict.n} fresh seeds'
    if verdict.outcome == UNDECIDED:
        return f'{name} vs {baseline} is {verdict.describe()}; difference {size}, {seeds}'
    return f'{name} is {verdict.outcome} than {baseline} by {size}, p = {verdict.p:.2g}, {seeds}'


def compare_pair(ablation: Ablation, arm: int, against: int) -> Verdict | None:
    """Returns the verdict on an arm against another arm, over the fresh seeds that both have.

    An end of the interval is infinite if an arm at an edge could still become better. p is not
    adjusted for other pairs.

    Args:
      ablation: the arms and their losses.
      arm: position of the arm.
      against: position of the other arm.

    Returns:
      The verdict; None until both have two fresh losses, and if a run of either diverged.
    """
    first, second = (ablation.study.fresh_results[i] for i in (arm, against))
    if first is None or second is None:
        return None
    n = min(len(first.losses), len(second.losses))
    arm_losses, other_losses = first.losses[:n], second.losses[:n]
    if n < 2 or not np.all(np.isfinite([arm_losses, other_losses])):
        return None
    r_arm, r_other = (ablation.study.allowances[i] for i in (arm, against))
    (verdict,) = judge_arms([arm_losses], other_losses, [r_arm], r_other)
    low = -math.inf if math.isinf(r_arm) else verdict.low
    high = math.inf if math.isinf(r_other) else verdict.high
    return dataclasses.replace(verdict, low=low, high=high)


def describe_progress(ablation: Ablation) -> str:
    """Returns the stage in progress: 'stage look 1, 3 of 10 runs finished'; '' at the end.

    A later version of the search may ask for more runs of a study that has ended.
    """
    if ablation.study.next_runs is None:
        return ''
    stage, points = ablation.study.next_runs
    requested = [
        (arm, p) for arm, arm_points in zip(ablation.arms, points, strict=True) for p in arm_points
    ]
    ended = sum(point in arm.losses for arm, point in requested)
    text = f'stage {stage}, {ended} of {len(requested)} runs finished'
    version = ablation.settings.get('search_version', VERSION)
    if version == VERSION:
        return text
    return f'{text}, by version {VERSION} of the search (the runs are from version {version})'


def _make_variant(ablation: Ablation, arm: Arm) -> Variant:
    """Returns an arm as a variant."""
    records = list(arm.records.values())
    values = (
        {columns()[path]: records[0][columns()[path]] for path in arm.changes} if records else {}
    )
    return Variant(arm.name, values, records, arm is ablation.arms[0])


def make_variants(ablation: Ablation) -> list[Variant]:
    """Returns the arms as the variants of a page."""
    return [_make_variant(ablation, arm) for arm in ablation.arms]


def describe_run_length(ablation: Ablation, base: Mapping[str, Any]) -> str:
    """Returns the length of the runs behind the verdicts: '40 steps of 256 tokens'."""
    config = base if 'train.steps' in base else flatten(base)
    steps = {r['steps'] for arm in ablation.arms if arm.is_judged for r in arm.records.values()}
    tokens = config['data.batch_size'] * config['data.seq_len']
    step_range = (
        f'{min(steps):,} to {max(steps):,}' if len(steps) > 1 else f'{config["train.steps"]:,}'
    )
    if config.get('train.stages') is not None:
        return f'{step_range} steps in stages'
    return f'{step_range} steps of {tokens:,} tokens'
