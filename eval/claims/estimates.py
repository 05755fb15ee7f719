"""An estimate: a number, its interval, and what it would take to narrow it."""

import dataclasses
import math
from collections.abc import Iterable

from lm.study.statistics import t_interval

HOLDS, FAILS, UNDECIDED = 'holds', 'fails', 'undecided'


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number and its interval of 95%. n: seeds. deviation: of the number of one seed; nan where
    seeds have none of their own.
    """

    value: float
    low: float
    high: float
    n: int
    deviation: float = math.nan

    def outcome(self, low: float, high: float) -> str:
        """Returns HOLDS where all of the interval lies in a range, FAILS where none of it does."""
        if math.isnan(self.value):
            return UNDECIDED
        if low <= self.low and self.high <= high:
            return HOLDS
        return FAILS if self.low > high or self.high < low else UNDECIDED


def exact_estimate(value: float) -> Estimate:
    """Returns the estimate of a number that no seed has a part in."""
    return Estimate(value, value, value, 1)


def mean_over_seeds(values: Iterable[float]) -> Estimate:
    """Returns the mean over seeds with Student's interval."""
    found = t_interval(values)
    low, high = found.mean - found.half_width, found.mean + found.half_width
    return Estimate(found.mean, low, high, found.n, found.std)
