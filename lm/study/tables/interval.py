"""Means of few values with their intervals, which assume normal values, as Student's t does."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
from scipy import stats

from lm.study.statistics import CONFIDENCE


@dataclasses.dataclass(frozen=True)
class Interval:
    """`mean` of n values and their standard deviation: nan where n < 2."""

    mean: float
    std: float
    n: int

    @property
    def half(self) -> float:
        """Half the confidence interval of the mean: t s / sqrt(n), nan where n < 2. t is the (1 +
        CONFIDENCE) / 2 quantile for n - 1 degrees of freedom (Student, Biometrika 6, 1908).
        """
        if self.n < 2:
            return math.nan
        t = stats.t.ppf((1 + CONFIDENCE) / 2, self.n - 1)
        return float(t * self.std / math.sqrt(self.n))


def t_interval(values: Iterable[float]) -> Interval:
    """The interval of the mean of values x, with s^2 = sum (x - mean)^2 / (n - 1)."""
    x = np.asarray(list(values), float)
    mean = float(x.mean()) if x.size else math.nan
    return Interval(mean, float(x.std(ddof=1)) if x.size > 1 else math.nan, x.size)
