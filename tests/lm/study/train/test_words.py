"""Terminal output on costs and waves of a tuned sweep."""

import dataclasses
import math

import pytest

from lm.study.arm import Ablation
from lm.study.plan.arms import ArmPlan
from lm.study.plan.settings import parse_tune
from lm.study.train.words import (
    describe_arms,
    describe_costs,
    describe_wave,
    format_duration,
    max_runs,
)
from tests.helpers import tiny_raw

ARMS = {'optim.b1': (0.9, 0.8)}


def simulate_arms(plan, of_arm):
    """Yields the ablation before each wave, and at the end; of_arm(i, octaves, seed) is a loss."""
    losses = [{} for _ in plan.arms]
    while True:
        pairs = zip(plan.arms, losses, strict=True)
        arms = [dataclasses.replace(arm, losses=dict(arm_losses)) for arm, arm_losses in pairs]
        ablation = Ablation(plan.tune, plan.metric, arms)
        yield ablation
        if ablation.study.next_runs is None:
            return
        for i, points in enumerate(ablation.study.next_runs[1]):
            losses[i].update({p: of_arm(i, p.k[0] / 8, p.seed) for p in points})


def noisy(i, octaves, seed):
    return (octaves - 7 * i) ** 2 + math.sin(37 * seed + octaves + i)


@pytest.mark.parametrize('tune', [{}, {'budget': 40}, {'budget': 18, 'seeds': 4}])
def test_no_arm_exceeds_announced_runs(tune):
    """Each arm gets exactly the announced runs, although a distant optimum and noise request all
    waves.
    """
    plan = ArmPlan(tiny_raw(), ARMS, {'optim.lr': 0.01, 'smallest_effect': 1e-9} | tune)
    *_, last = simulate_arms(plan, noisy)
    tune_settings = plan.tune
    assert tune_settings.min_budget <= tune_settings.typical_runs <= max_runs(tune_settings)
    for stages in last.study.stages:
        assert tune_settings.min_budget <= len(stages) <= max_runs(tune_settings)
    assert tune_settings.budget is None or max_runs(tune_settings) == tune_settings.budget


def test_costs_sum_arms_at_their_rates():
    plan = ArmPlan(tiny_raw({'train.steps': 100}), ARMS, {'optim.lr': 0.01, 'budget': 15})
    line, slowest = describe_costs(plan, [10.0, 30.0], 120.0)
    assert line == (
        'tune: 2 arms, 15 runs per arm, including fresh seeds: 12 min in total at the speed '
        'measured here; includes evaluation and compilation'
    )
    assert format_duration(15 * (10 + 30) + 120) == '12 min'
    assert slowest == 'most expensive arm: optim.b1=0.8, 30.0 s per run'
    line, _ = describe_costs(plan, [10.0, 30.0], None)
    assert ': 10 min in total at' in line and line.endswith('excludes evaluation and compilation')
    (line,) = describe_costs(plan, [10.0, None], 120.0)
    assert line.endswith('the time will be known after the first wave')
    plan = ArmPlan(tiny_raw({'train.steps': 100}), ARMS, {'optim.lr': 0.01})
    line, _ = describe_costs(plan, [10.0, 30.0], 0.0)
    assert line.startswith(
        'tune: 2 arms, 15 to 100 runs per arm (usually 25), including fresh seeds'
    )
    assert ': 10 min to 1.1 h in total (usually 17 min) at the speed measured here' in line


def test_wave_announcements_count_new_runs():
    """A second look includes the runs of the first, which are not trained again."""
    plan = ArmPlan(tiny_raw(), ARMS, {'optim.lr': 0.01, 'smallest_effect': 10.0})
    lines, last = [], None
    for ablation in simulate_arms(
        plan, lambda i, octaves, seed: octaves**2 + math.sin(seed * (i + 9))
    ):
        if ablation.study.next_runs is not None:
            lines += describe_wave(ablation, [None, None], None)
        last = ablation
    assert lines[0].startswith('wave 1, scan: 5 runs for each of 2 arms; 0 finished, at most ')
    looks = [line.partition(';')[0] for line in lines if 'look' in line]
    n = len(lines)
    assert looks == [
        f'wave {n - 1}, look 1: 5 runs for each of 2 arms',
        f'wave {n}, look 2: 5 runs for each of 2 arms',
    ]
    assert ', inconclusive: p = ' in describe_arms(last)[1]


def test_wave_announcements_include_compilation():
    """At most 170 runs more, of 10 s and 30 s in turn, after 180 s of compilation."""
    plan = ArmPlan(tiny_raw(), ARMS, {'optim.lr': 0.01, 'budget': 85})
    ablation = next(simulate_arms(plan, noisy))
    (line,) = describe_wave(ablation, [10.0, 30.0], 180.0)
    assert line.endswith(' at most 170 more (60 min)') and 85 * 40 + 180 == 60 * 60 - 20
    (line,) = describe_wave(ablation, [10.0, 30.0], None)
    assert line.endswith(' at most 170 more (57 min)') and 85 * 40 == 57 * 60 - 20


def test_max_runs_exceed_typical_runs():
    for fields in ({'optim.lr': 0.01}, {'optim.lr': 0.01, 'optim.weight_decay': 0.1}):
        tune = parse_tune(fields)
        assert tune.min_budget < tune.typical_runs < max_runs(tune) < math.inf
