"""Loss over one tuned field: its fit, the place of its minimum, and what is not known of it.

A field is searched over centre * 2^(k / PER_OCTAVE), k an integer. Losses of one k differ by their
seeds. A loss that is not finite is that of a run that diverged: it bounds the search, and is in no
fit.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lm.study.statistics import t_quantile

PER_OCTAVE = 8
OCTAVE, HALF_OCTAVE = PER_OCTAVE, PER_OCTAVE // 2
NARROW = 4.0  # the fit is over one octave where the loss there is so many deviations above the best
ASYMMETRY = 0.5  # of the curvatures to both sides: deviation of their difference, over their mean
DRAWS = 100  # of means, for the allowance
ALLOWANCE_QUANTILE = 0.9  # quantile of the loss that a choice by other seeds would cost
NOT_WORSE = 0.95  # level of the set of values that are as good as the best
MIN_SPREAD = 1e-3  # of the losses near the best: what three points leave open the prior decides
RIDGE = 1e-9  # keeps what no point tells apart from being divided by 0


@dataclasses.dataclass(frozen=True)
class Means:
    """Values that were tried, in order: mean loss of each (inf: a run diverged), and its seeds."""

    k: np.ndarray
    mean: np.ndarray
    n: np.ndarray

    @property
    def best_position(self) -> int:
        """Returns the place of the lowest mean, of equal ones the smallest value."""
        return int(np.argmin(self.mean))

    @property
    def cache_key(self) -> tuple[tuple, ...]:
        """Returns the same as what a cache can look up."""
        return tuple(map(tuple, (self.k.tolist(), self.mean.tolist(), self.n.tolist())))

    @property
    def finite(self) -> 'Means':
        """Returns the values of which no run diverged."""
        keep = np.isfinite(self.mean)
        return Means(self.k[keep], self.mean[keep], self.n[keep])


def compute_means(losses: Mapping[int, Sequence[float]]) -> Means:
    """Returns the means of {k: losses of its seeds}."""
    ks = sorted(losses)
    n = np.array([len(losses[k]) for k in ks])
    return Means(np.array(ks, int), np.array([mean_loss(losses[k]) for k in ks]), n)


def mean_loss(losses: Sequence[float]) -> float:
    """Returns the mean over seeds; inf where one diverged."""
    return math.fsum(losses) / len(losses) if is_all_finite(losses) else math.inf


def is_all_finite(losses: Sequence[float]) -> bool:
    """Returns whether no run diverged."""
    return all(map(math.isfinite, losses))


class Spread(NamedTuple):
    """Standard deviation s over seeds at one value, its degrees of freedom; (0, 0) if unknown."""

    s: float
    freedom: int


def pool_spread(samples: Iterable[Sequence[float]]) -> Spread:
    """Pools the spread of samples, each of one value: s^2 = sum (x - mean)^2 / sum (n - 1)."""
    kept = [x for x in samples if len(x) > 1 and is_all_finite(x)]
    freedom = sum(len(x) - 1 for x in kept)
    squares = math.fsum(_squared_deviations(x) for x in kept)
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else Spread(0.0, 0)


def _squared_deviations(losses: Sequence[float]) -> float:
    mean = mean_loss(losses)
    return math.fsum((loss - mean) ** 2 for loss in losses)


class Fits(NamedTuple):
    """Curves, one for each row R of means, near their best value:

        loss(k) = least + (left if z < 0 else right) z^2,    z = (k - vertex) / PER_OCTAVE

    Where points are not convex both curvatures are 0, and the vertex is the best value tried.
    """

    vertex_R: np.ndarray
    left_R: np.ndarray
    right_R: np.ndarray

    def rise(self, k_R: np.ndarray) -> np.ndarray:
        """Returns loss(k) - least."""
        z_R = (k_R - self.vertex_R) / PER_OCTAVE
        return np.where(z_R < 0, self.left_R, self.right_R) * z_R**2


def fit_rows(k: np.ndarray, mean_RK: np.ndarray, n: np.ndarray, s: float) -> Fits:
    """Fits the curve of each row by least squares, weighted by seeds.

    The fit is over one octave on each side of the best value where the loss there is above NARROW s
    on both, else over two. The curvatures have a prior, left - right ~ N(0, (ASYMMETRY mean)^2), as
    three points do not tell them apart. The vertex is an integer between the tried neighbours of
    the best value, and not beyond it towards one that diverged.
    """
    rows = np.arange(len(mean_RK))
    finite = np.isfinite(mean_RK[0])
    best_R = np.argmin(mean_RK, 1)
    z_RK = (k - k[best_R][:, None]) / PER_OCTAVE
    rise_RK = np.where(finite, mean_RK, np.nan) - mean_RK[rows, best_R][:, None]
    near_RK = finite & (np.abs(z_RK) <= _select_width(z_RK, rise_RK, NARROW * s)[:, None])
    w_RK = np.where(near_RK, n, 0.0)
    z_RK, y_RK = np.where(near_RK, z_RK, 0.0), np.where(near_RK, rise_RK, 0.0)
    curvature_R = _fit_curvature(w_RK, z_RK, y_RK)
    convex_R = (near_RK.sum(1) >= 3) & (curvature_R > 0)
    curvature_R = np.where(convex_R, curvature_R, 1.0)
    offset_C = np.arange(-OCTAVE, OCTAVE + 1)
    s_R = np.maximum(s, MIN_SPREAD * y_RK.max(1))
    squares_RC, left_RC, right_RC = _fit_halves(
        w_RK, z_RK, y_RK, offset_C, s_R / (ASYMMETRY * curvature_R)
    )
    below_R, above_R = np.maximum(best_R - 1, 0), np.minimum(best_R + 1, len(k) - 1)
    low_R = np.where(finite[below_R], k[below_R], k[best_R])
    high_R = np.where(finite[above_R], k[above_R], k[best_R])
    k_RC = k[best_R][:, None] + offset_C
    allowed_RC = (k_RC >= low_R[:, None]) & (k_RC <= high_R[:, None])
    allowed_RC &= (left_RC >= 0) & (right_RC >= 0)
    squares_RC = np.where(allowed_RC, squares_RC, np.inf)
    at_R = np.argmin(squares_RC, 1)
    found_R = convex_R & np.isfinite(squares_RC[rows, at_R])
    left_R, right_R = (np.where(found_R, x[rows, at_R], 0.0) for x in (left_RC, right_RC))
    return Fits(np.where(found_R, k_RC[rows, at_R], k[best_R]), left_R, right_R)


def _select_width(z_RK: np.ndarray, rise_RK: np.ndarray, threshold: float) -> np.ndarray:
    """1 where the losses an octave off on both sides are above `least`, else 2."""
    is_above_RK = np.nan_to_num(rise_RK) > threshold
    steep = [np.any((z_RK == side) & is_above_RK, 1) for side in (-1, 1)]
    return np.where(np.logical_and(*steep), 1, 2)


def _fit_curvature(w_RK: np.ndarray, z_RK: np.ndarray, y_RK: np.ndarray) -> np.ndarray:
    """The curvature of each row's parabola, by least squares."""
    x_RK3 = z_RK[..., None] ** np.arange(3)
    matrix = np.einsum('rk,rki,rkj->rij', w_RK, x_RK3, x_RK3) + RIDGE * np.eye(3)
    vector = np.einsum('rk,rki,rk->ri', w_RK, x_RK3, y_RK)
    return np.linalg.solve(matrix, vector[..., None])[:, 2, 0]


def _fit_halves(
    w_RK: np.ndarray, z_RK: np.ndarray, y_RK: np.ndarray, offset_C: np.ndarray, tie_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sum of squares, left, right curvature) of the curves with vertices at the offsets C.

    tie_R: weight of the difference of the curvatures among the residuals. The least loss is
    eliminated from the normal equations, and the two that are left are solved by Cramer's rule.
    """
    u_RCK = z_RK[:, None] - offset_C[:, None] / PER_OCTAVE
    w_RCK, y_RCK, tie_R1 = w_RK[:, None], y_RK[:, None], tie_R[:, None] ** 2
    weight_RC1 = w_RCK.sum(-1, keepdims=True)

    def subtract_mean(x_RCK):
        return x_RCK - (w_RCK * x_RCK).sum(-1, keepdims=True) / weight_RC1

    left_RCK = subtract_mean(np.where(u_RCK < 0, u_RCK, 0.0) ** 2)
    right_RCK = subtract_mean(np.where(u_RCK > 0, u_RCK, 0.0) ** 2)
    y_RCK = subtract_mean(y_RCK)

    def product(one_RCK, other_RCK):
        return (w_RCK * one_RCK * other_RCK).sum(-1)

    a_RC = product(left_RCK, left_RCK) + tie_R1 + RIDGE
    b_RC = product(right_RCK, right_RCK) + tie_R1 + RIDGE
    c_RC = product(left_RCK, right_RCK) - tie_R1
    p_RC, q_RC = product(left_RCK, y_RCK), product(right_RCK, y_RCK)
    determinant_RC = a_RC * b_RC - c_RC**2
    l_RC = (p_RC * b_RC - q_RC * c_RC) / determinant_RC
    r_RC = (q_RC * a_RC - p_RC * c_RC) / determinant_RC
    residual_RCK = l_RC[..., None] * left_RCK + r_RC[..., None] * right_RCK - y_RCK
    return product(residual_RCK, residual_RCK) + tie_R1 * (l_RC - r_RC) ** 2, l_RC, r_RC


def fit_curve(means: Means, s: float) -> Fits:
    """Returns the curve of means, one row."""
    return _fit_cached(means.cache_key, s)


def find_vertex(means: Means, s: float) -> int:
    """Returns the k of the fitted minimum; without a fit the best value tried."""
    return int(fit_curve(means, s).vertex_R[0])


def is_convex(means: Means, s: float) -> bool:
    """Returns whether there is a fit with a minimum near the best value."""
    return bool(fit_curve(means, s).left_R[0] + fit_curve(means, s).right_R[0] > 0)


def compute_allowance(means: Means, spread: Spread) -> float:
    """Returns the loss that a choice by other seeds could cost, at the quantile ALLOWED; inf where
    the spread is not known.

    Each mean is moved by its standard error s / sqrt(n), by the same normal deviates at all times;
    the cost is that of the place where the minimum is then, by the curve of the means as they are:
    the fitted one, and where it is not convex lines between the means.
    """
    if not spread.freedom:
        return math.inf
    return _allowance_cached(means.cache_key, spread.s)


@functools.lru_cache(4096)  # waves are made again from the beginning, many times
def _fit_cached(key: tuple, s: float) -> Fits:
    means = Means(*map(np.array, key))
    return fit_rows(means.k, means.mean[None], means.n, s)


@functools.lru_cache(4096)
def _allowance_cached(key: tuple, s: float) -> float:
    means, own = Means(*map(np.array, key)), _fit_cached(key, s)
    moves_RK = normal_deviates(DRAWS, len(means.k)) * s / np.sqrt(means.n)
    moved_R = fit_rows(means.k, means.mean + moves_RK, means.n, s).vertex_R
    if own.left_R[0] + own.right_R[0] > 0:
        cost_R = own.rise(moved_R)
    else:
        known = means.finite
        cost_R = np.interp(moved_R, known.k, known.mean) - np.min(known.mean)
    return float(np.quantile(cost_R, ALLOWANCE_QUANTILE))


@functools.lru_cache
def normal_deviates(rows: int, columns: int) -> np.ndarray:
    """Returns standard normal deviates that are the same on every machine and with every library.

    Row i has the normal quantiles of frac((i + 1) sqrt(prime)), one prime a column (Richtmyer).
    """
    primes = [
        p for p in range(2, 12 * columns + 3) if all(p % q for q in range(2, math.isqrt(p) + 1))
    ]
    u_RK = np.arange(1, rows + 1)[:, None] * np.sqrt(primes[:columns]) % 1
    return np.vectorize(statistics.NormalDist().inv_cdf)(u_RK)


def find_worse(means: Means, spread: Spread) -> np.ndarray:
    """Returns which values are significantly worse than the best: mean - best > t s sqrt(1 / n +
    1 / n_best), t the quantile NOT_WORSE; all that are worse where the spread is not known.
    """
    best = means.best_position
    error = spread.s * np.sqrt(1 / means.n + 1 / means.n[best])
    t = t_quantile(NOT_WORSE, spread.freedom) if spread.freedom else 0.0
    return means.mean - means.mean[best] > t * error


def near_best_range(means: Means, spread: Spread) -> tuple[float, float]:
    """Returns (lowest, highest) k that is not significantly worse than the best.

    The set reaches to the middle of the way to the first that are worse: -inf or inf where there is
    none (Hsu's multiple comparisons with the best, in one step).
    """
    if not spread.freedom:
        return -math.inf, math.inf
    low = high = means.best_position
    is_worse = find_worse(means, spread)
    while low and not is_worse[low - 1]:
        low -= 1
    while high < len(is_worse) - 1 and not is_worse[high + 1]:
        high += 1
    return _midpoint(means, low, -1), _midpoint(means, high, 1)


def _midpoint(means: Means, position: int, side: int) -> float:
    """The middle of the way to the next value that was tried."""
    if not 0 <= position + side < len(means.k):
        return side * math.inf
    return (int(means.k[position]) + int(means.k[position + side])) / 2
