"""Loss over one tuned field: its fit, its minimum, and the uncertainty of both.

A field is searched over centre * 2^(k / PER_OCTAVE), with k an integer. Losses at one k differ by
their seeds. A diverged run has a loss that is not finite: it bounds the search, and is not fitted.
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
NARROW = 4.0  # the fit covers one octave if losses there exceed the best by so many deviations
ASYMMETRY = 0.5  # prior deviation of the difference between both curvatures, over their mean
DRAWS = 100  # number of moved means for the allowance
ALLOWANCE_QUANTILE = 0.9  # quantile of the loss that a choice by other seeds would cost
NOT_WORSE = 0.95  # level of the set of values that are not worse than the best
MIN_SPREAD = 1e-3  # smallest spread, over the losses near the best: the prior decides below it
RIDGE = 1e-9  # keeps the normal equations regular if points do not determine a coefficient


@dataclasses.dataclass(frozen=True)
class Means:
    """Tried values in ascending order, with the mean loss (inf if a run diverged) and number of
    seeds.
    """

    k: np.ndarray
    mean: np.ndarray
    n: np.ndarray

    @property
    def best_position(self) -> int:
        """Returns the position of the lowest mean; the smallest value of equal means."""
        return int(np.argmin(self.mean))

    @property
    def cache_key(self) -> tuple[tuple, ...]:
        """Returns the means as a hashable key."""
        return tuple(map(tuple, (self.k.tolist(), self.mean.tolist(), self.n.tolist())))

    @property
    def finite(self) -> 'Means':
        """Returns the values without diverged runs."""
        keep = np.isfinite(self.mean)
        return Means(self.k[keep], self.mean[keep], self.n[keep])


def compute_means(losses: Mapping[int, Sequence[float]]) -> Means:
    """Returns the means of {k: losses of its seeds}."""
    ks = sorted(losses)
    n = np.array([len(losses[k]) for k in ks])
    return Means(np.array(ks, int), np.array([mean_loss(losses[k]) for k in ks]), n)


def mean_loss(losses: Sequence[float]) -> float:
    """Returns the mean over seeds; inf if a run diverged."""
    return math.fsum(losses) / len(losses) if is_all_finite(losses) else math.inf


def is_all_finite(losses: Sequence[float]) -> bool:
    """Whether no run diverged."""
    return all(map(math.isfinite, losses))


class Spread(NamedTuple):
    """Standard deviation s over seeds at one value, and its degrees of freedom; (0, 0) if
    unknown.
    """

    s: float
    freedom: int


def pool_spread(samples: Iterable[Sequence[float]]) -> Spread:
    """Pools the spread of samples, each at one value: s^2 = sum (x - mean)^2 / sum (n - 1)."""
    pooled = [x for x in samples if len(x) > 1 and is_all_finite(x)]
    freedom = sum(len(x) - 1 for x in pooled)
    squares = math.fsum(_squared_deviations(x) for x in pooled)
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else Spread(0.0, 0)


def _squared_deviations(losses: Sequence[float]) -> float:
    """Returns the sum of squared deviations from the mean."""
    mean = mean_loss(losses)
    return math.fsum((loss - mean) ** 2 for loss in losses)


class Fits(NamedTuple):
    """Curves near the best value, one for each row R of means:

        loss(k) = least + (left if z < 0 else right) z^2,    z = (k - vertex) / PER_OCTAVE

    If the points are not convex, both curvatures are 0, and the vertex is the best value tried.
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

    The fit covers one octave on each side of the best value if the losses there exceed the best by
    NARROW s on both sides, else two octaves. The curvatures have a prior, left - right ~ N(0,
    (ASYMMETRY mean)^2), since three points do not tell them apart. The vertex is an integer between
    the tried neighbours of the best value, and not beyond it on the side of a neighbour that
    diverged.

    Args:
      k: tried indices, ascending, [K].
      mean_RK: mean losses of each row; not finite for a value with a diverged run.
      n: number of seeds at each index, [K].
      s: standard deviation over seeds.

    Returns:
      The curves of the rows.
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
    is_allowed_RC = (k_RC >= low_R[:, None]) & (k_RC <= high_R[:, None])
    is_allowed_RC &= (left_RC >= 0) & (right_RC >= 0)
    squares_RC = np.where(is_allowed_RC, squares_RC, np.inf)
    best_offset_R = np.argmin(squares_RC, 1)
    is_fitted_R = convex_R & np.isfinite(squares_RC[rows, best_offset_R])
    left_R, right_R = (
        np.where(is_fitted_R, x[rows, best_offset_R], 0.0) for x in (left_RC, right_RC)
    )
    return Fits(np.where(is_fitted_R, k_RC[rows, best_offset_R], k[best_R]), left_R, right_R)


def _select_width(z_RK: np.ndarray, rise_RK: np.ndarray, threshold: float) -> np.ndarray:
    """Returns 1 if the losses an octave off on both sides exceed `threshold`, else 2."""
    is_above_RK = np.nan_to_num(rise_RK) > threshold  # nan, where a run diverged, is not above
    steep = [np.any((z_RK == side) & is_above_RK, 1) for side in (-1, 1)]
    return np.where(np.logical_and(*steep), 1, 2)


def _fit_curvature(w_RK: np.ndarray, z_RK: np.ndarray, y_RK: np.ndarray) -> np.ndarray:
    """Returns the curvature of each row's least-squares parabola."""
    x_RK3 = z_RK[..., None] ** np.arange(3)
    matrix = np.einsum('rk,rki,rkj->rij', w_RK, x_RK3, x_RK3) + RIDGE * np.eye(3)
    vector = np.einsum('rk,rki,rk->ri', w_RK, x_RK3, y_RK)
    return np.linalg.solve(matrix, vector[..., None])[:, 2, 0]


def _fit_halves(
    w_RK: np.ndarray, z_RK: np.ndarray, y_RK: np.ndarray, offset_C: np.ndarray, tie_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (sum of squares, left, right curvature) of the curves with vertices at the offsets C.

    tie_R weighs the difference of the curvatures among the residuals. The smallest loss is
    eliminated from the normal equations, and Cramer's rule solves the remaining two.
    """
    u_RCK = z_RK[:, None] - offset_C[:, None] / PER_OCTAVE
    w_RCK, y_RCK, tie_R1 = w_RK[:, None], y_RK[:, None], tie_R[:, None] ** 2
    weight_RC1 = w_RCK.sum(-1, keepdims=True)

    def subtract_mean(x_RCK):
        return x_RCK - (w_RCK * x_RCK).sum(-1, keepdims=True) / weight_RC1

    left_RCK = subtract_mean(np.where(u_RCK < 0, u_RCK, 0.0) ** 2)
    right_RCK = subtract_mean(np.where(u_RCK > 0, u_RCK, 0.0) ** 2)
    y_RCK = subtract_mean(y_RCK)

    def product(a_RCK, b_RCK):
        return (w_RCK * a_RCK * b_RCK).sum(-1)

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
    """Returns the curve of means, as one row."""
    return _fit_cached(means.cache_key, s)


def find_vertex(means: Means, s: float) -> int:
    """Returns the k of the fitted minimum; without a fit the best value tried."""
    return int(fit_curve(means, s).vertex_R[0])


def is_convex(means: Means, s: float) -> bool:
    """Whether the fit has a minimum near the best value."""
    return bool(fit_curve(means, s).left_R[0] + fit_curve(means, s).right_R[0] > 0)


def compute_allowance(means: Means, spread: Spread) -> float:
    """Returns the loss that a choice by other seeds could cost, at the quantile ALLOWANCE_QUANTILE.

    Each mean is moved by its standard error s / sqrt(n), always by the same normal deviates. The
    cost is the loss at the new minimum on the original curve: the fitted curve, or lines between
    the means if it is not convex. The allowance is inf if the spread is unknown.
    """
    if not spread.freedom:
        return math.inf
    return _allowance_cached(means.cache_key, spread.s)


@functools.lru_cache(4096)  # every replay recomputes all waves from the first
def _fit_cached(key: tuple, s: float) -> Fits:
    means = Means(*map(np.array, key))
    return fit_rows(means.k, means.mean[None], means.n, s)


@functools.lru_cache(4096)
def _allowance_cached(key: tuple, s: float) -> float:
    means, curve = Means(*map(np.array, key)), _fit_cached(key, s)
    moves_RK = normal_deviates(DRAWS, len(means.k)) * s / np.sqrt(means.n)
    moved_R = fit_rows(means.k, means.mean + moves_RK, means.n, s).vertex_R
    if curve.left_R[0] + curve.right_R[0] > 0:
        cost_R = curve.rise(moved_R)
    else:
        finite = means.finite
        cost_R = np.interp(moved_R, finite.k, finite.mean) - np.min(finite.mean)
    return float(np.quantile(cost_R, ALLOWANCE_QUANTILE))


@functools.lru_cache
def normal_deviates(rows: int, columns: int) -> np.ndarray:
    """Returns standard normal deviates that are the same on every machine and with every library.

    Row i has the normal quantiles of frac((i + 1) sqrt(prime)), with one prime for each column
    (Richtmyer).
    """
    primes = [
        p for p in range(2, 12 * columns + 3) if all(p % q for q in range(2, math.isqrt(p) + 1))
    ]
    u_RK = np.arange(1, rows + 1)[:, None] * np.sqrt(primes[:columns]) % 1
    return np.vectorize(statistics.NormalDist().inv_cdf)(u_RK)


def find_worse(means: Means, spread: Spread) -> np.ndarray:
    """Returns which values are significantly worse than the best: mean - best > t s sqrt(1 / n + 1
    / n_best).

    t is the quantile NOT_WORSE. If the spread is unknown, all values with a higher mean count as
    worse.
    """
    best = means.best_position
    error = spread.s * np.sqrt(1 / means.n + 1 / means.n[best])
    t = t_quantile(NOT_WORSE, spread.freedom) if spread.freedom else 0.0
    return means.mean - means.mean[best] > t * error


def near_best_range(means: Means, spread: Spread) -> tuple[float, float]:
    """Returns (lowest, highest) k that is not significantly worse than the best.

    An end lies halfway to the first k that is worse: -inf or inf if there is none (Hsu's multiple
    comparisons with the best, in one step).
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
    """Returns the middle between a tried value and the next on a side; ±inf without one."""
    if not 0 <= position + side < len(means.k):
        return side * math.inf
    return (int(means.k[position]) + int(means.k[position + side])) / 2
