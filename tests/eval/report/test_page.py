"""Reference: the report's numbers, figures, and contents of the page."""

import errno
import html.parser
import json
import math
import re

import pytest

from eval.charts import chart_spec, save_chart
from eval.report import figures, series
from eval.report.layers import MEAN, draw_layer_maps
from eval.report.page import write_report
from eval.report.tables import interval_cell
from lm.study.statistics import Interval
from tests.eval import sweep_fixture as fixture
from tests.eval import tuned_fixture as tuned
from tests.eval.programs import run_module


@pytest.fixture(scope='module')
def written(sweep):
    """Returns the page and the printed text."""
    messages = []
    return write_report(sweep, say=messages.append).read_text(), *messages


@pytest.fixture(scope='module')
def page(written):
    return written[0]


class Page(html.parser.HTMLParser):
    """Parses tables as lists of rows of text by heading, loads of elements, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.loads, self.text, self.scripts = {}, [], '', 0
        self._heading, self._inside, self._rows = '', [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self._inside.append(tag)
        self.scripts += tag == 'script'
        self.loads += [
            value for name, value in attributes if name in ('src', 'href', 'srcset', 'data')
        ]
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


def chart_specs(text):
    match = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.S)
    return json.loads(match[1])['specs']


def test_page_loads_nothing(page):
    parsed = Page(page)
    assert parsed.scripts == 3 and parsed.loads == ['data:,']  # an empty icon
    style = re.search(r'<style>(.*?)</style>', page, re.S)[1]
    assert '@import' not in style and 'url(' not in style


def test_folder_without_rights_is_named(sweep, monkeypatch):
    def refuse(path, text):
        raise PermissionError(errno.EACCES, 'Permission denied', str(path))

    monkeypatch.setattr('eval.report.page.write_text', refuse)
    with pytest.raises(ValueError, match=r'report\.html cannot be written .*; pass --out=FILE$'):
        write_report(sweep)


def test_page_lists_cell_status(page):
    parsed = Page(page)
    for text in ('20 done', '1 diverged', '1 failed', '1 unfinished', '1 waiting', 'f92bf91'):
        assert text in ' '.join(parsed.text.split())
    cells = as_dicts(parsed.tables['All cells'])
    assert len(cells) == 24
    by_key = {(cell['norm'], float(cell['lr']), int(cell['train_seed'])): cell for cell in cells}
    assert {key: by_key[key]['status'] for key in fixture.FATES} == fixture.FATES
    failed = next(cell for cell in cells if cell['status'] == 'failed')
    assert failed['reason'] == "<b>out of memory</b> at 'step' 1 | oom"  # as text, not as markup
    finished = by_key['rmsnorm', 0.003, 1]
    assert (finished['ce'], finished['tokens/s']) == ('2.8900', '13,100')


def test_terminal_prints_verdicts(written, page):
    rms, layer = as_dicts(Page(page).tables['Variants'])
    best, against, caveat, head, *lines = written[1].splitlines()
    assert best.startswith('Lowest final validation loss: 2.8900 ± ')
    assert against == 'Compared with the baseline (norm rmsnorm): 1 worse.'
    assert caveat.startswith('The same seeds chose the learning rates')
    assert head.split()[:3] == ['variant', 'verdict', 'difference']
    for line, row in zip(lines, (rms, layer), strict=True):
        words = f'{row["verdict"]} {row["difference"]} {row["final loss"]} {row["best lr"]}'
        assert ' '.join(words.split()) in ' '.join(re.sub('[()]', '', line).split())


def test_page_compares_variants(page):
    rms, layer = as_dicts(Page(page).tables['Variants'])
    assert (rms['verdict'], rms['difference'], rms['best lr']) == ('baseline', '', '0.003')
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert rms['final loss'] == f'2.8900 ± {half:.4f}' and rms['seeds'] == '3'
    assert layer['verdict'] == '▲ worse p < 0.0001'
    assert layer['difference'].startswith('+0.0807 ± 0.0029')
    assert layer['diverged'] == '1 of 12' and rms['diverged'] == '0 of 12'
    assert layer['sensitivity'] == rms['sensitivity'] == ''
    assert rms['variant'].endswith('no sensitivity: lr 0.03 failed for 1 of 3 seeds')


def test_page_shows_config_changes(page):
    rms, layer = Page(page).tables['Config'][1:]
    assert rms == ['rmsnorm', 'nothing']
    assert layer == ['layernorm', 'model.norm: rmsnorm → layernorm']


@pytest.mark.full
def test_option_for_other_variant_is_unset(tmp_path):
    """Catches an empty value, and a 'none' that reads like a choice."""
    fixture.write_sweep(tmp_path / 'sweep', {'model.reparam': ('none', 'sigma')}, {})
    path = next(
        path for path in (tmp_path / 'sweep').glob('*/config.json') if 'sigma' in path.read_text()
    )
    config = json.loads(path.read_text())
    config['reparam']['gamma_start'] = 'sigma'
    path.write_text(json.dumps(config))
    text = (write_report(tmp_path / 'sweep').with_suffix('.md')).read_text()
    assert 'reparam.gamma_start: unset → sigma' in text


def test_page_has_curves(page):
    specs = chart_specs(page)
    assert len(page) < 2_000_000
    panel = specs['loss_curves']['concat'][0]
    curves, crosses = (layer['data']['values'] for layer in panel['layer'])
    cells = {row['cell'] for row in curves}
    assert len(curves) == len(cells) == 22  # all that have begun
    assert {row['cell'] for row in curves if row['best']} < cells
    [cross] = crosses
    cut = next(row for row in curves if row['step'][-1] == 120)  # the cut line is left out
    assert cut['lr'] == 0.01 and cut['line'] == 'layernorm'
    diverged = next(row for row in curves if row['cell'] == cross['cell'])
    assert diverged['y0'][-1] is None and diverged['y0'][-2] == cross['loss'] > 3
    assert cross['step'] == diverged['step'][-2]
    rows = specs['learning_rates']['data']['values']
    points = [row for row in rows if (row['line'], row['lr']) == ('layernorm', 0.03)]
    assert [row.get('runs') for row in points] == [None, '1 diverged']
    assert points[1]['at'] > max(row['loss'] for row in rows if 'loss' in row)
    quantities = {f'{k}_{n}' for k in ('steps', 'depth', 'layers') for n in fixture.BY_LAYER}
    assert specs.keys() == {'differences', 'learning_rates', 'loss_curves', *quantities}


def test_smoothing_is_unbiased():
    """Reference, closed form: a constant stays, a step decays at its rate, gaps are skipped."""
    steps = list(range(1, 101))
    assert series.smooth((steps, [2.0] * 100), 0.05) == pytest.approx([2.0] * 100)
    values = [0.0] + [1.0] * 98 + [None]
    smoothed = series.smooth((steps, values), 0.05)
    keep = math.exp(-1 / 5)
    assert smoothed[:2] == pytest.approx([0.0, 1 / (1 + keep)]) and smoothed[-1] is None
    assert series.smooth((steps, values), 0.0) is values


@pytest.mark.parametrize('steps', [[1, 10**9, 2, 3], [5, 5, 5], [1, 10**300], [-2, -1], [0, 0]])
def test_smoothing_with_damaged_steps(steps):
    """Catches a page that fails because a single number of one run was damaged."""
    values = [2.0] * len(steps)
    assert series.smooth((steps, values), 0.05) == pytest.approx(values)


def test_markdown_has_tables(sweep, page):
    text = (sweep / 'report.md').read_text()
    for fragment in (
        'steps: 200',
        'swept: model.norm over rmsnorm, layernorm',
        'differences, learning',
    ):
        assert fragment in text
    assert '| layernorm | ▲ worse (p < 0.0001) | +0.0807 ± 0.0029 |' in text
    rows = [line for line in text.splitlines() if line.startswith('| ')]
    by_depth = len(fixture.BY_LAYER) * (1 + 1 + 2 * 2)  # two variants at two steps
    assert len(rows) == 2 * (1 + 1 + 2) + by_depth + (1 + 1 + 24)  # variants, their rates, cells
    assert r"&lt;b>out of memory&lt;/b> at 'step' 1 \| oom |" in text


def test_refuses_paths_before_it_reads(tmp_path):
    """Catches tables in Markdown over the page, and a local folder named `gs:`."""
    with pytest.raises(ValueError, match=r'^--out must end in .html; got .*r\.md$'):
        write_report(tmp_path, tmp_path / 'r.md')
    for paths in ({'out': 'gs://b/r.html'}, {'figures': 'gs://b/figures'}):
        with pytest.raises(ValueError, match=r'=gs://b/.* must be a path on this machine'):
            write_report(tmp_path, **paths)


@pytest.mark.full
def test_single_run(tmp_path):
    fixture.write_run(tmp_path / 'run', fixture.base_config())
    path = tmp_path / 'elsewhere' / 'page.html'
    assert write_report(tmp_path / 'run', path) == path and path.with_suffix('.md').exists()
    parsed = Page(path.read_text())
    assert 'Variants' not in parsed.tables and '1 done' in ' '.join(parsed.text.split())
    [row] = as_dicts(parsed.tables['Results'])
    ce = fixture.final_ce(fixture.base_config())
    assert float(row['ce']) == pytest.approx(ce, abs=1e-4)
    bits = ce / math.log(2) / fixture.BYTES_PER_TOKEN
    assert float(row['bits per byte']) == pytest.approx(bits, abs=1e-4)
    assert 'optim.weight_decay' in parsed.text and 'Other quantities' in parsed.text


@pytest.mark.parametrize('axes', [fixture.AXES, {}], ids=['all wait', 'no cells'])
def test_sweep_without_finished_cells(axes, tmp_path):
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
    text = write_report(tmp_path / 'sweep', figures=tmp_path / 'figures').read_text()
    assert ('24 waiting' if axes else 'no cells') in ' '.join(Page(text).text.split())
    assert 'No cell has ended yet' in text and 'id="loss_curves"' not in text
    assert not (tmp_path / 'figures').exists()


def test_escapes_script_end(tmp_path):
    config = fixture.update_config(fixture.base_config(), {'data.source': 'text:</script><b>x'})
    axes = fixture.AXES | {'data.source': ('text:</script><b>x',), 'optim.lr': (0.003,)}
    fixture.write_sweep(tmp_path / 'sweep', axes, {})
    text = write_report(tmp_path / 'sweep').read_text()
    assert Page(text).scripts == 3 and '</script><b>' not in text
    rows = chart_specs(text)['final_losses']['layer'][0]['data']['values']
    assert any(config['data']['source'] in row['line'] for row in rows)


@pytest.mark.full
def test_figures_are_written_for_papers(sweep, tmp_path):
    write_report(sweep, tmp_path / 'page.html', figures=tmp_path / 'figures')
    names = [
        'differences',
        'learning_rates',
        'loss_curves',
        *(f'{kind}_{n}' for kind in ('steps', 'depth', 'layers') for n in fixture.BY_LAYER),
    ]
    files = sorted(path.name for path in (tmp_path / 'figures').iterdir())
    assert files == sorted(f'{name}.{kind}' for name in names for kind in ('png', 'svg'))
    svg = (tmp_path / 'figures' / 'learning_rates.svg').read_text()
    assert 'layernorm' in svg and 'final loss (nats per token)' in svg
    svg = (tmp_path / 'figures' / 'depth_activation_rms.svg').read_text()
    assert 'layernorm' in svg and f'4 layers, step {fixture.STEPS}' in svg


@pytest.mark.full
def test_many_variants_have_panels(tmp_path):
    kinds = ('gelu', 'relu', 'silu', 'swiglu', 'geglu')
    fixture.write_sweep(tmp_path / 'sweep', fixture.AXES | {'model.activation': kinds}, {})
    spec = chart_spec(figures.draw_learning_rates(fixture.compare_sweep(tmp_path / 'sweep'), 'ce'))
    names = [f'{norm}, {kind}' for norm in fixture.NORMS for kind in kinds]
    assert spec['facet']['sort'] == names[1:]
    for panel in names[1:]:  # with the baseline in each
        rows = [row for row in spec['data']['values'] if row['panel'] == panel]
        assert {row['line'] for row in rows} == {names[0], panel}
    assert spec['facet']['title'] == 'each panel also shows the baseline, rmsnorm, gelu'


@pytest.mark.parametrize(('low', 'scale'), [(1.0, 'log'), (0.0, 'linear'), (-1.0, 'linear')])
def test_heat_map_scale_and_layer_numbers(low, scale):
    row = {'line': 'a', 'lr': 0.1, 'best': True, 'seed': MEAN}
    maps = [(row, ([0, 10], [[low, 10.0], [2.0, 100.0]]))]
    spec = chart_spec(draw_layer_maps(maps, [], 'x'))
    assert spec['spec']['encoding']['color']['scale']['type'] == scale
    rows = [(row['layer'], row['step'], row['y']) for row in spec['data']['values']]
    assert rows == [(1, [0, 10], [low, 2.0]), (2, [0, 10], [10.0, 100.0])]


@pytest.mark.parametrize(
    ('low', 'high', 'labels'),
    [
        (1.2, 9.0, ['1.2', '3.29', '9']),
        (-1.0, 5.0, ['\N{MINUS SIGN}1', '2', '5']),
        (2.0, 2.0, ['2']),
    ],
)
def test_heat_map_labels_both_ends(tmp_path, low, high, labels):
    """Catches a logarithmic colour bar within one decade, of which Vega labels one end or none."""
    row = {'line': 'a', 'lr': 0.1, 'best': True, 'seed': MEAN}
    save_chart(draw_layer_maps([(row, ([0, 10], [[low], [high]]))], [], 'x'), tmp_path / 'map.svg')
    _, _, legend = (tmp_path / 'map.svg').read_text().partition('role-legend')
    assert re.findall(r'<text[^>]*>([^<]*)</text>', legend) == [*labels, 'x']


@pytest.mark.full
def test_page_describes_zip(tmp_path):
    """Catches a page that multiplies fields that were swept together."""
    axes = {'model.norm': ('rmsnorm', 'layernorm'), 'model.placement': ('pre', 'post')}
    for name, n_cells in (('grid', 4), ('zip', 2)):
        cells = fixture.write_sweep(tmp_path / name, axes, {})
        path = tmp_path / name / 'sweep.json'
        sweep = json.loads(path.read_text())
        sweep['cells'] = cells[:: 3 if n_cells == 2 else 1]
        path.write_text(json.dumps(sweep))
        text = ' '.join(Page(write_report(tmp_path / name).read_text()).text.split())
        assert ('Swept: model.norm over' in text) == (n_cells == 4)
        assert ('Swept together, in 2 combinations of model.norm over' in text) == (n_cells == 2)


@pytest.mark.full
def test_selects_baseline(tmp_path, sweep):
    text = write_report(sweep, tmp_path / 'page.html', baseline='layernorm').read_text()
    rms, layer = as_dicts(Page(text).tables['Variants'])
    assert layer['verdict'] == 'baseline' and rms['difference'].startswith('-0.0807')
    with pytest.raises(ValueError, match=r"=layernrom is not a variant .* mean 'layernorm'"):
        write_report(sweep, tmp_path / 'page.html', baseline='layernrom')


def test_explanations_and_setup_are_folded(page):
    """Catches a page that begins with its provenance, or explains before it answers."""
    pattern = r'<details class="how">\s*<summary>(.*?)</summary>(.*?)</details>'
    folded = dict(re.findall(pattern, page, re.S))
    assert 'Holm' in folded['How to read this table']
    for text in ('git commit', 'python -m eval.report --workdir='):
        assert text in folded['Setup and commands']
    unfolded = re.sub(r'<details class="how">.*?</details>', '', page, flags=re.S)
    for text in ('git commit', 'Holm', 'python -m'):
        assert text not in Page(unfolded).text


@pytest.mark.parametrize('name', ['sweep', 'tuned', 'single'])
def test_tables_scroll_in_their_container(name, sweep, tmp_path):
    """Catches a table that widens the page, so that a phone cuts off its text too."""
    if name == 'tuned':
        tuned.write_tuned(tmp_path / name, {'rmsnorm': tuned.bowl(3.0)}, {'optim.lr': None}, 0)
    elif name == 'single':
        fixture.write_run(tmp_path / name, fixture.base_config(), 'diverged')
    folder = sweep if name == 'sweep' else tmp_path / name
    text = write_report(folder, tmp_path / 'page.html').read_text()
    tables = re.findall(r'(<div class="scroll[^"]*">)?<table', text.partition('<script')[0])
    assert tables and all(tables)


def write_evaluated(folder, steps, seeds=(0,)):
    """Writes a sweep over seeds (a run for a single one) with validation losses at some steps."""
    if len(seeds) > 1:
        fixture.write_sweep(folder, {'train.seed': seeds}, {})
    else:
        fixture.write_run(folder, fixture.base_config())
    for path in folder.rglob('metrics.jsonl'):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row for row in rows if 'validation_ce' not in row or row['step'] in steps]
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return write_report(folder).read_text()


def validation_panels(text):
    panels = chart_specs(text)['loss_curves']['concat']
    titles = [panel['encoding']['y']['title'] for panel in panels]
    return [title for title in titles if title.startswith('validation')]


def test_single_evaluation_is_a_number(tmp_path):
    """Catches a chart of a single dot."""
    text = write_evaluated(tmp_path / 'run', [200])
    ce = fixture.final_ce(fixture.base_config())
    sentence = f'Validation loss at step 200, the only evaluation: {ce:.4f} nats per token.'
    assert sentence in text and not validation_panels(text)
    text = write_evaluated(tmp_path / 'sweep', [200], (0, 1))
    assert 'Each run was evaluated once at step 200; the tables' in text
    assert not validation_panels(text)


def test_two_evaluations_are_a_curve(tmp_path):
    text = write_evaluated(tmp_path / 'run', [160, 200])
    assert len(validation_panels(text)) == 1 and 'the only evaluation' not in text


def test_interval_cell():
    three = Interval(2.0, 0.01, 3)
    assert str(interval_cell(three)) == '2.0000 ± 0.0248'  # 4.3027 / sqrt(3) of 0.01
    assert str(interval_cell(Interval(0.5, math.nan, 1), '+')) == '+0.5000'
    assert str(interval_cell(Interval(math.nan, math.nan, 0))) == ''


def test_thin_curve_keeps_ends_and_spikes():
    values = [math.sin(i / 50) for i in range(5000)]
    values[3217], values[40] = 9.0, None
    steps, thinned = series.thin_curve((list(range(5000)), values), 300)
    assert len(steps) == 300 and steps[0] == 0 and steps[-1] == 4999
    assert sorted(set(steps)) == steps and 3217 in steps
    assert all(values[step] == value for step, value in zip(steps, thinned, strict=True))
    short = ([1, 2], [3.0, None])
    assert series.thin_curve(short, 300) is short


def test_thins_and_averages_maps():
    steps = list(range(0, 1000, 10))
    thinned = series.thin_map((steps, [[step, 0.0] for step in steps]), 7)
    assert thinned[0][0] == 0 and thinned[0][-1] == 990 and len(thinned[0]) == 7
    assert [row[0] for row in thinned[1]] == thinned[0]
    mean = series.mean_map([([1, 2, 3], [[1.0], [2.0], [None]]), ([2, 3], [[4.0], [5.0]])])
    assert mean == ([2, 3], [[3.0], [None]])
    wide = series.Series(([], []), ([], []), {'a': ([1], [[0.0] * 100])})
    assert series.select_fitting([wide] * 100)[0] == series.MAP_NUMBERS // 10_000 == 40
    assert [series.select_fitting(all_series)[0] for all_series in ([wide] * 10_000, [])] == [6, 60]


@pytest.mark.full
def test_program_writes_page(sweep, tmp_path):
    process = run_module(
        'eval.report', f'--workdir={sweep}', f'--out={tmp_path}/page.html', '--json'
    )
    *_, page, last = process.stdout.splitlines()
    assert page == f'{tmp_path}/page.html', process.stderr
    assert json.loads(last)['page'] == page and len(json.loads(last)['runs']) == 24
    assert (tmp_path / 'page.md').exists() and 'rmsnorm' in (tmp_path / 'page.html').read_text()


def test_empty_folder_raises(tmp_path):
    with pytest.raises(ValueError, match='must contain a run or a sweep, but has no'):
        write_report(tmp_path)
