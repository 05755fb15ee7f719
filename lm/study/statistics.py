"""Statistics of studies: means, paired differences, tests, and the seeds that a difference takes.

Losses of two arms are paired by seed: what a seed does to both cancels. All assumes normal values,
as Student's t does. A sweep makes one test, at 1 - CONFIDENCE. A tuned study looks twice, after n
and 2 n fresh seeds, at LEVEL each: together 5% (nominal .027 for a t test at n and 2 n, by
simulation). Its verdicts make an allowance for what tuning left open. With d = loss of an arm -
loss of the baseline, the difference at the best values of both lies in [d - r_arm, d + r_baseline]
but for noise, with r the `lm.study.plan.curve.allowance` of each.

SciPy's `ttest_rel` has neither an allowance nor a p from a mean and a deviation, and its `dunnett`
is of independent samples: those tests are here, and SciPy's distributions behind them.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

CONFIDENCE = 0.95  # of intervals, and of the one test of a sweep
LEVEL = 0.027  # of each of two looks
POWER = 0.8  # the chance to find a difference with as many seeds as `seeds_needed` says
MAX_SEEDS = 1000  # that anybody would train
BETTER, WORSE, UNDECIDED = 'better', 'worse', 'undecided'
WITHIN_NOISE, ONE_SEED = 'within noise', 'one seed'  # of the one test of a sweep
HOLM, DUNNETT = 'holm', 'dunnett'
TESTS = (HOLM, DUNNETT)


@functools.lru_cache
def t_quantile(level: float, freedom: int) -> float:
    """Returns the quantile of Student's t."""
    from scipy import stats  # takes 0.3 s, which a program that trains need not wait for

    return float(stats.t.ppf(level, freedom))


@dataclasses.dataclass(frozen=True)
class Interval:
    """`mean` of n values and their standard deviation: nan where n < 2."""

    mean: float
    std: float
    n: int

    @property
    def half_width(self) -> float:
        """Half the confidence interval of the mean: t s / sqrt(n), nan where n < 2. t is the (1 +
        CONFIDENCE) / 2 quantile for n - 1 degrees of freedom (Student, Biometrika 6, 1908).
        """
        if self.n < 2:
            return math.nan
        return t_quantile((1 + CONFIDENCE) / 2, self.n - 1) * self.std / math.sqrt(self.n)


def t_interval(values: Iterable[float]) -> Interval:
    """Returns the interval of the mean of values x, with s^2 = sum (x - mean)^2 / (n - 1)."""
    x = np.asarray(list(values), float)
    mean = float(x.mean()) if x.size else math.nan
    return Interval(mean, float(x.std(ddof=1)) if x.size > 1 else math.nan, x.size)


def paired_interval(
    losses: Mapping[Hashable, float], baseline: Mapping[Hashable, float]
) -> Interval:
    """Returns the interval of losses[s] - baseline[s] over the seeds s that both have."""
    return t_interval(losses[seed] - baseline[seed] for seed in losses if seed in baseline)


def p_value(difference: Interval) -> float:
    """Returns the two-sided p of the paired t test of a mean of 0: P(|T| >= |mean| sqrt(n) / s).

    T has n - 1 degrees of freedom. nan where n < 2. Without variance 0, or 1 where the mean is 0.
    """
    from scipy import stats

    if difference.n < 2:
        return math.nan
    if difference.std == 0:
        return float(difference.mean == 0)
    t = abs(difference.mean) * math.sqrt(difference.n) / difference.std
    return float(2 * stats.t.sf(t, difference.n - 1))


def classify_difference(difference: Interval, p: float) -> str:
    """Returns where a difference in loss lies by the one test of a sweep: BETTER, WORSE,
    WITHIN_NOISE, or ONE_SEED. p: as `holm` adjusts it.
    """
    if difference.n < 2:
        return ONE_SEED
    if p >= 1 - CONFIDENCE:
        return WITHIN_NOISE
    return BETTER if difference.mean < 0 else WORSE


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verdict of fresh seeds on an arm against the baseline.

    said: BETTER, WORSE or UNDECIDED. difference: mean of the pairs. low, high: interval of the
    difference at the best values of both, without allowances that are inf. p: adjusted for the
    number of arms. n: pairs. deviation: of a pair. correlation: of the two losses over seeds, nan
    where one does not vary.
    """

    outcome: str
    difference: float
    low: float
    high: float
    p: float
    n: int
    deviation: float
    correlation: float


def judge_arms(
    arms: Sequence[np.ndarray],
    baseline: np.ndarray,
    r_arms: Sequence[float],
    r_baseline: float,
    test: str = HOLM,
) -> list[Verdict]:
    """Judges arms at one look.

    Args:
      arms: losses of each arm, one a seed.
      baseline: losses of the baseline by the same seeds, two at least.
      r_arms: allowance of each arm; inf if its loss is a bound only: it is never worse then.
      r_baseline: allowance of the baseline; inf: no arm is better then.
      test: HOLM (paired t tests, adjusted by Holm's procedure) or DUNNETT (the joint distribution
        of all differences, with the spread pooled over arms and seeds as blocks).
    """
    differences = [np.asarray(own) - np.asarray(baseline) for own in arms]
    errors, freedom = standard_errors(differences, arms, baseline, test)
    sides = []
    for d, se, r in zip(differences, errors, r_arms, strict=True):
        down, up = _t_statistic(-(d.mean() + r_baseline), se), _t_statistic(d.mean() - r, se)
        sides.append((down, BETTER) if down > up else (up, WORSE))
    adjust = {HOLM: _holm_p_values, DUNNETT: _dunnett_p_values}[test]
    adjusted = adjust([t for t, _ in sides], freedom)
    found = []
    for own, d, se, r, (_, side), p in zip(
        arms, differences, errors, r_arms, sides, adjusted, strict=True
    ):
        half = t_quantile((1 + CONFIDENCE) / 2, freedom) * se
        mean = float(d.mean())
        said = side if p < LEVEL else UNDECIDED
        r_low = 0.0 if math.isinf(r) else r
        r_high = 0.0 if math.isinf(r_baseline) else r_baseline
        low, high = mean - r_low - half, mean + r_high + half
        sd = float(se * math.sqrt(len(d)))
        found.append(Verdict(said, mean, low, high, p, len(d), sd, _correlation(own, baseline)))
    return found


def standard_errors(
    differences: Sequence[np.ndarray],
    arms: Sequence[np.ndarray],
    baseline: np.ndarray,
    test: str,
) -> tuple[list[float], int]:
    """Returns the standard error of each mean difference, and their degrees of freedom."""
    n = len(baseline)
    if test == HOLM:
        return [float(d.std(ddof=1)) / math.sqrt(n) for d in differences], n - 1
    losses_AS = np.array([baseline, *arms])
    residual = losses_AS - losses_AS.mean(0) - losses_AS.mean(1, keepdims=True) + losses_AS.mean()
    freedom = (len(losses_AS) - 1) * (n - 1)
    return [math.sqrt(2 * float(np.sum(residual**2)) / freedom / n)] * len(arms), freedom


def _t_statistic(gap: float, se: float) -> float:
    """gap / se; without any spread infinite, on the side of the gap."""
    if se == 0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / se


def _holm_p_values(ts: Sequence[float], freedom: int) -> list[float]:
    """Two-sided p-values of t statistics, adjusted."""
    from scipy import special

    return holm_adjust([min(1.0, 2 * float(special.stdtr(freedom, -t))) for t in ts])


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number; those below a level are significant together at it.

    With m of them in order p_(1) <= ... <= p_(m): max over j <= k of min(1, (m - j + 1) p_(j)). The
    chance that any true null hypothesis is rejected is then at most the level, whatever the
    dependence between the tests; here all share a baseline. A nan is no test: it stays, and does
    not count (S. Holm, Scandinavian Journal of Statistics 6, 1979).
    """
    tests = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(sorted(tests, key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(tests) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _dunnett_p_values(ts: Sequence[float], freedom: int) -> list[float]:
    """p-values that the largest of all |T| is as large: T as equally correlated by 1/2."""
    return [1.0 if t <= 0 else 1 - dunnett_cdf(t, len(ts), freedom) for t in ts]


def dunnett_cdf(t: float, n_arms: int, freedom: int, nodes: int = 64) -> float:
    """Returns P(max |T_i| <= t) for Dunnett's statistics of `arms` means against one baseline.

    T_i = (Z_i - Z_0) / (sqrt(2) S), Z normal, freedom S^2 chi-squared: by Gauss quadrature over Z_0
    and over the quantiles of S (C. Dunnett, JASA 50, 1955).
    """
    from scipy import stats

    if math.isinf(t):
        return 1.0
    z_Z, weight_Z = np.polynomial.hermite_e.hermegauss(nodes)
    u_S, weight_S = np.polynomial.legendre.leggauss(nodes)
    s_S = np.sqrt(stats.chi2.ppf((u_S + 1) / 2, freedom) / freedom)
    reach_S1 = math.sqrt(2) * t * s_S[:, None]
    inside_SZ = stats.norm.cdf(z_Z + reach_S1) - stats.norm.cdf(z_Z - reach_S1)
    weights_SZ = weight_S[:, None] / 2 * weight_Z / math.sqrt(2 * math.pi)
    return float(min(1.0, np.sum(weights_SZ * inside_SZ**n_arms)))


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    if not (np.ptp(x) and np.ptp(y)):
        return math.nan
    x, y = x - np.mean(x), y - np.mean(y)
    return float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))


def seeds_needed(effect: float, deviation: float, tests: int = 1) -> int:
    """Returns the pairs that find an effect with a chance of POWER, MOST_SEEDS + 1 for more.

    The least n with P(|T| > t | noncentrality effect sqrt(n) / deviation) >= POWER, for the paired
    t test at LEVEL / tests, two-sided. The one test of a sweep is at a higher level, and finds the
    effect more often.

    Args:
      effect: the difference of losses that is to be found.
      deviation: standard deviation of the difference of a pair.
      tests: differences that are tested together.
    """
    from scipy import stats

    if effect == 0 or not math.isfinite(deviation):
        return MAX_SEEDS + 1
    n = np.arange(2, MAX_SEEDS + 1)
    if deviation == 0:
        return 2
    t = stats.t.isf(LEVEL / tests / 2, n - 1)
    shift = abs(effect) * np.sqrt(n) / deviation
    enough = n[stats.nct.sf(t, n - 1, np.minimum(shift, 35.0)) >= POWER]  # nct fails far out
    return int(enough[0]) if enough.size else MAX_SEEDS + 1


def format_seeds(seeds: int, noun: str = 'seeds') -> str:
    """Returns 'about 14 seeds', or 'more than 1000 seeds'."""
    return f'about {seeds} {noun}' if seeds <= MAX_SEEDS else f'more than {MAX_SEEDS} {noun}'
