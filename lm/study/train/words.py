"""Terminal output of a tuned sweep: its costs, each wave, the state of its arms."""

import math
from collections.abc import Sequence
from pathlib import Path

from lm.record.run import Run, run_seconds
from lm.study.arm import Ablation, describe_budget
from lm.study.plan.arms import ArmPlan
from lm.study.plan.search import (
    CYCLES,
    EXTENSIONS,
    REFINEMENTS,
    REPEATS,
    WAVE,
    LineSearch,
    edge_side,
)
from lm.study.plan.settings import Grid, Tune
from lm.study.tables.text import format_count
from lm.study.verdicts import LOOKS, FreshResult

AT_EDGE = {-1: 'still at the lower edge', 0: '', 1: 'still at the upper edge'}


def format_duration(sec: float) -> str:
    """Returns '3.2 h', '12 min' or '5 s'."""
    if sec < 60:
        return f'{sec:.0f} s'
    return f'{sec / 60:.0f} min' if sec < 3600 else f'{sec / 3600:.1f} h'


def max_runs(tune: Tune) -> int:
    """Returns the maximal number of runs of an arm, or the budget.

    The maximum has all waves that `lm.study.plan.search` allows, and all looks.
    """
    n, scan = len(tune.fields), max(map(len, tune.scans))
    lines = 1 if n == 1 else CYCLES * n
    waves = lines * EXTENSIONS + REFINEMENTS + EXTENSIONS + REPEATS + EXTENSIONS
    runs = lines * scan + waves * WAVE + LOOKS[-1] * tune.seeds
    return runs if tune.budget is None else min(runs, tune.budget)


def describe_costs(
    plan: ArmPlan, run_sec: Sequence[float | None], compile_sec: float | None
) -> list[str]:
    """Returns lines with the runs and the hours of a whole study, before it begins.

    Args:
      plan: the arms.
      run_sec: seconds of a run of each arm; None if unknown.
      compile_sec: seconds of compilation; None if unknown.

    Returns:
      The lines.
    """
    tune, arms = plan.tune, plan.arms
    min_runs, typical_runs, most_runs = tune.min_budget, tune.typical_runs, max_runs(tune)
    runs = _format_range(f'{min_runs}', f'{most_runs}', 'runs per arm', f'{typical_runs}')
    line = f'tune: {format_count(len(arms), "arm")}, {runs}, including fresh seeds'
    known_sec = [sec for sec in run_sec if sec is not None]
    if len(known_sec) < len(run_sec):
        return [f'{line}; the time will be known after the first wave']
    seconds = [
        n * sum(known_sec) + (compile_sec or 0.0) for n in (min_runs, most_runs, typical_runs)
    ]
    low, high, usual = map(format_duration, seconds)
    slowest = max(range(len(arms)), key=known_sec.__getitem__)
    scope = 'excludes' if compile_sec is None else 'includes'
    return [
        f'{line}: {_format_range(low, high, "in total", usual)} at the speed measured here; '
        f'{scope} evaluation and compilation',
        f'most expensive arm: {arms[slowest].name}, {known_sec[slowest]:.1f} s per run',
    ]


def _format_range(low: str, high: str, unit: str, usual: str) -> str:
    """Returns '15 to 100 runs (usually 25)', or '15 runs' if both ends are equal."""
    return f'{low} {unit}' if low == high else f'{low} to {high} {unit} (usually {usual})'


def describe_wave(
    ablation: Ablation, run_sec: Sequence[float | None], compile_sec: float | None
) -> list[str]:
    """Returns a line on the next wave.

    An example is 'wave 3, refine: 5 runs for each of 2 arms; 20 finished, at most 80 more (12
    min)'.

    Args:
      ablation: the losses so far.
      run_sec: seconds of a run of each arm; None if unknown.
      compile_sec: seconds of compilation that are still to come; None if unknown.

    Returns:
      One line.
    """
    study = ablation.study
    assert study.next_runs is not None  # there is a wave to train
    stage, points = study.next_runs
    number = len(study.tuning.waves) + len(study.looks)
    arms_with_stages = zip(study.stages, study.losses, strict=True)
    n_ended = [sum(point in losses for point in stages) for stages, losses in arms_with_stages]
    wave_points = [
        [p for p in arm_points if stage_by_point[p] == stage]
        for arm_points, stage_by_point in zip(points, study.stages, strict=True)
    ]
    remaining = [
        [p for p in arm_points if p not in losses]
        for arm_points, losses in zip(wave_points, study.losses, strict=True)
    ]
    n_new = sum(map(len, remaining))
    if remaining == wave_points:
        width = max(map(len, wave_points))
        n_arms = format_count(sum(map(bool, wave_points)), 'arm')
        what = f'{format_count(width, "run")} for each of {n_arms}'
    else:  # an earlier command has trained a part of the wave
        what = f'{format_count(n_new, "unfinished run")}'
    most_runs = max_runs(ablation.tune)
    arms = zip(study.tuning.arms, n_ended, strict=True)
    more_runs = [0 if arm.is_dead else max(0, most_runs - n) for arm, n in arms]
    line = f'wave {number}, {stage}: {what}; {sum(n_ended)} finished, at most {sum(more_runs)} more'
    known_sec = [sec for sec in run_sec if sec is not None]
    if len(known_sec) < len(run_sec):
        return [line]
    training_sec = sum(n * sec for n, sec in zip(more_runs, known_sec, strict=True))
    return [f'{line} ({format_duration(training_sec + (compile_sec or 0.0))})']


def describe_arms(ablation: Ablation) -> list[str]:
    """Returns a line for each arm: its best values so far, or its verdict.

    Before the first look a further line reports a budget that cannot detect the smallest effect.
    """
    study, lines = ablation.study, []
    for i, (arm, searched) in enumerate(zip(ablation.arms, study.tuning.arms, strict=True)):
        parts = [describe_best(arm.grid, searched)]
        if not study.tuning.open_wave:
            parts += study.picks[i].states
        elif not searched.is_dead:
            parts.append(AT_EDGE[edge_side(searched.means)])
        if fresh_result := study.fresh_results[i]:
            parts.append(describe_fresh(fresh_result))
        lines.append(f'  {arm.name}: ' + ', '.join(filter(None, parts)))
    is_tuned = study.next_runs is not None and study.next_runs[0] == 'look 1'
    budget_note = describe_budget(study) if is_tuned else None
    return lines if budget_note is None else [*lines, f'NOTE: {budget_note}']


def describe_best(grid: Grid, arm: LineSearch) -> str:
    """Returns '2.8119 at optim.lr=0.004, 2 seeds, 1 value diverged'."""
    means = arm.means
    n_diverged = len(means.k) - len(means.finite.k)
    if not len(means.k):
        return 'no runs yet'
    if n_diverged == len(means.k):
        return f'diverged at all {format_count(n_diverged, "value")} so far'
    values = grid.values(arm.place_at(arm.best_index))
    values_text = ' '.join(f'{path}={value:.3g}' for path, value in values.items())
    parts = [
        f'{means.mean[means.best_position]:.4f} at {values_text}',
        format_count(int(means.n[means.best_position]), 'seed'),
    ]
    parts.append(f'{format_count(n_diverged, "value")} diverged' if n_diverged else '')
    return ', '.join(filter(None, parts))


def describe_fresh(fresh: FreshResult) -> str:
    """Returns '5 fresh seeds: 2.8043, better by 0.0213 (97.3% interval 0.0101 to 0.0325)'."""
    if fresh.n_diverged:
        return f'{fresh.n_diverged} of {format_count(len(fresh.losses), "fresh seed")} diverged'
    text = f'{format_count(len(fresh.losses), "fresh seed")}: {fresh.losses.mean():.4f}'
    return text if fresh.verdict is None else f'{text}, {fresh.verdict.describe(digits=4)}'


def describe_spending(plan: ArmPlan, ablation: Ablation, folder: Path) -> list[str]:
    """Returns a line for each arm: runs, steps and seconds of the runs that the study requested.

    Args:
      plan: the arms.
      ablation: the losses.
      folder: folder of the sweep.

    Returns:
      The lines.
    """
    lines = []
    for i, arm in enumerate(ablation.arms):
        runs = [p for p in ablation.study.stages[i] if p in arm.losses]
        records = [Run(folder / plan.make_cell(i, p, '').name).summary for p in runs]
        steps = sum(record.get('step', 0) for record in records)
        sec = math.fsum(run_seconds(record) for record in records)
        lines.append(
            f'total for {arm.name}: {format_count(len(runs), "run")}, {steps:,} steps, {sec:,.1f} s'
        )
    return lines
