"""Reference tests of the statistics: closed forms, numbers worked out by hand, scipy's tests."""

import math

import numpy as np
import pytest
from scipy import stats

from eval import compare, runs
from eval.compare import Interval, best_lr, paired, sensitivity, t_interval, verdict
from tests.eval import sweep_fixture as fixture


def test_t_interval_by_hand():
    found = t_interval([1, 2, 3, 4])  # s = sqrt(5 / 3); 3.18245 stands in tables of t, 3 d.o.f.
    assert found.mean == 2.5 and found.n == 4
    assert found.half == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2, rel=1e-6)


def test_t_interval_of_two_values_is_the_cauchy_quantile():
    """With one degree of freedom t is Cauchy, whose quantile function is tan."""
    found = t_interval([0, 1])
    assert found.half == pytest.approx(math.tan(math.pi * 0.475) / 2)


def test_t_interval_covers_the_mean_as_often_as_it_says():
    x_RS = np.random.default_rng(0).normal(3.0, 2.0, (4000, 3))
    found = [t_interval(x_S) for x_S in x_RS]
    covered = np.mean([abs(i.mean - 3.0) <= i.half for i in found])
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


@pytest.mark.parametrize(('values', 'mean'), [([2.5], 2.5), ([], math.nan)])
def test_t_interval_without_enough_values(values, mean):
    found = t_interval(values)
    np.testing.assert_equal((found.mean, found.half, found.n), (mean, math.nan, len(values)))
    assert verdict(found) == 'one seed'


def test_paired_takes_common_seeds_only():
    found = paired({0: 2.0, 1: 3.1, 2: 9.0}, {1: 3.0, 0: 2.1, 7: 0.0})
    assert found.n == 2 and found.mean == pytest.approx(0.0)  # of -0.1 and 0.1


def test_verdict_is_that_of_the_paired_t_test():
    rng = np.random.default_rng(1)
    seen = set()
    for shift in (-0.3, -0.1, 0.0, 0.1, 0.3):
        for _ in range(20):
            base, other = rng.normal(3.0, 1.0, 4), rng.normal(shift, 0.1, 4)
            other += base
            told = verdict(paired(dict(enumerate(other)), dict(enumerate(base))))
            test = stats.ttest_rel(other, base)
            side = 'better' if test.statistic < 0 else 'worse'
            assert told == (side if test.pvalue < 0.05 else 'within noise')
            seen.add(told)
    assert seen == {'better', 'worse', 'within noise'}


def test_verdict_of_an_interval_that_touches_zero():
    assert verdict(Interval(-0.1, 0.1, 3)) == 'within noise'
    assert verdict(Interval(-0.1, 0.09, 3)) == 'better'
    assert verdict(Interval(0.0, 0.0, 3)) == 'within noise'


def test_best_lr_is_of_the_mean_over_seeds():
    losses = {0.1: {0: 2.0, 1: 3.0}, 0.01: {0: 2.4, 1: 2.4}, 0.001: {0: 2.4, 1: 2.4}, 1.0: {}}
    assert best_lr(losses) == 0.001
    assert best_lr({}) is best_lr({0.1: {}}) is None


def test_sensitivity_by_hand():
    losses = {0.001: {0: 3.0}, 0.01: {0: 2.5}, 0.1: {0: 12.0}}  # 12 is worse than 9 at the start
    assert sensitivity(losses, 9.0) == pytest.approx((3.0 + 2.5 + 9.0) / 3 - 2.5)
    seeds = {0.001: {0: 3.0, 1: 4.0}, 0.01: {0: 2.0, 1: 12.0}}  # means 3.5 and 5.5, capped
    assert sensitivity(seeds, 9.0) == pytest.approx(4.5 - 3.5)
    assert sensitivity({0.001: {0: 2.0}, 0.01: {0: 2.0}}, 9.0) == 0
    assert math.isnan(sensitivity({0.01: {0: 2.0}}, 9.0))
    assert math.isnan(sensitivity(losses, math.nan))


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'norms'
    fixture.write_sweep(folder)
    return runs.gather(folder), runs.read_sweep(folder)


def test_compare_a_sweep(sweep):
    rms, layer = compare.compare(*sweep)
    assert [c.variant.name for c in (rms, layer)] == ['norm rmsnorm', 'norm layernorm']
    assert rms.variant.is_baseline and not layer.variant.is_baseline
    assert rms.best_lr == layer.best_lr == 0.003
    assert (rms.loss.mean, rms.loss.n) == (pytest.approx(2.89), 3)
    assert rms.loss.half == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-6)  # t, 2 d.o.f.
    assert rms.verdict == '' and layer.verdict == 'worse'
    assert layer.difference.mean == pytest.approx(0.08 + 0.002 / 3)
    spread = np.std([0.08, 0.08, 0.082], ddof=1)
    assert layer.difference.half == pytest.approx(4.302653 * spread / math.sqrt(3), rel=1e-6)
    assert (rms.diverged, layer.diverged) == (0, 1)
    per_byte = 2.89 / math.log(2) / fixture.BYTES_PER_TOKEN
    assert rms.bits_per_byte.mean == pytest.approx(per_byte)


def test_compare_counts_divergence_and_leaves_out_what_has_not_ended(sweep):
    layer = compare.compare(*sweep)[1]
    far = 0.2 * math.log10(0.03 / 0.003) ** 2
    assert layer.losses[0.03] == {  # of seeds 0, diverged; 1, done; 2 waits
        (0, 0): fixture.INITIAL_CE,
        (1, 0): pytest.approx(2.9 + 0.08 - 0.01 + far),
    }
    assert set(layer.losses[0.01]) == {(0, 0), (1, 0)}  # seed 2 goes on
    means = [np.mean(list(by_seed.values())) for by_seed in layer.losses.values()]
    assert layer.sensitivity == pytest.approx(np.mean(means) - min(means))
    assert layer.notes == []


def ended(loss, seed, lr=0.01, norm='rmsnorm', status='done', **more):
    record = dict.fromkeys(runs.schema().names) | {'status': status, 'ce': loss, 'norm': norm}
    return record | {'lr': lr, 'train_seed': seed, 'data_seed': 0, 'workdir': '/none'} | more


SWEEP = {'base': fixture.base_config(), 'axes': {'model.norm': [], 'train.seed': []}}


def test_divergence_at_the_best_learning_rate_is_said(monkeypatch):
    monkeypatch.setattr(compare, 'initial_loss', lambda records: 8.0)
    base = [ended(3.0 + 0.01 * seed, seed) for seed in range(3)]
    bad = [ended(2.0, seed, norm='none') for seed in range(2)]
    bad.append(ended(None, 2, norm='none', status='diverged'))
    found = compare.compare(base + bad, SWEEP)[1]
    assert found.loss.mean == pytest.approx((2.0 + 2.0 + 8.0) / 3)
    assert found.verdict == 'within noise'  # and not better by two lucky seeds
    assert found.notes[0].startswith('1 of 3 diverged at its best learning rate')


def test_what_a_failed_or_stopped_run_lacks_is_not_divergence():
    for status in ('failed', 'stopped', 'unfinished', 'waiting'):
        assert not compare.has_diverged(ended(None, 0, status=status))
    assert compare.has_diverged(ended(None, 0, status='failed', diverged_step=7))
    assert compare.has_diverged(ended(None, 0, validated_step=100))  # done, and NaN
    pair = [ended(3.0, 0), ended(2.0, 0, norm='none', status='stopped')]
    found = compare.compare(pair, SWEEP)[1]
    assert found.best_lr is None and found.notes == ['no run has ended'] and found.verdict == ''


def test_one_seed_and_no_common_seed():
    records = [ended(3.0, 0), ended(2.0, 0, norm='none'), ended(2.0, 5, norm='layernorm')]
    _, one, none = compare.compare(records, SWEEP)
    assert one.verdict == 'one seed' and one.difference.mean == -1.0
    assert none.verdict == '' and 'no seed has ended' in none.notes[-1]


def test_first_variant_is_the_baseline_where_none_has_the_values_of_the_base():
    records = [ended(3.0, 0, norm='none'), ended(3.0, 0, norm='layernorm')]
    assert [v.is_baseline for v in compare.split(records, SWEEP)] == [True, False]
    records.append(ended(3.0, 0))
    assert [v.is_baseline for v in compare.split(records, SWEEP)] == [False, False, True]


def test_tokenizers_are_compared_in_bits_per_byte(monkeypatch):
    """The byte tokenizer has less loss per token, and more per byte."""
    monkeypatch.setattr(compare, 'initial_loss', lambda records: 8.0)
    sweep = SWEEP | {'axes': {'data.tokenizer': ['bpe:4096', 'byte'], 'train.seed': [0, 1]}}
    records = []
    for seed in (0, 1):
        jitter = 0.001 * seed
        records.append(ended(3.0, seed, tokenizer='bpe:4096', bits_per_byte=1.5))
        records.append(ended(1.2, seed, tokenizer='byte', bits_per_byte=1.8 + jitter))
    found = compare.compare(records, sweep)[1]
    assert found.verdict == 'worse' and found.difference.mean == pytest.approx(0.3005)
    assert found.initial == pytest.approx(8.0 * np.mean([1.8, 1.801]) / 1.2)
