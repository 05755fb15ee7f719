"""The page of eval.report as a browser shows it, loads nothing from a network.

Needs Chromium and is skipped without; EVENKEEL_BROWSER=required fails instead.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval.report.page import write_report
from tests.browser import open_page
from tests.eval import sweep_fixture as fixture
from tests.eval import tuned_fixture as tuned
from tests.eval.report.test_unstable import diagnostics_by_layer, summary_with_warning

pytestmark = pytest.mark.full  # a browser: half a minute

LEAST_WINDOW = 500  # of Chromium; a narrower page is shown in a frame

WATCH = """<script>
window.wrong = [];
// A layer may be empty, as that of crosses where no run diverged.
console.error = (...told) => /Infinite extent/.test(told) || window.wrong.push(told.join(' '));
console.warn = console.error;
window.addEventListener('error', e => window.wrong.push(e.message));
window.addEventListener('unhandledrejection', e => window.wrong.push(String(e.reason)));
</script>"""

TRY = """<script>
const sleep = ms => new Promise(done => setTimeout(done, ms));
const byId = name => document.getElementById(name);
const lines = name => byId(name).querySelectorAll('.mark-line path').length;
const scales = name => Object.fromEntries(Object.entries(views[name]._runtime.scales)
  .map(([key, scale]) => [key, scale.value.type]));
async function give(input, value) {
  if (value === undefined) input.click(); else input.value = value;
  for (const kind of ['input', 'change']) input.dispatchEvent(new Event(kind, {bubbles: true}));
  await sleep(500);
}
const box = (name, label) => [...byId(name).querySelectorAll('label')].find(
  one => one.textContent.trim() === label).querySelector('input');
async function tryPage() {
  const found = {};
  await sleep(2000);
  const marks = (name, kind) => byId(name).querySelectorAll(kind).length;
  found.drawn = Object.keys(views).map(name => [name, marks(name, 'svg.marks')]);
  found.shown = [...document.querySelectorAll('.chart')].filter(e => !e.hidden).map(e => e.id);
  found.ink = getComputedStyle(byId('differences').querySelector('.role-axis-label text')).fill;
  found.before = lines('loss_curves');
  const name = [...byId('loss_curves').querySelectorAll('.role-legend-label text')].find(
    text => text.textContent === 'layernorm');
  name.dispatchEvent(new MouseEvent('click', {bubbles: true, view: window}));
  await sleep(500);
  found.picked = lines('loss_curves');
  const named = one => byId('loss_curves').querySelector(`[name=${one}]`);
  found.rates = [...named('rate').options].map(option => option.textContent);
  await give(named('rate'), 'all');
  found.all = lines('loss_curves');
  await give(named('smoothing'), '2');
  await give(box('loss_curves', 'log steps'));
  found.kept = [named('smoothing').value, named('rate').value, lines('loss_curves')];
  found.scales = [scales('loss_curves'), scales('learning_rates')];

  const select = document.querySelector('[data-shows]');
  found.offered = [...select.options].map(option => option.textContent.trim());
  await give(select, select.options[found.offered.indexOf('activation rms')].value);
  found.chosen = [...byId('quantities').children].filter(e => !e.hidden).map(e => e.id);
  found.map = marks('layers_activation_rms', '.mark-rect.role-mark path');

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
  top.document.body.replaceChildren(out);  // and not a megabyte of page
});
</script>"""

LOOK = """<script>
async function tryPage() {
  await new Promise(done => setTimeout(done, 3000));
  const tables = [...document.querySelectorAll('.scroll:has(.variants, #warnings, .wrapped)')];
  const charts = [...document.querySelectorAll('.chart')];
  const beside = charts.filter(e => e.scrollWidth > e.clientWidth);
  return {fits: tables.map(e => e.scrollWidth <= e.clientWidth), beside: beside.map(e => e.id),
    legend: document.querySelectorAll('#learning_rates .role-legend-label').length,
    shown: charts.filter(e => !e.hidden).map(e => e.id),
    wrong: window.wrong};
}
"""


PHONE = """<script>
async function tryPage() {
  const sleep = ms => new Promise(done => setTimeout(done, ms));
  await sleep(3000);
  const root = document.documentElement;
  const found = {width: innerWidth, page: root.scrollWidth, wrong: window.wrong};
  const isCut = box => box.scrollWidth > box.clientWidth + 1;
  const hasCue = box => getComputedStyle(box.previousElementSibling).display !== 'none';
  const isShown = box => box.checkVisibility();
  const boxes = [...document.querySelectorAll('.scroll, .chart')].filter(isShown);
  const name = box => box.id || box.firstElementChild.id || box.firstElementChild.className;
  found.cut = boxes.filter(isCut).map(name);
  found.cues = boxes.filter(hasCue).map(name);
  const isSeen = text => text.textContent && text.getAttribute('opacity') !== '0';
  const near = (a, b) => a.left < b.right + 2 && b.left < a.right + 2
    && a.top < b.bottom && b.top < a.bottom;
  const collide = axis => {
    const seen = [...axis.querySelectorAll('text')].filter(isSeen);
    const labels = seen.map(text => text.getBoundingClientRect());
    return labels.some((a, i) => labels.slice(i + 1).some(b => near(a, b)));
  };
  const axes = [...document.querySelectorAll('.role-axis-label')];
  found.axes = axes.length;
  found.collisions = axes.filter(collide).map(axis => axis.textContent);
  const details = [...document.querySelectorAll('details.how')];
  const count = () => details.filter(one => one.open).length;
  found.open = [count()];
  for (const kind of ['beforeprint', 'afterprint']) {
    dispatchEvent(new Event(kind));
    found.open.push(count());
  }
  return found;
}
"""


def browse(page: str, script: str, folder: Path, *flags: str, width: int = 1280) -> dict[str, Any]:
    """Returns the findings of `script` on the page, and the messages of the browser."""
    body, end, tail = page.replace('<head>', '<head>' + WATCH, 1).rpartition('</body>')
    text = body + script + TELL + end + tail
    if width < LEAST_WINDOW:
        style = f'border: 0; width: {width}px; height: 2000px'
        text = f'<body><iframe style="{style}" srcdoc="{html.escape(text)}"></iframe></body>'
    (folder / 'page.html').write_text(text)
    flags = ('--host-resolver-rules=MAP * ~NOTFOUND', '--virtual-time-budget=20000', *flags)
    flags += (f'--window-size={max(width, LEAST_WINDOW)},2000',)
    process = open_page(f'file://{folder}/page.html', folder / 'profile', *flags)
    match = re.search(r'<pre id="findings">(.*?)</pre>', process.stdout, re.S)
    assert match, process.stderr
    observations = json.loads(html.unescape(match[1]))
    assert 'threw' not in observations, observations['threw']
    return observations | {
        'console': [
            line
            for line in process.stderr.splitlines()
            if 'CONSOLE' in line and 'Infinite' not in line
        ]
    }


@pytest.fixture(scope='module')
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp('browser')
    fixture.write_sweep(folder / 'norms')
    return write_report(folder / 'norms').read_text()


@pytest.fixture(scope='module')
def findings(page, tmp_path_factory):
    return browse(page, TRY, tmp_path_factory.mktemp('seen'))


def test_draws_everything_without_errors(findings):
    assert findings['wrong'] == findings['console'] == findings['loaded'] == []
    assert findings['shown'][:3] == ['differences', 'learning_rates', 'loss_curves']
    n_drawn = dict(findings['drawn'])
    assert set(findings['shown']) == n_drawn.keys() and set(n_drawn.values()) == {1}


def test_legend_click_isolates_variant(findings):
    assert findings['before'] == 2 * 2 * 3  # two panels, two variants at their best rate, 3 seeds
    assert findings['picked'] == 2 * 3


def test_choices_survive_scale_change(findings):
    """Catches a chart that is redrawn and forgets the reader's choices."""
    assert findings['rates'] == ['best of each', 'all', *map(str, fixture.LRS)]
    assert findings['all'] == 2 * 11  # training and validation of the picked variant; one run waits
    assert findings['kept'] == ['2', 'all', findings['all']]
    curves, rates = findings['scales']
    assert {kind for name, kind in curves.items() if name.endswith('_x')} == {'log'}
    assert {kind for name, kind in curves.items() if name.endswith('_y')} == {'linear'}
    assert (rates['x'], rates['y']) == ('log', 'linear')


def test_selects_quantities(findings):
    names = [name.replace('_', ' ') for name in fixture.BY_LAYER]
    assert findings['offered'][0] == 'key quantities' and {*findings['offered'][1:]} == {*names}
    assert findings['chosen'] == [f'{k}_activation_rms' for k in ('steps', 'depth', 'layers')]
    assert findings['map'] == 2 * fixture.LAYERS * 6  # two variants, six recorded steps


def test_sorts_cells(findings):
    numbers = [float(text) for text in findings['sorted'] if text]
    assert numbers == sorted(numbers) and len(numbers) == 22
    assert findings['sorted'][22:] == ['', '']  # what is unknown is last


def test_dark_mode_has_light_text(page, findings, tmp_path):
    dark = browse(page, TRY, tmp_path, '--blink-settings=preferredColorScheme=0')
    assert dark['wrong'] == []
    brightness = [
        sum(map(int, re.findall(r'\d+', page_findings['ink']))) / 3
        for page_findings in (findings, dark)
    ]
    assert brightness[0] < 128 < brightness[1]


def test_many_variants_in_a_narrow_window(tmp_path):
    """Ten variants and 120 cells: neither the table nor a chart needs scrolling."""
    kinds = ('gelu', 'relu', 'silu', 'swiglu', 'geglu')
    fixture.write_sweep(tmp_path / 'sweep', fixture.AXES | {'model.activation': kinds}, {})
    observations = browse(write_report(tmp_path / 'sweep').read_text(), LOOK, tmp_path, width=900)
    assert observations['wrong'] == observations['console'] == observations['beside'] == []
    assert observations['fits'] == [True] and observations['legend'] == 10


def test_diverged_run_fits_narrow_window(tmp_path, monkeypatch):
    """The most important quantities come first."""
    monkeypatch.setattr(fixture, 'by_layer', diagnostics_by_layer)
    summary = fixture.summary
    monkeypatch.setattr(fixture, 'summary', lambda *a: summary(*a) | summary_with_warning(a[1]))
    fixture.write_run(tmp_path / 'run', fixture.base_config(), 'diverged')
    observations = browse(write_report(tmp_path / 'run').read_text(), LOOK, tmp_path, width=900)
    assert observations['wrong'] == observations['console'] == observations['beside'] == []
    assert len(observations['fits']) == 2 and all(observations['fits'])
    for name in ('steps_attention_entropy_share', 'heads_attention_entropy_share'):
        assert name in observations['shown']


@pytest.mark.parametrize('width', [400, 1280])
@pytest.mark.parametrize('kind', ['sweep', 'tuned', 'run'])
def test_fits_phone_and_desk(kind, width, page, tmp_path):
    """Nothing widens the page, the main table needs no scrolling, other tables tell that they do,
    labels of axes do not collide, and explanations are printed.
    """
    if kind == 'tuned':
        losses = {'rmsnorm': tuned.bowl(3.0, 0.5, 0.01, 1), 'dyt': tuned.bowl(3.1, -2.0, 0.01, 2)}
        tuned.write_tuned(tmp_path / kind, losses, {'optim.lr': None})
    elif kind == 'run':
        fixture.write_run(tmp_path / kind, fixture.base_config(), 'diverged')
    text = page if kind == 'sweep' else write_report(tmp_path / kind).read_text()
    observations = browse(text, PHONE, tmp_path, width=width)
    assert observations['wrong'] == observations['console'] == observations['collisions'] == []
    assert observations['width'] == width >= observations['page'] and observations['axes']
    assert observations['cut'] == observations['cues']
    allowed = {'cells', 'warnings', ''} if width == 400 else {'cells'}
    assert {*observations['cut']} <= allowed
    before, printed, after = observations['open']
    assert before == after == 0 < printed
