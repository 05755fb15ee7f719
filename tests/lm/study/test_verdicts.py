"""Property tests of a study: looks at fresh seeds, verdicts, what keeps an arm from one."""

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
        common, own = random.Random(point.seed), random.Random(repr((point, number, at)))
        noise = 0.6 * common.gauss(0, 1) + 0.8 * own.gauss(0, 1)
        return shift + 0.01 * (point.k[0] / 8 - at) ** 2 + s * noise

    return loss


def fails(loss, seeds):
    """The same arm, whose fresh seeds of these numbers diverge."""
    return lambda p: math.inf if p.seed - FIRST_FRESH_SEED in seeds else loss(p)


def study_of(ledgers, judged=None, **settings):
    judged = judged or [True] * len(ledgers)
    settings = {'search': SEARCH, 'seeds': 5, 'test': HOLM} | settings
    return Study(bounds=[(UNBOUNDED,)] * len(ledgers), losses=ledgers, is_judged=judged, **settings)


def grown(losses, **settings):
    """A study of arms with these losses, at its end."""
    ledgers = [{} for _ in losses]
    while (found := study_of(ledgers, **settings)).next_runs:
        for own, loss, points in zip(ledgers, losses, found.next_runs[1], strict=True):
            own.update({p: loss(p) for p in points if p not in own})
    return found


@functools.cache
def mixed():
    """Arms that are better, worse, equal, and one that diverges everywhere."""
    return grown([arm(), arm(-0.02), arm(0.02, at=-1), arm(0.0, number=1), lambda p: math.nan])


def test_verdicts_of_clear_differences():
    found = mixed()
    assert [c and c.verdict and c.verdict.outcome for c in found.fresh_results] == [
        None,
        BETTER,
        WORSE,
        UNDECIDED,
        None,
    ]
    assert found.states(1) == found.states(2) == (LOCATED,)
    assert found.states(4) == (DIVERGED,) and found.fresh_results[4] is None
    assert found.next_runs is None


def test_looks_are_of_fresh_seeds_that_all_arms_share():
    found = mixed()
    (first, _), (second, _) = found.looks
    tuned = {
        p.seed for points in found.stages for p, stage in points.items() if 'look' not in stage
    }
    assert max(tuned) < FIRST_FRESH_SEED
    seeds = [[p.seed for p in points] for points in first]
    assert seeds == [[*range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + 5)]] * 4 + [[]]
    assert [len(points) for points in second] == [10, 0, 0, 10, 0]
    assert all(p.k == found.picks[i].k for i, points in enumerate(first) for p in points)
    assert [len(c.losses) for c in found.fresh_results[:4]] == [10, 5, 5, 10]


def test_first_look_decides_by_its_own_seeds():
    """Verdicts of the first look are those of `judge` on the losses of its seeds."""
    found = mixed()
    points, confirmed = found.looks[0]
    fresh = [np.array([own[p] for p in ps]) for own, ps in zip(found.losses, points, strict=True)]
    r = [pick.allowance for pick in found.picks]
    wanted = judge_arms(fresh[1:4], fresh[0], r[1:4], r[0], HOLM)
    assert [c.verdict for c in confirmed[1:4]] == wanted
    points, confirmed = found.looks[1]
    fresh = [np.array([own[p] for p in ps]) for own, ps in zip(found.losses, points, strict=True)]
    assert [confirmed[3].verdict] == judge_arms([fresh[3]], fresh[0], [r[3]], r[0], HOLM)


def test_a_kill_at_every_fresh_run_asks_for_the_same():
    found = mixed()
    ended = [
        {p: own[p] for p, stage in stages.items() if 'look' not in stage}
        for own, stages in zip(found.losses, found.stages, strict=True)
    ]
    for points, _ in found.looks:
        for i, own in enumerate(points):
            for point in own:
                if point not in ended[i]:
                    assert study_of(ended).next_runs[1] == points
                    ended[i][point] = found.losses[i][point]
    whole = study_of(ended)
    assert (
        whole.next_runs is None and whole.fresh_results[3].verdict == found.fresh_results[3].verdict
    )


def test_no_second_look_where_all_is_decided():
    found = grown([arm(), arm(-0.05), arm(0.05)])
    assert len(found.looks) == 1 and [c.verdict.outcome for c in found.fresh_results[1:]] == [
        BETTER,
        WORSE,
    ]


def test_a_length_of_the_baseline_gets_seeds_and_no_verdict():
    found = grown([arm(), arm(0.0, number=1), arm(-0.3)], judged=[True, True, False])
    assert found.fresh_results[2].verdict is None and len(found.fresh_results[2].losses) == 5
    assert found.states(2) == (LOCATED,)


def test_diverged_seeds_leave_no_verdict():
    found = grown([arm(), fails(arm(-0.05), {1, 3}), arm(-0.05, number=1)])
    one, other = found.fresh_results[1:]
    assert one.n_diverged == 2 and one.verdict is None and len(one.losses) == 5
    assert found.states(1) == (LOCATED, 'diverged 2 of 5')
    assert other.verdict.outcome == BETTER and found.seeds_needed(1, 0.01) is None


def test_diverged_seeds_of_the_baseline_leave_no_verdicts():
    found = grown([fails(arm(), {0}), arm(-0.05)])
    assert found.states(0) == (LOCATED, 'diverged 1 of 5')
    assert [c.verdict for c in found.fresh_results] == [None, None] and len(found.looks) == 1


def test_a_dead_baseline_leaves_no_verdicts():
    found = grown([lambda p: math.inf, arm()])
    assert found.states(0) == (DIVERGED,) and found.fresh_results[1].verdict is None


def test_an_edge_is_never_worse():
    """The arm's loss still falls at the last value, so that it says nothing of worse; as
    a baseline it keeps others from being better, and an arm that is better there is so.
    """

    def falling(point):
        return 2 - 1e-3 * point.k[0] + 1e-4 * random.Random(repr(point)).random()

    found = grown([arm(-5.0), falling])
    assert EDGE in found.states(1) and found.fresh_results[1].verdict.outcome == UNDECIDED
    assert TUNING_LIMITED in found.states(1) and found.seeds_needed(1, 0.01) is None
    swapped = grown([falling, arm(-5.0)])
    assert swapped.fresh_results[1].verdict.outcome == UNDECIDED
    lower = grown([arm(9.0), falling])
    assert lower.fresh_results[1].verdict.outcome == BETTER


def with_verdict(difference, r_arm, r_baseline, deviation=0.01, n=10, said=UNDECIDED):
    """A study of two arms that ends with this verdict."""
    base = grown([arm(), arm(0.0, number=1)])
    verdict = Verdict(said, difference, -1.0, 1.0, 0.5, n, deviation, 0.0)
    study = dataclasses.replace(base)
    study.__dict__['picks'] = [
        dataclasses.replace(pick, allowance=r)
        for pick, r in zip(base.picks, (r_baseline, r_arm), strict=True)
    ]
    study.__dict__['looks'] = [([], [None, FreshResult(np.zeros(n), verdict)])]
    return study


def test_tuning_limited_is_an_allowance_above_the_difference():
    """The arm's stands in the way of worse, the baseline's in that of better."""
    assert TUNING_LIMITED in with_verdict(0.003, 0.004, 0.0).states(1)
    assert TUNING_LIMITED not in with_verdict(0.003, 0.002, 9.0).states(1)
    assert TUNING_LIMITED in with_verdict(-0.003, 0.0, 0.004).states(1)
    assert TUNING_LIMITED not in with_verdict(-0.003, 9.0, 0.002).states(1)
    assert with_verdict(-0.003, 9.0, 9.0, said=BETTER).states(1) == (LOCATED,)


def test_seed_limited_is_more_seeds_than_there_were():
    """They are counted for the difference, or the smallest effect, less the allowance."""
    study = with_verdict(-0.004, 0.0, 0.002)
    assert study.seeds_needed(1, 0.001) == seeds_needed(0.002, 0.01) > 10
    assert study.seeds_needed(1, 0.01) == seeds_needed(0.008, 0.01) > 10
    assert SEED_LIMITED in study.states(1)
    assert SEED_LIMITED not in with_verdict(-0.004, 0.0, 0.002, deviation=1e-4).states(1)
    assert with_verdict(-0.001, 0.0, 0.02).seeds_needed(1, 0.01) is None
    assert with_verdict(0.0, 0.0, 0.0).seeds_needed(1, 1e-9) == MAX_SEEDS + 1
    assert study.seeds_needed(0, 0.01) is None


def test_budget_keeps_the_second_look_away():
    losses = [arm(), arm(0.0, number=1)]
    free = grown(losses)
    assert len(free.looks) == 2
    short = grown(losses, budget=free.tuning_runs[0] + 9)
    assert len(short.looks) == 1 and short.next_runs is None
    assert len(grown(losses, budget=free.tuning_runs[0] + 10).looks) == 2


def test_runs_and_stages_count_every_run_once():
    found = mixed()
    for i, stages in enumerate(found.stages):
        assert {*stages} == {*found.losses[i]}
        tuned = [p for p, stage in stages.items() if 'look' not in stage]
        assert found.tuning_runs[i] == len(tuned)
    assert len({*found.tuning_runs[:4]}) == 1
    kinds = {stage for stages in found.stages for stage in stages.values()}
    assert {'scan', 'refine', 'look 1', 'look 2'} <= kinds


def test_states_while_tuning_goes_on():
    nothing = study_of([{}, {}])
    assert nothing.states(0) == (NOT_REFINED,) and nothing.fresh_results == [None, None]
    stage, points = nothing.next_runs
    assert stage == 'scan' and nothing.tuning_runs == [5, 5]
    scanned = [{p: arm(at=at)(p) for p in points[0]} for at in (0.0, 5.0)]
    assert NOT_REFINED in study_of(scanned).states(0)
    assert {NOT_REFINED, EDGE} <= {*study_of(scanned).states(1)}
    assert Point((0,), 0) in scanned[0]
