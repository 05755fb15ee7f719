"""The table of a tuned sweep's arms, against the study that made the runs, and by hand."""

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
    """Returns a finished sweep: its folder, the study that made it, the ablation read from it."""
    folder = tmp_path_factory.mktemp('runs') / 'norms'
    study = tuned.write_tuned(folder, LOSSES, ASKED)
    return folder, study, read(folder)


@pytest.fixture(scope='module')
def rows(written):
    return {row.arm.name: row for row in tables.arm_results(written[2])}


def test_study_is_restored_from_ledger(written):
    """Catches a run that is read as another run, and a diverged run that is read as missing."""
    _, study, ablation = written
    assert ablation.study.next_runs is None
    assert ablation.study.picks == study.picks
    assert [arm.losses for arm in ablation.arms] == list(study.losses)
    ours = [result and result.verdict for result in ablation.study.fresh_results]
    assert ours == [result and result.verdict for result in study.fresh_results]
    names = ['rmsnorm', 'layernorm', 'dyt', 'norm none', 'derf', 'groupnorm']
    assert [arm.name for arm in ablation.arms] == names


def test_arm_numbers_come_from_fresh_runs(written, rows):
    """Recomputes the loss, its interval, the difference and the chosen value from closed forms.
    Catches tuning seeds in a verdict.
    """
    row, study = rows['layernorm'], written[1]
    z = {i: study.picks[i].k[0] / PER_OCTAVE for i in (0, 1)}
    arm_losses, base = (
        np.array([LOSSES[name](z[i], FIRST_FRESH_SEED + j) for j in range(5)])
        for i, name in ((1, 'layernorm'), (0, 'rmsnorm'))
    )
    assert row.outcome == 'better' and row.is_fresh and row.diverged == 0
    assert row.loss.mean == pytest.approx(arm_losses.mean()) and row.loss.n == 5
    assert row.loss.half_width == pytest.approx(
        2.776445 * arm_losses.std(ddof=1) / math.sqrt(5), rel=1e-6
    )
    assert row.verdict.difference == pytest.approx((arm_losses - base).mean())
    half = stats.t.ppf(0.975, 4) * (arm_losses - base).std(ddof=1) / math.sqrt(5)
    r_arm, r_base = (study.picks[i].allowance for i in (1, 0))
    assert row.verdict.low == pytest.approx((arm_losses - base).mean() - r_arm - half)
    assert row.verdict.high == pytest.approx((arm_losses - base).mean() + r_base + half)
    assert row.values == {'optim.lr': pytest.approx(tuned.LR * 2 ** z[1])}
    assert abs(z[1] - BEST) <= 0.5
    low, high = row.near_best
    assert tuned.LR < low < row.values['optim.lr'] < high < tuned.LR * 8


def test_costs_count_runs_and_time_shares(written, rows):
    study, row = written[1], rows['layernorm']
    assert row.runs == (study.tuning_runs[1], 5)
    first = sum(point.seed == 0 for point in study.losses[1])
    tuning_sec = first * tuned.FIRST_SEC + (study.tuning_runs[1] - first) * tuned.SEC
    assert row.seconds == pytest.approx((tuning_sec / tuned.BESIDE, 5 * tuned.SEC / tuned.BESIDE))


def test_sensitivity_by_hand(tmp_path):
    """Both arms are parabolas an octave apart: the octaves that both have around their own minimum
    are at least -1, 0 and 1, and equal curves have equal sensitivity wherever their minima lie.
    """
    tuned.write_tuned(tmp_path / 's', {'rmsnorm': bowl(3.0), 'layernorm': bowl(2.9, 2.0)}, ASKED)
    ablation = read(tmp_path / 's')
    first, second = tables.arm_results(ablation)
    below = above = math.inf
    for i, best in ((0, 0), (1, 2)):
        octaves = [k // OCTAVE for k in ablation.tuning_line(i).means.k.tolist() if k % OCTAVE == 0]
        below, above = min(below, best - octaves[0]), min(above, octaves[-1] - best)
    assert below >= 1 and above >= 1
    costs = [tuned.CURVATURE * z**2 for z in range(-below, above + 1)]
    assert first.sensitivity == pytest.approx(sum(costs) / len(costs))
    assert second.sensitivity == pytest.approx(first.sensitivity)


def test_failed_arms_leave_other_verdicts(written, rows):
    """The other arms get their verdicts."""
    none, some, edge = rows['norm none'], rows['groupnorm'], rows['derf']
    assert none.outcome == 'diverged' and none.states == (DIVERGED,) and none.values == {}
    assert math.isnan(none.loss.mean) and none.runs[1] == 0 and none.near_best is None
    assert some.outcome == 'diverged' and some.diverged == 2 and some.verdict is None
    assert 'diverged 2 of 5' in some.states and '2 of 5 fresh runs diverged' in some.caveats[0]
    assert EDGE in edge.states and edge.outcome == 'undecided'  # its loss is a bound: never worse
    assert math.isinf(edge.near_best[1]) and math.isnan(edge.sensitivity)
    assert edge.caveats[0].startswith('widen the range of optim.lr')
    assert rows['layernorm'].outcome == 'better'


def test_undecided_arm_lists_caveats(rows):
    """Catches advice to use the present number of seeds."""
    row = rows['dyt']
    assert row.outcome == 'undecided' and row.verdict.n == 10
    (caveat,) = row.caveats
    assert caveat.startswith('nothing if 0.01 is the smallest difference that matters')
    assert rows['layernorm'].caveats == ()


def test_caveats_count_deciding_seeds(tmp_path):
    """The number follows from the deviation of pairs in the study, not in tuning."""
    losses = {'rmsnorm': bowl(3.0, 0, 0.02, 1), 'layernorm': bowl(3.0, 0, 0.02, 2)}
    study = tuned.write_tuned(tmp_path / 's', losses, ASKED)
    row = tables.arm_results(read(tmp_path / 's'))[1]
    needed = study.seeds_needed(1, 0.01)
    assert row.outcome == 'undecided' and needed > 10
    assert row.caveats[-1].startswith(f'about {needed} fresh seeds would detect a difference')


def make_arm(name, length, tokens, losses):
    points = [Point((0,), FIRST_FRESH_SEED + j) for j in range(len(losses))]
    record = {'status': 'done', 'tokens': tokens}
    records = dict.fromkeys(points, record)
    return Arm(name, {}, None, length, dict(zip(points, losses, strict=True)), records)


def test_speedup_interpolates_baseline_lengths():
    """The loss falls by 0.1 as tokens double. An arm with the baseline's loss at twice its tokens
    is twice as fast, and an arm below all lengths is faster than the longest shows.
    """
    noise = np.array([0.0, 0.001, -0.001])
    arms = [
        make_arm('base', 1.0, 100, 3.0 + noise),
        make_arm('twice', 1.0, 100, 2.9 + noise),
        make_arm('far', 1.0, 100, 2.5 + noise),
        make_arm('longer', 2.0, 200, 2.9 + noise),
        make_arm('longest', 4.0, 400, 2.8 + noise),
    ]
    ablation = Ablation(None, 'ce', arms)
    assert ablation.speedup(1).value == pytest.approx(2.0) and ablation.speedup(1).bound == ''
    assert str(ablation.speedup(2)) == 'more than 4'
    assert ablation.speedup(0) is ablation.speedup(3) is None
    assert Ablation(None, 'ce', arms[:2]).speedup(1) is None


def test_format_verdicts(written, rows):
    folder, _, ablation = written
    lines = compare_arms(str(folder), lambda text: pytest.fail(text))
    verdict = rows['layernorm'].verdict
    low, high = verdict.look_interval
    assert lines[0] == (
        f'layernorm is better than rmsnorm by {-verdict.difference:.3f} nats per token '
        f'(97.3% interval {-high:.3f} to {-low:.3f}), p = {verdict.p:.2g}, 5 fresh seeds'
    )
    assert lines[1].startswith('dyt vs rmsnorm is inconclusive: p = ')
    assert ', this look needs p < 0.027; difference ' in lines[1]
    assert lines[2] == 'norm none diverged at every value tried'
    assert lines[4].startswith('groupnorm diverged in 2 of 5 fresh runs at its best values; ')
    assert len(lines) == len(tables.format_verdicts(ablation)) == 5


def test_sweep_without_tune_has_no_arms(tmp_path):
    fixture.write_sweep(tmp_path / 'sweep')
    assert compare_arms(str(tmp_path / 'sweep'), print) is None
    assert compare_arms(str(tmp_path), print) is None


@pytest.fixture(scope='module', params=[0, 36, 60])
def half(request, tmp_path_factory):
    """Returns a sweep that was stopped in its first wave, in its tuning, or in its fresh seeds."""
    folder = tmp_path_factory.mktemp('runs') / 'half'
    losses = {'rmsnorm': LOSSES['rmsnorm'], 'layernorm': LOSSES['layernorm'], 'none': dead}
    study = tuned.write_tuned(folder, losses, ASKED, request.param)
    assert study.next_runs[0] == {0: 'scan', 36: 'extend', 60: 'look 1'}[request.param]
    return folder


def test_unfinished_sweep_shows_partial_results(half):
    """There is no verdict before the look has ended, and no divergence before every value was
    tried.
    """
    ablation, noted = read(half), []
    first, second, third = tables.arm_results(ablation)
    assert (first.outcome, second.outcome) == ('baseline', 'not yet') and second.verdict is None
    if ablation.study.tuning.open_wave:
        assert third.outcome == 'not yet' and not second.is_fresh
    assert tables.describe_progress(ablation) in findings(ablation)[0]
    later = dataclasses.replace(ablation, settings=ablation.settings | {'search_version': 0})
    assert tables.describe_progress(later).startswith(tables.describe_progress(ablation))
    assert tables.describe_progress(later).endswith('(the runs are from version 0)')
    assert second.runs[0] > 0 and ablation.study.next_runs is not None
    text = [str(row.cells['tuned loss']) for row in arm_rows(ablation, ['', '', ''])]
    if second.is_fresh:
        assert f'{second.loss.n} of 5 fresh seeds' in text[1]
    elif second.values:
        assert 'on tuning seeds' in text[1]
    else:
        assert text[1] == ''
    lines = compare_arms(str(half), noted.append)
    assert lines[0] == 'layernorm has no verdict yet'
    assert noted[0].startswith('NOTE: the sweep is not finished')
    spec = draw_tuned_losses(ablation).to_dict()
    assert len(spec['concat']) == 1


def test_record_has_arm_and_stage(written, tmp_path):
    folder, study, _ = written
    select = (
        "select arm, stage, count(*) n from runs where stage = 'look 1' group by all order by n"
    )
    counts = runs.query(select, folder).to_pylist()
    assert {row['arm']: row['n'] for row in counts}['layernorm'] == 5
    stages = {stage for by_point in study.stages for stage in by_point.values()}
    records = runs.gather(folder)
    assert {record['stage'] for record in records} == stages
    assert list(runs.overview(records)[0])[:4] == ['cell', 'arm', 'stage', 'swept']
    fixture.write_run(tmp_path / 'run', fixture.base_config())
    (single,) = runs.gather(tmp_path / 'run')
    assert single['arm'] is single['stage'] is None


def test_cells_from_earlier_sweep_have_no_arm(written, tmp_path):
    """The cells stay on record, and their arm numbers may now belong to other arms."""
    folder, _, ablation = written
    sweep = read_sweep(folder)
    old_cell = sweep['cells'][0] | {
        'group': None,
        'tuned': {**sweep['cells'][0]['tuned'], 'arm': 99},
    }
    again = sweep | {'cells': [old_cell, *sweep['cells'][1:]]}
    read_again = tables.read_ablation(again, runs.gather(folder))
    assert len(read_again.arms[0].losses) == len(ablation.arms[0].losses) - 1


def test_arms_are_named_like_variants():
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
    single = {'base': base, 'cells': cells[:1], 'tune': {'arms': arms[:1]}}
    assert arm_names(single) == ['the base']


def test_chart_has_a_panel_for_each_field(tmp_path):
    """The chart marks the chosen value of each field, at the height of its fit."""
    settings = {'optim.lr': None, 'optim.weight_decay': 0.01}

    def loss(z, seed, place=None):
        return 3.0 + 0.02 * z**2

    study = tuned.write_tuned(tmp_path / 's', {'rmsnorm': loss, 'layernorm': loss}, settings)
    ablation = read(tmp_path / 's')
    assert ablation.study.picks == study.picks
    panels = draw_tuned_losses(ablation).to_dict()['concat']
    titles = [panel['layer'][0]['encoding']['x']['title'] for panel in panels]
    assert titles == ['optim.lr', 'optim.weight_decay']
    (row, _) = tables.arm_results(ablation)
    assert list(row.values) == ['optim.lr', 'optim.weight_decay']
    assert len(arm_rows(ablation, ['', ''])) == 2


def test_curve_without_fit_stays_between_means(written):
    means = written[2].tuning_line(4).means  # a straight line
    k = np.array([float(means.k[0]), means.k[0] + OCTAVE / 2])
    got = loss_at(means, None, k)
    assert got[0] == means.mean[0] and got[1] == pytest.approx(means.mean[0] - 0.005)


def test_settings_survive_the_ledger(tmp_path):
    """JSON has lists where settings have tuples."""
    settings = {'optim.lr': (0.001, 0.1), 'smallest_effect': 0.02, 'seeds': 4}
    tuned.write_tuned(tmp_path / 's', {'rmsnorm': bowl(3.0), 'layernorm': bowl(2.9)}, settings)
    text = json.loads((tmp_path / 's' / 'sweep.json').read_text())
    assert text['tune']['fields'] == {'optim.lr': [0.001, 0.1]}
    ablation = read(tmp_path / 's')
    assert ablation.tune == tuned.parse_tune(settings) and ablation.study.next_runs is None
