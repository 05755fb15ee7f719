"""Statistics of studies: means, paired differences, tests, and the number of seeds they need.

Losses of two arms are paired by seed, since a seed's effect on both cancels. All tests assume
normal values, as Student's t does. A sweep makes one test, at 1 - CONFIDENCE. A tuned study looks
twice, after n and 2 n fresh seeds, at LEVEL each: together 5% (nominal .027 for a t test at n and 2
n, by simulation). Its verdicts allow for errors of tuning. With d = loss of an arm - loss of the
baseline, the difference at the best values of both lies in [d - r_arm, d + r_baseline] except for
noise, with r the `lm.study.plan.curve.compute_allowance` of each.

SciPy's `ttest_rel` has neither an allowance nor a p from a mean and a deviation, and its `dunnett`
takes independent samples, so both tests are implemented here on SciPy's distributions.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

CONFIDENCE = 0.95  # level of intervals, and of the one test of a sweep
LEVEL = 0.027  # level of each of two looks
LOOK_CONFIDENCE = f'{1 - LEVEL:.1%}'  # level of the intervals that are printed for a look
POWER = 0.8  # probability that the `seeds_needed` for a difference detect it
MAX_SEEDS = 1000  # more than anybody would train
BETTER, WORSE, UNDECIDED = 'better', 'worse', 'undecided'
WITHIN_NOISE, ONE_SEED = 'within noise', 'one seed'  # further outcomes of a sweep's one test
INCONCLUSIVE = 'inconclusive'  # how UNDECIDED and WITHIN_NOISE are printed
HOLM, DUNNETT = 'holm', 'dunnett'
TESTS = (HOLM, DUNNETT)


def format_outcome(outcome: str) -> str:
    """Returns an outcome as terminals and pages print it."""
    return INCONCLUSIVE if outcome in (UNDECIDED, WITHIN_NOISE) else outcome


@functools.lru_cache
def t_quantile(level: float, freedom: int) -> float:
    """Returns the quantile of Student's t distribution."""
    from scipy import stats  # takes 0.3 s, which a program that trains need not wait for

    return float(stats.t.ppf(level, freedom))


@dataclasses.dataclass(frozen=True)
class Interval:
    """Mean and standard deviation of n values; the deviation is nan if n < 2."""

    mean: float
    std: float
    n: int

    @property
    def half_width(self) -> float:
        """Half the confidence interval of the mean: t s / sqrt(n), nan if n < 2.

        t is the (1 + CONFIDENCE) / 2 quantile for n - 1 degrees of freedom (Student, Biometrika 6,
        1908).
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

    T has n - 1 degrees of freedom. p is nan if n < 2. Without variance it is 0, or 1 if the mean is
    0.
    """
    from scipy import stats

    if difference.n < 2:
        return math.nan
    if difference.std == 0:
        return float(difference.mean == 0)
    t = abs(difference.mean) * math.sqrt(difference.n) / difference.std
    return float(2 * stats.t.sf(t, difference.n - 1))


def classify_difference(difference: Interval, p: float) -> str:
    """Returns BETTER, WORSE, WITHIN_NOISE or ONE_SEED by the one test of a sweep.

    Args:
      difference: difference in loss from the baseline.
      p: its p-value, adjusted by `holm_adjust`.
    """
    if difference.n < 2:
        return ONE_SEED
    if p >= 1 - CONFIDENCE:
        return WITHIN_NOISE
    return BETTER if difference.mean < 0 else WORSE


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Verdict of fresh seeds on an arm against the baseline.

    Attributes:
      outcome: BETTER, WORSE or UNDECIDED.
      difference: mean of the paired differences.
      low: lower end of the interval of the difference at the best values of both arms; infinite
        allowances are left out.
      high: upper end of the same interval.
      p: p-value, adjusted for the number of arms.
      n: number of pairs.
      deviation: standard deviation of a paired difference.
      correlation: correlation of the two losses over seeds; nan if either is constant.
      freedom: degrees of freedom of the test.
    """

    outcome: str
    difference: float
    low: float
    high: float
    p: float
    n: int
    deviation: float
    correlation: float
    freedom: int

    @property
    def look_interval(self) -> tuple[float, float]:
        """The interval of the difference at 1 - LEVEL, the level at which a look decides.

        `low` and `high` are at CONFIDENCE, and may exclude 0 while the look is inconclusive.
        """
        quantiles = [t_quantile((1 + x) / 2, self.freedom) for x in (1 - LEVEL, CONFIDENCE)]
        wider = (quantiles[0] - quantiles[1]) * self.deviation / math.sqrt(self.n)
        return self.low - wider, self.high + wider

    def describe(self, unit: str = '', digits: int = 3) -> str:
        """Returns 'better by 0.112 nats per token (97.3% interval 0.060 to 0.161)', or
        'inconclusive: p = 0.037, this look needs p < 0.027'.
        """
        if self.outcome == UNDECIDED:
            return (
                f'{format_outcome(self.outcome)}: p = {self.p:.2g}, this look needs p < {LEVEL:g}'
            )
        return f'{self.outcome} by {self.describe_size(unit, digits)}'

    def describe_size(self, unit: str = '', digits: int = 3) -> str:
        """Returns the difference with its interval at the level of the look.

        It has a sign if the verdict is open; otherwise it is the size of the difference.
        """
        sign = -1 if self.outcome == BETTER else 1
        form = f'+.{digits}f' if self.outcome == UNDECIDED else f'.{digits}f'
        low, high = sorted(sign * end for end in self.look_interval)
        value = f'{sign * self.difference:{form}} {unit}'.strip()
        return f'{value} ({LOOK_CONFIDENCE} interval {low:{form}} to {high:{form}})'


def judge_arms(
    arms: Sequence[np.ndarray],
    baseline: np.ndarray,
    r_arms: Sequence[float],
    r_baseline: float,
    test: str = HOLM,
) -> list[Verdict]:
    """Judges arms at one look.

    Args:
      arms: losses of each arm, by seed.
      baseline: losses of the baseline at the same seeds, at least two.
      r_arms: allowance of each arm; inf if its loss is only an upper bound, so that it is never
        worse.
      r_baseline: allowance of the baseline; with inf no arm is better.
      test: HOLM (paired t tests, adjusted by Holm's procedure) or DUNNETT (the joint distribution
        of all differences, with the spread pooled over arms and with seeds as blocks).

    Returns:
      The verdict on each arm.
    """
    differences = [np.asarray(losses) - np.asarray(baseline) for losses in arms]
    errors, freedom = standard_errors(differences, arms, baseline, test)
    sides = []
    for d, se, r in zip(differences, errors, r_arms, strict=True):
        down, up = _t_statistic(-(d.mean() + r_baseline), se), _t_statistic(d.mean() - r, se)
        sides.append((down, BETTER) if down > up else (up, WORSE))
    adjust = {HOLM: _holm_p_values, DUNNETT: _dunnett_p_values}[test]
    adjusted = adjust([t for t, _ in sides], freedom)
    verdicts = []
    for arm_losses, d, se, r, (_, outcome_side), p in zip(
        arms, differences, errors, r_arms, sides, adjusted, strict=True
    ):
        half = t_quantile((1 + CONFIDENCE) / 2, freedom) * se
        mean = float(d.mean())
        outcome = outcome_side if p < LEVEL else UNDECIDED
        r_low = 0.0 if math.isinf(r) else r
        r_high = 0.0 if math.isinf(r_baseline) else r_baseline
        low, high = mean - r_low - half, mean + r_high + half
        sd = float(se * math.sqrt(len(d)))
        verdicts.append(
            Verdict(
                outcome=outcome,
                difference=mean,
                low=low,
                high=high,
                p=p,
                n=len(d),
                deviation=sd,
                correlation=_correlation(arm_losses, baseline),
                freedom=freedom,
            )
        )
    return verdicts


def standard_errors(
    differences: Sequence[np.ndarray],
    arms: Sequence[np.ndarray],
    baseline: np.ndarray,
    test: str,
) -> tuple[list[float], int]:
    """Returns the standard error of each mean difference, and their degrees of freedom.

    Args:
      differences: paired differences from the baseline, for each arm.
      arms: losses of each arm, by seed.
      baseline: losses of the baseline, by seed.
      test: HOLM (one error for each arm) or DUNNETT (one pooled error).

    Returns:
      (standard errors, degrees of freedom).
    """
    n = len(baseline)
    if test == HOLM:
        return [float(d.std(ddof=1)) / math.sqrt(n) for d in differences], n - 1
    losses_AS = np.array([baseline, *arms])
    residual = losses_AS - losses_AS.mean(0) - losses_AS.mean(1, keepdims=True) + losses_AS.mean()
    freedom = (len(losses_AS) - 1) * (n - 1)
    return [math.sqrt(2 * float(np.sum(residual**2)) / freedom / n)] * len(arms), freedom


def _t_statistic(gap: float, se: float) -> float:
    """Returns gap / se; without any spread ±inf, with the sign of the gap."""
    if se == 0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / se


def _holm_p_values(ts: Sequence[float], freedom: int) -> list[float]:
    """Returns the two-sided p-values of t statistics, adjusted by `holm_adjust`."""
    from scipy import special

    return holm_adjust([min(1.0, 2 * float(special.stdtr(freedom, -t))) for t in ts])


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """Adjusts p-values for their number; all that fall below a level are jointly significant at it.

    With m of them in order p_(1) <= ... <= p_(m): max over j <= k of min(1, (m - j + 1) p_(j)). The
    chance that any true null hypothesis is rejected is then at most the level, for any dependence
    between the tests; here all share a baseline. A nan is not a test: it stays, and does not count
    (S. Holm, Scandinavian Journal of Statistics 6, 1979).
    """
    tests = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(sorted(tests, key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(tests) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _dunnett_p_values(ts: Sequence[float], freedom: int) -> list[float]:
    """Returns the probability that the largest |T| of all arms reaches each t; correlations are
    1/2.
    """
    return [1.0 if t <= 0 else 1 - dunnett_cdf(t, len(ts), freedom) for t in ts]


def dunnett_cdf(t: float, n_arms: int, freedom: int, nodes: int = 64) -> float:
    """Returns P(max |T_i| <= t) for Dunnett's statistics of `n_arms` means against one baseline.

    T_i = (Z_i - Z_0) / (sqrt(2) S), Z normal, freedom S^2 chi-squared: by Gauss quadrature over Z_0
    and over the quantiles of S (C. Dunnett, JASA 50, 1955).

    Args:
      t: the bound on the statistics.
      n_arms: number of arms besides the baseline.
      freedom: degrees of freedom of S.
      nodes: number of quadrature nodes for each integral.

    Returns:
      The probability.
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
    """Returns the pairs that detect an effect with probability POWER; MAX_SEEDS + 1 if that is too
    few.

    The smallest n with P(|T| > t | noncentrality effect sqrt(n) / deviation) >= POWER, for the
    paired t test at LEVEL / tests, two-sided. The one test of a sweep has a higher level, and
    detects the effect more often.

    Args:
      effect: the difference of losses to be detected.
      deviation: standard deviation of a paired difference.
      tests: number of differences tested together.

    Returns:
      The number of pairs.
    """
    from scipy import stats

    if effect == 0 or not math.isfinite(deviation):
        return MAX_SEEDS + 1
    n = np.arange(2, MAX_SEEDS + 1)
    if deviation == 0:
        return 2
    t = stats.t.isf(LEVEL / tests / 2, n - 1)
    shift = abs(effect) * np.sqrt(n) / deviation
    # The noncentrality is capped because SciPy's nct fails for large values.
    enough = n[stats.nct.sf(t, n - 1, np.minimum(shift, 35.0)) >= POWER]
    return int(enough[0]) if enough.size else MAX_SEEDS + 1


def format_seeds(seeds: int, noun: str = 'seeds') -> str:
    """Returns 'about 14 seeds', or 'more than 1000 seeds'."""
    return f'about {seeds} {noun}' if seeds <= MAX_SEEDS else f'more than {MAX_SEEDS} {noun}'


def detectable_difference(
    seeds: int, deviation: float, tests: int = 1, level: float = 1 - CONFIDENCE
) -> float:
    """Returns the difference that this many pairs of runs detect with probability POWER.

    The d with P(|T| > t | noncentrality d sqrt(n) / deviation) = POWER, for the paired t test at
    level / tests, two-sided. It is infinite for fewer than two pairs. `seeds_needed` is its inverse
    at LEVEL.

    Args:
      seeds: number of pairs, n.
      deviation: standard deviation of a paired difference.
      tests: number of differences tested together.
      level: probability of any false verdict.

    Returns:
      The difference of losses.
    """
    from scipy import optimize, stats

    if seeds < 2:
        return math.inf
    t = float(stats.t.isf(level / tests / 2, seeds - 1))

    def excess_power(shift: float) -> float:
        # SciPy's nct fails far from its mean; there the power is 1 to rounding.
        return float(stats.nct.sf(t, seeds - 1, shift)) - POWER if shift < 2 * t + 20 else 1 - POWER

    shift = optimize.brentq(excess_power, 0.0, 2 * t + 20, xtol=1e-6)
    return float(shift) * deviation / math.sqrt(seeds)


def deviation_interval(deviation: float, freedom: int) -> tuple[float, float]:
    """Returns the interval of a standard deviation, s sqrt(f / chi2), at CONFIDENCE.

    Args:
      deviation: the estimate, s.
      freedom: its degrees of freedom, f.
    """
    from scipy import stats

    tails = ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)
    low, high = (math.sqrt(freedom / float(stats.chi2.ppf(tail, freedom))) for tail in tails)
    return deviation * low, deviation * high
