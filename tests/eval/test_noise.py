"""The difference that seeds can detect, on sweeps whose losses are known."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from eval.noise import describe, list_settings, measure_spread, nearest_settings
from eval.runs import gather
from lm.study.statistics import (
    LEVEL,
    POWER,
    detectable_difference,
    deviation_interval,
    seeds_needed,
)
from tests.eval import sweep_fixture as fixture
from tests.eval.programs import run_module

AXES = {'model.norm': fixture.NORMS, 'train.seed': fixture.SEEDS}


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'norms'
    fixture.write_sweep(folder, AXES, {('layernorm', 2): 'diverged'})
    fixture.write_run(folder.parent / 'single', fixture.base_config())
    return folder


def test_detectable_difference_inverts_seeds_needed():
    for tests in (1, 4):
        for n in (3, 5, 12, 40):
            d = detectable_difference(n, 0.7, tests, LEVEL)
            assert seeds_needed(1.0001 * d, 0.7, tests) == n
            assert seeds_needed(0.9999 * d, 0.7, tests) == n + 1


def test_detectable_difference_by_simulation():
    """Catches a deviation of the mean where that of one pair is meant."""
    n, rng = 4, np.random.default_rng(0)
    d = detectable_difference(n, 2.0)
    differences = rng.normal(d, 2.0, (20_000, n))
    power = np.mean(stats.ttest_1samp(differences, 0.0, axis=1).pvalue < 0.05)
    assert abs(power - POWER) < 0.01
    assert detectable_difference(1, 2.0) == math.inf


def test_deviation_interval_covers_the_deviation():
    rng = np.random.default_rng(0)
    estimates = rng.normal(0, 3.0, (4000, 5)).std(axis=1, ddof=1)
    low, high = np.transpose([deviation_interval(s, 4) for s in estimates])
    assert np.mean((low < 3.0) & (high > 3.0)) == pytest.approx(0.95, abs=0.01)


def test_spread_agrees_with_a_sweep_by_hand(sweep):
    """RMSNorm's losses are c, c - .01, c - .02; LayerNorm's, .08 above, lack the diverged seed."""
    settings = list_settings(gather(sweep))
    assert [len(setting.losses) for setting in settings] == [3, 2]
    spread = measure_spread(settings)
    assert spread.freedom == 3
    assert spread.deviation == pytest.approx(math.sqrt((2e-4 + 0.5e-4) / 3))
    # Both lose .01 from seed 0 to seed 1, so that their difference is constant.
    assert spread.paired_freedom == 1 and spread.paired == pytest.approx(0.0, abs=1e-12)


def test_spread_without_pairs_counts_both_runs(sweep):
    settings = list_settings(gather(sweep))[:1]
    spread = measure_spread(settings)
    assert spread.paired_freedom == 0
    assert spread.paired == pytest.approx(math.sqrt(2) * 0.01)
    assert any('sqrt(2) times that' in line for line in describe(spread, 'ce', 1))


def test_nearest_recorded_setting_and_how_it_differs(sweep, tmp_path):
    config = fixture.update_config(fixture.base_config(), {'model.norm': 'layernorm'})
    config['model']['d_model'] = 512
    fixture.write_run(tmp_path / 'wide', config)
    candidates = list_settings(gather(sweep))
    nearest, names = nearest_settings(list_settings(gather(tmp_path / 'wide')), candidates)
    assert [setting.fields['norm'] for setting in nearest] == ['layernorm']
    assert names == ['d_model']
    with pytest.raises(ValueError, match='no setting has two seeds'):
        nearest_settings(candidates, list_settings(gather(tmp_path / 'wide')))


@pytest.mark.parametrize(
    ('section', 'field', 'value', 'is_same'),
    [
        ('train', 'log_every', 7, True),
        ('train', 'checkpoint_steps', 'log', True),
        ('eval', 'texts', "{'a': 'python'}", True),
        ('optim', 'weight_decay', 0.2, False),
    ],
)
def test_fields_that_only_observe_make_no_setting(section, field, value, is_same, tmp_path):
    """Runs of two seeds, of which one is evaluated or saved more often."""
    for seed in (0, 1):
        config = fixture.update_config(fixture.base_config(), {'train.seed': seed})
        if seed:
            config[section][field] = value
        fixture.write_run(tmp_path / str(seed), config)
    assert len(list_settings(gather(tmp_path))) == (1 if is_same else 2)


@pytest.mark.full
def test_program_prints_the_table_and_the_nearest_run(sweep):
    """A lone run has the spread of the sweep beside it, in which nothing but the seed differs."""
    done = run_module('eval.noise', str(sweep.parent / 'single'), '--tests=2', '--json')
    assert done.returncode == 0, done.stderr
    assert 'NOTE: no setting has two seeds' in done.stdout and 'differs in 0 fields' in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    expected = f'{detectable_difference(5, math.sqrt(2) * 0.01, 2):.2g}'
    assert ['5', expected] in rows
    record = json.loads(done.stdout.splitlines()[-1])
    assert f'{record["detectable_difference"]["5"]:.2g}' == expected
    assert record['is_of_nearest_setting'] and record['tests'] == 2


@pytest.mark.full
def test_program_needs_runs_that_ended(tmp_path):
    fixture.write_run(tmp_path / 'run', fixture.base_config(), 'unfinished')
    done = run_module('eval.noise', str(tmp_path / 'run'))
    assert done.returncode == 1 and 'no run has ended with a ce' in done.stderr
    done = run_module('eval.noise')
    assert done.returncode == 1 and 'name runs or sweeps' in done.stderr
