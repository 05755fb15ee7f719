"""Reference: a report's numbers, tables and figures by depth, in closed form."""

import json
import math

import numpy as np
import pytest

from configs.studies import depth_variance
from eval.charts import INK, chart_spec
from eval.report import figures
from eval.report.layers import (
    MEAN,
    Profile,
    build_profiles,
    depth_exponent,
    depth_table,
    draw_by_depth,
    last_over_first,
)
from eval.report.page import write_report
from eval.report.series import Series, read_series
from eval.runs import gather
from lm.study.tables.columns import schema
from lm.study.tables.comparison import compare, compare_variants
from lm.study.tables.results import read_sweep
from lm.study.tables.variants import Variant
from modules.placements import PLACEMENTS
from tests.eval import sweep_fixture as fixture

POWERS = {'pre': 0.5, 'peri': 1.0}
AXES = {
    'model.placement': tuple(POWERS),
    'model.n_layers': (3, 6),
    'optim.lr': (0.003,),
    'train.seed': (0, 2),
}


def power_law(config, step):
    """Returns (1 + seed) (1 + step) l^p, and a quantity that is not positive everywhere."""
    scale = (1 + config['train']['seed']) * (1 + step)
    layers = np.arange(1, config['model']['n_layers'] + 1)
    powers = scale * layers ** POWERS[config['model']['placement']]
    return {'residual_rms': list(powers), 'skewness': list(layers - 2.0)}


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'depth'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixture, 'by_layer', power_law)
        fixture.write_sweep(folder, AXES, {})
    return folder


@pytest.fixture(scope='module')
def profiles_by_quantity(sweep):
    records = gather(sweep)
    series = {record['workdir']: read_series(record) for record in records}
    comparisons = compare(records, read_sweep(sweep))
    return {
        name: build_profiles(comparisons, series, name) for name in ('residual_rms', 'skewness')
    }


def test_profiles_average_seeds_at_both_ends(profiles_by_quantity):
    """Catches a middle step, one seed for all, and lines that still name their depth."""
    lines = [
        (profile.line, profile.layers, profile.is_baseline)
        for profile in profiles_by_quantity['residual_rms']
    ]
    pre, peri = 'pre', 'peri'
    assert lines == [(pre, 3, True), (pre, 6, False), (peri, 3, False), (peri, 6, False)]
    for profile in profiles_by_quantity['residual_rms']:
        layers = np.arange(1, profile.layers + 1)
        power = POWERS[profile.line]
        assert list(profile.values) == [1, fixture.STEPS]
        for step, values_L in profile.values.items():
            np.testing.assert_allclose(values_L, 2 * (1 + step) * layers**power)  # seeds 0 and 2
            ratios = [last_over_first(values_L) for values_L in profile.seeds[step]]
            np.testing.assert_allclose(ratios, [profile.layers**power] * 2)


def test_depth_exponent_and_ratio():
    layers = np.arange(1, 25)
    assert depth_exponent(3 * layers**-0.7) == pytest.approx(-0.7) == depth_exponent(layers**-0.7)
    for invalid in ([1.0], [1.0, 0.0], [1.0, -2.0], [1.0, math.nan], [1.0, math.inf]):
        assert math.isnan(depth_exponent(np.array(invalid)))
    assert last_over_first(np.array([2.0, 9.0, 3.0])) == 1.5
    assert math.isnan(last_over_first(np.array([0.0, 1.0]))) and math.isnan(
        last_over_first(np.array([math.nan, 1.0]))
    )


def test_table_without_numbers_has_gaps():
    gap = np.array([1.0, math.nan])
    profile = Profile('x', False, 2, {0: gap}, {0: [gap, gap]})
    assert depth_table([profile])[1] == ['x', '2', '0', '1', '1', '', '', '', '', '']


@pytest.mark.full
def test_markdown_has_a_table_by_depth(sweep, tmp_path):
    write_report(sweep, tmp_path / 'page.html')
    text = (tmp_path / 'page.md').read_text()
    assert '## By depth: residual rms' in text and '## By depth: skewness' in text
    assert '| peri | 6 | 1 | 4 | 12 | 24 | 6 | 6 to 6 | 6 | +1.00 |' in text
    assert '| pre | 3 | 200 | 402 | 569 | 696 | 1.73 | 1.73 to 1.73 | 1.73 | +0.50 |' in text
    assert '| pre | 3 | 200 | -1 | 0 | 1 | -1 | -1 to -1 |  |  |' in text


def draw_lines(profiles_by_quantity, name):
    """Returns the specification of the chart by depth, and its rows by panel, line and seed."""
    spec = chart_spec(draw_by_depth(profiles_by_quantity, name))
    values, lines = spec['data']['values'], {}
    for row in values:
        line = lines.setdefault((row['panel'], row['line'], row['seed']), [])
        line.append((row['layer'], row['y']))
    return spec, lines


def find_scale(spec, channel='y'):
    return spec['spec']['layer'][0]['encoding'][channel]['scale']


def test_figure_has_row_per_depth_and_column_per_end(profiles_by_quantity):
    spec, lines = draw_lines(profiles_by_quantity['residual_rms'], 'residual_rms')
    steps = ('step 1', f'step {fixture.STEPS}')
    assert spec['facet']['sort'] == [f'{n} layers, {step}' for n in (3, 6) for step in steps]
    assert spec['columns'] == 2 and find_scale(spec)['type'] == 'log'
    colours = find_scale(spec, 'color')
    assert (
        colours['domain'] == ['pre', 'peri'] and colours['range'][0] == INK != colours['range'][1]
    )
    last = lines[spec['facet']['sort'][-1], 'peri', MEAN]
    np.testing.assert_allclose(last, [(n, 402 * n) for n in range(1, 7)])
    seeds = [lines[spec['facet']['sort'][-1], 'peri', seed] for seed in '01']  # of 0 and 2
    np.testing.assert_allclose(seeds, [[(n, k * 201 * n) for n in range(1, 7)] for k in (1, 3)])
    assert len(lines) == 4 * 2 * 3


def test_figure_is_linear_for_nonpositive_values(profiles_by_quantity):
    assert (
        find_scale(draw_lines(profiles_by_quantity['skewness'], 'skewness')[0])['type'] == 'linear'
    )


def test_single_step_has_one_column_and_no_legend(profiles_by_quantity):
    profile = profiles_by_quantity['residual_rms'][0]
    single_step = Profile(profile.line, True, 3, {1: profile.values[1]}, {1: profile.seeds[1]})
    spec, _ = draw_lines([single_step], 'residual_rms')
    assert spec['columns'] == 1 and spec['facet']['sort'] == ['3 layers, step 1']
    assert spec['spec']['layer'][0]['encoding']['color']['legend'] is None


def test_profile_skips_step_without_change():
    """Catches an update ratio of 0 at the rate 0 of a warm-up, drawn like a finding."""
    update = ([0, 1, 9], [[0.0, 0.0], [0.1, 0.2], [0.3, 0.4]])
    run_series = Series(([], []), ([], []), {'update_ratio': update})
    record = dict.fromkeys(schema().names) | {'workdir': 'w', 'lr': 0.1}
    (comparison,) = compare_variants([Variant('x', {}, [record], True)], 'ce')
    (profile,) = build_profiles([comparison], {'w': run_series}, 'update_ratio')
    assert list(profile.values) == [1, 9]


def test_eleven_lines_look_different():
    styles = figures.line_styles([True] + [False] * 10)
    assert len({json.dumps(style) for style in styles}) == 11


def test_study_has_every_placement():
    parallel = {'parallel', 'parallel_shared'}  # a block of theirs is one step of depth, not two
    assert {*depth_variance.PLACEMENTS} == PLACEMENTS.keys() - parallel
