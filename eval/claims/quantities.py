"""Quantities that conditions of claims are about, with their intervals, from a tuned sweep."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from eval.tables.ablation import Ablation, difference


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


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A row of QUANTITIES. of: (ablation, arm, against) -> Estimate, None before its runs ended or
    where it is not defined. words: of both arms.
    """

    of: Callable[[Ablation, int, int], Estimate | None]
    words: str
    unit: str


def loss_difference(ablation: Ablation, arm: int, against: int) -> Estimate | None:
    """Returns the loss of an arm less that of another, each at its best values, by fresh seeds.

    The interval has the allowances of both: an end is infinite where an arm is still at an edge of
    what was tried, which could make it better without bound. An arm that diverges at every value is
    infinitely worse.
    """
    is_dead = [ablation.is_dead(i) for i in (arm, against)]
    if ablation.study.tuned.open is None and is_dead == [True, False]:
        return Estimate(math.inf, math.inf, math.inf, 0)
    found = difference(ablation, arm, against)
    if found is None:
        return None
    return Estimate(found.difference, found.low, found.high, found.n, found.deviation)


def speedup(ablation: Ablation, arm: int, against: int) -> Estimate | None:
    """Returns the tokens the baseline needs for the arm's loss over the arm's
    (`lm.tuning.speedup`); against: the baseline, 0.
    """
    found = ablation.speedup(arm) if against == 0 else None
    return found and Estimate(found.value, found.low, found.high, len(ablation.arms[arm].fresh))


QUANTITIES: Mapping[str, Quantity] = {
    'difference': Quantity(loss_difference, '{arm} - {against}', 'nats per token'),
    'speedup': Quantity(speedup, 'speed-up of {arm} over {against}', ''),
}
