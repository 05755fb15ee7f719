"""Reference tests of the statistics: closed forms, numbers worked out by hand, scipy's tests."""

import math

import numpy as np
import pytest
from scipy import stats

from lm.study.tables.comparison import MOST_SEEDS, holm, p_value, paired, seeds_needed, verdict
from lm.study.tables.interval import Interval, t_interval


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
    assert verdict(found, p_value(found)) == 'one seed' and math.isnan(p_value(found))


def test_paired_takes_common_seeds_only():
    found = paired({0: 2.0, 1: 3.1, 2: 9.0}, {1: 3.0, 0: 2.1, 7: 0.0})
    assert found.n == 2 and found.mean == pytest.approx(0.0)  # of -0.1 and 0.1


def test_p_value_is_that_of_the_paired_t_test():
    rng = np.random.default_rng(1)
    seen = set()
    for shift in (-0.3, -0.1, 0.0, 0.1, 0.3):
        for _ in range(20):
            base, other = rng.normal(3.0, 1.0, 4), rng.normal(shift, 0.1, 4)
            other += base
            difference = paired(dict(enumerate(other)), dict(enumerate(base)))
            test = stats.ttest_rel(other, base)
            assert p_value(difference) == pytest.approx(test.pvalue)
            side = 'better' if test.statistic < 0 else 'worse'
            told = verdict(difference, p_value(difference))
            assert told == (side if test.pvalue < 0.05 else 'within noise')
            assert (told != 'within noise') == (abs(difference.mean) > difference.half)
            seen.add(told)
    assert seen == {'better', 'worse', 'within noise'}


def test_without_variance_the_sign_decides():
    assert p_value(Interval(-0.1, 0.0, 3)) == 0 and p_value(Interval(0.0, 0.0, 3)) == 1
    assert verdict(Interval(-0.1, 0.0, 3), 0.0) == 'better'
    assert verdict(Interval(0.0, 0.0, 3), 1.0) == 'within noise'


def test_holm_by_hand():
    """0.01 * 4, 0.02 * 3, 0.03 * 2, and 0.04 * 1, which is raised to the one before it."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([0.03]) == [0.03] and holm([]) == []


def test_holm_does_not_count_what_has_no_p_value():
    found = holm([math.nan, 0.02, math.nan, 0.03])
    np.testing.assert_allclose(found, [math.nan, 0.04, math.nan, 0.04])


def test_holm_keeps_the_chance_of_any_false_verdict():
    """Of ten variants equal to the baseline, with which all are compared."""
    rng, wrong, alone, trials = np.random.default_rng(2), 0, 0, 400
    for _ in range(trials):
        x_VS = rng.normal(size=(11, 3))
        p_values = [p_value(t_interval(x_S - x_VS[0])) for x_S in x_VS[1:]]
        wrong += min(holm(p_values)) < 0.05
        alone += min(p_values) < 0.05
    assert wrong / trials < 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials) < alone / trials


def test_seeds_needed_by_hand():
    """Half widths by the tables of t: 4.3027 s / sqrt(3) for 3 seeds, 3.1824 s / 2 for 4."""
    for mean, n in ((4.3027 / 3**0.5, 3), (2.0, 4), (3.1824 / 2, 4), (1.5, 5), (13.0, 2)):
        assert seeds_needed(Interval(1.0001 * mean, 1.0, 2)) == n
    assert seeds_needed(Interval(-2.0, 1.0, 2)) == 4
    assert seeds_needed(Interval(0.1, 1.0, 5)) == pytest.approx(1.96**2 / 0.1**2, rel=0.01)
    assert seeds_needed(Interval(0.0, 1.0, 5)) == MOST_SEEDS + 1
    assert seeds_needed(Interval(0.0, 0.0, 5)) == MOST_SEEDS + 1
    assert seeds_needed(Interval(2.0, 1.0, 5), tests=10) == 6  # t of 0.9975: 4.773 / sqrt(6)
    with pytest.raises(ValueError, match='two seeds'):
        seeds_needed(Interval(1.0, math.nan, 1))


def test_a_difference_within_noise_needs_more_seeds_than_it_has():
    rng = np.random.default_rng(3)
    for _ in range(50):
        differences = [t_interval(rng.normal(0.1, 0.1, 3)) for _ in range(4)]
        adjusted = holm([p_value(difference) for difference in differences])
        told = [verdict(d, p) for d, p in zip(differences, adjusted, strict=True)]
        undecided = [d for d, t in zip(differences, told, strict=True) if t == 'within noise']
        assert all(seeds_needed(d, len(undecided)) > 3 for d in undecided)
