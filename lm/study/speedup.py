"""Speed-up of an arm: tokens that the baseline needs for the arm's loss, over the arm's tokens.

The baseline's loss L(D) is known at complete, tuned lengths (`tune.lengths`), and is linear in log
D between two of them. Beyond the lengths only a bound is known: "more than", "less than".

The interval holds all D at which a paired t test does not tell the arm's loss from L(D): with
L_i(D) the line of seed i, d_i = arm_i - L_i(D), |mean d| <= t_(n-1) sd(d) / sqrt(n). The curve may
sag below its lines, which counts against the arm. To first order the half width in ln D is t se(d)
/ |dL / d ln D|. (Percentiles of resampled seeds cover 88% at most at five seeds.)
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lm.study.statistics import CONFIDENCE

MORE, LESS = 'more than', 'less than'
POINTS = 1000  # numbers of tokens tested between the shortest and the longest run


@dataclasses.dataclass(frozen=True)
class Speedup:
    """A speed-up and its interval; 2 means that the baseline needs twice the tokens.

    Attributes:
      value: the speed-up; with a `bound`, the end of the range that the lengths cover.
      low: lower end of the interval; 0 if the lengths do not reach it.
      high: upper end of the interval; inf if the lengths do not reach it.
      bound: '', MORE or LESS.
    """

    value: float
    low: float
    high: float
    bound: str = ''

    def __str__(self) -> str:
        """Returns '1.32', or 'more than 2.0'."""
        return f'{self.bound} {self.value:.3g}'.strip()


def speedup(
    lengths: Mapping[float, Sequence[float]], arm_losses: Sequence[float], arm_tokens: float
) -> Speedup | None:
    """Returns the speed-up of an arm; None if it cannot be estimated.

    The estimate needs two lengths and two seeds, and all of these runs must have ended. A length
    with a diverged run is left out, and an arm with a diverged run has no speed-up. Seeds that some
    lengths lack are left out.

    Args:
      lengths: {tokens: losses by seed} of the baseline, its own length included.
      arm_losses: losses of the arm, with the same seeds in the same order.
      arm_tokens: tokens of one run of the arm.

    Returns:
      The speed-up with its interval.
    """
    complete = {
        tokens: losses for tokens, losses in sorted(lengths.items()) if np.all(np.isfinite(losses))
    }
    n = min(map(len, (arm_losses, *complete.values())))
    if len(complete) < 2 or n < 2 or not np.all(np.isfinite(arm_losses)):
        return None
    log_K = np.log(np.array(list(complete)))
    losses_KS = np.array([losses[:n] for losses in complete.values()])
    arm_S = np.array(arm_losses[:n], float)
    log_tokens, bound = _find_crossing(log_K, _isotonic_fit(losses_KS.mean(1)), float(arm_S.mean()))
    low, high = _interval(log_K, losses_KS, arm_S, log_tokens, bound)
    value, low, high = (math.exp(x - math.log(arm_tokens)) for x in (log_tokens, low, high))
    return Speedup(value, low, high, bound)


def _isotonic_fit(mean_K: np.ndarray) -> np.ndarray:
    """Returns the nearest nonincreasing losses (pool adjacent violators).

    A longer run with a higher loss, which is noise, shares one mean with the runs before it.
    """
    blocks: list[list[float]] = []
    for loss in mean_K.tolist():
        blocks.append([loss])
        while len(blocks) > 1 and np.mean(blocks[-2]) < np.mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return np.repeat([np.mean(block) for block in blocks], list(map(len, blocks)))


def _find_crossing(log_K: np.ndarray, loss_K: np.ndarray, target: float) -> tuple[float, str]:
    """Returns (log of the smallest tokens at which nonincreasing losses reach the target, '').

    Returns (end of the lengths, bound) if the target lies outside their losses.
    """
    if target > loss_K[0]:
        return float(log_K[0]), LESS
    if target < loss_K[-1]:
        return float(log_K[-1]), MORE
    k = int(np.argmax(loss_K <= target))
    if k == 0:  # the shortest run reaches it
        return float(log_K[0]), ''
    share = (loss_K[k - 1] - target) / (loss_K[k - 1] - loss_K[k])
    return float(log_K[k - 1] + share * (log_K[k] - log_K[k - 1])), ''


def _sag(log_D: np.ndarray, log_K: np.ndarray, mean_K: np.ndarray) -> np.ndarray:
    """Returns how far L may lie below the line between its neighbours.

    The sag is L'' / 2 times the distances to both neighbours in log D, and 0 if L is not convex.
    L'' is taken as twice the second derivative of a parabola through all lengths, since a power law
    bends more at its short end.
    """
    if len(log_K) < 3:
        return np.zeros_like(log_D)
    half = max(0.0, 2 * float(np.polyfit(log_K - log_K[0], mean_K, 2)[0]))
    k = np.clip(np.searchsorted(log_K, log_D, side='right') - 1, 0, len(log_K) - 2)
    return half * (log_D - log_K[k]) * (log_K[k + 1] - log_D)


def _interval(
    log_K: np.ndarray, losses_KS: np.ndarray, arm_S: np.ndarray, log_tokens: float, bound: str
) -> tuple[float, float]:
    """Returns the logarithms of the smallest and largest tokens that the test does not reject."""
    from scipy import stats

    n = len(arm_S)
    log_D = np.linspace(log_K[0], log_K[-1], POINTS)
    losses_DS = np.stack([np.interp(log_D, log_K, loss_K) for loss_K in losses_KS.T], -1)
    d_DS = arm_S - losses_DS
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
    d_D, reach_D = d_DS.mean(-1), t * d_DS.std(-1, ddof=1) / math.sqrt(n)
    accepted_D = (d_D <= reach_D) & (d_D + _sag(log_D, log_K, losses_KS.mean(1)) >= -reach_D)
    inside = log_D[accepted_D] if accepted_D.any() else np.array([log_tokens])
    low = -math.inf if accepted_D[0] or bound == LESS else min(float(inside[0]), log_tokens)
    high = math.inf if accepted_D[-1] or bound == MORE else max(float(inside[-1]), log_tokens)
    return low, high
