"""Reference tests of the report's numbers, figures and what the page holds."""

import html.parser
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from eval.compare import Interval, compare
from eval.report import figures, series
from eval.report.layers import layer_maps
from eval.report.page import report
from eval.report.tables import plus_minus
from eval.runs import gather
from eval.tables.results import read_sweep
from tests import ROOT
from tests.commands import PATIENCE_SEC
from tests.eval import sweep_fixture as fixture


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'norms'
    fixture.write_sweep(folder)
    return folder


@pytest.fixture(scope='module')
def page(sweep):
    return report(sweep).read_text()


class Page(html.parser.HTMLParser):
    """Tables as lists of rows of text, by the heading above them; what elements load; text."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.loads, self.text, self.scripts = {}, [], '', 0
        self._heading, self._inside, self._rows = '', [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._inside.append(tag)
        self.scripts += tag == 'script'
        self.loads += [v for k, v in attributes if k in ('src', 'href', 'srcset', 'data')]
        if tag == 'h2':
            self._heading = ''
        elif tag == 'table':
            self._rows = self.tables.setdefault(self._heading, [])
        elif tag == 'tr':
            self._rows.append([])
        elif tag in ('td', 'th'):
            self._rows[-1].append('')

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        if {'script', 'style'} & set(self._inside):
            return
        self.text += data
        if 'h2' in self._inside:
            self._heading += data
        if {'td', 'th'} & set(self._inside):
            self._rows[-1][-1] = (self._rows[-1][-1] + ' ' + data.strip()).strip()


def as_dicts(rows):
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def data_of(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found[1])


def test_page_loads_nothing(page):
    parsed = Page(page)
    assert parsed.scripts == 3 and parsed.loads == ['data:,']  # an empty icon
    style = re.search(r'<style>(.*?)</style>', page, re.S)[1]
    assert '@import' not in style and 'url(' not in style


def test_page_says_how_each_cell_stands(page):
    parsed = Page(page)
    for told in ('20 done', '1 diverged', '1 failed', '1 unfinished', '1 waiting', 'f92bf91'):
        assert told in ' '.join(parsed.text.split())
    cells = as_dicts(parsed.tables['All cells'])
    assert len(cells) == 24
    by_key = {(c['norm'], float(c['lr']), int(c['train_seed'])): c for c in cells}
    assert {key: by_key[key]['status'] for key in fixture.FATES} == fixture.FATES
    failed = next(c for c in cells if c['status'] == 'failed')
    assert failed['reason'] == "<b>out of memory</b> at 'step' 1 | oom"  # as text, not as markup
    done = by_key['rmsnorm', 0.003, 1]
    assert (done['ce'], done['tokens/s']) == ('2.8900', '13,100')


def test_page_compares_variants(page):
    rms, layer = as_dicts(Page(page).tables['Variants'])
    assert (rms['verdict'], rms['difference'], rms['best lr']) == ('baseline', '', '0.003')
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert rms['final loss'] == f'2.8900 ± {half:.4f}' and rms['seeds'] == '3'
    assert layer['verdict'] == '▲ worse p < 0.0001'
    assert layer['difference'].startswith('+0.0807 ± 0.0029')
    assert layer['diverged'] == '1 of 12' and rms['diverged'] == '0 of 12'
    assert layer['sensitivity'] == rms['sensitivity'] == ''
    assert rms['variant'].endswith('sensitivity is not given: lr 0.03 failed for 1 of 3 seeds')


def test_page_shows_configs_against_the_base(page):
    rms, layer = Page(page).tables['Config'][1:]
    assert rms == ['norm rmsnorm', 'nothing']
    assert layer == ['norm layernorm', 'model.norm: rmsnorm → layernorm']


def test_page_holds_the_curves(page):
    data = data_of(page)
    assert len(data['cells']) == 24 and len(page) < 6_000_000
    cell = next(c for c in data['cells'] if c['status'] == 'unfinished')
    assert cell['training'][0][-1] == 120  # the cut line is left out
    assert cell['layers'].keys() == fixture.BY_LAYER.keys()
    assert cell['rates'] == [cell['training'][0], [cell['lr']] * len(cell['training'][0])]
    diverged = next(c for c in data['cells'] if c['status'] == 'diverged')
    assert diverged['training'][1][-1] is None and diverged['training'][1][-2] > 3
    by_lr = {p['lr']: p for p in data['variants'][1]['points']}
    assert (len(by_lr[0.03]['done']), by_lr[0.03]['diverged']) == (1, 1)


def test_markdown_has_the_tables(sweep, page):
    text = (sweep / 'report.md').read_text()
    assert '| norm layernorm | ▲ worse p < 0.0001 | +0.0807 ± 0.0029 |' in text
    rows = [line for line in text.splitlines() if line.startswith('| ')]
    by_depth = len(fixture.BY_LAYER) * (1 + 1 + 2 * 2)  # two variants at two steps
    assert len(rows) == 2 * (1 + 1 + 2) + by_depth + (1 + 1 + 24)  # variants, their rates, cells
    assert r"&lt;b>out of memory&lt;/b> at 'step' 1 \| oom |" in text


def test_single_run(tmp_path):
    fixture.write_run(tmp_path / 'run', fixture.base_config())
    out = tmp_path / 'elsewhere' / 'page.html'
    assert report(tmp_path / 'run', out) == out and out.with_suffix('.md').exists()
    parsed = Page(out.read_text())
    assert 'Variants' not in parsed.tables and '1 done' in ' '.join(parsed.text.split())
    [result] = as_dicts(parsed.tables['Results'])
    assert result['bits per byte'] == f'{2.946 / math.log(2) / fixture.BYTES_PER_TOKEN:.4f}'[
        :4
    ] or (float(result['ce']) == pytest.approx(fixture.final_ce(fixture.base_config()), abs=1e-4))
    assert 'optim.weight_decay' in parsed.text and 'By layer' in parsed.text


@pytest.mark.parametrize('axes', [fixture.AXES, {}], ids=['all wait', 'no cells'])
def test_sweep_without_a_result(axes, tmp_path):
    fates = {
        (norm, lr, seed): 'waiting'
        for norm in fixture.NORMS
        for lr in fixture.LRS
        for seed in fixture.SEEDS
    }
    fixture.write_sweep(tmp_path / 'sweep', axes or fixture.AXES, fates)
    path = tmp_path / 'sweep' / 'sweep.json'
    if not axes:
        path.write_text(json.dumps(json.loads(path.read_text()) | {'axes': {}, 'cells': []}))
    text = report(tmp_path / 'sweep', figures=tmp_path / 'figures').read_text()
    assert ('24 waiting' if axes else 'no cells') in ' '.join(Page(text).text.split())
    assert 'No cell has ended yet' in text and 'id="curves"' not in text
    assert not list((tmp_path / 'figures').iterdir())


def test_text_that_would_end_the_script(tmp_path):
    config = fixture.changed(fixture.base_config(), {'data.source': 'text:</script><b>x'})
    axes = fixture.AXES | {'data.source': ('text:</script><b>x',), 'optim.lr': (0.003,)}
    fixture.write_sweep(tmp_path / 'sweep', axes, {})
    text = report(tmp_path / 'sweep').read_text()
    assert Page(text).scripts == 3 and '</script><b>' not in text
    assert config['data']['source'] in data_of(text)['variants'][0]['name']


@pytest.mark.full
def test_figures_for_papers(sweep, tmp_path):
    report(sweep, tmp_path / 'page.html', figures=tmp_path / 'figures')
    names = [
        'differences',
        'learning_rates',
        'loss_curves',
        'steps_learning_rate',
        *(f'{kind}_{n}' for kind in ('depth', 'layers') for n in fixture.BY_LAYER),
    ]
    files = sorted(path.name for path in (tmp_path / 'figures').iterdir())
    assert files == sorted(f'{name}.{kind}' for name in names for kind in ('png', 'svg'))
    svg = (tmp_path / 'figures' / 'learning_rates.svg').read_text()
    assert 'norm layernorm' in svg and 'final loss, nats per token' in svg
    svg = (tmp_path / 'figures' / 'depth_activation_rms.svg').read_text()
    assert 'norm layernorm' in svg and f'4 layers, step {fixture.STEPS}' in svg


def test_many_variants_have_a_panel_each(tmp_path):
    kinds = ('gelu', 'relu', 'silu', 'swiglu', 'geglu')
    fixture.write_sweep(tmp_path / 'sweep', fixture.AXES | {'model.activation': kinds}, {})
    comparisons, figure = (
        compare(gather(tmp_path / 'sweep'), read_sweep(tmp_path / 'sweep')),
        Figure(),
    )
    figures.learning_rates(figure, comparisons, 'ce')
    wanted = [f'norm {norm}\nactivation {kind}' for norm in fixture.NORMS for kind in kinds]
    assert sorted(axes.get_title() for axes in figure.axes) == sorted(wanted[1:])
    assert all(len(axes.lines) == 2 for axes in figure.axes)  # with the baseline in each
    assert figure._supxlabel.get_text().endswith('norm rmsnorm, activation gelu')


@pytest.mark.parametrize(('least', 'scale'), [(1.0, LogNorm), (0.0, Normalize), (-1.0, Normalize)])
def test_heat_maps_count_layers_from_1_and_are_logarithmic_where_they_can(least, scale):
    figure = Figure()
    layer_maps(figure, {'a': ([0, 10], [[least, 10.0], [2.0, 100.0]])}, 'x')
    (mesh,) = figure.axes[0].collections
    assert type(mesh.norm) is scale and (mesh.norm.vmin, mesh.norm.vmax) == (least, 100.0)
    edges = mesh.get_coordinates()[:, 0, 1]
    np.testing.assert_allclose(edges, [0.5, 1.5, 2.5])


def test_plus_minus():
    assert plus_minus(Interval(2.0, 0.01, 3)) == '2.0000 ± 0.0248'  # 4.3027 / sqrt(3) of 0.01
    assert plus_minus(Interval(0.5, math.nan, 1), '+') == '+0.5000'
    assert plus_minus(Interval(math.nan, math.nan, 0)) == ''


def test_thin_curve_keeps_ends_and_spikes():
    values = [math.sin(i / 50) for i in range(5000)]
    values[3217], values[40] = 9.0, None
    steps, thinned = series.thin_curve((list(range(5000)), values), 300)
    assert len(steps) == 300 and steps[0] == 0 and steps[-1] == 4999
    assert sorted(set(steps)) == steps and 3217 in steps
    assert all(values[step] == value for step, value in zip(steps, thinned, strict=True))
    short = ([1, 2], [3.0, None])
    assert series.thin_curve(short, 300) is short


def test_maps():
    steps = list(range(0, 1000, 10))
    kept = series.thin_map((steps, [[step, 0.0] for step in steps]), 7)
    assert kept[0][0] == 0 and kept[0][-1] == 990 and len(kept[0]) == 7
    assert [row[0] for row in kept[1]] == kept[0]
    mean = series.mean_map([([1, 2, 3], [[1.0], [2.0], [None]]), ([2, 3], [[4.0], [5.0]])])
    assert mean == ([2, 3], [[3.0], [None]])
    wide = series.Series(([], []), ([], []), {'a': ([1], [[0.0] * 100])})
    assert series.room([wide] * 100)[0] == series.MAP_NUMBERS // 10_000 == 40
    assert [series.room(all_series)[0] for all_series in ([wide] * 10_000, [])] == [6, 60]


def program(*arguments):
    command = [sys.executable, '-m', 'eval.report', *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SEC)


def test_program_writes_the_page(sweep, tmp_path):
    done = program(f'--workdir={sweep}', f'--out={tmp_path}/page.html')
    assert done.stdout == f'{tmp_path}/page.html\n', done.stderr
    assert (tmp_path / 'page.md').exists() and 'norm rmsnorm' in (
        tmp_path / 'page.html'
    ).read_text()


def test_neither_run_nor_sweep(tmp_path):
    with pytest.raises(ValueError, match='holds no run and no sweep'):
        report(tmp_path)
