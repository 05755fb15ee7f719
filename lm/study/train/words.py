"""Words of a tuned sweep on the terminal: its costs, each wave, the state of its arms."""

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

AT_EDGE = {-1: 'still at the lowest edge', 0: '', 1: 'still at the highest edge'}


def format_duration(sec: float) -> str:
    """'3.2 h', '12 min' or '5 s'."""
    if sec < 60:
        return f'{sec:.0f} s'
    return f'{sec / 60:.0f} min' if sec < 3600 else f'{sec / 3600:.1f} h'


def max_runs(tune: Tune) -> int:
    """Returns the runs of an arm at most: those of every wave that `lm.study.plan.search` allows,
    and of all looks; or the budget.
    """
    n, scan = len(tune.fields), max(map(len, tune.scans))
    lines = 1 if n == 1 else CYCLES * n
    waves = lines * EXTENSIONS + REFINEMENTS + EXTENSIONS + REPEATS + EXTENSIONS
    most = lines * scan + waves * WAVE + LOOKS[-1] * tune.seeds
    return most if tune.budget is None else min(most, tune.budget)


def describe_costs(plan: ArmPlan, step_sec: Sequence[float | None]) -> list[str]:
    """Says the runs and the hours of a whole study, before it begins.

    step_sec: seconds of a step and run of each arm, None where that is unknown.
    """
    tune, arms = plan.tune, plan.arms
    least, usual, most = tune.min_budget, tune.typical_runs, max_runs(tune)
    runs = f'{least} runs at least, {usual} as a rule and {most} at most'
    line = f'tune: {format_count(len(arms), "arm")}, each of {runs}, fresh seeds included'
    if None in step_sec:
        return [f'{line}; their time is known once a wave has trained']
    each = [sec * steps for sec, steps in zip(step_sec, plan.steps, strict=True)]
    times = [format_duration(n * sum(each)) for n in (least, usual, most)]
    slowest = max(range(len(arms)), key=each.__getitem__)
    return [
        f'{line}: {times[0]} of steps at least, {times[1]} as a rule and {times[2]} at most, by '
        f'the rates measured here; evaluations and compiling are not in it',
        f'the most costly arm is {arms[slowest].name}: {each[slowest]:.1f} s of steps a run',
    ]


def describe_wave(plan: ArmPlan, ablation: Ablation, step_sec: Sequence[float | None]) -> list[str]:
    """'wave 3, refine: 5 runs of each of 2 arms; 20 have ended, 80 more at most, 12 min'."""
    study = ablation.study
    stage, points = study.next_runs
    number = len(study.tuning.waves) + len(study.looks)
    every = zip(study.stages, study.losses, strict=True)
    done = [sum(point in ended for point in stages) for stages, ended in every]
    asked = [
        [p for p in own if by[p] == stage] for own, by in zip(points, study.stages, strict=True)
    ]
    left = [[p for p in own if p not in at] for own, at in zip(asked, study.losses, strict=True)]
    new = sum(map(len, left))
    if left == asked:
        width = max(map(len, asked))
        who = (
            f'{format_count(width, "run")} of each of {format_count(sum(map(bool, asked)), "arm")}'
        )
    else:  # the same command again
        who = f'{format_count(new, "run")} that {"has" if new == 1 else "have"} not ended'
    most = max_runs(ablation.tune)
    arms = zip(study.tuning.arms, done, strict=True)
    more = [0 if arm.is_dead else max(0, most - n) for arm, n in arms]
    line = f'wave {number}, {stage}: {who}; {sum(done)} have ended, {sum(more)} more at most'
    if None in step_sec:
        return [line]
    arms = zip(more, step_sec, plan.steps, strict=True)
    return [f'{line}, {format_duration(sum(n * sec * steps for n, sec, steps in arms))}']


def describe_arms(ablation: Ablation) -> list[str]:
    """Returns a line for each arm: its best values so far, or its verdict. Before the first look
    one more says, where it is so, that the budget cannot reach the smallest effect.
    """
    study, found = ablation.study, []
    for i, (arm, searched) in enumerate(zip(ablation.arms, study.tuning.arms, strict=True)):
        said = [describe_best(arm.grid, searched)]
        if not study.tuning.open_wave:
            said += study.picks[i].states
        elif not searched.is_dead:
            said.append(AT_EDGE[edge_side(searched.means)])
        if confirmed := study.fresh_results[i]:
            said.append(describe_fresh(confirmed))
        found.append(f'  {arm.name}: ' + ', '.join(filter(None, said)))
    is_tuned = study.next_runs is not None and study.next_runs[0] == 'look 1'
    short = describe_budget(study) if is_tuned else None
    return found if short is None else [*found, f'NOTE: {short}']


def describe_best(grid: Grid, arm: LineSearch) -> str:
    """'2.8119 at optim.lr=0.004, 2 seeds, 1 value diverged'."""
    means = arm.means
    diverged = len(means.k) - len(means.finite.k)
    if not len(means.k):
        return 'no run yet'
    if diverged == len(means.k):
        return f'diverged at all {format_count(diverged, "value")} so far'
    values = grid.values(arm.place_at(arm.best_index))
    at = ' '.join(f'{path}={value:.3g}' for path, value in values.items())
    said = [
        f'{means.mean[means.best_position]:.4f} at {at}',
        format_count(int(means.n[means.best_position]), 'seed'),
    ]
    said.append(f'{format_count(diverged, "value")} diverged' if diverged else '')
    return ', '.join(filter(None, said))


def describe_fresh(fresh_result: FreshResult) -> str:
    """'fresh seeds 2.8043 (5), better than the baseline by 0.0213'."""
    if fresh_result.n_diverged:
        return f'{fresh_result.n_diverged} of {format_count(len(fresh_result.losses), "fresh seed")} diverged'
    said = f'fresh seeds {fresh_result.losses.mean():.4f} ({len(fresh_result.losses)})'
    if fresh_result.verdict is None:
        return said
    low, high = fresh_result.verdict.low, fresh_result.verdict.high
    return f'{said}, {fresh_result.verdict.outcome}: {fresh_result.verdict.difference:+.4f} [{low:+.4f}, {high:+.4f}]'


def describe_spending(plan: ArmPlan, ablation: Ablation, folder: Path) -> list[str]:
    """Returns a line for each arm: runs, steps and seconds of those that the study asked for."""
    found = []
    for i, arm in enumerate(ablation.arms):
        runs = [p for p in ablation.study.stages[i] if p in arm.losses]
        records = [Run(folder / plan.make_cell(i, p, '').name).summary for p in runs]
        steps = sum(record.get('step', 0) for record in records)
        sec = math.fsum(run_seconds(record) for record in records)
        found.append(
            f'  {arm.name}: {format_count(len(runs), "run")}, {steps:,} steps, {sec:,.1f} s'
        )
    return found
