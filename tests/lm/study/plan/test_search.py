"""Property tests of the waves of tuning: equal budgets, the same waves whenever and in whatever
order runs end, bounds, edges, arms that diverge.
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
    """A number like a standard normal one, of the point alone."""
    return random.Random(repr((point, arm))).gauss(0, 1)


def parabola(at, s=0.002, curvature=0.01, cliff=math.inf):
    """Loss of a point of one field, diverging from `cliff` octaves on."""

    def loss(point):
        z = point.k[0] / 8
        return math.inf if z > cliff else curvature * (z - at) ** 2 + s * noise(point, at)

    return loss


def grown(losses, search=ONE, bounds=None):
    """(replay of all waves, ledgers) of arms with these losses."""
    bounds = bounds or [(UNBOUNDED,) * search.n_fields] * len(losses)
    ledgers = [{} for _ in losses]
    while (found := replay_waves(ledgers, search, bounds)).open_wave:
        for own, loss, points in zip(ledgers, losses, found.open_wave.missing, strict=True):
            own.update({p: loss(p) for p in points})
    return found, ledgers


@functools.cache
def several():
    """Arms with their best within, at an edge, at a cliff, and one that diverges everywhere."""
    losses = [parabola(0.3), parabola(-2.7), parabola(4.0), parabola(1, cliff=1.2)]
    return grown([*losses, lambda point: math.nan])


@functools.cache
def surfaces():
    return grown([bowl(0.6, -0.9), bowl(-2.5, 0.4)], TWO)


def bowl(x, y, s=0.002):
    def loss(point):
        u, v = point.k[0] / 8 - x, point.k[1] / 8 - y
        return 0.01 * (u**2 + v**2 + 1.4 * u * v) + s * noise(point, x)

    return loss


@pytest.mark.parametrize('study', [several, surfaces])
def test_every_wave_has_as_many_runs_of_each_arm(study):
    found, _ = study()
    dead = {i for i, pick in enumerate(compute_picks(found)) if DIVERGED in pick.states}
    assert len(found.waves) > 3
    for wave in found.waves:
        counts = {len(points) for i, points in enumerate(wave.points) if i not in dead}
        assert len(counts) == 1 and counts != {0}
        assert all(len(wave.points[i]) <= min(counts) for i in dead)


@pytest.mark.parametrize('study', [several, surfaces])
def test_seeds_of_a_value_are_counted_from_0(study):
    found, _ = study()
    for i in range(len(found.arms)):
        points = [p for wave in found.waves for p in wave.points[i]]
        assert len({*points}) == len(points)
        for k in {p.k for p in points}:
            assert [p.seed for p in points if p.k == k] == [*range(len(found.arms[i].losses[k]))]


@pytest.mark.parametrize(('study', 'search'), [(several, ONE), (surfaces, TWO)])
def test_waves_are_the_same_after_a_kill_at_every_run(study, search):
    """Ledgers cut off before each run in turn have the waves up to there, and it is missing."""
    found, ledgers = study()
    bounds = [(UNBOUNDED,) * search.n_fields] * len(ledgers)
    ended = [{} for _ in ledgers]
    for number, wave in enumerate(found.waves):
        for arm, points in enumerate(wave.points):
            for point in points:
                cut = replay_waves(ended, search, bounds)
                assert [w.points for w in cut.waves] == [
                    w.points for w in found.waves[: number + 1]
                ]
                assert cut.open_wave.stage == wave.stage and point in cut.open_wave.missing[arm]
                ended[arm][point] = ledgers[arm][point]
    assert replay_waves(ended, search, bounds).open_wave is None


def test_neither_order_nor_other_runs_change_waves():
    found, ledgers = several()
    mixed = []
    for ledger in ledgers:
        items = [*ledger.items(), (Point((3,), 0), -5.0), (Point((0,), 400), -5.0)]
        random.Random(1).shuffle(items)
        mixed.append(dict(items))
    other = replay_waves(mixed, ONE, [(UNBOUNDED,)] * len(ledgers))
    assert [w.points for w in other.waves] == [w.points for w in found.waves]
    assert compute_picks(other) == compute_picks(found)
    later = {p: x for p, x in ledgers[0].items() if p not in found.waves[1].points[0]}
    assert replay_waves([later, *ledgers[1:]], ONE, [(UNBOUNDED,)] * 5).open_wave == (
        found.waves[1]._replace(missing=[found.waves[1].points[0], [], [], [], []])
    )


def test_no_constant_changes_waves():
    """Losses are compared within an arm alone, and arms share only their spread."""
    shifts = (3.0, -40.0, 0.125)
    losses = [parabola(at) for at in (0.3, -2.7, 1.1)]
    moved = [
        lambda p, loss=loss, shift=shift: loss(p) + shift
        for loss, shift in zip(losses, shifts, strict=True)
    ]
    (one, _), (other, _) = grown(losses), grown(moved)
    assert [w.points for w in one.waves] == [w.points for w in other.waves]
    assert [p.k for p in compute_picks(one)] == [p.k for p in compute_picks(other)]


def test_mirrored_losses_have_mirrored_picks():
    def mirrored(point):
        return parabola(0.8, s=0)(Point((-point.k[0],), point.seed))

    (one, _), (other, _) = grown([parabola(0.8, s=0)]), grown([mirrored])
    assert compute_picks(one)[0].k == (6,) and compute_picks(other)[0].k == (-6,)
    assert len(one.waves) == len(other.waves)


@pytest.mark.parametrize('at', [-6.3, -2.4, -0.7, 0.0, 0.55, 1.9, 7.1])
def test_minimum_is_found_wherever_it_is(at):
    (found, _) = grown([parabola(at, s=1e-5)])
    pick = compute_picks(found)[0]
    assert abs(pick.k[0] / 8 - at) <= 0.13 and pick.states == (LOCATED,)
    assert pick.near_best[0] <= pick.k[0] <= pick.near_best[1]
    stages = [wave.stage for wave in found.waves]
    assert stages[0] == 'scan' and ('extend' in stages) == (abs(at) > 1.5) and 'refine' in stages


def test_first_waves_by_hand():
    found, _ = grown([parabola(0.0, s=0)])
    scan, refine = found.waves
    assert scan.points == [[Point((k,), 0) for k in SCAN]]
    halves = [Point((-4,), 0), Point((4,), 0)]
    assert refine.points == [[*halves, Point((0,), 1), Point((-8,), 1), Point((8,), 1)]]
    (wide, _) = grown([parabola(2.3, s=0)])
    steps = [Point((k,), 0) for k in (24, 32, 40)]
    assert wide.waves[1].points == [[*steps, Point((16,), 1), Point((8,), 1)]]


def test_search_that_never_ends_is_an_edge():
    found, _ = grown([lambda point: -0.01 * point.k[0], parabola(0.0)])
    falling, other = compute_picks(found)
    assert falling.states == (EDGE,) and falling.k[0] == 16 + EXTENSIONS * 24 + REFINEMENTS * 4
    assert other.states == (LOCATED,)
    assert sum(wave.stage == 'extend' for wave in found.waves) == EXTENSIONS
    assert len({len(p) for wave in found.waves for p in [wave.points[0], wave.points[1]]}) <= 2


def test_noise_alone_rarely_leads_beyond_one_extension():
    """Loud runs far out are low by chance; they are repeated before the search goes on beyond."""
    ledgers = [grown([lambda p, i=i: 0.02 * noise(p, i)])[1][0] for i in range(40)]
    farthest = [max(abs(p.k[0]) for p in ledger) for ledger in ledgers]
    assert sum(k > 40 + 12 for k in farthest) <= 2 and max(farthest) > 16


@pytest.mark.parametrize(('bound', 'last'), [((-math.inf, 19), 19), ((-math.inf, 30), 30)])
def test_bounds_are_kept_and_reached(bound, last):
    found, ledgers = grown([lambda point: -0.01 * point.k[0]], bounds=[(bound,)])
    assert max(p.k[0] for p in ledgers[0]) == last
    assert compute_picks(found)[0].k == (last,) and EDGE in compute_picks(found)[0].states


def test_divergence_bounds_the_search():
    found, ledgers = grown([parabola(2.0, cliff=0.8)])
    pick = compute_picks(found)[0]
    assert max(p.k[0] for p in ledgers[0]) <= 16 and pick.k[0] <= 6
    assert CLIFF in pick.states and EDGE not in pick.states


def test_a_dead_arm_is_extended_downwards_and_dropped():
    """An arm that diverges everywhere is tried at lower values; the others go on without it."""
    found, ledgers = grown([lambda point: math.inf, parabola(0.4), parabola(-0.2)])
    dead, *others = compute_picks(found)
    assert dead.states == (DIVERGED,) and math.isinf(dead.allowance)
    tried = sorted(p.k[0] for p in ledgers[0])
    assert tried == [*range(-16 - EXTENSIONS * 24, 17, 8)]
    assert not found.waves[-1].points[0] and found.waves[-1].points[1]
    assert [pick.states for pick in others] == [(LOCATED,)] * 2


def test_an_arm_that_trains_at_low_values_alone_is_found():
    found, _ = grown([parabola(-5.2, cliff=-3.0), parabola(0.0)])
    assert (
        abs(compute_picks(found)[0].k[0] / 8 + 5.2) < 0.3
        and EDGE not in compute_picks(found)[0].states
    )


def test_dead_arms_in_several_fields_have_no_more_lines():
    found, ledgers = grown([lambda point: math.nan, bowl(0.2, 0.1)], TWO)
    assert {p.k[1] for p in ledgers[0]} == {0}
    assert compute_picks(found)[0].states == (DIVERGED,) and compute_picks(found)[1].states == (
        LOCATED,
    )


def test_flat_is_of_what_was_tried():
    found, _ = grown([lambda point: 0.001 * noise(point)])
    assert FLAT in compute_picks(found)[0].states
    found, _ = grown([parabola(0.0)])
    assert FLAT not in compute_picks(found)[0].states
    nothing_known = replay_waves([{}], ONE, [(UNBOUNDED,)])
    assert compute_picks(nothing_known)[0].states == (NOT_REFINED,)


def test_not_convex_keeps_the_best_value():
    """A best value between a hill and divergence has no parabola through it."""
    losses = {-16: 0.02, -12: 0.6, -8: 1.0, -4: 1.2, 0: 0.0}
    found, _ = grown([lambda point: losses.get(point.k[0], math.inf) + 0.001 * noise(point)])
    pick = compute_picks(found)[0]
    assert pick.k == (0,) and {NOT_CONVEX, CLIFF} == {*pick.states}


@pytest.mark.parametrize('most', [5, 9, 10, 14, 15, 20])
def test_budget_is_kept_and_what_is_open_is_said(most):
    losses = [parabola(0.3), parabola(-2.7)]
    whole, _ = grown(losses)
    found, ledgers = grown(losses, Search(smallest_effect=0.01, max_runs=most))
    assert all(len(ledger) <= most for ledger in ledgers)
    asked = [wave.points for wave in found.waves]
    assert asked == [wave.points for wave in whole.waves][: len(asked)]
    refined = any(wave.stage == 'refine' for wave in found.waves)
    for pick in compute_picks(found):
        assert refined or NOT_REFINED in pick.states
    if most < 10:
        assert EDGE in compute_picks(found)[1].states and math.isinf(
            compute_picks(found)[0].allowance
        )


def test_noise_asks_for_repeats_and_a_large_effect_for_none():
    loud = parabola(0.2, s=0.03)
    (found, _), (easy, _) = grown([loud]), grown([loud], Search(smallest_effect=10.0))
    assert [wave.stage for wave in found.waves].count('repeat') == 2
    assert 'repeat' not in [wave.stage for wave in easy.waves]


@pytest.mark.parametrize('at', [(0.6, -0.9), (-1.2, 1.1), (2.6, 0.0)])
def test_two_fields_are_found_together(at):
    found, ledgers = grown([bowl(*at, s=1e-5)], TWO)
    pick = compute_picks(found)[0]
    assert max(abs(k / 8 - x) for k, x in zip(pick.k, at, strict=True)) <= 0.26
    assert pick.states == (LOCATED,) and len(ledgers[0]) < 32
    assert {'scan', 'line', 'refine'} <= {wave.stage for wave in found.waves}


def test_several_fields_with_few_runs_keep_the_minimum_of_the_last_line():
    found, _ = grown([bowl(0.3, 0.0, s=0)], Search(TWO.scans, 0.01, max_runs=3))
    pick = compute_picks(found)[0]
    assert pick.k == (2, 0) and NOT_REFINED in pick.states and math.isinf(pick.allowance)


@pytest.mark.parametrize('fields', [2, 3])
def test_minimum_of_a_quadratic_surface_is_exact(fields):
    at = np.array([5, -3, 2][:fields])
    places = itertools.product((-8, 0, 8), repeat=fields)
    losses = {k: [float(np.sum((k - at) ** 2) + 1.4 * np.prod((k - at)[:2]))] for k in places}
    found = surface.find_minimum(losses, (0,) * fields, STEPS[:fields])
    assert max(abs(np.array(found) - at)) <= 1
    assert surface.find_minimum({k: [-x[0]] for k, x in losses.items()}, at, STEPS[:fields]) is None
    assert surface.find_minimum(dict([*losses.items()][:5]), at, STEPS[:fields]) is None
