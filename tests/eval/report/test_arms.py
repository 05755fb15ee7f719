"""The page of a tuned sweep: its answer first, and no unfair comparison."""

import math
import re

import pytest

from eval.report import tables, terminal
from eval.report.page import write_report
from eval.report.subject import read_subject
from tests.eval import tuned_fixture as tuned
from tests.eval.report.test_page import Page, as_dicts, chart_specs
from tests.eval.tuned_fixture import bowl

TUNE = {'optim.lr': None}
LOSSES = {
    'rmsnorm': bowl(3.0, 0.0, 0.004, 1),
    'layernorm': tuned.diverging(1.8, bowl(2.94, 1.0, 0.004, 2)),
    'none': lambda z, seed: math.inf,
}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """Returns the folder, the text of the page, and the printed text."""
    folder, messages = tmp_path_factory.mktemp('runs') / 'norms', []
    tuned.write_tuned(folder, LOSSES, TUNE)
    return folder, write_report(folder, say=messages.append).read_text(), messages[0]


def test_page_begins_with_verdict(written):
    """Catches the table of variants at the rates that the compared seeds selected."""
    folder, text, _ = written
    parsed = Page(text)
    assert next(iter(parsed.tables)) == 'Arms' and 'Variants' not in parsed.tables
    assert text.index('<h2>Arms') < text.index('id="tuned_losses"') < text.index('class="chips"')
    rms, layer, none = as_dicts(parsed.tables['Arms'])
    assert rms['verdict'] == 'baseline' and none['verdict'] == '✕ diverged all runs'
    assert layer['verdict'].startswith('▼ better p') and layer['difference'].startswith('-0.06')
    assert layer['state'] == 'cliff' and none['state'] == 'diverged everywhere'
    assert float(layer['best lr']) == pytest.approx(0.02, rel=0.3)
    for name in ('learning_rates', 'differences', 'final_losses'):
        assert f'id="{name}"' not in text
    markdown = (folder / 'report.md').read_text()
    assert markdown.index('## Arms') < markdown.index('## Runs')
    assert 'Layernorm is better than rmsnorm by 0.06' in markdown and '## Variants' not in markdown


def test_page_lists_caveats_and_tuning(written):
    text = ' '.join(Page(written[1]).text.split())
    assert 'Every run has 200 steps of 2,048 tokens' in text
    assert "tunedoptim.lr around each arm's own value" in text and 'smallest effect0.01' in text


def test_chart_matches_table(written):
    """Selected values, the fit below them, near-best values around them, and a cross for each value
    at which a run diverged.
    """
    layers = chart_specs(written[1])['tuned_losses']['concat'][0]['layer']
    good, mean, _, _, fit, cross, best = (layer['data']['values'] for layer in layers)
    assert {row['line'] for row in best} == {'rmsnorm', 'layernorm'}
    for row in best:
        near_best = [point for point in good if point['line'] == row['line']]
        assert near_best[0]['value'] < row['value'] < near_best[-1]['value']
        curve = [point['loss'] for point in fit if point['line'] == row['line']]
        assert row['loss'] == pytest.approx(min(curve), abs=1e-3)
    highest = max(row['loss'] for row in mean if row['line'] == 'rmsnorm')
    assert {row['line'] for row in cross} == {'norm none', 'layernorm'}
    assert min(row['loss'] for row in cross) > min(highest, 3.05)


def test_terminal_prints_answer(written):
    lines = written[2].splitlines()
    assert lines[0].startswith('Layernorm is better than rmsnorm by 0.06')
    assert lines[1] == 'Norm none diverged at every value tried.'
    head = lines.index('arm        tuned loss       best lr  runs  state')
    assert [line.split()[0] for line in lines[head + 1 :]] == ['rmsnorm', 'layernorm', 'norm']


MANY = {
    'rmsnorm': bowl(3.0, 0.0, 0.004, 1),
    'layernorm': bowl(2.94, 1.0, 0.004, 2),
    'dyt': bowl(3.002, 0.0, 0.004, 3),
    'derf': bowl(3.1, 5.0, 0.004, 4),
    'scalenorm:scale=False': tuned.diverging(1.0, bowl(3.05, 0.0, 0.02, 5)),
}


def test_terminal_table_fits_with_many_arms(tmp_path):
    """Catches sentences or open questions as columns, and a verdict without its size."""
    messages = []
    tuned.write_tuned(tmp_path / 'norms', MANY, TUNE)
    write_report(tmp_path / 'norms', say=messages.append)
    lines = messages[0].splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith('arm  '))
    table = lines[head : head + 1 + len(MANY)]
    assert max(map(len, table)) <= terminal.WIDTH
    assert table[0].split() == ['arm', 'verdict', 'difference', 'tuned', 'loss', 'best', 'lr']
    assert re.match(r'layernorm +▼ better +-0\.06\d+ ', table[2])
    questions = lines[head + 1 + len(MANY) :]
    assert questions[0] == 'What could still change the verdicts:'
    assert questions[1].startswith('  ') and questions[1].split(': ')[0].strip() in MANY


def test_terminal_table_shortens_labels_and_drops_columns(written, monkeypatch):
    folder = written[0]
    ablation = read_subject([folder]).ablation
    wide = terminal.format_arms(ablation)
    assert wide[0].split() == ['arm', 'tuned', 'loss', 'best', 'lr', 'runs', 'state']
    monkeypatch.setattr(terminal, 'WIDTH', 60)
    narrow = terminal.format_arms(ablation)
    assert 'runs' not in narrow[0] and 'tuned loss' in narrow[0] and max(map(len, narrow)) <= 60
    monkeypatch.setattr(terminal, 'MIN_LABEL', 5)
    monkeypatch.setattr(terminal, 'WIDTH', 34)
    cut = terminal.format_arms(ablation)
    assert [line.split('  ')[0] for line in cut[1:]] == ['rmsnorm', 'laye…orm', 'norm…one']


def test_shortened_labels_remain_distinct():
    labels = ['norm rmsnorm, depth 2, tied', 'norm dyt, depth 2, tied', 'none']
    assert terminal.shorten(labels, 30) == labels
    short = terminal.shorten(['norm a, depth 2, tied', 'norm a, depth 3, tied', 'x'], 12)
    assert short == ['1 norm …tied', '2 norm …tied', '3 x'] and max(map(len, short)) == 12


def test_page_for_unfinished_sweep(tmp_path):
    """The page of a first wave has a chart of finished runs, and a row for each arm."""
    tuned.write_tuned(tmp_path / 'half', LOSSES, TUNE, 0)
    text = write_report(tmp_path / 'half').read_text()
    parsed = Page(text)
    assert 'Not finished: stage scan, 6 of 15 runs finished' in parsed.text
    rows = as_dicts(parsed.tables['Arms'])
    assert [row['verdict'] for row in rows] == ['baseline', 'not yet', 'not yet']
    assert 'id="tuned_losses"' in text


def test_tuned_sweep_refuses_baseline_and_others(written, tmp_path):
    with pytest.raises(ValueError, match=r'--baseline=layernorm: .* its first arm, here rmsnorm'):
        write_report(written[0], tmp_path / 'page.html', baseline='layernorm')
    with pytest.raises(ValueError, match=r'norms is a sweep with config.tune'):
        tuned.write_tuned(tmp_path / 'other', {'rmsnorm': bowl(3.0)}, TUNE, 0)
        write_report([written[0], tmp_path / 'other'])


def test_facts_include_protocol():
    protocol = {'name': 'equal_time', 'options': {'hours': 6.0}, 'of_each': []}
    assert tables.shared_facts([], {'protocol': protocol})['protocol'] == 'equal_time (hours 6)'
    protocol |= {'name': 'equal_flops', 'options': {}}
    assert tables.shared_facts([], {'protocol': protocol})['protocol'] == 'equal_flops'
    assert 'protocol' not in tables.shared_facts([], {})
