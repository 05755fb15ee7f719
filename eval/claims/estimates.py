"""An estimate: a number, its interval, and the deviation, from which needed seeds follow."""

import dataclasses
import math
from collections.abc import Iterable

from lm.study.statistics import t_interval

HOLDS, FAILS, UNDECIDED = 'holds', 'fails', 'undecided'


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


def mean_over_seeds(values: Iterable[float]) -> Estimate:
    """Returns the mean over seeds with Student's interval."""
    interval = t_interval(values)
    low, high = interval.mean - interval.half_width, interval.mean + interval.half_width
    return Estimate(interval.mean, low, high, interval.n, interval.std)
