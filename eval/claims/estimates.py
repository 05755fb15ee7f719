"""An estimate: a number, its interval, and the deviation, from which needed seeds follow."""

import dataclasses
import math
from collections.abc import Iterable

from lm.study.statistics import t_interval

HOLDS, FAILS, UNDECIDED = 'holds', 'fails', 'undecided'
SCALES = {'identity': (-math.inf, math.inf), 'log': (0.0, math.inf), 'logit': (0.0, 1.0)}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number and its 95% interval.

    n: seeds. deviation: standard deviation between seeds; nan if the number does not vary with the
    seed.
    """

    value: float
    low: float
    high: float
    n: int
    deviation: float = math.nan

    def outcome(self, low: float, high: float) -> str:
        """Returns HOLDS if all of the interval lies in the range, FAILS if none of it does."""
        if math.isnan(self.value):
            return UNDECIDED
        if low <= self.low and self.high <= high:
            return HOLDS
        return FAILS if self.low > high or self.high < low else UNDECIDED


def exact_estimate(value: float) -> Estimate:
    """Returns the estimate of a number that does not depend on a seed."""
    return Estimate(value, value, value, 1)


def mean_over_seeds(values: Iterable[float], scale: str = 'identity') -> Estimate:
    """Returns the mean over seeds with Student's interval, on a scale that fits the quantity.

    With 'log' and 'logit' the interval is that of log(mean) or logit(mean), whose standard error is
    that of the mean times the derivative of the scale, and is transformed back. It then stays above
    0, or between 0 and 1.

    Args:
      values: one number of each seed.
      scale: one of SCALES: 'identity' for differences, 'log' for ratios and errors above 0, 'logit'
        for shares. Means at an end of the scale's range have the interval of 'identity', cut there.
    """
    interval = t_interval(values)
    mean, half_width = interval.mean, interval.half_width
    low, high = mean - half_width, mean + half_width
    start, end = SCALES[scale]
    if scale == 'log' and mean > 0:
        factor = math.exp(half_width / mean)
        low, high = mean / factor, mean * factor
    elif scale == 'logit' and 0 < mean < 1:
        factor = math.exp(half_width / (mean * (1 - mean)))
        low = mean / (mean + (1 - mean) * factor)
        high = mean / (mean + (1 - mean) / factor)
    return Estimate(mean, max(low, start), min(high, end), interval.n, interval.std)
