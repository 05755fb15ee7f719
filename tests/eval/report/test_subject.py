"""Reference: the comparisons of a page, of several sweeps or of learning rates."""

import dataclasses
import json
import math
import re

import pytest

from eval.charts import chart_spec
from eval.report import figures, tables
from eval.report.page import write_report
from eval.report.series import read_series
from eval.report.subject import read_subject
from eval.report.tables import format_p_value, needed_seeds_text, rank_comparisons
from lm.study.statistics import MAX_SEEDS, Interval
from lm.study.tables import comparison
from tests.eval import sweep_fixture as fixture

SEEDS = {'train.seed': (0, 1, 2)}
NORMS = {'model.norm': ('rmsnorm', 'layernorm')}


def change_base(folder, changes):
    """Rewrites a sweep as if it had started from another config."""
    path = folder / 'sweep.json'
    sweep = json.loads(path.read_text())
    sweep['base'] = fixture.update_config(sweep['base'], changes)
    path.write_text(json.dumps(sweep))
    for cell in sweep['cells']:
        config = folder / cell['cell'] / 'config.json'
        config.write_text(
            json.dumps(fixture.update_config(json.loads(config.read_text()), changes))
        )


@pytest.fixture(scope='module')
def sweeps(tmp_path_factory):
    """Returns three sweeps: of norms, of one norm again and another, and of placements in a wider
    model.
    """
    folder = tmp_path_factory.mktemp('runs')
    fixture.write_sweep(folder / 'a', NORMS | SEEDS, {})
    fixture.write_sweep(folder / 'b', {'model.norm': ('rmsnorm', 'dyt')} | SEEDS, {})
    fixture.write_sweep(folder / 'c', {'model.placement': ('pre', 'post')} | SEEDS, {})
    change_base(folder / 'c', {'model.d_model': 512})
    return folder


def compare_folders(*folders):
    subject = read_subject(folders)
    return subject, comparison.compare_variants(subject.variants, subject.metric)


def test_shared_names_include_sweep(sweeps):
    _, comparisons = compare_folders(sweeps / 'a', sweeps / 'b', sweeps / 'c')
    assert [c.variant.name for c in comparisons] == [
        'rmsnorm (a)',
        'layernorm',
        'rmsnorm (b)',
        'dyt',
        'pre',
        'post',
    ]
    assert [c.variant.is_baseline for c in comparisons] == [True] + [False] * 5
    assert all(c.difference.n == 3 for c in comparisons)
    assert (
        comparisons[5].difference.mean == pytest.approx(0.03) and comparisons[5].verdict == 'worse'
    )
    assert comparisons[2].difference.mean == 0 and comparisons[2].verdict == 'within noise'


def test_sweeps_without_variants_have_their_own_name(tmp_path):
    for name in ('a', 'b'):
        fixture.write_sweep(tmp_path / name, SEEDS, {})
    fixture.write_run(tmp_path / 'single', fixture.base_config())
    _, comparisons = compare_folders(tmp_path / 'a', tmp_path / 'b', tmp_path / 'single')
    assert [c.variant.name for c in comparisons] == ['a', 'b', 'single']


@pytest.mark.full
def test_page_for_several_sweeps(sweeps):
    page = write_report([sweeps / 'a', sweeps / 'c'])
    assert page == sweeps / 'a' / 'report-with-c.html'
    text, markdown = page.read_text(), page.with_suffix('.md').read_text()
    assert f'--workdir={sweeps}/a,{sweeps}/c</code>' in text
    assert re.search(r'<code>model.d_model</code> \(256 / 512\)\.', text)
    assert '- post: model.d_model: 256 → 512; model.placement: pre → post' in markdown
    assert markdown.count('| a | ') == markdown.count('| c | ') == 6  # cells
    assert 'Compared with the baseline (norm rmsnorm): ' in markdown


def test_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    for name in ('a', 'b'):
        fixture.write_sweep(tmp_path / name, NORMS | SEEDS, {})
    change_base(tmp_path / 'b', {'data.tokenizer': 'byte'})
    subject, comparisons = compare_folders(tmp_path / 'a', tmp_path / 'b')
    assert subject.metric == 'bits_per_byte'
    assert comparisons[0].loss.mean == pytest.approx(2.9255 / math.log(2) / 3, rel=0.01)
    for path in (tmp_path / 'b').glob('*/summary.json'):
        path.write_text(json.dumps(json.loads(path.read_text()) | {'bits_per_byte': None}))
    with pytest.raises(ValueError, match='have no bits per byte') as error:
        read_subject([tmp_path / 'a', tmp_path / 'b'])
    assert 'data.tokenizer (bpe:4096, byte)' in str(error.value)
    assert str(tmp_path / 'b') in str(error.value)


def test_duplicate_sweep_raises(sweeps):
    with pytest.raises(ValueError, match=r'lists .*/a twice'):
        read_subject([sweeps / 'a', sweeps / 'b' / '..' / 'a'])


def sweep_table(tmp_path, axes, fates=None):
    fixture.write_sweep(tmp_path / 'sweep', axes, fates or {})
    subject, comparisons = compare_folders(tmp_path / 'sweep')
    rates = comparison.compare_rates(subject.records, subject.sweep)
    name, displayed = ('learning rate', rates) if rates else ('variant', comparisons)
    return (
        tables.variant_rows(displayed, ['#000'] * len(displayed), name),
        subject,
        comparisons,
        rates,
    )


def test_omits_uninformative_columns(tmp_path):
    one_rate = sweep_table(tmp_path / '1', NORMS | SEEDS)[0][0].cells
    assert list(one_rate) == [
        'variant',
        'verdict',
        'difference',
        'final loss',
        'bits per byte',
        'seeds',
        'tokens/s',
    ]
    several = sweep_table(tmp_path / '2', fixture.AXES, fixture.FATES)[0][0].cells
    assert several.keys() - one_rate.keys() == {'best lr', 'sensitivity', 'diverged'}
    assert one_rate.keys() - sweep_table(tmp_path / '3', SEEDS)[0][0].cells.keys() == {
        'verdict',
        'difference',
    }


def test_single_seed_has_no_verdict(tmp_path):
    """Catches 'Compared with the baseline: 1 one seed.'"""
    _, subject, *compared = sweep_table(tmp_path, NORMS)
    assert tables.findings(subject, *compared)[1] == (
        'Compared with the baseline (norm rmsnorm): 1 without a verdict (only one seed).'
    )


@pytest.mark.full
def test_compares_learning_rates(tmp_path):
    fates = {(0.03, seed): 'waiting' for seed in fixture.SEEDS}
    table, subject, *compared = sweep_table(tmp_path, {'optim.lr': fixture.LRS} | SEEDS, fates)
    assert [str(row.cells['learning rate']) for row in table] == [
        'lr 0.001',
        'lr 0.003',
        'lr 0.01',
        'lr 0.03',
    ]
    assert [str(row.cells['verdict']) for row in table][:3] == [
        'baseline',
        '▼ better (p < 0.0001)',
        '▲ worse (p < 0.0001)',
    ]
    assert tables.findings(subject, *compared)[1:] == [
        'Compared with the baseline (lr 0.001): 1 better, 1 worse.',
        'The learning rates are compared as configured: no result chose one.',
        'No sensitivity: lr 0.03 has not ended.',
    ]
    assert '## Learning rates' in write_report(tmp_path / 'sweep').with_suffix('.md').read_text()
    by_variant, rates = compared
    charts = figures.draw_loss_charts(rates, by_variant, read_curves(subject), subject.metric)
    assert charts.keys() == {'loss_curves', 'learning_rates', 'differences'}
    names = [
        row['variant'] for row in chart_spec(charts['differences'])['layer'][1]['data']['values']
    ]
    assert names == ['lr 0.003', 'lr 0.01'] and 'lr 0.001' in json.dumps(
        chart_spec(charts['loss_curves'])
    )


def read_curves(subject):
    """Returns the series without quantities by layer, which take seconds to draw."""
    series = {record['workdir']: read_series(record) for record in subject.records}
    return {
        workdir: dataclasses.replace(run_series, layers={})
        for workdir, run_series in series.items()
    }


def test_differences_are_sorted_with_needed_seeds(sweeps):
    _, comparisons = compare_folders(sweeps / 'b', sweeps / 'c', sweeps / 'a')
    means = [c.difference.mean for c in rank_comparisons(comparisons)]
    assert len(means) == 5 and means == sorted(means)
    within = next(c for c in comparisons if c.verdict == 'within noise')
    assert (
        needed_seeds_text(within) == f'more than {MAX_SEEDS} seeds needed'
        and format_p_value(within.p) == 'p = 1'
    )
    assert needed_seeds_text(next(c for c in comparisons if c.verdict == 'worse')) == ''
    resolvable = dataclasses.replace(within, seeds_needed=14, p=0.0123)
    assert (needed_seeds_text(resolvable), format_p_value(resolvable.p)) == (
        'about 14 seeds needed',
        'p = 0.012',
    )
    single_seed = dataclasses.replace(within, difference=Interval(1.0, math.nan, 1), p=math.nan)
    assert format_p_value(single_seed.p) == ''


def test_single_variant_curves_name_seeds(tmp_path):
    fixture.write_sweep(tmp_path / 'sweep', SEEDS, {})
    subject, comparisons = compare_folders(tmp_path / 'sweep')
    chart = figures.draw_loss_curves(
        comparisons, figures.collect_runs(comparisons, read_curves(subject))
    )
    panel = chart_spec(chart)['concat'][0]
    seeds = [f'train_seed {seed}' for seed in (0, 1, 2)]
    assert [row['line'] for row in panel['layer'][0]['data']['values']] == seeds
    colours = panel['encoding']['color']['scale']
    assert colours['domain'] == seeds and len(set(colours['range'])) == 3


@pytest.mark.full
def test_page_reports_unreadable_curves(tmp_path):
    cells = fixture.write_sweep(tmp_path / 'sweep', NORMS | SEEDS, {})
    path = tmp_path / 'sweep' / cells[0]['cell'] / 'metrics.jsonl'
    path.unlink()
    path.mkdir()
    markdown = write_report(tmp_path / 'sweep').with_suffix('.md').read_text()
    assert f'No curves for {cells[0]["cell"]}: ' in markdown and str(path) in markdown
    assert markdown.count('| done |') == 6
