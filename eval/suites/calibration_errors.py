"""Errors of probabilities: how far predictions are from observed frequencies.

An event is a probability p and whether it happened, o. Bins of events are sums, so that a bootstrap
over groups of events (documents) only adds them up again.
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
        """The sums over all groups, [bins]."""
        return Bins(*(sums.sum(0) for sums in self))


def equal_width(bins: int) -> np.ndarray:
    """Returns the edges between bins of equal width over [0, 1], [bins - 1]."""
    return np.arange(1, bins) / bins


def equal_mass(p: np.ndarray, bins: int) -> np.ndarray:
    """Returns the edges between bins with equal numbers of the probabilities, [bins - 1]."""
    return np.quantile(p, equal_width(bins))


def bin_events(p: np.ndarray, o: np.ndarray, group: np.ndarray, edges: np.ndarray) -> Bins:
    """Returns the sums of events [M] by group and by bin. Bin b has edges[b - 1] < p <= edges[b].

    Args:
      p: probabilities.
      o: whether the events happened.
      group: number of each event's group, from 0.
      edges: between bins.
    """
    n_bins, n_groups = len(edges) + 1, int(group.max()) + 1
    # A single bincount over pairs of group and bin.
    place = group * n_bins + np.searchsorted(edges, p)

    def sum_by_bin(values):
        return np.bincount(place, values, n_groups * n_bins).reshape(n_groups, n_bins)

    return Bins(sum_by_bin(np.ones_like(p, float)), sum_by_bin(p), sum_by_bin(o.astype(float)))


def expected_error(bins: Bins) -> np.ndarray:
    """Returns sum_b n_b / n |mean o - mean p| over the last axis: ECE (arXiv:1706.04599)."""
    return np.abs(bins.o - bins.p).sum(-1) / bins.count.sum(-1)


def debiased_square(bins: Bins) -> np.ndarray:
    """Returns sum_b n_b / n [(mean o - mean p)^2 - a (1 - a) / (n_b - 1)] with a = mean o.

    The mean square error of bins over events, minus the contribution of chance in bins of finitely
    many independent events: it may be below 0. Bins with fewer than two events are left out of the
    sum. Source: arXiv:1909.10155, section 4.
    """
    has_several = bins.count > 1
    n = np.where(has_several, bins.count, 2.0)
    a = bins.o / n
    squares = ((bins.o - bins.p) / n) ** 2 - a * (1 - a) / (n - 1)
    return np.where(has_several, n * squares, 0.0).sum(-1) / bins.count.sum(-1)


def debiased_error(bins: Bins) -> np.ndarray:
    """Returns the root of `debiased_square`, or 0 if that is negative."""
    return np.sqrt(np.maximum(debiased_square(bins), 0.0))


def bootstrap_interval(
    error: Callable[[Bins], np.ndarray], bins: Bins, resamples: int, seed: int = 0
) -> tuple[float, float, float]:
    """Returns an error with its 95% interval by a bootstrap over groups.

    The interval is 2 e - q, with q quantiles of the resamples: absolute values of noise inflate the
    error, and inflate a resample's error by the same amount again. The interval is cut at 0.

    Args:
      error: computes the error of bins.
      bins: of all groups.
      resamples: of the bootstrap.
      seed: of the resamples.

    Returns:
      (error of all events, low, high).
    """
    n_groups = len(bins.count)
    rng = np.random.default_rng(seed)
    weights_RG = rng.multinomial(n_groups, np.full(n_groups, 1 / n_groups), resamples)
    resampled = error(bins.resample(weights_RG))
    whole = float(error(bins.total))
    high, low = 2 * whole - np.quantile(resampled, [0.025, 0.975])
    return whole, max(0.0, float(low)), max(0.0, float(high))


def h_error(p: np.ndarray, o: np.ndarray, window: int = WINDOW, clusters: int = CLUSTERS) -> float:
    """Returns the mean over clusters of p of the mean over their events of |T|.

    T is the mean of p - o over the `window` events nearest in the order of p; events beyond the
    ends count 0. This is the error of h-calibration (arXiv:2506.17968) over all events at once,
    with bound eps = 0 and without its factor of 1e5. Clusters are from 1-D k-means, as in its code.

    Args:
      p: probabilities [M].
      o: whether the events happened [M].
      window: events in a mean.
      clusters: of probabilities.
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
    """Returns the end of each cluster of sorted p [M], [clusters], by k-means (Lloyd's rounds).

    The initial centres are evenly spaced between the smallest and the largest p.
    """
    sums = np.concatenate([[0.0], np.cumsum(p)])
    centres = p[0] + (p[-1] - p[0]) * (np.arange(clusters) + 0.5) / clusters
    previous_ends = None
    for _ in range(ROUNDS):
        inner_edges = np.searchsorted(p, (centres[1:] + centres[:-1]) / 2)
        ends = np.concatenate([inner_edges, [len(p)]])
        if previous_ends is not None and np.array_equal(ends, previous_ends):
            break
        starts, previous_ends = np.concatenate([[0], inner_edges]), ends
        count = ends - starts
        # Empty clusters keep their centres.
        centres = np.where(count > 0, (sums[ends] - sums[starts]) / np.maximum(count, 1), centres)
    return ends


def correctness_losses(confidence: np.ndarray, correct: np.ndarray) -> tuple[float, float]:
    """Returns the loss of correctness-aware calibration, plain and balanced as in its code.

    Plain is the mean of (confidence - correct)^2. Balanced is the mean of its means over the
    correct and the wrong; NaN if all or none are correct. Source: arXiv:2404.13016 and its code.
    """
    squares = (confidence - correct) ** 2
    if correct.all() or not correct.any():
        return float(squares.mean()), float('nan')
    balanced = (squares[correct].mean() + squares[~correct].mean()) / 2
    return float(squares.mean()), float(balanced)


def solve_temperature(betas: np.ndarray, slopes: np.ndarray, curvatures: np.ndarray) -> float:
    """Returns the T = 1 / beta that minimises the mean loss of logits beta z.

    The loss is convex in beta. Its slope, mean(E_p[z] - z_y), is interpolated between the betas by
    cubics with its derivative, mean(Var_p[z]). T is at the root of the slope, or at the end of the
    range.

    Args:
      betas: ascending.
      slopes: of the mean loss in beta.
      curvatures: of the mean loss in beta.
    """
    if slopes[0] >= 0:
        return float(1 / betas[0])
    if slopes[-1] <= 0:
        return float(1 / betas[-1])
    # The root lies between the last negative slope and the next beta.
    last = int(np.flatnonzero(slopes < 0)[-1])
    bracket = slice(last, last + 2)
    cubic = CubicHermiteSpline(betas[bracket], slopes[bracket], curvatures[bracket])
    (root, *_) = cubic.solve(0.0, extrapolate=False)
    return float(1 / root)
