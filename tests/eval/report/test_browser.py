"""The page of eval.report as a browser shows it, loads nothing from a network.

Needs Chromium and is skipped without; EVENKEEL_BROWSER=required fails instead.
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.report.page import report
from tests.commands import PATIENCE_SEC
from tests.eval import sweep_fixture as fixture
from tests.eval.report.test_unstable import HEADS, diagnosed, warned

pytestmark = pytest.mark.full  # a browser: half a minute

BROWSERS = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')

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
  const map = [...document.querySelectorAll('#layers .js-plotly-plot')].find(
    p => p.layout.title && p.layout.title.text === 'activation rms');
  found.map = map._fullData[0].z;
  found.depths = map._fullData[0].y;

  found.buttons = [...new Set([...document.querySelectorAll('.modebar-btn')].map(
    b => b.dataset.title))];
  const heads = [...document.querySelectorAll('#cells th button')];
  heads.find(b => b.textContent === 'ce').click();
  found.sorted = [...document.querySelectorAll('#cells tbody tr')].map(r => r.cells[6].textContent);
  found.loaded = performance.getEntriesByType('resource').map(e => e.name);
  found.wrong = window.wrong;
  return found;
}
"""

TELL = """
tryPage().catch(e => ({threw: e.stack})).then(found => {
  const out = document.createElement('pre');
  out.id = 'findings';
  out.textContent = JSON.stringify(found);
  document.body.replaceChildren(out);  // and not five megabytes of page
});
</script>"""

LOOK = """<script>
async function tryPage() {
  await new Promise(done => setTimeout(done, 500));
  const plots = ['final', 'curves'].map(id => document.getElementById(id));
  document.body.style.width = '885px';  // of a window of 900 with a scroll bar
  const table = document.querySelector('table.variants').parentElement;
  return {fits: table.scrollWidth <= table.clientWidth, wrong: window.wrong,
    shown: document.getElementById('curves-lr').value,
    plots: plots.map(plot => ({legend: plot._fullLayout.legend.orientation,
      height: plot._fullLayout._size.h,
      entries: plot.querySelectorAll('.legend .traces').length}))};
}
"""


def browse(page: str, script: str, folder: Path) -> dict[str, Any]:
    """What `script` found of the page, and what the browser complained of."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        if os.environ.get('EVENKEEL_BROWSER') == 'required':
            pytest.fail(f'EVENKEEL_BROWSER=required, and none of {", ".join(BROWSERS)} is here')
        pytest.skip(f'no browser on this machine: none of {", ".join(BROWSERS)} on PATH')
    text = page.replace('<head>', '<head>' + WATCH, 1)
    (folder / 'page.html').write_text(text.replace('</body>', script + TELL + '</body>'))
    command = [browser, '--headless', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr']
    command += ['--host-resolver-rules=MAP * ~NOTFOUND', f'--user-data-dir={folder}/profile']
    command += ['--window-size=1280,2000', '--virtual-time-budget=20000', '--dump-dom']
    command += [f'file://{folder}/page.html']
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SEC)
    found = re.search(r'<pre id="findings">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr
    result = json.loads(html.unescape(found[1]))
    assert 'threw' not in result, result['threw']
    return result | {'console': [line for line in done.stderr.splitlines() if 'CONSOLE' in line]}


@pytest.fixture(scope='module')
def findings(tmp_path_factory):
    folder = tmp_path_factory.mktemp('browser')
    fixture.write_sweep(folder / 'norms')
    return browse(report(folder / 'norms').read_text(), TRY, folder)


def test_draws_everything_without_a_complaint(findings):
    assert findings['wrong'] == findings['console'] == findings['loaded'] == []
    plots = {name: traces for name, traces, _ in findings['plots'] if name}
    assert plots['final'] == 2 * 4
    assert plots['curves'] == 2 + 2 * 22 + 2  # legend; two curves a begun cell, less one; crosses
    assert plots['differences'] == 1 and plots['rates'] == 22
    assert len(findings['plots']) == 4 + 2 * len(fixture.BY_LAYER)
    assert all(svgs for _, _, svgs in findings['plots'])
    buttons = findings['buttons']  # Plotly would offer to upload the plot
    assert 'Zoom' in buttons and not [b for b in buttons if re.search('share|cloud', b, re.I)]


def test_click_on_the_legend_hides_a_variant(findings):
    first, second, lines = findings['before']
    assert first > 20 and second > 20
    assert findings['after'][:2] == [first, 0] and findings['after'][2] < lines - 20
    assert findings['kept'] == 0


def test_hover_shows_values(findings):
    x, y = findings['hovered']
    [told] = findings['hover']
    assert f'step {x}' in told and f'{y:.4f}' in told
    assert 'norm rmsnorm' in told and 'learning rate 0.001' in told and 'train_seed' in told


def test_controls(findings):
    assert findings['axes'] == ['log', 'log', 'linear']
    assert findings['smoothed'] > findings['hovered'][1] + 0.3  # remembers the steps before
    assert findings['options'] == ['all', 'best', *map(str, fixture.LRS)]
    assert findings['best'] == 1 + 2 * 3
    assert findings['choices'] == [2 + 22, 2]


def test_map_of_a_variant(findings):
    config = fixture.changed(fixture.base_config(), {'model.norm': 'layernorm'})
    rows = [fixture.by_layer(config, step) for step in (1, 40, 80, 120, 160, 200)]
    wanted_LS = np.array([row['activation_rms'] for row in rows]).T
    np.testing.assert_allclose(findings['map'], wanted_LS, rtol=1e-4)
    assert findings['depths'] == [1, 2, 3, 4]


def test_sorts_the_cells(findings):
    numbers = [float(text) for text in findings['sorted'] if text]
    assert numbers == sorted(numbers) and len(numbers) == 22
    assert findings['sorted'][22:] == ['', '']  # what is unknown is last


def test_many_variants_leave_the_plots_room(tmp_path):
    """Ten variants and 120 cells: legends stand beside, and the best learning rates come first. The
    table needs no scrolling in a narrow window.
    """
    kinds = ('gelu', 'relu', 'silu', 'swiglu', 'geglu')
    fixture.write_sweep(tmp_path / 'sweep', fixture.AXES | {'model.activation': kinds}, {})
    found = browse(report(tmp_path / 'sweep').read_text(), LOOK, tmp_path)
    assert found['wrong'] == found['console'] == []
    assert found['shown'] == 'best' and found['fits']
    for plot in found['plots']:
        assert plot['legend'] == 'v' and plot['entries'] == 10 and plot['height'] > 300


CHOOSE = """<script>
const sleep = ms => new Promise(done => setTimeout(done, ms));
const plots = () => [...document.querySelectorAll('#layers .js-plotly-plot')].map(
  p => [p.layout.title ? p.layout.title.text : '', p._fullData.map(t => [t.type, t.y.length])]);
async function choose(id, value) {
  document.getElementById(id).value = value;
  document.getElementById(id).dispatchEvent(new Event('input'));
  await sleep(300);
}
async function tryPage() {
  await sleep(500);
  document.body.style.width = '885px';
  const fits = [...document.querySelectorAll('.scroll')].map(e => e.scrollWidth <= e.clientWidth);
  const offered = [...document.getElementById('layers-what').options].map(o => o.textContent);
  const found = {fits, few: plots(), offered};
  await choose('layers-layer', 1);
  const lines = [...document.querySelectorAll('#layers .js-plotly-plot')][3];
  found.lines = lines._fullData.map(t => [t.name, t.y[0]]);
  await choose('layers-what', found.offered.indexOf('log z mean'));
  found.one = plots();
  found.heads = document.getElementById('layers-heads').style.display;
  found.wrong = window.wrong;
  return found;
}
"""


def test_quantities_are_chosen(tmp_path, monkeypatch):
    """The few that matter first, with the heads of the first; then one of the whole model. The
    tables of warnings and of what was last seen need no scrolling in a narrow window.
    """
    monkeypatch.setattr(fixture, 'by_layer', diagnosed)
    whole = fixture.summary
    monkeypatch.setattr(fixture, 'summary', lambda *a: whole(*a) | warned(a[1]))
    fixture.write_run(tmp_path / 'run', fixture.base_config(), 'diverged')
    found = browse(report(tmp_path / 'run').read_text(), CHOOSE, tmp_path)
    assert found['wrong'] == found['console'] == []
    titles = [title for title, _ in found['few'] if title]
    share = 'attention entropy share'
    assert titles[:3] == [share, f'{share}, each head', 'heads of layer 1']
    assert titles[3:] == [
        'attention largest logit',
        'residual rms',
        'update ratio hidden',
        'log z mean',
    ]
    by_title = dict(found['few'])
    assert by_title[f'{share}, each head'] == [['heatmap', fixture.LAYERS * HEADS]]
    assert found['lines'] == [[f'head {h + 1}', 0.6 + h / 100] for h in range(HEADS)]
    assert found['one'] == [['log z mean', [['scatter', 2]]]] and found['heads'] == 'none'
    assert found['offered'][0] == 'the few that matter' and all(found['fits'][:2])
