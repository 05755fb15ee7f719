"""The page of a tuned sweep: its answer first, and nothing of the unfair kind."""

import math

import pytest

from eval.report import tables
from eval.report.page import write_report
from tests.eval import tuned_fixture as tuned
from tests.eval.report.test_page import Page, as_dicts, specs_of
from tests.eval.tuned_fixture import bowl

ASKED = {'optim.lr': None}
LOSSES = {
    'rmsnorm': bowl(3.0, 0.0, 0.004, 1),
    'layernorm': tuned.diverging(1.8, bowl(2.94, 1.0, 0.004, 2)),
    'none': lambda z, seed: math.inf,
}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """The folder, the text of the page and what a terminal is told."""
    folder, said = tmp_path_factory.mktemp('runs') / 'norms', []
    tuned.write_tuned(folder, LOSSES, ASKED)
    return folder, write_report(folder, say=said.append).read_text(), said[0]


def test_the_answer_comes_first(written):
    """Catches the table of variants at the rates that the compared seeds chose."""
    folder, text, _ = written
    parsed = Page(text)
    assert next(iter(parsed.tables)) == 'Arms' and 'Variants' not in parsed.tables
    assert text.index('<h2>Arms') < text.index('id="tuned_losses"') < text.index('class="chips"')
    rms, layer, none = as_dicts(parsed.tables['Arms'])
    assert rms['verdict'] == 'baseline' and none['verdict'] == '✕ diverged all'
    assert layer['verdict'].startswith('▼ better p') and layer['difference'].startswith('-0.06')
    assert layer['state'] == 'cliff' and none['state'] == 'diverged everywhere'
    assert float(layer['best lr']) == pytest.approx(0.02, rel=0.3)
    for name in ('learning_rates', 'differences', 'final_losses'):
        assert f'id="{name}"' not in text
    markdown = (folder / 'report.md').read_text()
    assert markdown.index('## Arms') < markdown.index('## Runs')
    assert 'Layernorm is better than rmsnorm: 0.06' in markdown and '## Variants' not in markdown


def test_what_could_change_it_and_how_it_was_tuned_is_said(written):
    text = ' '.join(Page(written[1]).text.split())
    assert 'More tokens: every run here has 200 steps of 2,048 tokens' in text
    assert "tunedoptim.lr around each arm's own" in text and 'smallest effect0.01' in text


def test_the_picture_has_what_the_table_says(written):
    """Chosen values, the fit under them, values as good around them, and a cross for each value at
    which a run diverged.
    """
    layers = specs_of(written[1])['tuned_losses']['hconcat'][0]['layer']
    good, mean, _, _, fit, cross, best = (layer['data']['values'] for layer in layers)
    assert {row['line'] for row in best} == {'rmsnorm', 'layernorm'}
    for row in best:
        own = [one for one in good if one['line'] == row['line']]
        assert own[0]['value'] < row['value'] < own[-1]['value']
        curve = [one['loss'] for one in fit if one['line'] == row['line']]
        assert row['loss'] == pytest.approx(min(curve), abs=1e-3)
    highest = max(row['loss'] for row in mean if row['line'] == 'rmsnorm')
    assert {row['line'] for row in cross} == {'norm none', 'layernorm'}
    assert min(row['loss'] for row in cross) > min(highest, 3.05)


def test_a_terminal_is_told_the_answer(written):
    lines = written[2].splitlines()
    assert lines[0].startswith('Layernorm is better than rmsnorm: 0.06')
    assert lines[1] == 'Norm none diverged at every value that was tried.'
    assert any(line.split()[:3] == ['arm', 'verdict', 'difference'] for line in lines)


def test_a_page_of_what_is_not_finished(tmp_path):
    """In the first wave there is a picture of what has ended, and a row for each arm."""
    tuned.write_tuned(tmp_path / 'half', LOSSES, ASKED, 0)
    text = write_report(tmp_path / 'half').read_text()
    parsed = Page(text)
    assert 'Not finished: stage scan, of which 6 of 15 runs have ended' in parsed.text
    rows = as_dicts(parsed.tables['Arms'])
    assert [row['verdict'] for row in rows] == ['baseline', 'not yet', 'not yet']
    assert 'id="tuned_losses"' in text


def test_what_a_tuned_sweep_cannot_be_asked(written, tmp_path):
    with pytest.raises(ValueError, match=r'--baseline=layernorm: runs .* first arm, rmsnorm'):
        write_report(written[0], tmp_path / 'page.html', baseline='layernorm')
    with pytest.raises(ValueError, match=r'norms is a sweep with config.tune'):
        tuned.write_tuned(tmp_path / 'other', {'rmsnorm': bowl(3.0)}, ASKED, 0)
        write_report([written[0], tmp_path / 'other'])


def test_the_protocol_is_a_fact_of_the_sweep():
    protocol = {'name': 'equal_time', 'options': {'hours': 6.0}, 'of_each': []}
    assert tables.shared_facts([], {'protocol': protocol})['protocol'] == 'equal_time (hours 6)'
    protocol |= {'name': 'equal_flops', 'options': {}}
    assert tables.shared_facts([], {'protocol': protocol})['protocol'] == 'equal_flops'
    assert 'protocol' not in tables.shared_facts([], {})
