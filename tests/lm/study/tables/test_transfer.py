"""Verdicts of several sweeps: by variant, and which of the first hold in the others."""

import json
import math

import pytest

from eval import compare as program
from eval.report.transfer import compare_sweeps, draw_differences
from lm.study.tables.results import gather, read_sweep
from lm.study.tables.transfer import align_findings
from tests.eval import sweep_fixture as fixture
from tests.eval import tuned_fixture as tuned
from tests.eval.tuned_fixture import bowl

SETTINGS = {'optim.lr': None, 'budget': 15}
NOISE = 0.002


def dead(z, seed):
    return math.inf


def gaps(layernorm, dyt, derf, none=dead):
    """Losses of four arms, as differences from rmsnorm."""
    return {
        'rmsnorm': bowl(3.0, 0.0, NOISE, 1),
        'layernorm': bowl(3.0 + layernorm, 0.5, NOISE, 2),
        'dyt': bowl(3.0 + dyt, 0.0, NOISE, 3),
        'derf': bowl(3.0 + derf, 0.0, NOISE, 4),
        'none': none,
    }


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """Two tuned sweeps and one of fixed rates, with the same arms."""
    folder = tmp_path_factory.mktemp('runs')
    small = gaps(layernorm=-0.1, dyt=0.2, derf=0.0, none=bowl(3.3, 0.0, NOISE, 5))
    tuned.write_tuned(folder / 'small', small, SETTINGS)
    tuned.write_tuned(folder / 'large', gaps(layernorm=0.1, dyt=0.0, derf=-0.1), SETTINGS)
    fixture.write_sweep(
        folder / 'fixed', {'model.norm': ('rmsnorm', 'layernorm'), 'train.seed': (0, 1, 2)}
    )
    return folder


def describe(comparison):
    return {row.name: [str(finding or '') for finding in row.findings] for row in comparison.rows}


def test_two_tuned_sweeps(folders):
    comparison = compare_sweeps([str(folders / 'small'), str(folders / 'large')])
    outcomes = {row.name: [finding.outcome for finding in row.findings] for row in comparison.rows}
    assert outcomes == {
        'rmsnorm': ['baseline', 'baseline'],
        'layernorm': ['better', 'worse'],
        'dyt': ['worse', 'undecided'],
        'derf': ['undecided', 'better'],
        'norm none': ['worse', 'diverged'],
    }
    assert comparison.gaps == ['', ''] and comparison.names == ['small', 'large']
    for row in comparison.rows[1:4]:
        for finding in row.findings:
            assert finding.low < finding.difference < finding.high and finding.seeds == 5
            assert finding.is_decided == (finding.low > 0 or finding.high < 0)
    *_, holding, deciding = comparison.format_lines()
    assert holding == (
        'Verdicts of small that hold in large: 0 of 3; reversed there: layernorm; not decided '
        'there: dyt, norm none.'
    )
    assert deciding == 'Not decided in small, but in large: derf (better).'


def test_tuned_sweep_and_fixed_rates(folders):
    """Layernorm is worse by 0.08 there, with three seeds."""
    comparison = compare_sweeps([str(folders / 'large'), str(folders / 'fixed')])
    by_name = {row.name: row.findings for row in comparison.rows}
    assert by_name['dyt'][1] is None
    finding = by_name['layernorm'][1]
    assert finding.outcome == 'worse' and finding.seeds == 3
    assert finding.difference == pytest.approx(0.08 + 0.002 / 3)
    assert finding.low < finding.difference < finding.high
    assert comparison.format_lines()[-1] == 'Verdicts of large that hold in fixed: 1 of 1.'


def test_baselines_must_be_equal(folders, tmp_path):
    tuned.write_tuned(tmp_path / 'other', {'dyt': bowl(3.0), 'rmsnorm': bowl(3.1)}, SETTINGS)
    sweeps = [folders / 'small', tmp_path / 'other']
    with pytest.raises(ValueError, match='different baselines: norm rmsnorm and norm dyt'):
        align_findings([*map(read_sweep, sweeps)], [*map(gather, sweeps)])


def test_same_sweep_twice_and_run_among_sweeps(folders, tmp_path):
    with pytest.raises(ValueError, match='a sweep is listed twice'):
        compare_sweeps([str(folders / 'small'), str(folders / 'small')])
    (tmp_path / 'config.json').write_text('{}')
    assert compare_sweeps([str(folders / 'small'), str(tmp_path)]) is None


def test_unfinished_sweep_has_gap(folders, tmp_path):
    losses = gaps(layernorm=-0.1, dyt=0.2, derf=0.0, none=bowl(3.3))
    tuned.write_tuned(tmp_path / 'half', losses, SETTINGS, max_runs=30)
    comparison = compare_sweeps([str(folders / 'small'), str(tmp_path / 'half')])
    assert comparison.gaps[0] == '' and 'runs finished' in comparison.gaps[1]
    assert {finding.outcome for row in comparison.rows[1:] for finding in row.findings[1:]} <= {
        'not yet'
    }


def test_chart_has_a_point_for_each_difference(folders):
    comparison = compare_sweeps([str(folders / 'small'), str(folders / 'large')])
    spec = draw_differences(comparison).to_dict()
    rows = spec['layer'][-1]['data']['values']
    assert {(row['variant'], row['sweep']) for row in rows} == {
        ('layernorm', 'small'),
        ('layernorm', 'large'),
        ('dyt', 'small'),
        ('dyt', 'large'),
        ('derf', 'small'),
        ('derf', 'large'),
        ('norm none', 'small'),
    }


def test_program_compares_sweeps(folders, tmp_path, capsys, monkeypatch):
    figure = tmp_path / 'differences.svg'
    args = type('Flags', (), {'json': True, 'figure': str(figure), 'suite': 'perplexity'})
    monkeypatch.setattr(program.flags, 'FLAGS', args)
    monkeypatch.setattr(program, 'read_option_flags', dict)
    program.main(['', str(folders / 'small'), str(folders / 'large')])
    *_, path, last = capsys.readouterr().out.splitlines()
    assert path == str(figure) and figure.read_text().rstrip().endswith('</svg>')
    record = json.loads(last)
    assert record['sweeps'] == ['small', 'large']
    assert record['variants'][1]['findings'][0]['outcome'] == 'better'
