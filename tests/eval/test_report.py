"""Reference tests of the report's numbers, and the page itself as a browser shows it.

The browser test needs Chromium and is skipped without; EVENKEEL_BROWSER=required fails instead.
"""

import html.parser
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from eval import series
from eval.compare import Interval
from eval.report import plus_minus, report
from tests.eval import sweep_fixture as fixture
from tests.test_layering import ROOT

BROWSERS = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')


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
    assert layer['verdict'] == '▲ worse' and layer['difference'].startswith('+0.0807 ± 0.0029')
    assert layer['diverged'] == '1 of 12' and rms['diverged'] == '0 of 12'
    assert float(layer['sensitivity']) > float(rms['sensitivity']) > 0


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
    diverged = next(c for c in data['cells'] if c['status'] == 'diverged')
    assert diverged['training'][1][-1] is None and diverged['training'][1][-2] > 3
    by_lr = {p['lr']: p for p in data['variants'][1]['points']}
    assert (len(by_lr[0.03]['done']), by_lr[0.03]['diverged']) == (1, 1)


def test_markdown_has_the_tables(sweep, page):
    text = (sweep / 'report.md').read_text()
    assert '| norm layernorm | worse | +0.0807 ± 0.0029 |' in text
    rows = [line for line in text.splitlines() if line.startswith('| ')]
    by_depth = len(fixture.BY_LAYER) * (1 + 1 + 2 * 2)  # two variants at two steps
    assert len(rows) == 2 * (1 + 1 + 2) + by_depth + (1 + 1 + 24)  # variants, their rates, cells
    assert r"<b>out of memory</b> at 'step' 1 \| oom |" in text


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


def test_figures_for_papers(sweep, tmp_path):
    report(sweep, tmp_path / 'page.html', figures=tmp_path / 'figures')
    names = [
        'differences',
        'learning_rates',
        'loss_curves',
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
    report(tmp_path / 'sweep', figures=tmp_path / 'figures')
    svg = (tmp_path / 'figures' / 'learning_rates.svg').read_text()
    panels = set(re.findall(r'id="(axes_\d+)"', svg))
    assert len(panels) == len(fixture.NORMS) * len(kinds) - 1  # the baseline is in all of them
    for norm, kind in itertools.product(fixture.NORMS, kinds):
        assert f'norm {norm}' in svg and f'activation {kind}' in svg


def test_plus_minus():
    assert plus_minus(Interval(2.0, 0.01234, 3)) == '2.0000 ± 0.0123'
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
    assert series.map_steps([wide] * 100) == series.MAP_NUMBERS // 10_000 == 40
    np.testing.assert_equal([series.map_steps([wide] * 10_000), series.map_steps([])], [6, 60])


def program(*arguments):
    command = [sys.executable, '-m', 'eval.report', *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_program_writes_the_page(sweep, tmp_path):
    done = program(f'--workdir={sweep}', f'--out={tmp_path}/page.html')
    assert done.stdout == f'{tmp_path}/page.html\n', done.stderr
    assert (tmp_path / 'page.md').exists() and 'norm rmsnorm' in (
        tmp_path / 'page.html'
    ).read_text()


def test_neither_run_nor_sweep(tmp_path):
    with pytest.raises(ValueError, match='holds no run and no sweep'):
        report(tmp_path)


WATCH = """<script>
window.wrong = [];
console.error = (...told) => window.wrong.push(told.join(' '));
console.warn = console.error;
window.addEventListener('error', e => window.wrong.push(e.message));
window.addEventListener('unhandledrejection', e => window.wrong.push(String(e.reason)));
</script>"""

TRY = """<script>
const sleep = ms => new Promise(done => setTimeout(done, ms));
const shown = (gd, group) => gd._fullData.filter(
  t => t.legendgroup === group && t.visible === true).length;
const lines = gd => gd.querySelectorAll('.scatterlayer .js-line').length;
function press(target, x, y) {
  for (const kind of ['mousemove', 'mousedown', 'mouseup', 'click']) {
    const at = {bubbles: true, view: window, clientX: x, clientY: y};
    target.dispatchEvent(new MouseEvent(kind, at));
  }
}
async function tryPage() {
  const found = {}, gd = document.getElementById('curves');
  await sleep(500);
  found.plots = [...document.querySelectorAll('.js-plotly-plot')].map(
    p => [p.id, p._fullData.length, p.querySelectorAll('.main-svg').length]);
  found.before = [shown(gd, '0'), shown(gd, '1'), lines(gd)];
  const toggle = gd.querySelectorAll('.legend .legendtoggle')[1];
  const box = toggle.getBoundingClientRect();
  press(toggle, box.x + 5, box.y + 5);
  await sleep(1000);
  found.after = [shown(gd, '0'), shown(gd, '1'), lines(gd)];

  const k = gd._fullData.findIndex(t => t.legendgroup === '0' && t.x.length > 5);
  const trace = gd._fullData[k], x = trace.x[5], y = trace.y[5];
  // Close up, since curves lie within a pixel of each other.
  await Plotly.relayout(gd, {'xaxis.range': [x - 1, x + 1], 'yaxis.range': [y - 0.01, y + 0.01]});
  gd.scrollIntoView();
  await sleep(200);
  const drag = gd.querySelector('.nsewdrag'), corner = drag.getBoundingClientRect();
  const {xaxis, yaxis} = gd._fullLayout;
  drag.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, view: window,
    clientX: corner.x + xaxis.c2p(x), clientY: corner.y + yaxis.c2p(y)}));
  await sleep(500);
  found.hover = [...gd.querySelectorAll('.hoverlayer .hovertext')].map(t => t.textContent);
  found.hovered = [x, y];

  document.getElementById('curves-log-x').click();
  document.getElementById('smoothing').value = 10;
  document.getElementById('smoothing').dispatchEvent(new Event('input'));
  await sleep(300);
  found.axes = [gd._fullLayout.xaxis.type, gd._fullLayout.xaxis2.type, gd._fullLayout.yaxis.type];
  found.smoothed = gd._fullData[k].y[5];
  found.kept = shown(gd, '1');  // what was hidden stays hidden
  const select = document.getElementById('curves-lr');
  found.options = [...select.options].map(o => o.value);
  select.value = 'best';
  select.dispatchEvent(new Event('input'));
  await sleep(300);
  found.best = gd._fullData.filter(t => t.legendgroup === '0').length;

  const layers = document.getElementById('layers-of');
  found.choices = [layers.options.length, layers.querySelectorAll('optgroup').length];
  layers.value = 1;
  layers.dispatchEvent(new Event('input'));
  await sleep(500);
  found.map = document.querySelector('#layers .js-plotly-plot')._fullData[0].z;

  found.buttons = [...new Set([...document.querySelectorAll('.modebar-btn')].map(
    b => b.dataset.title))];
  const heads = [...document.querySelectorAll('#cells th button')];
  heads.find(b => b.textContent === 'ce').click();
  found.sorted = [...document.querySelectorAll('#cells tbody tr')].map(r => r.cells[6].textContent);
  found.loaded = performance.getEntriesByType('resource').map(e => e.name);
  found.wrong = window.wrong;
  return found;
}
tryPage().catch(e => ({threw: e.stack})).then(found => {
  const out = document.createElement('pre');
  out.id = 'findings';
  out.textContent = JSON.stringify(found);
  document.body.replaceChildren(out);  // and not five megabytes of page
});
</script>"""


@pytest.fixture(scope='module')
def findings(page, tmp_path_factory):
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        if os.environ.get('EVENKEEL_BROWSER') == 'required':
            pytest.fail(f'EVENKEEL_BROWSER=required, and none of {", ".join(BROWSERS)} is here')
        pytest.skip(f'no browser on this machine: none of {", ".join(BROWSERS)} on PATH')
    folder = tmp_path_factory.mktemp('browser')
    text = page.replace('<head>', '<head>' + WATCH, 1).replace('</body>', TRY + '</body>')
    (folder / 'page.html').write_text(text)
    command = [browser, '--headless', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr']
    command += ['--host-resolver-rules=MAP * ~NOTFOUND', f'--user-data-dir={folder}/profile']
    command += ['--window-size=1280,2000', '--virtual-time-budget=20000', '--dump-dom']
    command += [f'file://{folder}/page.html']
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="findings">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr
    result = json.loads(html.unescape(found[1]))
    assert 'threw' not in result, result['threw']
    return result | {'console': [line for line in done.stderr.splitlines() if 'CONSOLE' in line]}


def test_browser_draws_everything_without_a_complaint(findings):
    assert findings['wrong'] == findings['console'] == findings['loaded'] == []
    plots = {name: traces for name, traces, _ in findings['plots'] if name}
    assert plots['final'] == 2 * 4
    assert plots['curves'] == 2 + 2 * 22 + 2  # legend; two curves a begun cell, less one; crosses
    assert len(findings['plots']) == 2 + 2 * len(fixture.BY_LAYER)
    assert all(svgs for _, _, svgs in findings['plots'])
    buttons = findings['buttons']  # Plotly would offer to upload the plot
    assert 'Zoom' in buttons and not [b for b in buttons if re.search('share|cloud', b, re.I)]


def test_browser_click_on_the_legend_hides_a_variant(findings):
    first, second, lines = findings['before']
    assert first > 20 and second > 20
    assert findings['after'][:2] == [first, 0] and findings['after'][2] < lines - 20
    assert findings['kept'] == 0


def test_browser_hover_shows_values(findings):
    x, y = findings['hovered']
    [told] = findings['hover']
    assert f'step {x}' in told and f'{y:.4f}' in told
    assert 'norm rmsnorm' in told and 'learning rate 0.001' in told and 'train_seed' in told


def test_browser_controls(findings):
    assert findings['axes'] == ['log', 'log', 'linear']
    assert findings['smoothed'] > findings['hovered'][1] + 0.3  # remembers the steps before
    assert findings['options'] == ['all', 'best', *map(str, fixture.LRS)]
    assert findings['best'] == 1 + 2 * 3
    assert findings['choices'] == [2 + 22, 2]


def test_browser_map_of_a_variant(findings):
    config = fixture.changed(fixture.base_config(), {'model.norm': 'layernorm'})
    rows = [fixture.by_layer(config, step) for step in (1, 40, 80, 120, 160, 200)]
    wanted_LS = np.array([row['activation_rms'] for row in rows]).T
    np.testing.assert_allclose(findings['map'], wanted_LS, rtol=1e-4)


def test_browser_sorts_the_cells(findings):
    numbers = [float(text) for text in findings['sorted'] if text]
    assert numbers == sorted(numbers) and len(numbers) == 22
    assert findings['sorted'][22:] == ['', '']  # what is unknown is last
