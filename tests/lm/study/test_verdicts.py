"""Property tests of a study: looks at fresh seeds, verdicts, and reasons for a missing verdict."""

import dataclasses
import functools
import math
import random

import numpy as np

from lm.study.plan.search import (
    DIVERGED,
    EDGE,
    LOCATED,
    NOT_REFINED,
    UNBOUNDED,
    Point,
    Search,
)
from lm.study.statistics import (
    BETTER,
    HOLM,
    MAX_SEEDS,
    UNDECIDED,
    WORSE,
    Verdict,
    judge_arms,
    seeds_needed,
)
from lm.study.verdicts import FIRST_FRESH_SEED, SEED_LIMITED, TUNING_LIMITED, FreshResult, Study

SEARCH = Search(smallest_effect=0.01)


def arm(shift=0.0, s=0.002, at=0.3, number=0):
    def loss(point):
        common, private = random.Random(point.seed), random.Random(repr((point, number, at)))
        noise = 0.6 * common.gauss(0, 1) + 0.8 * private.gauss(0, 1)
        return shift + 0.01 * (point.k[0] / 8 - at) ** 2 + s * noise

    return loss


def fails(loss, seeds):
    """Returns the same arm, with divergence at these fresh seeds."""
    return lambda p: math.inf if p.seed - FIRST_FRESH_SEED in seeds else loss(p)


def make_study(ledgers, judged=None, **settings):
    judged = judged or [True] * len(ledgers)
    settings = {'search': SEARCH, 'seeds': 5, 'test': HOLM} | settings
    return Study(bounds=[(UNBOUNDED,)] * len(ledgers), losses=ledgers, is_judged=judged, **settings)


def run_study(losses, **settings):
    """Returns a complete study of arms with these losses."""
    ledgers = [{} for _ in losses]
    while (study := make_study(ledgers, **settings)).next_runs:
        for ledger, loss, points in zip(ledgers, losses, study.next_runs[1], strict=True):
            ledger.update({p: loss(p) for p in points if p not in ledger})
    return study


@functools.cache
def run_mixed_study():
    """Returns a study of arms that are better, worse, equal, and diverging everywhere."""
    return run_study([arm(), arm(-0.02), arm(0.02, at=-1), arm(0.0, number=1), lambda p: math.nan])


def test_clear_differences_get_verdicts():
    study = run_mixed_study()
    assert [c and c.verdict and c.verdict.outcome for c in study.fresh_results] == [
        None,
        BETTER,
        WORSE,
        UNDECIDED,
        None,
    ]
    assert study.states(1) == study.states(2) == (LOCATED,)
    assert study.states(4) == (DIVERGED,) and study.fresh_results[4] is None
    assert study.next_runs is None


def test_looks_use_fresh_seeds_common_to_all_arms():
    study = run_mixed_study()
    (first, _), (second, _) = study.looks
    tuned = {
        p.seed for points in study.stages for p, stage in points.items() if 'look' not in stage
    }
    assert max(tuned) < FIRST_FRESH_SEED
    seeds = [[p.seed for p in points] for points in first]
    assert seeds == [[*range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + 5)]] * 4 + [[]]
    assert [len(points) for points in second] == [10, 0, 0, 10, 0]
    assert all(p.k == study.picks[i].k for i, points in enumerate(first) for p in points)
    assert [len(c.losses) for c in study.fresh_results[:4]] == [10, 5, 5, 10]


def test_first_look_uses_only_its_seeds():
    """Verdicts of the first look equal `judge_arms` on the losses of its seeds."""
    study = run_mixed_study()
    points, confirmed = study.looks[0]
    fresh = [
        np.array([losses[p] for p in ps]) for losses, ps in zip(study.losses, points, strict=True)
    ]
    r = [pick.allowance for pick in study.picks]
    expected = judge_arms(fresh[1:4], fresh[0], r[1:4], r[0], HOLM)
    assert [c.verdict for c in confirmed[1:4]] == expected
    points, confirmed = study.looks[1]
    fresh = [
        np.array([losses[p] for p in ps]) for losses, ps in zip(study.losses, points, strict=True)
    ]
    assert [confirmed[3].verdict] == judge_arms([fresh[3]], fresh[0], [r[3]], r[0], HOLM)


def test_killing_any_fresh_run_requests_it_again():
    study = run_mixed_study()
    ended = [
        {p: losses[p] for p, stage in stages.items() if 'look' not in stage}
        for losses, stages in zip(study.losses, study.stages, strict=True)
    ]
    for points, _ in study.looks:
        for i, arm_points in enumerate(points):
            for point in arm_points:
                if point not in ended[i]:
                    assert make_study(ended).next_runs[1] == points
                    ended[i][point] = study.losses[i][point]
    whole = make_study(ended)
    assert (
        whole.next_runs is None and whole.fresh_results[3].verdict == study.fresh_results[3].verdict
    )


def test_no_second_look_after_verdicts():
    study = run_study([arm(), arm(-0.05), arm(0.05)])
    assert len(study.looks) == 1 and [c.verdict.outcome for c in study.fresh_results[1:]] == [
        BETTER,
        WORSE,
    ]


def test_baseline_length_gets_seeds_but_no_verdict():
    study = run_study([arm(), arm(0.0, number=1), arm(-0.3)], judged=[True, True, False])
    assert study.fresh_results[2].verdict is None and len(study.fresh_results[2].losses) == 5
    assert study.states(2) == (LOCATED,)


def test_diverged_seeds_leave_no_verdict():
    study = run_study([arm(), fails(arm(-0.05), {1, 3}), arm(-0.05, number=1)])
    diverged, complete = study.fresh_results[1:]
    assert diverged.n_diverged == 2 and diverged.verdict is None and len(diverged.losses) == 5
    assert study.states(1) == (LOCATED, 'diverged 2 of 5')
    assert complete.verdict.outcome == BETTER and study.seeds_needed(1, 0.01) is None


def test_diverged_baseline_seeds_leave_no_verdicts():
    study = run_study([fails(arm(), {0}), arm(-0.05)])
    assert study.states(0) == (LOCATED, 'diverged 1 of 5')
    assert [c.verdict for c in study.fresh_results] == [None, None] and len(study.looks) == 1


def test_dead_baseline_leaves_no_verdicts():
    study = run_study([lambda p: math.inf, arm()])
    assert study.states(0) == (DIVERGED,) and study.fresh_results[1].verdict is None


def test_arm_at_edge_is_never_worse():
    """The arm's loss still falls at the last value, so it cannot be called worse. As a baseline it
    prevents others from being better, while an arm that is better at the edge is better.
    """

    def falling(point):
        return 2 - 1e-3 * point.k[0] + 1e-4 * random.Random(repr(point)).random()

    study = run_study([arm(-5.0), falling])
    assert EDGE in study.states(1) and study.fresh_results[1].verdict.outcome == UNDECIDED
    assert TUNING_LIMITED in study.states(1) and study.seeds_needed(1, 0.01) is None
    swapped = run_study([falling, arm(-5.0)])
    assert swapped.fresh_results[1].verdict.outcome == UNDECIDED
    lower = run_study([arm(9.0), falling])
    assert lower.fresh_results[1].verdict.outcome == BETTER


def with_verdict(difference, r_arm, r_baseline, deviation=0.01, n=10, outcome=UNDECIDED):
    """Returns a complete study of two arms with this verdict."""
    base = run_study([arm(), arm(0.0, number=1)])
    verdict = Verdict(outcome, difference, -1.0, 1.0, 0.5, n, deviation, 0.0, n - 1)
    study = dataclasses.replace(base)
    study.__dict__['picks'] = [
        dataclasses.replace(pick, allowance=r)
        for pick, r in zip(base.picks, (r_baseline, r_arm), strict=True)
    ]
    study.__dict__['looks'] = [([], [None, FreshResult(np.zeros(n), verdict)])]
    return study


def test_tuning_limited_if_allowance_exceeds_difference():
    """The arm's allowance prevents worse, the baseline's prevents better."""
    assert TUNING_LIMITED in with_verdict(0.003, 0.004, 0.0).states(1)
    assert TUNING_LIMITED not in with_verdict(0.003, 0.002, 9.0).states(1)
    assert TUNING_LIMITED in with_verdict(-0.003, 0.0, 0.004).states(1)
    assert TUNING_LIMITED not in with_verdict(-0.003, 9.0, 0.002).states(1)
    assert with_verdict(-0.003, 9.0, 9.0, outcome=BETTER).states(1) == (LOCATED,)


def test_seed_limited_if_more_seeds_are_needed():
    """Seeds are counted for the larger of difference and smallest effect, less the allowance."""
    study = with_verdict(-0.004, 0.0, 0.002)
    assert study.seeds_needed(1, 0.001) == seeds_needed(0.002, 0.01) > 10
    assert study.seeds_needed(1, 0.01) == seeds_needed(0.008, 0.01) > 10
    assert SEED_LIMITED in study.states(1)
    assert SEED_LIMITED not in with_verdict(-0.004, 0.0, 0.002, deviation=1e-4).states(1)
    assert with_verdict(-0.001, 0.0, 0.02).seeds_needed(1, 0.01) is None
    assert with_verdict(0.0, 0.0, 0.0).seeds_needed(1, 1e-9) == MAX_SEEDS + 1
    assert study.seeds_needed(0, 0.01) is None


def test_budget_prevents_second_look():
    losses = [arm(), arm(0.0, number=1)]
    free = run_study(losses)
    assert len(free.looks) == 2
    short = run_study(losses, budget=free.tuning_runs[0] + 9)
    assert len(short.looks) == 1 and short.next_runs is None
    assert len(run_study(losses, budget=free.tuning_runs[0] + 10).looks) == 2


def test_runs_and_stages_count_each_run_once():
    study = run_mixed_study()
    for i, stages in enumerate(study.stages):
        assert {*stages} == {*study.losses[i]}
        tuned = [p for p, stage in stages.items() if 'look' not in stage]
        assert study.tuning_runs[i] == len(tuned)
    assert len({*study.tuning_runs[:4]}) == 1
    kinds = {stage for stages in study.stages for stage in stages.values()}
    assert {'scan', 'refine', 'look 1', 'look 2'} <= kinds


def test_states_follow_tuning():
    nothing = make_study([{}, {}])
    assert nothing.states(0) == (NOT_REFINED,) and nothing.fresh_results == [None, None]
    stage, points = nothing.next_runs
    assert stage == 'scan' and nothing.tuning_runs == [5, 5]
    scanned = [{p: arm(at=at)(p) for p in points[0]} for at in (0.0, 5.0)]
    assert NOT_REFINED in make_study(scanned).states(0)
    assert {NOT_REFINED, EDGE} <= {*make_study(scanned).states(1)}
    assert Point((0,), 0) in scanned[0]
