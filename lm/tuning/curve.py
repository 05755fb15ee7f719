"""Loss over one tuned field: its fit, the place of its minimum, and what is not known of it.

A field is searched over centre * 2^(k / PER_OCTAVE), k an integer. Losses of one k differ by their
seeds. A loss that is not finite is that of a run that diverged: it bounds the search, and is in no
fit.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

PER_OCTAVE = 8
OCTAVE, HALF = PER_OCTAVE, PER_OCTAVE // 2
NARROW = 4.0  # the fit is over one octave where the loss there is so many deviations above the best
ASYMMETRY = 0.5  # of the curvatures to both sides: deviation of their difference, over their mean
DRAWS = 100  # of means, for the allowance
ALLOWED = 0.9  # quantile of the loss that a choice by other seeds would cost
NOT_WORSE = 0.95  # level of the set of values that are as good as the best
RIDGE = 1e-6  # keeps what no point tells apart from being divided by 0


@dataclasses.dataclass(frozen=True)
class Means:
    """Values that were tried, in order: mean loss of each (inf: a run diverged), and its seeds."""

    k: np.ndarray
    mean: np.ndarray
    n: np.ndarray

    @property
    def best(self) -> int:
        """Returns the place of the lowest mean, of equal ones the smallest value."""
        return int(np.argmin(self.mean))

    @property
    def finite(self) -> 'Means':
        """Returns the values of which no run diverged."""
        keep = np.isfinite(self.mean)
        return Means(self.k[keep], self.mean[keep], self.n[keep])


def means_of(losses: Mapping[int, Sequence[float]]) -> Means:
    """Returns the means of {k: losses of its seeds}."""
    ks = sorted(losses)
    mean = [float(np.mean(losses[k])) if np.all(np.isfinite(losses[k])) else math.inf for k in ks]
    return Means(np.array(ks, int), np.array(mean), np.array([len(losses[k]) for k in ks]))


class Spread(NamedTuple):
    """Standard deviation s over seeds at one value, its degrees of freedom; (0, 0) if unknown."""

    s: float
    freedom: int


def spread(samples: Sequence[Sequence[float]]) -> Spread:
    """Pools the spread of samples, each of one value: s^2 = sum (x - mean)^2 / sum (n - 1)."""
    kept = [np.array(x, float) for x in samples if len(x) > 1 and np.all(np.isfinite(x))]
    freedom = sum(len(x) - 1 for x in kept)
    squares = sum(float(np.sum((x - x.mean()) ** 2)) for x in kept)
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else Spread(0.0, 0)


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


def fits(k: np.ndarray, mean_RK: np.ndarray, n: np.ndarray, s: float) -> Fits:
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
    near_RK = finite & (np.abs(z_RK) <= _width(z_RK, rise_RK, NARROW * s)[:, None])
    w_RK = np.where(near_RK, n, 0.0)
    z_RK, y_RK = np.where(near_RK, z_RK, 0.0), np.where(near_RK, rise_RK, 0.0)
    curvature_R = _parabola(w_RK, z_RK, y_RK)
    convex_R = (near_RK.sum(1) >= 3) & (curvature_R > 0)
    curvature_R = np.where(convex_R, curvature_R, 1.0)
    offset_C = np.arange(-OCTAVE, OCTAVE + 1)
    squares_RC, parts_RC2 = _halves(w_RK, z_RK, y_RK, offset_C, s / (ASYMMETRY * curvature_R))
    below_R, above_R = np.maximum(best_R - 1, 0), np.minimum(best_R + 1, len(k) - 1)
    low_R = np.where(finite[below_R], k[below_R], k[best_R])
    high_R = np.where(finite[above_R], k[above_R], k[best_R])
    k_RC = k[best_R][:, None] + offset_C
    allowed_RC = (k_RC >= low_R[:, None]) & (k_RC <= high_R[:, None])
    allowed_RC &= np.all(parts_RC2 >= 0, -1)
    squares_RC = np.where(allowed_RC, squares_RC, np.inf)
    at_R = np.argmin(squares_RC, 1)
    found_R = convex_R & np.isfinite(squares_RC[rows, at_R])
    left_R, right_R = np.where(found_R[:, None], parts_RC2[rows, at_R], 0.0).T
    return Fits(np.where(found_R, k_RC[rows, at_R], k[best_R]), left_R, right_R)


def _width(z_RK: np.ndarray, rise_RK: np.ndarray, least: float) -> np.ndarray:
    """1 where the losses an octave off on both sides are above `least`, else 2."""
    is_above_RK = np.nan_to_num(rise_RK) > least
    steep = [np.any((z_RK == side) & is_above_RK, 1) for side in (-1, 1)]
    return np.where(np.logical_and(*steep), 1, 2)


def _parabola(w_RK: np.ndarray, z_RK: np.ndarray, y_RK: np.ndarray) -> np.ndarray:
    """The curvature of each row's parabola, by least squares."""
    x_RK3 = z_RK[..., None] ** np.arange(3)
    matrix = np.einsum('rk,rki,rkj->rij', w_RK, x_RK3, x_RK3) + RIDGE * np.eye(3)
    vector = np.einsum('rk,rki,rk->ri', w_RK, x_RK3, y_RK)
    return np.linalg.solve(matrix, vector[..., None])[:, 2, 0]


def _halves(
    w_RK: np.ndarray, z_RK: np.ndarray, y_RK: np.ndarray, offset_C: np.ndarray, tie_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(sum of squares, (left, right) curvature) of the curves with vertices at the offsets C.

    tie_R: weight of the difference of the curvatures among the residuals.
    """
    u_RCK = z_RK[:, None] - offset_C[:, None] / PER_OCTAVE
    parts = [np.ones_like(u_RCK), np.minimum(u_RCK, 0.0) ** 2, np.maximum(u_RCK, 0.0) ** 2]
    x_RCK3 = np.stack(parts, -1)
    tie = np.array([[0.0, 0, 0], [0, 1, -1], [0, -1, 1]])
    prior = tie_R[:, None, None, None] ** 2 * tie + RIDGE * np.eye(3)
    matrix = np.einsum('rk,rcki,rckj->rcij', w_RK, x_RCK3, x_RCK3, optimize=True) + prior
    vector = np.einsum('rk,rcki,rk->rci', w_RK, x_RCK3, y_RK, optimize=True)
    p_RC3 = np.linalg.solve(matrix, vector[..., None])[..., 0]
    residual_RCK = np.einsum('rcki,rci->rck', x_RCK3, p_RC3) - y_RK[:, None]
    squares = np.einsum('rk,rck->rc', w_RK, residual_RCK**2)
    squares += (tie_R[:, None] * (p_RC3[..., 1] - p_RC3[..., 2])) ** 2
    return squares, p_RC3[..., 1:]


def vertex(means: Means, s: float) -> int:
    """Returns the k of the fitted minimum; without a fit the best value tried."""
    return int(fits(means.k, means.mean[None], means.n, s).vertex_R[0])


def is_convex(means: Means, s: float) -> bool:
    """Returns whether there is a fit with a minimum near the best value."""
    found = fits(means.k, means.mean[None], means.n, s)
    return bool(found.left_R[0] + found.right_R[0] > 0)


def allowance(means: Means, s: float) -> float:
    """Returns the loss that a choice by other seeds could cost, at the quantile ALLOWED.

    Each mean is moved by its standard error s / sqrt(n), by the same normal deviates at all times;
    the cost is that of the place where the minimum is then, by the curve of the means as they are:
    the fitted one, and where it is not convex lines between the means.
    """
    return _allowance(tuple(means.k), tuple(means.mean), tuple(means.n), s)


@functools.lru_cache(4096)  # waves are made again from the beginning, many times
def _allowance(k: tuple, mean: tuple, n: tuple, s: float) -> float:
    means = Means(np.array(k), np.array(mean), np.array(n))
    own = fits(means.k, means.mean[None], means.n, s)
    deviates_RK = np.random.default_rng(0).standard_normal((DRAWS, len(means.k)))
    moved = fits(means.k, means.mean + deviates_RK * s / np.sqrt(means.n), means.n, s).vertex_R
    if own.left_R[0] + own.right_R[0] > 0:
        cost_R = Fits(*(np.broadcast_to(x, DRAWS) for x in own)).rise(moved)
    else:
        known = means.finite
        cost_R = np.interp(moved, known.k, known.mean) - np.min(known.mean)
    return float(np.quantile(cost_R, ALLOWED))


def as_good(means: Means, spread: Spread) -> tuple[float, float]:
    """Returns (lowest, highest) k that is not significantly worse than the best.

    A value is worse where mean - best > t s sqrt(1 / n + 1 / n_best), t the quantile NOT_WORSE. The
    set reaches to the middle of the way to the first that are worse: -inf or inf where there is
    none (Hsu's multiple comparisons with the best, in one step).
    """
    from scipy import stats

    if not spread.freedom:
        return -math.inf, math.inf
    known = means.finite
    best = known.best
    t = stats.t.ppf(NOT_WORSE, spread.freedom)
    bound = t * spread.s * np.sqrt(1 / known.n + 1 / known.n[best])
    good = known.mean - known.mean[best] <= bound
    low = high = best
    while low and good[low - 1]:
        low -= 1
    while high < len(good) - 1 and good[high + 1]:
        high += 1
    return _edge_of(means, int(known.k[low]), -1), _edge_of(means, int(known.k[high]), 1)


def _edge_of(means: Means, k: int, side: int) -> float:
    """The middle of the way from k to the next value that was tried, diverged ones too."""
    at = int(np.searchsorted(means.k, k)) + side
    return (k + int(means.k[at])) / 2 if 0 <= at < len(means.k) else side * math.inf
