"""The table of a tuned sweep's arms: against the study that made the runs, and by hand."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from eval import runs
from eval.compare import compare_arms
from eval.report.arm_charts import draw_tuned_losses, loss_at
from eval.report.arms import arm_rows, findings
from lm.study.arm import Ablation, Arm
from lm.study.plan.curve import OCTAVE, PER_OCTAVE
from lm.study.plan.search import DIVERGED, EDGE, Point
from lm.study.tables import ablation as tables
from lm.study.tables.arms import arm_names
from lm.study.tables.results import read_sweep
from lm.study.verdicts import FIRST_FRESH_SEED
from tests.eval import sweep_fixture as fixture
from tests.eval import tuned_fixture as tuned
from tests.eval.tuned_fixture import bowl

ASKED = {'optim.lr': None}
GAP, NOISE, BEST = 0.06, 0.004, 1.0  # of the second arm: its loss is less, its best an octave off


def dead(z, seed):
    return math.inf


def some_fail(z, seed):
    return (
        math.inf
        if seed in (FIRST_FRESH_SEED + 1, FIRST_FRESH_SEED + 3)
        else 2.9 + tuned.CURVATURE * z**2
    )


LOSSES = {
    'rmsnorm': bowl(3.0, 0.0, NOISE, 1),
    'layernorm': bowl(3.0 - GAP, BEST, NOISE, 2),
    'dyt': bowl(3.001, -0.5, NOISE, 3),
    'none': dead,
    'derf': lambda z, seed: 3.4 - 0.01 * z,
    'groupnorm': some_fail,
}


def read(folder):
    return tables.read_ablation(read_sweep(folder), runs.gather(folder))


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """A finished sweep: its folder, the study that made it, the ablation read from it."""
    folder = tmp_path_factory.mktemp('runs') / 'norms'
    study = tuned.write_tuned(folder, LOSSES, ASKED)
    return folder, study, read(folder)


@pytest.fixture(scope='module')
def rows(written):
    return {row.arm.name: row for row in tables.arm_results(written[2])}


def test_the_study_is_made_again_from_the_ledger(written):
    """Catches a run that is read as another's, and a diverged one that is read as missing."""
    _, study, found = written
    assert found.study.next_runs is None
    assert found.study.picks == study.picks
    assert [own.losses for own in found.arms] == list(study.losses)
    ours = [one and one.verdict for one in found.study.fresh_results]
    assert ours == [one and one.verdict for one in study.fresh_results]
    names = ['rmsnorm', 'layernorm', 'dyt', 'norm none', 'derf', 'groupnorm']
    assert [arm.name for arm in found.arms] == names


def test_numbers_of_an_arm_are_those_of_its_fresh_runs(written, rows):
    """The loss, its interval, the difference and the chosen value, computed here from closed
    forms. Catches seeds of tuning in what a verdict is of.
    """
    row, study = rows['layernorm'], written[1]
    z = {i: study.picks[i].k[0] / PER_OCTAVE for i in (0, 1)}
    own, base = (
        np.array([LOSSES[name](z[i], FIRST_FRESH_SEED + j) for j in range(5)])
        for i, name in ((1, 'layernorm'), (0, 'rmsnorm'))
    )
    assert row.outcome == 'better' and row.is_fresh and row.diverged == 0
    assert row.loss.mean == pytest.approx(own.mean()) and row.loss.n == 5
    assert row.loss.half_width == pytest.approx(2.776445 * own.std(ddof=1) / math.sqrt(5), rel=1e-6)
    assert row.verdict.difference == pytest.approx((own - base).mean())
    half = stats.t.ppf(0.975, 4) * (own - base).std(ddof=1) / math.sqrt(5)
    r_arm, r_base = (study.picks[i].allowance for i in (1, 0))
    assert row.verdict.low == pytest.approx((own - base).mean() - r_arm - half)
    assert row.verdict.high == pytest.approx((own - base).mean() + r_base + half)
    assert row.values == {'optim.lr': pytest.approx(tuned.LR * 2 ** z[1])}
    assert abs(z[1] - BEST) <= 0.5
    low, high = row.near_best
    assert tuned.LR < low < row.values['optim.lr'] < high < tuned.LR * 8


def test_costs_are_runs_and_their_shares_of_the_time(written, rows):
    study, row = written[1], rows['layernorm']
    assert row.runs == (study.tuning_runs[1], 5)
    first = sum(point.seed == 0 for point in study.losses[1])
    wanted = first * tuned.FIRST_SEC + (study.tuning_runs[1] - first) * tuned.SEC
    assert row.seconds == pytest.approx((wanted / tuned.BESIDE, 5 * tuned.SEC / tuned.BESIDE))


def test_sensitivity_by_hand(tmp_path):
    """Both arms are parabolas an octave apart: the octaves that both have around their own bests
    are -1, 0 and 1 at least, and equal curves are equally sensitive wherever their bests lie.
    """
    tuned.write_tuned(tmp_path / 's', {'rmsnorm': bowl(3.0), 'layernorm': bowl(2.9, 2.0)}, ASKED)
    found = read(tmp_path / 's')
    first, second = tables.arm_results(found)
    below = above = math.inf
    for i, best in ((0, 0), (1, 2)):
        octaves = [k // OCTAVE for k in found.tuning_line(i).means.k.tolist() if k % OCTAVE == 0]
        below, above = min(below, best - octaves[0]), min(above, octaves[-1] - best)
    assert below >= 1 and above >= 1
    costs = [tuned.CURVATURE * z**2 for z in range(-below, above + 1)]
    assert first.sensitivity == pytest.approx(sum(costs) / len(costs))
    assert second.sensitivity == pytest.approx(first.sensitivity)


def test_arms_that_fail(written, rows):
    """Others go on: each has its verdict."""
    none, some, edge = rows['norm none'], rows['groupnorm'], rows['derf']
    assert none.outcome == 'diverged' and none.states == (DIVERGED,) and none.values == {}
    assert math.isnan(none.loss.mean) and none.runs[1] == 0 and none.near_best is None
    assert some.outcome == 'diverged' and some.diverged == 2 and some.verdict is None
    assert 'diverged 2 of 5' in some.states and '2 of 5 fresh runs diverged' in some.caveats[0]
    assert EDGE in edge.states and edge.outcome == 'undecided'  # its loss is a bound: never worse
    assert math.isinf(edge.near_best[1]) and math.isnan(edge.sensitivity)
    assert edge.caveats[0].startswith('a wider range of optim.lr')
    assert rows['layernorm'].outcome == 'better'


def test_what_could_still_change_an_undecided_arm(rows):
    """Catches advice of as many seeds as there were."""
    row = rows['dyt']
    assert row.outcome == 'undecided' and row.verdict.n == 10
    assert row.caveats == ('nothing, if 0.01 is what matters: its seeds would have shown it',)
    assert rows['layernorm'].caveats == ()


def test_seeds_that_would_decide(tmp_path):
    """The deviation of the pairs decides, as the study says; not that of tuning."""
    losses = {'rmsnorm': bowl(3.0, 0, 0.02, 1), 'layernorm': bowl(3.0, 0, 0.02, 2)}
    study = tuned.write_tuned(tmp_path / 's', losses, ASKED)
    row = tables.arm_results(read(tmp_path / 's'))[1]
    needed = study.seeds_needed(1, 0.01)
    assert row.outcome == 'undecided' and needed > 10
    assert row.caveats[-1].startswith(f'about {needed} fresh seeds, which would show a difference')


def arm_of(name, length, tokens, losses):
    points = [Point((0,), FIRST_FRESH_SEED + j) for j in range(len(losses))]
    record = {'status': 'done', 'tokens': tokens}
    records = dict.fromkeys(points, record)
    return Arm(name, {}, None, length, dict(zip(points, losses, strict=True)), records)


def test_a_speed_up_is_read_between_lengths_of_the_baseline():
    """Loss falls by 0.1 as tokens double; an arm with what the baseline has at twice its tokens is
    twice as fast, and one below all lengths is faster than the longest shows.
    """
    noise = np.array([0.0, 0.001, -0.001])
    arms = [
        arm_of('base', 1.0, 100, 3.0 + noise),
        arm_of('twice', 1.0, 100, 2.9 + noise),
        arm_of('far', 1.0, 100, 2.5 + noise),
        arm_of('longer', 2.0, 200, 2.9 + noise),
        arm_of('longest', 4.0, 400, 2.8 + noise),
    ]
    found = Ablation(None, 'ce', arms)
    assert found.speedup(1).value == pytest.approx(2.0) and found.speedup(1).bound == ''
    assert str(found.speedup(2)) == 'more than 4'
    assert found.speedup(0) is found.speedup(3) is None
    assert Ablation(None, 'ce', arms[:2]).speedup(1) is None


def test_sentences(written, rows):
    folder, _, found = written
    said = compare_arms(str(folder), lambda text: pytest.fail(text))
    one = rows['layernorm'].verdict
    assert said[0] == (
        f'layernorm is better than rmsnorm: {-one.difference:.3f} [{-one.high:.3f}, '
        f'{-one.low:.3f}] nats per token lower over 5 fresh seeds, p = {one.p:.2g}'
    )
    assert said[1].startswith('dyt is neither better nor worse than rmsnorm: ')
    assert said[2] == 'norm none diverged at every value that was tried'
    assert said[4].startswith('groupnorm diverged in 2 of 5 fresh runs at its best values; ')
    assert len(said) == len(tables.format_verdicts(found)) == 5


def test_sweeps_without_tune_are_not_judged_by_arms(tmp_path):
    fixture.write_sweep(tmp_path / 'sweep')
    assert compare_arms(str(tmp_path / 'sweep'), print) is None
    assert compare_arms(str(tmp_path), print) is None


@pytest.fixture(scope='module', params=[0, 36, 60])
def half(request, tmp_path_factory):
    """A sweep that was stopped in its first wave, in its tuning, and in its fresh seeds."""
    folder = tmp_path_factory.mktemp('runs') / 'half'
    losses = {'rmsnorm': LOSSES['rmsnorm'], 'layernorm': LOSSES['layernorm'], 'none': dead}
    study = tuned.write_tuned(folder, losses, ASKED, request.param)
    assert study.next_runs[0] == {0: 'scan', 36: 'extend', 60: 'look 1'}[request.param]
    return folder


def test_a_sweep_that_is_not_finished_shows_what_is_known(half):
    """No verdict before its look has ended, and no divergence before every value was tried."""
    found, noted = read(half), []
    first, second, third = tables.arm_results(found)
    assert (first.outcome, second.outcome) == ('baseline', 'not yet') and second.verdict is None
    if found.study.tuning.open_wave:
        assert third.outcome == 'not yet' and not second.is_fresh
    assert tables.describe_progress(found) in findings(found)[0]
    other = dataclasses.replace(found, settings=found.settings | {'search_version': 0})
    assert tables.describe_progress(other).startswith(tables.describe_progress(found))
    assert tables.describe_progress(other).endswith('its runs are of version 0')
    assert second.runs[0] > 0 and found.study.next_runs is not None
    text = [str(row.cells['tuned loss']) for row in arm_rows(found, ['', '', ''])]
    if second.is_fresh:
        assert f'{second.loss.n} of 5 fresh seeds' in text[1]
    elif second.values:
        assert 'by the seeds that chose it' in text[1]
    else:
        assert text[1] == ''
    said = compare_arms(str(half), noted.append)
    assert said[0] == 'layernorm has no verdict yet' and noted[0].startswith('NOTE: not finished')
    spec = draw_tuned_losses(found).to_dict()
    assert len(spec['hconcat']) == 1


def test_a_run_knows_its_arm_and_stage(written, tmp_path):
    folder, study, _ = written
    select = (
        "select arm, stage, count(*) n from runs where stage = 'look 1' group by all order by n"
    )
    found = runs.query(select, folder).to_pylist()
    assert {row['arm']: row['n'] for row in found}['layernorm'] == 5
    asked = {stage for own in study.stages for stage in own.values()}
    records = runs.gather(folder)
    assert {record['stage'] for record in records} == asked
    assert list(runs.overview(records)[0])[:4] == ['cell', 'arm', 'stage', 'swept']
    fixture.write_run(tmp_path / 'run', fixture.base_config())
    (alone,) = runs.gather(tmp_path / 'run')
    assert alone['arm'] is alone['stage'] is None


def test_cells_of_an_earlier_sweep_are_of_no_arm(written, tmp_path):
    """They stay on record, and their numbers are of arms that may be others now."""
    folder, _, found = written
    sweep = read_sweep(folder)
    old = sweep['cells'][0] | {'group': None, 'tuned': {**sweep['cells'][0]['tuned'], 'arm': 99}}
    again = sweep | {'cells': [old, *sweep['cells'][1:]]}
    read_again = tables.read_ablation(again, runs.gather(folder))
    assert len(read_again.arms[0].losses) == len(found.arms[0].losses) - 1


def test_arms_are_named_as_variants_are():
    base = fixture.base_config()
    arms = [
        {'changes': changes, 'length': length}
        for changes, length in (({}, 1.0), ({'model.norm': 'none'}, 1.0), ({}, 0.5))
    ]
    cells = [
        {'group': 0, 'differs': arm['changes'], 'tuned': {'arm': i, 'stage': 'scan'}}
        for i, arm in enumerate(arms)
    ]
    sweep = {'base': base, 'cells': cells, 'tune': {'arms': arms}}
    assert arm_names(sweep) == ['rmsnorm', 'norm none', 'baseline at 0.5 of its steps']
    assert arm_names({'base': base, 'cells': []}) == []
    alone = {'base': base, 'cells': cells[:1], 'tune': {'arms': arms[:1]}}
    assert arm_names(alone) == ['the base']


def test_a_panel_for_each_field(tmp_path):
    """The picture has the chosen value of each field, at the height of its fit."""
    asked = {'optim.lr': None, 'optim.weight_decay': 0.01}

    def loss(z, seed, place=None):
        return 3.0 + 0.02 * z**2

    study = tuned.write_tuned(tmp_path / 's', {'rmsnorm': loss, 'layernorm': loss}, asked)
    found = read(tmp_path / 's')
    assert found.study.picks == study.picks
    panels = draw_tuned_losses(found).to_dict()['hconcat']
    titles = [panel['layer'][0]['encoding']['x']['title'] for panel in panels]
    assert titles == ['optim.lr', 'optim.weight_decay']
    (row, _) = tables.arm_results(found)
    assert list(row.values) == ['optim.lr', 'optim.weight_decay']
    assert len(arm_rows(found, ['', ''])) == 2


def test_the_height_of_what_has_no_fit_is_between_the_means(written):
    means = written[2].tuning_line(4).means  # a straight line
    k = np.array([float(means.k[0]), means.k[0] + OCTAVE / 2])
    got = loss_at(means, None, k)
    assert got[0] == means.mean[0] and got[1] == pytest.approx(means.mean[0] - 0.005)


def test_settings_survive_the_ledger(tmp_path):
    """JSON has lists where settings have tuples."""
    asked = {'optim.lr': (0.001, 0.1), 'smallest_effect': 0.02, 'seeds': 4}
    tuned.write_tuned(tmp_path / 's', {'rmsnorm': bowl(3.0), 'layernorm': bowl(2.9)}, asked)
    text = json.loads((tmp_path / 's' / 'sweep.json').read_text())
    assert text['tune']['fields'] == {'optim.lr': [0.001, 0.1]}
    found = read(tmp_path / 's')
    assert found.tune == tuned.parse_tune(asked) and found.study.next_runs is None
