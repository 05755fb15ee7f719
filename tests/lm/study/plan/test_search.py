"""Property tests of the waves of tuning: equal budgets, the same waves in whatever order runs end,
bounds, edges, and diverging arms.
"""

import functools
import itertools
import math
import random

import numpy as np
import pytest

from lm.study.plan import surface
from lm.study.plan.search import (
    CLIFF,
    DIVERGED,
    EDGE,
    EXTENSIONS,
    FLAT,
    LOCATED,
    NOT_CONVEX,
    NOT_REFINED,
    REFINEMENTS,
    SCAN,
    STEPS,
    UNBOUNDED,
    Point,
    Search,
    compute_picks,
    replay_waves,
)

ONE = Search(smallest_effect=0.01)
TWO = Search(tuple((-step, 0, step) for step in STEPS[:2]), 0.01)


def noise(point, arm=0):
    """Returns a number like a standard normal deviate, as a function of the point."""
    return random.Random(repr((point, arm))).gauss(0, 1)


def parabola(at, s=0.002, curvature=0.01, cliff=math.inf):
    """Returns the loss of a point with one field, which diverges from `cliff` octaves on."""

    def loss(point):
        z = point.k[0] / 8
        return math.inf if z > cliff else curvature * (z - at) ** 2 + s * noise(point, at)

    return loss


def run_search(losses, search=ONE, bounds=None):
    """Returns (replay of all waves, ledgers) of arms with these losses."""
    bounds = bounds or [(UNBOUNDED,) * search.n_fields] * len(losses)
    ledgers = [{} for _ in losses]
    while (replay := replay_waves(ledgers, search, bounds)).open_wave:
        for ledger, loss, points in zip(ledgers, losses, replay.open_wave.missing, strict=True):
            ledger.update({p: loss(p) for p in points})
    return replay, ledgers


@functools.cache
def several():
    """Returns arms with their best inside, at an edge, at a cliff, and an arm that diverges
    everywhere.
    """
    losses = [parabola(0.3), parabola(-2.7), parabola(4.0), parabola(1, cliff=1.2)]
    return run_search([*losses, lambda point: math.nan])


@functools.cache
def surfaces():
    return run_search([bowl(0.6, -0.9), bowl(-2.5, 0.4)], TWO)


def bowl(x, y, s=0.002):
    def loss(point):
        u, v = point.k[0] / 8 - x, point.k[1] / 8 - y
        return 0.01 * (u**2 + v**2 + 1.4 * u * v) + s * noise(point, x)

    return loss


@pytest.mark.parametrize('study', [several, surfaces])
def test_every_wave_has_equal_runs_for_each_arm(study):
    replay, _ = study()
    dead = {i for i, pick in enumerate(compute_picks(replay)) if DIVERGED in pick.states}
    assert len(replay.waves) > 3
    for wave in replay.waves:
        counts = {len(points) for i, points in enumerate(wave.points) if i not in dead}
        assert len(counts) == 1 and counts != {0}
        assert all(len(wave.points[i]) <= min(counts) for i in dead)


@pytest.mark.parametrize('study', [several, surfaces])
def test_seeds_start_at_0_for_each_value(study):
    replay, _ = study()
    for i in range(len(replay.arms)):
        points = [p for wave in replay.waves for p in wave.points[i]]
        assert len({*points}) == len(points)
        for k in {p.k for p in points}:
            assert [p.seed for p in points if p.k == k] == [*range(len(replay.arms[i].losses[k]))]


@pytest.mark.parametrize(('study', 'search'), [(several, ONE), (surfaces, TWO)])
def test_waves_survive_a_kill_at_any_run(study, search):
    """Cuts the ledgers off before each run in turn: the waves up to it are the same, and it is
    missing.
    """
    replay, ledgers = study()
    bounds = [(UNBOUNDED,) * search.n_fields] * len(ledgers)
    ended = [{} for _ in ledgers]
    for number, wave in enumerate(replay.waves):
        for arm, points in enumerate(wave.points):
            for point in points:
                interrupted = replay_waves(ended, search, bounds)
                assert [w.points for w in interrupted.waves] == [
                    w.points for w in replay.waves[: number + 1]
                ]
                assert (
                    interrupted.open_wave.stage == wave.stage
                    and point in interrupted.open_wave.missing[arm]
                )
                ended[arm][point] = ledgers[arm][point]
    assert replay_waves(ended, search, bounds).open_wave is None


def test_waves_ignore_order_and_other_runs():
    replay, ledgers = several()
    mixed = []
    for ledger in ledgers:
        losses = [*ledger.items(), (Point((3,), 0), -5.0), (Point((0,), 400), -5.0)]
        random.Random(1).shuffle(losses)
        mixed.append(dict(losses))
    shuffled = replay_waves(mixed, ONE, [(UNBOUNDED,)] * len(ledgers))
    assert [w.points for w in shuffled.waves] == [w.points for w in replay.waves]
    assert compute_picks(shuffled) == compute_picks(replay)
    later = {p: x for p, x in ledgers[0].items() if p not in replay.waves[1].points[0]}
    assert replay_waves([later, *ledgers[1:]], ONE, [(UNBOUNDED,)] * 5).open_wave == (
        replay.waves[1]._replace(missing=[replay.waves[1].points[0], [], [], [], []])
    )


def test_waves_ignore_constant_offsets():
    """Losses are compared only within an arm, and arms share only their spread."""
    shifts = (3.0, -40.0, 0.125)
    losses = [parabola(at) for at in (0.3, -2.7, 1.1)]
    moved = [
        lambda p, loss=loss, shift=shift: loss(p) + shift
        for loss, shift in zip(losses, shifts, strict=True)
    ]
    (replay, _), (moved_replay, _) = run_search(losses), run_search(moved)
    assert [w.points for w in replay.waves] == [w.points for w in moved_replay.waves]
    assert [p.k for p in compute_picks(replay)] == [p.k for p in compute_picks(moved_replay)]


def test_mirrored_losses_mirror_picks():
    def mirror(point):
        return parabola(0.8, s=0)(Point((-point.k[0],), point.seed))

    (replay, _), (mirrored_replay, _) = run_search([parabola(0.8, s=0)]), run_search([mirror])
    assert compute_picks(replay)[0].k == (6,) and compute_picks(mirrored_replay)[0].k == (-6,)
    assert len(replay.waves) == len(mirrored_replay.waves)


@pytest.mark.parametrize('at', [-6.3, -2.4, -0.7, 0.0, 0.55, 1.9, 7.1])
def test_minimum_is_found_at_any_place(at):
    (replay, _) = run_search([parabola(at, s=1e-5)])
    pick = compute_picks(replay)[0]
    assert abs(pick.k[0] / 8 - at) <= 0.13 and pick.states == (LOCATED,)
    assert pick.near_best[0] <= pick.k[0] <= pick.near_best[1]
    stages = [wave.stage for wave in replay.waves]
    assert stages[0] == 'scan' and ('extend' in stages) == (abs(at) > 1.5) and 'refine' in stages


def test_first_waves_by_hand():
    replay, _ = run_search([parabola(0.0, s=0)])
    scan, refine = replay.waves
    assert scan.points == [[Point((k,), 0) for k in SCAN]]
    halves = [Point((-4,), 0), Point((4,), 0)]
    assert refine.points == [[*halves, Point((0,), 1), Point((-8,), 1), Point((8,), 1)]]
    (wide, _) = run_search([parabola(2.3, s=0)])
    steps = [Point((k,), 0) for k in (24, 32, 40)]
    assert wide.waves[1].points == [[*steps, Point((16,), 1), Point((8,), 1)]]


def test_endless_descent_ends_at_an_edge():
    replay, _ = run_search([lambda point: -0.01 * point.k[0], parabola(0.0)])
    falling, located = compute_picks(replay)
    assert falling.states == (EDGE,) and falling.k[0] == 16 + EXTENSIONS * 24 + REFINEMENTS * 4
    assert located.states == (LOCATED,)
    assert sum(wave.stage == 'extend' for wave in replay.waves) == EXTENSIONS
    assert len({len(p) for wave in replay.waves for p in [wave.points[0], wave.points[1]]}) <= 2


def test_noise_rarely_causes_two_extensions():
    """Noisy runs at large values may be low by chance; they are repeated before the search extends
    further.
    """
    ledgers = [run_search([lambda p, i=i: 0.02 * noise(p, i)])[1][0] for i in range(40)]
    farthest = [max(abs(p.k[0]) for p in ledger) for ledger in ledgers]
    assert sum(k > 40 + 12 for k in farthest) <= 2 and max(farthest) > 16


@pytest.mark.parametrize(('bound', 'last'), [((-math.inf, 19), 19), ((-math.inf, 30), 30)])
def test_bounds_are_respected_and_reached(bound, last):
    replay, ledgers = run_search([lambda point: -0.01 * point.k[0]], bounds=[(bound,)])
    assert max(p.k[0] for p in ledgers[0]) == last
    assert compute_picks(replay)[0].k == (last,) and EDGE in compute_picks(replay)[0].states


def test_divergence_bounds_the_search():
    replay, ledgers = run_search([parabola(2.0, cliff=0.8)])
    pick = compute_picks(replay)[0]
    assert max(p.k[0] for p in ledgers[0]) <= 16 and pick.k[0] <= 6
    assert CLIFF in pick.states and EDGE not in pick.states


def test_dead_arm_is_extended_downwards_then_dropped():
    """An arm that diverges everywhere is tried at lower values; the others continue without it."""
    replay, ledgers = run_search([lambda point: math.inf, parabola(0.4), parabola(-0.2)])
    dead, *alive = compute_picks(replay)
    assert dead.states == (DIVERGED,) and math.isinf(dead.allowance)
    tried = sorted(p.k[0] for p in ledgers[0])
    assert tried == [*range(-16 - EXTENSIONS * 24, 17, 8)]
    assert not replay.waves[-1].points[0] and replay.waves[-1].points[1]
    assert [pick.states for pick in alive] == [(LOCATED,)] * 2


def test_arm_stable_only_at_low_values_is_found():
    replay, _ = run_search([parabola(-5.2, cliff=-3.0), parabola(0.0)])
    assert (
        abs(compute_picks(replay)[0].k[0] / 8 + 5.2) < 0.3
        and EDGE not in compute_picks(replay)[0].states
    )


def test_dead_arms_get_no_further_lines():
    replay, ledgers = run_search([lambda point: math.nan, bowl(0.2, 0.1)], TWO)
    assert {p.k[1] for p in ledgers[0]} == {0}
    assert compute_picks(replay)[0].states == (DIVERGED,) and compute_picks(replay)[1].states == (
        LOCATED,
    )


def test_flat_counts_only_tried_values():
    replay, _ = run_search([lambda point: 0.001 * noise(point)])
    assert FLAT in compute_picks(replay)[0].states
    replay, _ = run_search([parabola(0.0)])
    assert FLAT not in compute_picks(replay)[0].states
    nothing_known = replay_waves([{}], ONE, [(UNBOUNDED,)])
    assert compute_picks(nothing_known)[0].states == (NOT_REFINED,)


def test_non_convex_losses_keep_best_value():
    """A best value between a hill and divergence has no parabola through it."""
    losses = {-16: 0.02, -12: 0.6, -8: 1.0, -4: 1.2, 0: 0.0}
    replay, _ = run_search([lambda point: losses.get(point.k[0], math.inf) + 0.001 * noise(point)])
    pick = compute_picks(replay)[0]
    assert pick.k == (0,) and {NOT_CONVEX, CLIFF} == {*pick.states}


@pytest.mark.parametrize('max_runs', [5, 9, 10, 14, 15, 20])
def test_budget_is_kept_and_reported(max_runs):
    losses = [parabola(0.3), parabola(-2.7)]
    whole, _ = run_search(losses)
    replay, ledgers = run_search(losses, Search(smallest_effect=0.01, max_runs=max_runs))
    assert all(len(ledger) <= max_runs for ledger in ledgers)
    waves = [wave.points for wave in replay.waves]
    assert waves == [wave.points for wave in whole.waves][: len(waves)]
    refined = any(wave.stage == 'refine' for wave in replay.waves)
    for pick in compute_picks(replay):
        assert refined or NOT_REFINED in pick.states
    if max_runs < 10:
        assert EDGE in compute_picks(replay)[1].states and math.isinf(
            compute_picks(replay)[0].allowance
        )


def test_repeats_follow_noise_and_effect():
    loud = parabola(0.2, s=0.03)
    (replay, _), (easy, _) = run_search([loud]), run_search([loud], Search(smallest_effect=10.0))
    assert [wave.stage for wave in replay.waves].count('repeat') == 2
    assert 'repeat' not in [wave.stage for wave in easy.waves]


@pytest.mark.parametrize('at', [(0.6, -0.9), (-1.2, 1.1), (2.6, 0.0)])
def test_two_fields_are_found_together(at):
    replay, ledgers = run_search([bowl(*at, s=1e-5)], TWO)
    pick = compute_picks(replay)[0]
    assert max(abs(k / 8 - x) for k, x in zip(pick.k, at, strict=True)) <= 0.26
    assert pick.states == (LOCATED,) and len(ledgers[0]) < 32
    assert {'scan', 'line', 'refine'} <= {wave.stage for wave in replay.waves}


def test_few_runs_keep_minimum_along_last_line():
    replay, _ = run_search([bowl(0.3, 0.0, s=0)], Search(TWO.scans, 0.01, max_runs=3))
    pick = compute_picks(replay)[0]
    assert pick.k == (2, 0) and NOT_REFINED in pick.states and math.isinf(pick.allowance)


@pytest.mark.parametrize('fields', [2, 3])
def test_quadratic_surface_minimum_is_exact(fields):
    at = np.array([5, -3, 2][:fields])
    places = itertools.product((-8, 0, 8), repeat=fields)
    losses = {k: [float(np.sum((k - at) ** 2) + 1.4 * np.prod((k - at)[:2]))] for k in places}
    place = surface.find_minimum(losses, (0,) * fields, STEPS[:fields])
    assert max(abs(np.array(place) - at)) <= 1
    assert surface.find_minimum({k: [-x[0]] for k, x in losses.items()}, at, STEPS[:fields]) is None
    assert surface.find_minimum(dict([*losses.items()][:5]), at, STEPS[:fields]) is None
