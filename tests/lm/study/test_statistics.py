"""Reference and property tests of verdicts: SciPy's paired t test and Dunnett's distribution,
published critical values and sample sizes.
"""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from lm.study import statistics
from lm.study.statistics import (
    BETTER,
    CONFIDENCE,
    DUNNETT,
    HOLM,
    LEVEL,
    MAX_SEEDS,
    POWER,
    UNDECIDED,
    WORSE,
    Interval,
    classify_difference,
    dunnett_cdf,
    format_seeds,
    holm_adjust,
    judge_arms,
    p_value,
    paired_interval,
    seeds_needed,
    t_interval,
)

SEEDS_S = np.array([0.3, -0.8, 1.1, 0.2, -0.9])
NOISE_S = np.array([0.4, -0.1, -0.6, 0.5, 0.1])


def pair(difference, noise=0.1):
    return 3 + SEEDS_S + difference + noise * NOISE_S, 3 + SEEDS_S


def test_judge_one_arm_matches_paired_t_test():
    arm, baseline = pair(-0.2)
    (verdict,) = judge_arms([arm], baseline, [0.0], 0.0)
    reference = stats.ttest_rel(arm, baseline)
    assert verdict.p == pytest.approx(reference.pvalue) and verdict.outcome == BETTER
    assert verdict.difference == pytest.approx(np.mean(arm - baseline))
    assert verdict.deviation == pytest.approx(np.std(arm - baseline, ddof=1)) and verdict.n == 5
    interval = reference.confidence_interval(CONFIDENCE)
    assert (verdict.low, verdict.high) == pytest.approx((interval.low, interval.high))
    at_look = reference.confidence_interval(1 - LEVEL)
    assert verdict.look_interval == pytest.approx((at_look.low, at_look.high))
    assert verdict.correlation == pytest.approx(np.corrcoef(arm, baseline)[0, 1])


@pytest.mark.parametrize('difference', np.linspace(-0.08, 0.08, 33))
def test_look_interval_excludes_zero_if_the_look_decides(difference):
    """Catches the 95% interval, which excludes 0 where p is between 0.027 and 0.05."""
    arm, baseline = pair(difference)
    (verdict,) = judge_arms([arm], baseline, [0.004], 0.003)
    low, high = verdict.look_interval
    assert (low > 0 or high < 0) == (verdict.outcome != UNDECIDED)


def test_describe_verdict():
    arm, baseline = pair(-0.2)
    (better,) = judge_arms([arm], baseline, [0.0], 0.0)
    (worse,) = judge_arms([baseline], arm, [0.0], 0.0)
    low, high = worse.look_interval
    size = f'{worse.difference:.3f} nats per token (97.3% interval {low:.3f} to {high:.3f})'
    assert better.describe('nats per token') == f'better by {size}'
    assert worse.describe('nats per token') == f'worse by {size}'
    (same,) = judge_arms([pair(-0.01)[0]], baseline, [0.0], 0.0)
    assert same.describe() == f'inconclusive: p = {same.p:.2g}, this look needs p < 0.027'
    low, high = same.look_interval
    assert same.describe_size() == (
        f'{same.difference:+.3f} (97.3% interval {low:+.3f} to {high:+.3f})'
    )


def test_judge_holm_by_hand():
    """The smallest of three p-values is tripled, the next doubled, and none may fall below that."""
    _, baseline = pair(0)
    arms = [pair(-0.15)[0], pair(-0.06)[0], pair(0.065, 0.1)[0]]
    verdicts = judge_arms(arms, baseline, [0.0] * 3, 0.0)
    p = [stats.ttest_rel(arm, baseline).pvalue for arm in arms]
    assert p[0] < p[2] < p[1] or p[0] < p[1] < p[2]
    second, last = sorted((1, 2), key=lambda i: p[i])
    assert verdicts[0].p == pytest.approx(3 * p[0])
    assert verdicts[second].p == pytest.approx(2 * p[second])
    assert verdicts[last].p == pytest.approx(max(p[last], 2 * p[second]))


def test_allowances_prevent_verdicts():
    """A better arm must exceed the baseline's allowance, a worse arm its own."""
    (arm, baseline), free = pair(-0.2), 0.0
    shifted = stats.ttest_1samp(arm - baseline + 0.1, 0).pvalue
    (verdict,) = judge_arms([arm], baseline, [9.0], 0.1)
    assert verdict.p == pytest.approx(shifted) and verdict.outcome == BETTER
    (verdict,) = judge_arms([arm], baseline, [free], 0.3)
    assert verdict.outcome == UNDECIDED and verdict.p == 1.0
    (verdict,) = judge_arms([baseline], arm, [0.1], 9.0)
    assert verdict.p == pytest.approx(shifted) and verdict.outcome == WORSE
    (verdict,) = judge_arms([baseline], arm, [0.3], free)
    assert verdict.outcome == UNDECIDED


def test_allowances_widen_the_interval():
    arm, baseline = pair(-0.2)
    (verdict,), (free,) = (
        judge_arms([arm], baseline, [0.03], 0.07),
        judge_arms([arm], baseline, [0.0], 0.0),
    )
    assert verdict.low == pytest.approx(free.low - 0.03)
    assert verdict.high == pytest.approx(free.high + 0.07)


@pytest.mark.parametrize('test', [HOLM, DUNNETT])
def test_infinite_allowance_rules_out_an_outcome(test):
    arm, baseline = pair(5.0)
    (verdict,) = judge_arms([arm], baseline, [math.inf], 0.0, test)
    assert verdict.outcome == UNDECIDED and verdict.p == 1.0 and math.isfinite(verdict.low)
    (verdict,) = judge_arms([baseline], arm, [0.0], math.inf, test)
    assert verdict.outcome == UNDECIDED and verdict.p == 1.0 and math.isfinite(verdict.high)
    (verdict,) = judge_arms([baseline], arm, [math.inf], 0.0, test)
    assert verdict.outcome == BETTER


@pytest.mark.parametrize('test', [HOLM, DUNNETT])
def test_difference_without_spread_decides(test):
    same = np.full(5, 3.1)
    (verdict,) = judge_arms([same], same, [0.0], 0.0, test)
    assert verdict.outcome == UNDECIDED and verdict.p == 1.0 and math.isnan(verdict.correlation)
    (verdict,) = judge_arms([same - 1], same, [0.0], 0.0, test)
    assert verdict.outcome == BETTER and verdict.p == 0.0


def test_mirrored_losses_mirror_the_verdict():
    arm, baseline = pair(-0.2)
    (verdict,), (mirrored,) = (
        judge_arms([arm], baseline, [0.1], 0.0),
        judge_arms([-arm], -baseline, [0.0], 0.1),
    )
    assert (
        verdict.outcome == BETTER
        and mirrored.outcome == WORSE
        and verdict.p == pytest.approx(mirrored.p)
    )
    assert (verdict.low, verdict.high) == pytest.approx((-mirrored.high, -mirrored.low))


def test_two_looks_keep_five_percent():
    """Simulates two looks of a paired t test, after 5 and 10 seeds, at the level of each."""
    x_RS = np.random.default_rng(0).standard_normal((40000, 10))
    wrong = np.zeros(len(x_RS), bool)
    for n in (5, 10):
        t_R = x_RS[:, :n].mean(1) / x_RS[:, :n].std(1, ddof=1) * math.sqrt(n)
        wrong |= np.abs(t_R) > stats.t.isf(LEVEL / 2, n - 1)
    assert wrong.mean() == pytest.approx(0.05, abs=0.004)


@pytest.mark.parametrize(('arms', 'freedom'), [(1, 4), (2, 8), (4, 16), (8, 32)])
def test_dunnett_cdf_matches_multivariate_t(arms, freedom):
    shape = 0.5 + 0.5 * np.eye(arms)
    joint = stats.multivariate_t(shape=shape, df=freedom, seed=0)
    for t in (0.5, 2.0, 3.0):
        expected = joint.cdf(np.full(arms, t), lower_limit=np.full(arms, -t), random_state=1)
        assert dunnett_cdf(t, arms, freedom) == pytest.approx(expected, abs=2e-3)


def test_dunnett_cdf_with_one_arm_is_t():
    assert dunnett_cdf(2.5, 1, 7) == pytest.approx(1 - 2 * stats.t.sf(2.5, 7), abs=1e-4)


@pytest.mark.parametrize(
    ('arms', 'freedom', 'expected'),
    [(8, 32, 2.80), (2, 10, 2.57), (4, 20, 2.65)],
)
def test_dunnett_critical_values(arms, freedom, expected):
    """Two-sided, 5%: for eight arms with five blocks, and from Dunnett's table of 1964."""
    t = optimize.brentq(lambda t: dunnett_cdf(t, arms, freedom) - 0.95, 1, 6)
    assert t == pytest.approx(expected, abs=0.011)


def test_dunnett_pools_arms_with_seeds_as_blocks():
    rng = np.random.default_rng(3)
    blocks_S = 5 * rng.standard_normal(5)
    losses_AS = blocks_S + 0.1 * rng.standard_normal((4, 5))
    verdicts = judge_arms(list(losses_AS[1:]), losses_AS[0], [0.0] * 3, 0.0, DUNNETT)
    design = np.zeros((20, 8))  # arm and seed effects, by ordinary least squares
    for i in range(4):
        for j in range(5):
            design[5 * i + j, i] = 1
            if j:
                design[5 * i + j, 3 + j] = 1
    _, squares, rank, _ = np.linalg.lstsq(design, losses_AS.ravel(), rcond=None)
    assert rank == 8
    sd = math.sqrt(2 * squares[0] / 12)
    for verdict, arm in zip(verdicts, losses_AS[1:], strict=True):
        t = abs(np.mean(arm - losses_AS[0])) / sd * math.sqrt(5)
        assert verdict.deviation == pytest.approx(sd)
        assert verdict.p == pytest.approx(1 - dunnett_cdf(t, 3, 12), abs=1e-9)


def test_seeds_needed_matches_published_table(monkeypatch):
    monkeypatch.setattr(statistics, 'LEVEL', 0.05)
    seeds = [seeds_needed(d, 1.0) for d in (0.5, 1, 1.5, 2, 3)]
    assert seeds == [34, 10, 6, 5, 4]
    seeds = [seeds_needed(d, 1.0, 8) for d in (0.5, 1, 1.5, 2, 3)]
    assert seeds == [55, 17, 10, 7, 5]


def test_seeds_needed_depends_only_on_ratio():
    assert seeds_needed(-0.02, 0.01) == seeds_needed(2, 1.0) < seeds_needed(2, 1.0, tests=8)
    assert seeds_needed(1.0, 0.0) == 2 and seeds_needed(1e9, 1.0) == 2
    assert seeds_needed(0.0, 1.0) == seeds_needed(1e-6, 1.0) == MAX_SEEDS + 1
    assert seeds_needed(1.0, math.nan) == MAX_SEEDS + 1


# Means and the one test of a sweep.


def test_t_interval_by_hand():
    interval = t_interval([1, 2, 3, 4])  # s = sqrt(5 / 3); 3.18245 stands in tables of t, 3 d.o.f.
    assert interval.mean == 2.5 and interval.n == 4
    assert interval.half_width == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2, rel=1e-6)


def test_t_interval_with_two_values_is_cauchy_quantile():
    """With one degree of freedom t is Cauchy, and the Cauchy quantile function is tan."""
    interval = t_interval([0, 1])
    assert interval.half_width == pytest.approx(math.tan(math.pi * 0.475) / 2)


def test_t_interval_coverage():
    x_RS = np.random.default_rng(0).normal(3.0, 2.0, (4000, 3))
    intervals = [t_interval(x_S) for x_S in x_RS]
    covered = np.mean([abs(interval.mean - 3.0) <= interval.half_width for interval in intervals])
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


@pytest.mark.parametrize(('values', 'mean'), [([2.5], 2.5), ([], math.nan)])
def test_t_interval_without_enough_values(values, mean):
    interval = t_interval(values)
    np.testing.assert_equal(
        (interval.mean, interval.half_width, interval.n), (mean, math.nan, len(values))
    )
    assert classify_difference(interval, p_value(interval)) == 'one seed' and math.isnan(
        p_value(interval)
    )


def test_paired_interval_uses_common_seeds():
    interval = paired_interval({0: 2.0, 1: 3.1, 2: 9.0}, {1: 3.0, 0: 2.1, 7: 0.0})
    assert interval.n == 2 and interval.mean == pytest.approx(0.0)  # of -0.1 and 0.1


def test_p_value_matches_paired_t_test():
    rng = np.random.default_rng(1)
    sides = set()
    for shift in (-0.3, -0.1, 0.0, 0.1, 0.3):
        for _ in range(20):
            base, arm = rng.normal(3.0, 1.0, 4), rng.normal(shift, 0.1, 4)
            arm += base
            difference = paired_interval(dict(enumerate(arm)), dict(enumerate(base)))
            test = stats.ttest_rel(arm, base)
            assert p_value(difference) == pytest.approx(test.pvalue)
            better = 'better' if test.statistic < 0 else 'worse'
            side = classify_difference(difference, p_value(difference))
            assert side == (better if test.pvalue < 0.05 else 'within noise')
            assert (side != 'within noise') == (abs(difference.mean) > difference.half_width)
            sides.add(side)
    assert sides == {'better', 'worse', 'within noise'}


def test_sign_without_variance_decides():
    assert p_value(Interval(-0.1, 0.0, 3)) == 0 and p_value(Interval(0.0, 0.0, 3)) == 1
    assert classify_difference(Interval(-0.1, 0.0, 3), 0.0) == 'better'
    assert classify_difference(Interval(0.0, 0.0, 3), 1.0) == 'within noise'


def test_holm_adjust_by_hand():
    """0.01 * 4, 0.02 * 3, 0.03 * 2, and 0.04 * 1, which is raised to the one before it."""
    assert holm_adjust([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert (
        holm_adjust([0.6, 0.7]) == [1.0, 1.0]
        and holm_adjust([0.03]) == [0.03]
        and holm_adjust([]) == []
    )


def test_holm_adjust_ignores_nan():
    adjusted = holm_adjust([math.nan, 0.02, math.nan, 0.03])
    np.testing.assert_allclose(adjusted, [math.nan, 0.04, math.nan, 0.04])


def test_holm_adjust_controls_familywise_error():
    """Ten variants equal the baseline with which all are compared."""
    rng, wrong, unadjusted, trials = np.random.default_rng(2), 0, 0, 400
    for _ in range(trials):
        x_VS = rng.normal(size=(11, 3))
        p_values = [p_value(t_interval(x_S - x_VS[0])) for x_S in x_VS[1:]]
        wrong += min(holm_adjust(p_values)) < 0.05
        unadjusted += min(p_values) < 0.05
    assert wrong / trials < 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials) < unadjusted / trials


def test_sweep_and_study_need_equal_seeds():
    """Catches the former 64, 18 and 7 seeds beside 152, 40 and 12, for a power of one half at 5%
    and of 80% at 2.7%.
    """
    shares, losses_S = (0.25, 0.5, 1.0), (SEEDS_S - SEEDS_S.mean()) / SEEDS_S.std(ddof=1)
    for share, n in zip(shares, (152, 40, 12), strict=True):
        assert seeds_needed(share, 1.0) == n
        difference = paired_interval(
            dict(enumerate(share + losses_S)), dict.fromkeys(range(5), 0.0)
        )
        (verdict,) = judge_arms([share + losses_S], np.zeros(5), [0.0], 0.0)
        assert seeds_needed(difference.mean, difference.std) == n
        assert seeds_needed(verdict.difference, verdict.deviation) == n


def test_seeds_needed_reaches_its_power():
    """The power holds at the level of a look, and is higher in the one test of a sweep."""
    rng, n = np.random.default_rng(4), seeds_needed(1.0, 1.0)
    p_R = np.array([p_value(t_interval(rng.normal(1.0, 1.0, n))) for _ in range(1500)])
    assert abs(np.mean(p_R < LEVEL) - POWER) < 4 * math.sqrt(POWER * (1 - POWER) / 1500) + 0.01
    assert np.mean(p_R < 1 - CONFIDENCE) > np.mean(p_R < LEVEL)


def test_format_seeds():
    assert format_seeds(14) == 'about 14 seeds'
    assert format_seeds(MAX_SEEDS + 1, 'fresh seeds') == f'more than {MAX_SEEDS} fresh seeds'
