"""The catalogue of studies: questions, answers, search, and its page."""

import json

import pytest

from eval.runs import expand_patterns
from lm.record.names import STARTS
from lm.study.tables.catalogue import list_studies, search_studies
from tests.eval import sweep_fixture as fixture
from tests.eval.programs import run_module

AXES = {'model.norm': fixture.NORMS, 'train.seed': fixture.SEEDS}
QUESTION = 'Is LayerNorm as good\nas RMSNorm?\n\nCost:     nothing.'


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A sweep with a question, and an older run without."""
    folder = tmp_path_factory.mktemp('runs')
    cells = fixture.write_sweep(folder / 'norms', AXES, {})
    fixture.write_run(folder / 'single', fixture.base_config())
    starts = [
        {'began': '2026-11-02T10:00:00+00:00', 'step': 0, 'question': QUESTION},
        {'began': '2026-11-01T10:00:00+00:00', 'step': 0, 'question': QUESTION},
    ]
    for cell, start in zip(cells, starts, strict=False):
        (folder / 'norms' / cell['cell'] / STARTS).write_text(json.dumps(start) + '\n')
    return folder


def test_rows_have_question_date_and_verdict(folder):
    """LayerNorm's losses are .08 higher at all seeds, .082 at the last."""
    rows = {row['workdir'].rpartition('/')[2]: row for row in list_studies([folder])}
    sweep, run = rows['norms'], rows['single']
    assert sweep['question'] == 'Is LayerNorm as good as RMSNorm?'
    assert sweep['began'].startswith('2026-11-01')  # the first cell to begin is not the first
    assert sweep['runs'] == '6 of 6' and run['runs'] == '1 of 1'
    assert sweep['answer'] == 'layernorm worse (+0.0807 ± 0.0029)'
    assert run['question'] == '' and run['answer'].startswith('done, loss 2.9')


def test_latest_study_is_first(folder):
    """The files of the run are of today, the first start of the sweep was before."""
    assert [row['workdir'].rpartition('/')[2] for row in list_studies([folder])] == [
        'single',
        'norms',
    ]


def test_search_needs_all_words(folder):
    rows = list_studies([folder])
    assert len(search_studies(rows, '')) == 2
    assert [row['runs'] for row in search_studies(rows, 'rmsnorm WORSE')] == ['6 of 6']
    assert search_studies(rows, 'rmsnorm done') == []


@pytest.mark.full
def test_program_lists_and_writes_the_page(folder, tmp_path):
    page = tmp_path / 'index.html'
    (folder / 'norms' / 'report.html').write_text('')
    (folder / 'empty').mkdir(exist_ok=True)  # a pattern leaves it out
    done = run_module('eval.catalogue', f'--workdir={folder}/*', f'--out={page}')
    assert done.returncode == 0, done.stderr
    assert '  Is LayerNorm as good as RMSNorm?\n  layernorm worse (+0.0807' in done.stdout
    text = page.read_text()
    assert text.count('<section>') == 2 and 'norms/report.html">' in text


def test_patterns_are_folders_that_hold_runs(folder):
    (folder / 'empty').mkdir(exist_ok=True)
    assert expand_patterns([f'{folder}/*']) == [str(folder / name) for name in ('norms', 'single')]
    assert expand_patterns(['runs']) == ['runs']
    with pytest.raises(ValueError, match='matches no folder of a run'):
        expand_patterns([f'{folder}/none*'])


@pytest.mark.full
def test_words_that_match_nothing_are_refused(folder):
    done = run_module('eval.catalogue', f'--workdir={folder}', '--find=quantum')
    assert done.returncode == 1 and 'contains all words of --find=quantum' in done.stderr
