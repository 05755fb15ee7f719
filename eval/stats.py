"""Statistics of paired comparisons: intervals, tests, their correction, the seeds that they need.

All of them assume normal values, as Student's t does.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
MOST_SEEDS = 1000  # that anybody would train
BETTER, WORSE, WITHIN_NOISE, ONE_SEED = 'better', 'worse', 'within noise', 'one seed'

Seed = Hashable


@dataclasses.dataclass(frozen=True)
class Interval:
    """`mean` of n values and their standard deviation: nan where n < 2."""

    mean: float
    std: float
    n: int

    @property
    def half(self) -> float:
        """Half the width of the confidence interval of the mean: t s / sqrt(n), nan where n < 2.

        t is the (1 + CONFIDENCE) / 2 quantile of Student's distribution with n - 1 degrees of
        freedom (Student, Biometrika 6, 1908).
        """
        if self.n < 2:
            return math.nan
        t = stats.t.ppf((1 + CONFIDENCE) / 2, self.n - 1)
        return float(t * self.std / math.sqrt(self.n))


def t_interval(values: Iterable[float]) -> Interval:
    """The interval of the mean of values x, with s^2 = sum (x - mean)^2 / (n - 1)."""
    x = np.asarray(list(values), float)
    if x.size < 2:
        return Interval(float(x[0]) if x.size else math.nan, math.nan, x.size)
    return Interval(float(x.mean()), float(x.std(ddof=1)), x.size)


def paired(losses: Mapping[Seed, float], baseline: Mapping[Seed, float]) -> Interval:
    """The interval of losses[s] - baseline[s] over the seeds s that both have.

    What a seed does to both cancels, so this is narrower than the difference of two means.
    """
    return t_interval(losses[seed] - baseline[seed] for seed in losses if seed in baseline)


def p_value(difference: Interval) -> float:
    """Of the paired t test that the mean is 0, two-sided: P(|T| >= |mean| sqrt(n) / s).

    T has n - 1 degrees of freedom. nan where n < 2. Without variance 0, or 1 where the mean is 0.
    """
    if difference.n < 2:
        return math.nan
    if difference.std == 0:
        return float(difference.mean == 0)
    t = abs(difference.mean) * math.sqrt(difference.n) / difference.std
    return float(2 * stats.t.sf(t, difference.n - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number; those below 1 - CONFIDENCE are significant together.

    Of m of them in order p_(1) <= ... <= p_(m): max over j <= k of min(1, (m - j + 1) p_(j)). The
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


def verdict(difference: Interval, p: float) -> str:
    """Of a difference in loss from the baseline: is its p-value, adjusted by `holm`, significant,
    and which side is it on.
    """
    if difference.n < 2:
        return ONE_SEED
    if p >= 1 - CONFIDENCE:
        return WITHIN_NOISE
    return BETTER if difference.mean < 0 else WORSE


def seeds_needed(difference: Interval, tests: int = 1) -> int:
    """The least n for which t s / sqrt(n) < |mean|: how many seeds would settle this difference, if
    its mean and spread stay what they are; MOST_SEEDS + 1 where it takes more than MOST_SEEDS.

    t is the two-sided quantile of n - 1 degrees of freedom at the level (1 - CONFIDENCE) / tests:
    that of `holm`, where `tests` differences are not significant yet. About half of such
    experiments would find a difference of this size. Raises ValueError where n < 2.
    """
    if difference.n < 2:
        raise ValueError(f'a spread takes two seeds; got {difference.n}')
    n = np.arange(2, MOST_SEEDS + 1)
    t = stats.t.isf((1 - CONFIDENCE) / tests / 2, n - 1)
    enough = n[t * difference.std / np.sqrt(n) < abs(difference.mean)]
    return int(enough[0]) if enough.size else MOST_SEEDS + 1
