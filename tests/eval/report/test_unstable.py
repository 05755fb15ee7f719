"""Reference: the warnings and last diagnostics that a page shows of unstable runs."""

import json
import re

import numpy as np
import pytest

from eval.charts import chart_spec
from eval.report import series
from eval.report.figures import collect_runs, run_line_encodings
from eval.report.layers import draw_over_steps, step_rows
from eval.report.page import write_report
from tests.eval import sweep_fixture as fixture
from tests.eval.report.test_page import Page, as_dicts, chart_specs

HEADS = 3
WARNING = {
    'kind': 'entropy_collapse',
    'step': 40,
    'layer': 2,
    'head': 3,
    'seen': 'the attention of layer 2 is <b>low</b>',
    'help': [['--config.model.qk_norm=rmsnorm', 'arXiv:2302.05442'], ['--config.x=1', 'arXiv:1']],
}


def diagnostics_by_layer(config, step):
    """Returns quantities by layer, by head and of the model; layer l, head h has entropy 0.5 + l/10
    + h/100.
    """
    del config
    layers, heads = np.arange(fixture.LAYERS), np.arange(HEADS)
    share = 0.5 + layers[:, None] / 10 + heads / 100
    return {
        'attention_entropy_share': share.tolist(),
        'attention_largest_logit': (100 * share).tolist(),
        'residual_rms': (1.0 + layers).tolist(),
        'update_ratio_hidden': [0.01, None, 0.02, 0.03],
        'log_z_mean': 2.0 + step,
        'update_norm': 0.1,
    }


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'unstable'
    axes = {'model.norm': fixture.NORMS, 'optim.lr': (0.003, 0.03), 'train.seed': (0, 1)}
    summary = fixture.summary
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixture, 'by_layer', diagnostics_by_layer)
        patch.setattr(fixture, 'summary', lambda *a: summary(*a) | summary_with_warning(a[1]))
        fixture.write_sweep(folder, axes, {('layernorm', 0.03, 1): 'diverged'})
    return folder


def summary_with_warning(fate):
    return {'warnings': [WARNING]} if fate == 'diverged' else {}


@pytest.fixture(scope='module')
def page(sweep):
    return write_report(sweep).read_text()


@pytest.mark.full
def test_page_lists_warnings(page):
    """Only the run with the field has warnings; older summaries lack it."""
    [row] = as_dicts(Page(page).tables['Warnings'])
    assert row['run'].startswith('layernorm, lr 0.03, train_seed 1 (')
    assert (row['step'], row['layer'], row['head']) == ('40', '2', '3')
    assert row['warning'] == 'entropy collapse' and row['observation'] == WARNING['seen']
    for line, source in WARNING['help']:
        assert f'{line} ({source})' in ' '.join(row['what helps'].split())


@pytest.mark.full
def test_page_shows_last_diagnostics(page):
    """The page shows step 40 of 60, layer by layer. Catches the first step,
    another run, heads in the wrong order, and a mean in place of the least.
    """
    parsed = Page(page)
    rows = as_dicts(parsed.tables['Before it diverged'])
    assert [row['layer'] for row in rows] == ['1', '2', '3', '4']
    assert (rows[1]['entropy share'], rows[1]['entropy share, lowest head']) == ('0.61', '0.6')
    assert (rows[1]['largest logit'], rows[1]['residual rms']) == ('62', '2')
    assert rows[1]['update / weight'] == 'not finite' and rows[2]['update / weight'] == '0.02'
    text = ' '.join(parsed.text.split())
    assert 'step 60: loss nan, last diagnostics at step 40' in text and 'log z mean 42' in text


def test_markdown_has_warnings_and_diagnostics(sweep, page):
    text = (sweep / 'report.md').read_text()
    assert '## Warnings' in text and '--config.model.qk_norm=rmsnorm (arXiv:2302.05442), --' in text
    assert '## Before it diverged: layernorm, lr 0.03, train_seed 1 (' in text
    assert '| 2 | 0.61 | 0.6 | 62 | 2 | not finite |' in text


def test_page_has_heads_and_model_quantities(page):
    """Means over the seeds of a rate, and each seed. Catches a head in another's place."""
    specs, mean = chart_specs(page), {'line': 'rmsnorm', 'lr': 0.003, 'seed': 'mean'}
    share = 'attention_entropy_share'

    def rows(name, **columns):
        values = specs[name]['data']['values']
        return [row for row in values if (mean | columns).items() <= row.items()]

    [row] = rows(f'heads_{share}', layer=2, head=3)
    assert row['step'] == [1, 40, 80, 120, 160, 200] and row['y'] == [0.62] * 6
    [row] = rows(f'layers_{share}', layer=2)
    assert row['y'] == [0.61] * 6  # the mean over heads
    [row] = rows('layers_attention_largest_logit', layer=2)
    assert row['y'] == [62.0] * 6  # the largest
    seeds = {row['seed'] for row in specs[f'layers_{share}']['data']['values']}
    assert seeds == {'mean', 'train_seed 0', 'train_seed 1'}
    row = specs['steps_log_z_mean']['data']['values'][0]
    assert row['y'] == [3, 42, 82, 122, 162, 202]
    assert 'update_ratio_hidden' not in specs  # one that lacks a layer has no mean over layers
    choices = re.findall(r'<option value="([^"]*)">([^<]*)<', page)
    assert choices[0][1] == 'key quantities'
    assert choices[0][0].split()[:2] == [f'steps_{share}', f'depth_{share}']
    assert ('steps_residual_rms depth_residual_rms layers_residual_rms', 'residual rms') in choices


def test_unfinished_run_gets_warnings_from_rows(tmp_path):
    """Like a run that still trains: the page shows warnings from its rows."""
    fixture.write_run(tmp_path / 'run', fixture.base_config(), 'unfinished')
    rows = [{'step': 0, 'residual_rms': [1.0, 1.0]}, {'step': 9, 'residual_rms': [1.0, 5000.0]}]
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    (tmp_path / 'run' / 'metrics.jsonl').write_text(text)
    [row] = as_dicts(Page(write_report(tmp_path / 'run').read_text()).tables['Warnings'])
    assert (row['warning'], row['layer'], row['step']) == ('exploding layer', '2', '9')


def test_omits_less_important_quantities():
    """The most important quantities stay, whatever their size. Catches a page that grows with its
    sweep.
    """
    layers = {name: ([1], [[0.0] * 50]) for name in ('singular_value_up', 'residual_rms', 'x')}
    heads = {'attention_entropy_share': ([1], [[[0.0] * 10] * 50])}
    layers['attention_entropy_share'] = ([1], [[0.0] * 50])
    layers |= {f'gradient_rms_{i}': ([1], [[0.0] * 50]) for i in range(9)}
    run_series = series.Series(([], []), ([], []), layers, heads)
    steps, names, by_head = series.select_fitting([run_series] * 2)
    assert set(names) == layers.keys() and by_head == ['attention_entropy_share'] and steps == 60
    steps, names, by_head = series.select_fitting([run_series] * 1000)
    assert steps == 6 and names[:2] == ['attention_entropy_share', 'residual_rms'] and not by_head
    assert len(names) == 5 and 'x' not in names
    assert series.select_fitting([])[0] == series.MAP_STEPS[1]


def test_figures_select_important_quantities():
    """Catches hundreds of files from a run with all diagnostics, and none from a run with few."""
    names = [f'singular_value_{i}' for i in range(series.MOST_FIGURES - 1)]
    run_series = series.Series(
        ([], []), ([], []), dict.fromkeys([*names, 'residual_rms'], ([], []))
    )
    assert series.select_figures([run_series]) == ['residual_rms', *names]
    other_series = series.Series(([], []), ([], []), {'residual_sink': ([], [])})
    assert series.select_figures([run_series, other_series]) == ['residual_rms', 'residual_sink']


def test_figures_over_steps_have_line_per_run(sweep):
    """The mean over layers with its band, variants in their colours. Catches one layer for all, a
    missing run, and a gap that breaks a line.
    """
    comparisons = fixture.compare_sweep(sweep)
    records = [record for comparison in comparisons for record in comparison.variant.records]
    series_by_run = {record['workdir']: series.read_series(record) for record in records}
    runs = collect_runs(comparisons, series_by_run)
    assert step_rows(runs, 'update_ratio_hidden') == []  # it lacks a layer
    rows = step_rows(runs, 'attention_entropy_share')
    assert len(rows) == 2 * 2  # variants and their seeds at the best learning rate
    for row in rows:
        assert row['step'] == [1, 40, 80, 120, 160, 200] and row['best']
        np.testing.assert_allclose(row['y'], 0.66)  # of 0.51, 0.61, 0.71 and 0.81
        np.testing.assert_allclose([*row['low'], *row['high']], [0.51] * 6 + [0.81] * 6)
    spec = chart_spec(
        draw_over_steps(rows, run_line_encodings(comparisons, runs), 'attention_entropy_share')
    )
    assert (
        len(spec['layer']) == 3 and spec['layer'][1]['encoding']['y']['scale']['type'] == 'linear'
    )
    spec = chart_spec(
        draw_over_steps(step_rows(runs, 'log_z_mean'), run_line_encodings(comparisons, runs), 'x')
    )
    assert len(spec['layer']) == 2  # no band: it has no layers
    for row in step_rows(runs, 'learning_rate'):  # of every training row
        assert row['step'] == [1, *range(5, 201, 5)] and set(row['y']) == {0.003}


def test_constants_are_listed_and_not_drawn():
    """Catches a quantity that is 0 by construction, and one that is constant in a single run."""
    constant = {'update_ratio': ([1, 9], [[0.0, 0.0], [0.0, 0.0]])}
    run_series = series.Series(([], []), ([], []), constant | {'x': ([1], [[2.0]])})
    other_series = series.Series(([], []), ([], []), constant | {'x': ([1], [[3.0]])})
    assert series.constant_quantities([run_series, other_series]) == {'update_ratio': 0.0}
    assert series.select_figures([run_series, other_series]) == ['x']
