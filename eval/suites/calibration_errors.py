"""Errors of probabilities: how far what a model says is from how often it happens.

An event is a probability p and whether it happened, o. Bins of events keep sums alone, so that a
bootstrap over groups of events (documents) adds them up again.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.interpolate import CubicHermiteSpline

WINDOW = 201  # events, in h-calibration
CLUSTERS = 15  # of probabilities, in h-calibration
ROUNDS = 100  # of 1-D k-means, at most


class Bins(NamedTuple):
    """Sums over the events of each group in each bin, [G, bins]."""

    count: np.ndarray
    p: np.ndarray
    o: np.ndarray

    def resample(self, weights_RG: np.ndarray) -> 'Bins':
        """Returns the sums [R, bins] of resamples that take group g weights_RG[r, g] times."""
        return Bins(*(weights_RG @ sums for sums in self))

    @property
    def total(self) -> 'Bins':
        """Returns the sums over all groups, [bins]."""
        return Bins(*(sums.sum(0) for sums in self))


def equal_width(bins: int) -> np.ndarray:
    """Returns the edges between bins of equal width over [0, 1], [bins - 1]."""
    return np.arange(1, bins) / bins


def equal_mass(p: np.ndarray, bins: int) -> np.ndarray:
    """Returns edges between bins that each hold as many of the probabilities, [bins - 1]."""
    return np.quantile(p, equal_width(bins))


def bin_events(p: np.ndarray, o: np.ndarray, group: np.ndarray, edges: np.ndarray) -> Bins:
    """Returns the sums of events [M] by group, numbered from 0, and by bin.

    Bin b has edges[b - 1] < p <= edges[b].
    """
    n_bins, n_groups = len(edges) + 1, int(group.max()) + 1
    place = group * n_bins + np.searchsorted(edges, p)

    def total(values):
        return np.bincount(place, values, n_groups * n_bins).reshape(n_groups, n_bins)

    return Bins(total(np.ones_like(p, float)), total(p), total(o.astype(float)))


def expected_error(bins: Bins) -> np.ndarray:
    """Returns sum_b n_b / n |mean o - mean p| over the last axis: ECE (arXiv:1706.04599)."""
    return np.abs(bins.o - bins.p).sum(-1) / bins.count.sum(-1)


def debiased_square(bins: Bins) -> np.ndarray:
    """Returns sum_b n_b / n [(mean o - mean p)^2 - a (1 - a) / (n_b - 1)] with a = mean o.

    The mean square over events of what bins are off, without the part that chance adds to a square
    in bins of finitely many independent events: it may be below 0. Bins with one event or none are
    left out of the sum. Source: arXiv:1909.10155, section 4.
    """
    several = bins.count > 1
    n = np.where(several, bins.count, 2.0)
    a = bins.o / n
    squares = ((bins.o - bins.p) / n) ** 2 - a * (1 - a) / (n - 1)
    return np.where(several, n * squares, 0.0).sum(-1) / bins.count.sum(-1)


def debiased_error(bins: Bins) -> np.ndarray:
    """Returns the root of `debiased_square`, 0 where that is below 0."""
    return np.sqrt(np.maximum(debiased_square(bins), 0.0))


def bootstrap_interval(
    error: Callable[[Bins], np.ndarray], bins: Bins, resamples: int, seed: int = 0
) -> tuple[float, float, float]:
    """Returns (error of all events, low, high), 95% of a bootstrap over groups.

    The interval is 2 e - q, with q quantiles of the resamples: absolute values of noise make the
    error larger than it is, and that of a resample larger once more by as much. It is cut at 0.
    """
    n_groups = len(bins.count)
    rng = np.random.default_rng(seed)
    weights_RG = rng.multinomial(n_groups, np.full(n_groups, 1 / n_groups), resamples)
    found = error(bins.resample(weights_RG))
    whole = float(error(bins.total))
    high, low = 2 * whole - np.quantile(found, [0.025, 0.975])
    return whole, max(0.0, float(low)), max(0.0, float(high))


def h_error(p: np.ndarray, o: np.ndarray, window: int = WINDOW, clusters: int = CLUSTERS) -> float:
    """Returns the mean over clusters of p of the mean over their events of |T|, where T is the mean
    of p - o over the `window` events nearest in the order of p, those beyond the ends counting 0.

    The error of h-calibration (arXiv:2506.17968) of all events at once, with its bound eps = 0 and
    without its factor of 1e5; clusters are those of 1-D k-means, as in the code beside it.
    """
    order = np.argsort(p, kind='stable')
    p, off = p[order], (p - o)[order]
    sums = np.concatenate([[0.0], np.cumsum(off)])
    place = np.arange(len(p))
    half = window // 2
    stop, start = np.minimum(place + window - half, len(p)), np.maximum(place - half, 0)
    error = np.abs(sums[stop] - sums[start]) / window
    totals = np.concatenate([[0.0], np.cumsum(error)])
    ends = cluster_ends(p, clusters)
    starts = np.concatenate([[0], ends[:-1]])
    filled = ends > starts
    means = (totals[ends] - totals[starts])[filled] / (ends - starts)[filled]
    return float(means.mean())


def cluster_ends(p: np.ndarray, clusters: int) -> np.ndarray:
    """Returns where each cluster of sorted p [M] ends, [clusters], by k-means (Lloyd's rounds).

    The first centres are spread evenly between the least and the largest.
    """
    sums = np.concatenate([[0.0], np.cumsum(p)])
    centres = p[0] + (p[-1] - p[0]) * (np.arange(clusters) + 0.5) / clusters
    before = None
    for _ in range(ROUNDS):
        inner = np.searchsorted(p, (centres[1:] + centres[:-1]) / 2)
        ends = np.concatenate([inner, [len(p)]])
        if before is not None and np.array_equal(ends, before):
            break
        starts, before = np.concatenate([[0], inner]), ends
        count = ends - starts
        centres = np.where(count > 0, (sums[ends] - sums[starts]) / np.maximum(count, 1), centres)
    return ends


def correctness_losses(confidence: np.ndarray, correct: np.ndarray) -> tuple[float, float]:
    """Returns the loss of correctness-aware calibration, plain and as its authors' code weighs it:
    (the mean of (confidence - correct)^2, the mean of its means over the correct and the wrong).

    NaN where all are correct, or none. Source: arXiv:2404.13016 and the code beside it.
    """
    squares = (confidence - correct) ** 2
    if correct.all() or not correct.any():
        return float(squares.mean()), float('nan')
    balanced = (squares[correct].mean() + squares[~correct].mean()) / 2
    return float(squares.mean()), float(balanced)


def solve_temperature(betas: np.ndarray, slopes: np.ndarray, curvatures: np.ndarray) -> float:
    """Returns the T = 1 / beta at which the mean loss of logits beta z is least.

    The loss is convex in beta: its slope, mean(E_p[z] - z_y), is interpolated between the betas by
    cubics with its own derivative, mean(Var_p[z]), and T is where it is 0, or the end of the range.

    Args:
      betas: ascending.
      slopes: of the mean loss in beta.
      curvatures: of the mean loss in beta.
    """
    if slopes[0] >= 0:
        return float(1 / betas[0])
    if slopes[-1] <= 0:
        return float(1 / betas[-1])
    last = int(np.flatnonzero(slopes < 0)[-1])
    around = slice(last, last + 2)
    cubic = CubicHermiteSpline(betas[around], slopes[around], curvatures[around])
    (root, *_) = cubic.solve(0.0, extrapolate=False)
    return float(1 / root)
