"""Reference and property tests of verdicts: scipy's paired t and Dunnett's distribution, published
critical values and sample sizes.
"""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from lm.study.statistics import (
    BETTER,
    CONFIDENCE,
    DUNNETT,
    HOLM,
    LEVEL,
    MOST_SEEDS,
    UNDECIDED,
    WORSE,
    judge,
    seeds_for,
    within,
)

SEEDS_S = np.array([0.3, -0.8, 1.1, 0.2, -0.9])
NOISE_S = np.array([0.4, -0.1, -0.6, 0.5, 0.1])


def pair(difference, noise=0.1):
    return 3 + SEEDS_S + difference + noise * NOISE_S, 3 + SEEDS_S


def test_one_arm_is_the_paired_t_test():
    arm, baseline = pair(-0.2)
    (found,) = judge([arm], baseline, [0.0], 0.0)
    wanted = stats.ttest_rel(arm, baseline)
    assert found.p == pytest.approx(wanted.pvalue) and found.said == BETTER
    assert found.difference == pytest.approx(np.mean(arm - baseline))
    assert found.deviation == pytest.approx(np.std(arm - baseline, ddof=1)) and found.n == 5
    interval = wanted.confidence_interval(CONFIDENCE)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.correlation == pytest.approx(np.corrcoef(arm, baseline)[0, 1])


def test_holm_by_hand():
    """The smallest of three p-values is tripled, the next doubled, and none may fall below that."""
    _, baseline = pair(0)
    arms = [pair(-0.15)[0], pair(-0.06)[0], pair(0.065, 0.1)[0]]
    found = judge(arms, baseline, [0.0] * 3, 0.0)
    p = [stats.ttest_rel(arm, baseline).pvalue for arm in arms]
    assert p[0] < p[2] < p[1] or p[0] < p[1] < p[2]
    second, last = sorted((1, 2), key=lambda i: p[i])
    assert found[0].p == pytest.approx(3 * p[0])
    assert found[second].p == pytest.approx(2 * p[second])
    assert found[last].p == pytest.approx(max(p[last], 2 * p[second]))


def test_allowances_stand_in_the_way_of_a_verdict():
    """Better needs the baseline's allowance to be exceeded, worse the arm's."""
    (arm, baseline), free = pair(-0.2), 0.0
    shifted = stats.ttest_1samp(arm - baseline + 0.1, 0).pvalue
    (found,) = judge([arm], baseline, [9.0], 0.1)
    assert found.p == pytest.approx(shifted) and found.said == BETTER
    (found,) = judge([arm], baseline, [free], 0.3)
    assert found.said == UNDECIDED and found.p == 1.0
    (found,) = judge([baseline], arm, [0.1], 9.0)
    assert found.p == pytest.approx(shifted) and found.said == WORSE
    (found,) = judge([baseline], arm, [0.3], free)
    assert found.said == UNDECIDED


def test_allowances_widen_the_interval():
    arm, baseline = pair(-0.2)
    (found,), (free,) = judge([arm], baseline, [0.03], 0.07), judge([arm], baseline, [0.0], 0.0)
    assert found.low == pytest.approx(free.low - 0.03)
    assert found.high == pytest.approx(free.high + 0.07)


@pytest.mark.parametrize('test', [HOLM, DUNNETT])
def test_a_bound_is_never_worse_and_no_arm_better_than_one(test):
    arm, baseline = pair(5.0)
    (found,) = judge([arm], baseline, [math.inf], 0.0, test)
    assert found.said == UNDECIDED and found.p == 1.0 and math.isfinite(found.low)
    (found,) = judge([baseline], arm, [0.0], math.inf, test)
    assert found.said == UNDECIDED and found.p == 1.0 and math.isfinite(found.high)
    (found,) = judge([baseline], arm, [math.inf], 0.0, test)
    assert found.said == BETTER


@pytest.mark.parametrize('test', [HOLM, DUNNETT])
def test_losses_without_spread_are_decided_by_their_difference(test):
    same = np.full(5, 3.1)
    (found,) = judge([same], same, [0.0], 0.0, test)
    assert found.said == UNDECIDED and found.p == 1.0 and math.isnan(found.correlation)
    (found,) = judge([same - 1], same, [0.0], 0.0, test)
    assert found.said == BETTER and found.p == 0.0


def test_mirrored_losses_have_the_mirrored_verdict():
    arm, baseline = pair(-0.2)
    (one,), (other,) = judge([arm], baseline, [0.1], 0.0), judge([-arm], -baseline, [0.0], 0.1)
    assert one.said == BETTER and other.said == WORSE and one.p == pytest.approx(other.p)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_two_looks_keep_five_percent():
    """Two looks of a paired t test, after 5 and 10 seeds, at the level that each has."""
    x_RS = np.random.default_rng(0).standard_normal((40000, 10))
    wrong = np.zeros(len(x_RS), bool)
    for n in (5, 10):
        t_R = x_RS[:, :n].mean(1) / x_RS[:, :n].std(1, ddof=1) * math.sqrt(n)
        wrong |= np.abs(t_R) > stats.t.isf(LEVEL / 2, n - 1)
    assert wrong.mean() == pytest.approx(0.05, abs=0.004)


@pytest.mark.parametrize(('arms', 'freedom'), [(1, 4), (2, 8), (4, 16), (8, 32)])
def test_within_is_the_multivariate_t(arms, freedom):
    shape = 0.5 + 0.5 * np.eye(arms)
    joint = stats.multivariate_t(shape=shape, df=freedom, seed=0)
    for t in (0.5, 2.0, 3.0):
        wanted = joint.cdf(np.full(arms, t), lower_limit=np.full(arms, -t), random_state=1)
        assert within(t, arms, freedom) == pytest.approx(wanted, abs=2e-3)


def test_within_of_one_arm_is_t():
    assert within(2.5, 1, 7) == pytest.approx(1 - 2 * stats.t.sf(2.5, 7), abs=1e-4)


@pytest.mark.parametrize(
    ('arms', 'freedom', 'wanted'),
    [(8, 32, 2.80), (2, 10, 2.57), (4, 20, 2.65)],
)
def test_critical_values_of_dunnett(arms, freedom, wanted):
    """Two-sided, 5%: of eight arms with five blocks, and of Dunnett's table of 1964."""
    found = optimize.brentq(lambda t: within(t, arms, freedom) - 0.95, 1, 6)
    assert found == pytest.approx(wanted, abs=0.011)


def test_dunnett_pools_arms_and_takes_seeds_as_blocks():
    rng = np.random.default_rng(3)
    blocks_S = 5 * rng.standard_normal(5)
    losses_AS = blocks_S + 0.1 * rng.standard_normal((4, 5))
    found = judge(list(losses_AS[1:]), losses_AS[0], [0.0] * 3, 0.0, DUNNETT)
    design = np.zeros((20, 8))  # arm and seed effects, by ordinary least squares
    for i in range(4):
        for j in range(5):
            design[5 * i + j, i] = 1
            if j:
                design[5 * i + j, 3 + j] = 1
    _, squares, rank, _ = np.linalg.lstsq(design, losses_AS.ravel(), rcond=None)
    assert rank == 8
    sd = math.sqrt(2 * squares[0] / 12)
    for one, arm in zip(found, losses_AS[1:], strict=True):
        t = abs(np.mean(arm - losses_AS[0])) / sd * math.sqrt(5)
        assert one.deviation == pytest.approx(sd)
        assert one.p == pytest.approx(1 - within(t, 3, 12), abs=1e-9)


def test_seeds_for_is_the_published_table():
    found = [seeds_for(d, 1.0, level=0.05) for d in (0.5, 1, 1.5, 2, 3)]
    assert found == [34, 10, 6, 5, 4]
    found = [seeds_for(d, 1.0, 8, level=0.05) for d in (0.5, 1, 1.5, 2, 3)]
    assert found == [55, 17, 10, 7, 5]


def test_seeds_for_depends_on_the_ratio_alone():
    assert seeds_for(-0.02, 0.01) == seeds_for(2, 1.0) > seeds_for(2, 1.0, level=0.2)
    assert seeds_for(1.0, 0.0) == 2 and seeds_for(1e9, 1.0) == 2
    assert seeds_for(0.0, 1.0) == seeds_for(1e-6, 1.0) == MOST_SEEDS + 1
    assert seeds_for(1.0, math.nan) == MOST_SEEDS + 1
