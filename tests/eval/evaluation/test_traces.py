"""Numbers over steps and seeds. Reference: SciPy's tau, and numbers computed by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from eval.evaluation.targets import Evaluation
from eval.evaluation.traces import (
    NumberTrace,
    collect_traces,
    format_traces,
    group_evaluations,
    kendall_tau,
)
from eval.suites.base import SuiteResult


def test_tau_matches_scipy():
    rng = np.random.default_rng(1)
    for n, max_value in ((2, 100), (7, 3), (30, 8), (30, 1000)):
        x, y = np.arange(n), rng.integers(max_value, size=n)
        assert kendall_tau(x, y) == pytest.approx(stats.kendalltau(x, y).statistic)
    assert kendall_tau([1, 2, 3], [5, 4, math.inf]) == pytest.approx(1 / 3)
    for y in ([5, 5, 5], [1, math.nan, 2]):
        assert math.isnan(kendall_tau([1, 2, 3], y))
    assert math.isnan(kendall_tau([1], [2]))


def test_seed_spread_by_hand():
    """Standard deviations sqrt(2) and sqrt(8) at the two steps that both have, means 3 and 6."""
    trace = NumberTrace('s', 'n', '', {'a': {1: 2.0, 2: 4.0, 3: 9.0}, 'b': {1: 4.0, 2: 8.0}})
    spread = (math.sqrt(2) + math.sqrt(8)) / 2
    assert trace.seed_std == pytest.approx(spread)
    assert trace.signal_to_noise == pytest.approx(4.5 / spread)
    assert (trace.monotonicity, trace.steps, trace.mean_at(1)) == (1, [1, 2, 3], 3)
    single_run = NumberTrace('s', 'n', '', {'a': {1: 2.0, 2: 1.0}})
    assert single_run.monotonicity == -1
    assert math.isnan(single_run.seed_std) and math.isnan(single_run.signal_to_noise)
    equal = NumberTrace('s', 'n', '', {'a': {1: 2.0}, 'b': {1: 2.0}})
    assert equal.seed_std == 0 and equal.signal_to_noise == math.inf


def test_monotonicity_skips_runs_without_order():
    """A run of one step, or with a constant number, has no order. Catches a nan for the whole
    group, and a column without the number of runs in the mean.
    """
    short = {'a': {1: 2.0, 2: 3.0}, 'b': {1: 4.0}, 'c': {1: 5.0, 2: 5.0}}
    trace = NumberTrace('s', 'n', '', short)
    assert trace.monotonicity == 1 and trace.record['monotonicity_runs'] == 1
    (row,) = format_traces([trace])
    assert (row['monotonicity'], row['runs used']) == (1, '1 of 3')
    none = NumberTrace('s', 'n', '', {'b': {1: 4.0}, 'd': {2: 4.5}})
    assert math.isnan(none.monotonicity) and none.record['monotonicity_runs'] == 0
    whole = NumberTrace('s', 'n', '', {'a': {1: 2.0, 2: 3.0}, 'b': {1: 4.0, 2: 3.0}})
    assert whole.monotonicity == 0 and 'runs used' not in format_traces([whole, none])[0]
    assert math.isnan(NumberTrace('s', 'n', '', short | {'d': {1: 1.0, 2: math.nan}}).monotonicity)


def evaluation(run, step, norm, seed, loss):
    config = {'model.norm': norm, 'train.seed': seed, 'mesh.data': seed, 'model.final_norm': norm}
    return Evaluation(run, step, config, {'s': SuiteResult({'loss': loss, 'n': 4})})


def test_runs_with_different_seeds_form_a_group():
    """A field that changes together with another is not named."""
    evaluations = [
        evaluation('a', 10, 'rmsnorm', 0, 3.0),
        evaluation('b', 10, 'rmsnorm', 1, 5.0),
        evaluation('c', 10, 'layernorm', 0, 4.0),
        evaluation('d', 10, 'layernorm', 1, 4.0),
        evaluation('d', 20, 'layernorm', 1, 3.0),
    ]
    names = {
        name: [member.run for member in members]
        for name, members in group_evaluations(evaluations).items()
    }
    assert names == {'norm rmsnorm': ['a', 'b'], 'norm layernorm': ['c', 'd', 'd']}
    assert [*group_evaluations(evaluations[:2])] == [''] and [
        *group_evaluations(evaluations[1:3])
    ] == [
        'b',
        'c',
    ]
    rms, layer, *counts = format_traces(collect_traces(evaluations))
    assert (rms['step 10'], rms['step 20'], layer['step 20']) == (4, None, 3)
    assert rms['seed std'] == pytest.approx(math.sqrt(2)) and layer['seed std'] == 0
    assert [row['monotonicity'] for row in counts] == [None, None]
    many = [evaluation('a', step, 'rmsnorm', 0, step / 2) for step in range(9)]
    assert format_traces(collect_traces(many))[0]['last'] == 4
