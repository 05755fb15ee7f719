"""Reference and property tests of the curve of loss over a tuned field: closed forms, scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from lm.study.plan.curve import (
    ALLOWANCE_QUANTILE,
    HALF_OCTAVE,
    NOT_WORSE,
    OCTAVE,
    Spread,
    compute_allowance,
    compute_means,
    find_vertex,
    fit_curve,
    is_convex,
    near_best_range,
    normal_deviates,
    pool_spread,
)

KS = (-16, -8, 0, 8, 16)


def sample_means(curve, ks=KS, n=1):
    return compute_means({k: [curve(k / OCTAVE)] * n for k in ks})


@pytest.mark.parametrize('vertex', [-4, -3, -1, 0, 2, 3, 4])
@pytest.mark.parametrize('curvature', [1e-4, 0.01, 30.0])
def test_parabola_vertex_is_exact(vertex, curvature):
    means = sample_means(lambda z: 3.2 + curvature * (z - vertex / OCTAVE) ** 2)
    assert find_vertex(means, 0.0) == vertex and is_convex(means, 0.0)


@pytest.mark.parametrize('right', [0.02, 0.05])
def test_asymmetric_curve_vertex_and_curvatures(right):
    """Half octaves separate the two curvatures if the losses have no noise."""
    means = sample_means(
        lambda z: (right if z > 0.25 else 0.01) * (z - 0.25) ** 2, (-16, -8, -4, 0, 4, 8, 16)
    )
    curve = fit_curve(means, 1e-9)
    assert curve.vertex_R[0] == 2
    assert curve.left_R[0] == pytest.approx(0.01, rel=1e-3)
    assert curve.right_R[0] == pytest.approx(right, rel=1e-3)
    assert curve.rise(np.array([2 + OCTAVE]))[0] == pytest.approx(right, rel=1e-3)


@pytest.mark.parametrize('n', [(1, 1, 1, 1, 1), (1, 1, 2, 2, 9), (9, 1, 1, 1, 1)])
def test_noisy_vertex_matches_weighted_parabola(n):
    """With a prior of one common curvature the fit is NumPy's parabola, weighted by seeds."""
    y = np.array([0.05, 0.012, 0.0, 0.008, 0.02])
    means = compute_means({k: [loss] * i for k, loss, i in zip(KS, y, n, strict=True)})
    square, slope, _ = np.polyfit(np.array(KS) / OCTAVE, y, 2, w=np.sqrt(n))
    expected = -slope / (2 * square) * OCTAVE
    assert abs(find_vertex(means, 1.0) - expected) <= 0.51


@pytest.mark.parametrize('shift', [-3.0, 0.5, 1e3])
def test_constant_offset_keeps_vertex(shift):
    losses = {-8: [0.011, 0.014], 0: [0.003, 0.0], 4: [0.001], 8: [0.009, 0.012]}
    moved = compute_means({k: [x + shift for x in seeds] for k, seeds in losses.items()})
    assert find_vertex(moved, 0.002) == find_vertex(compute_means(losses), 0.002) == 1


def test_mirrored_losses_mirror_the_vertex():
    losses = {-16: 0.052, -8: 0.013, -4: 0.0051, 0: 0.0, 4: 0.0013, 8: 0.0072, 16: 0.031}
    means = compute_means({k: [x] for k, x in losses.items()})
    mirrored = compute_means({-k: [x] for k, x in losses.items()})
    assert find_vertex(means, 1e-4) == -find_vertex(mirrored, 1e-4) != 0


def test_vertex_stays_between_tried_neighbours():
    """Two equal best losses at the edge of a valley have the vertex between them."""
    means = sample_means(lambda z: 0.01 * (z - 0.99) ** 2, (-8, 0, 4, 8, 16))
    assert 4 <= find_vertex(means, 0.0) <= 16
    assert find_vertex(means, 0.0) == 8


def test_divergence_bounds_the_vertex():
    """The parabola through the finite losses has its vertex half an octave beyond the best."""
    losses = {-16: [0.0625], -8: [0.0225], 0: [0.0025], 8: [math.inf], 16: [math.nan]}
    assert find_vertex(compute_means(losses), 0.0) == 0
    assert find_vertex(compute_means(losses | {8: [0.0025], 16: [0.0225]}), 0.0) == 4
    half = compute_means(losses | {8: [0.0025, math.nan]})  # one seed of two diverged
    assert find_vertex(half, 0.0) == 0 and math.isinf(half.mean[3])


@pytest.mark.parametrize(
    'losses', [{0: [1.0]}, {0: [1.0], 8: [2.0]}, {-8: [1.0], 0: [2.0], 8: [1.5]}]
)
def test_best_value_is_kept_if_not_convex(losses):
    means = compute_means(losses)
    assert find_vertex(means, 0.0) == min(losses, key=lambda k: losses[k]) and not is_convex(
        means, 0.0
    )


def test_ties_go_to_the_smaller_value():
    means = compute_means({k: [1.0] for k in KS})
    assert means.k[means.best_position] == -16 and find_vertex(means, 0.0) == -16


def test_steep_curve_is_fitted_over_one_octave():
    """Far points of a curve that is not a parabola shift the vertex only if noise hides the near
    points.
    """
    y = {-16: [0.9], -8: [0.01], 0: [0.0], 8: [0.01], 16: [0.02]}
    assert find_vertex(compute_means(y), 0.001) == 0
    assert find_vertex(compute_means(y), 0.01) != 0


def test_spread_is_pooled_over_ended_samples():
    spread = pool_spread([[1.0, 3.0], [5.0], [2.0, 2.0, 5.0], [1.0, math.inf]])
    assert spread.freedom == 3 and spread.s == pytest.approx(math.sqrt((2 + 6) / 3))
    assert pool_spread([[1.0], [2.0]]) == (0.0, 0)


def test_allowance_without_noise_and_without_repeats():
    means = sample_means(lambda z: 0.01 * (z - 0.1) ** 2)
    assert compute_allowance(means, Spread(0.0, 3)) == 0
    assert math.isinf(compute_allowance(means, Spread(0.0, 0)))


def test_allowance_falls_with_seeds_and_rises_with_noise():
    few, many = (sample_means(lambda z: 0.01 * z**2, n=n) for n in (1, 16))
    allowances = [compute_allowance(few, Spread(s, 8)) for s in (0.001, 0.002, 0.004)]
    assert 0 < allowances[0] < allowances[1] < allowances[2]
    assert allowances[2] / 30 < compute_allowance(many, Spread(0.004, 8)) < allowances[2] / 3


def test_allowance_is_near_delta_method():
    """For a parabola c z^2 through steep points the vertex moves by s / (c sqrt(8)) and costs c
    times its square, with a quantile from chi-squared. Rounding to eighths adds a little.
    """
    c, s = 0.01, 0.002
    means = sample_means(lambda z: c * z**2, (-8, 0, 8))
    expected = c * (s / (c * math.sqrt(8))) ** 2 * stats.chi2.ppf(ALLOWANCE_QUANTILE, 1)
    assert expected * 0.8 < compute_allowance(means, Spread(s, 10)) < expected * 2


def test_normal_deviates_need_no_generator():
    x_RK = normal_deviates(100, 12)
    assert np.all(np.abs(x_RK.mean(0)) < 0.1) and np.all(np.abs(x_RK.std(0) - 1) < 0.1)
    off_diagonal = np.corrcoef(x_RK.T) - np.eye(12)
    assert np.max(np.abs(off_diagonal)) < 0.35
    u = (np.arange(1, 101) * math.sqrt(5)) % 1
    np.testing.assert_allclose(x_RK[:, 2], stats.norm.ppf(u), rtol=1e-9, atol=1e-9)


def test_near_best_range_ends_halfway_to_first_worse():
    losses = {-16: [0.2] * 2, -8: [0.011] * 2, 0: [0.0] * 2, 8: [0.009] * 2, 16: [0.1] * 2}
    s = 0.006
    bound = stats.t.ppf(NOT_WORSE, 5) * s * math.sqrt(1 / 2 + 1 / 2)
    assert 0.011 < bound < 0.1
    assert near_best_range(compute_means(losses), Spread(s, 5)) == (-12, 12)
    assert near_best_range(compute_means(losses), Spread(1e-6, 5)) == (-4, 4)
    assert near_best_range(compute_means(losses), Spread(1.0, 5)) == (-math.inf, math.inf)
    assert near_best_range(compute_means(losses), Spread(0.0, 0)) == (-math.inf, math.inf)


def test_near_best_range_ends_at_divergence():
    losses = {-8: [0.0], 0: [0.001], 8: [math.inf], 16: [0.001]}
    assert near_best_range(compute_means(losses), Spread(0.1, 4)) == (-math.inf, HALF_OCTAVE)
