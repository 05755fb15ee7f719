"""Suites during training (eval.suites). Reference: the same suite on the checkpoint of the step.
Equivalence: training is the same without them, and a resumed run has their rows.
"""

import json

import pytest

from eval import minimal_pairs
from eval.evaluation import during_training
from eval.load import load
from eval.report.page import write_report
from eval.runs import frame
from eval.suites import SUITES
from lm.launch.exit_status import DONE, SIGNALLED
from lm.record.run import Run
from lm.run import suites as lm_suites
from lm.storage.files import read_json
from tests.helpers import tiny_config
from tests.sweep_helpers import (
    base,
    before_step,
    cell_config,
    curves,
    terminate_at,
    timeless,
    write_corpus,
)
from train import SUITES as LOADER
from train import train, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')

WORDS = ('norm', 'layer', 'head', 'token', 'scale', 'depth')


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus'))


@pytest.fixture(scope='module')
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp('pairs') / 'words.jsonl'
    lines = [{'sentence_good': word, 'sentence_bad': word[::-1]} for word in WORDS]
    path.write_text('\n'.join(map(json.dumps, lines)))
    return path


def tree(corpus, pairs, **changes):
    listed = {'eval_suites': f'minimal_pairs:{pairs},layers', 'eval_suites_every': 3}
    options = {'eval_suite_options': 'minimal_pairs.limit=5, layers.tokens=64'}
    return base(corpus, **listed, **options, train_checkpoint_every=3, **changes)


@pytest.fixture(scope='module')
def suite_run(corpus, pairs, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('trained') / 'run'
    assert train(cell_config(tree(corpus, pairs, optim_average='ema'), {}), workdir) == DONE
    return workdir


def suite_rows(workdir):
    return [row for row in timeless(workdir) if any(name.startswith('suite_') for name in row)]


def test_rows_equal_the_suite_on_the_checkpoint(suite_run, pairs):
    """Of the averaged weights, which the run evaluates. Catches the trained weights, a step too
    late, and options that are lost.
    """
    rows = suite_rows(suite_run)
    assert [row['step'] for row in rows] == [0, 3, 6, 8]
    for step in (6, 8):
        (row,) = [row for row in rows if row['step'] == step]
        checkpoint = load(f'{suite_run}/checkpoints/{step}')
        expected = minimal_pairs(checkpoint, path=str(pairs), limit=5).numbers
        recorded = {
            name.removeprefix('suite_minimal_pairs_'): value
            for name, value in row.items()
            if name.startswith('suite_minimal_pairs_')
        }
        assert recorded == pytest.approx(expected, rel=1e-6) and recorded['pairs'] == 5
        layers = SUITES['layers'].function(checkpoint, tokens=64).numbers
        for name, value in layers.items():
            assert row[f'suite_layers_{name}'] == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_records_have_the_suites(suite_run):
    """summary.json, the table of runs, and the page."""
    last = suite_rows(suite_run)[-1]
    summary = read_json(suite_run / 'summary.json')
    assert summary['suite_minimal_pairs_accuracy'] == last['suite_minimal_pairs_accuracy']
    (row,) = frame(suite_run).to_dict('records')
    numbers = json.loads(row['suites'])
    assert numbers['minimal_pairs_pairs'] == 5 and 'layers_ce' in numbers
    page = write_report(suite_run).read_text()
    assert 'Held-out texts and suites' in page and 'minimal_pairs_accuracy' in page
    assert '## Held-out texts and suites' in (suite_run / 'report.md').read_text()


def test_training_is_the_same_without_suites(suite_run, corpus, tmp_path):
    plain = base(corpus, train_checkpoint_every=3, optim_average='ema')
    assert train(cell_config(plain, {}), tmp_path) == DONE
    rows = timeless(suite_run)
    suite_free = [row for row in rows if not any(name.startswith('suite_') for name in row)]
    assert suite_free == timeless(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize('stop', [3, 4])
def test_killed_run_has_the_same_rows(stop, suite_run, corpus, pairs, tmp_path, monkeypatch):
    recipe = cell_config(tree(corpus, pairs, optim_average='ema'), {})
    with monkeypatch.context() as patch:
        before_step(patch, terminate_at(stop))
        assert train(recipe, tmp_path) > SIGNALLED
    assert train(recipe, tmp_path) == DONE
    assert timeless(tmp_path) == timeless(suite_run)


@pytest.mark.full
@pytest.mark.parametrize('run_axis', ['loop', 'vmap'])
def test_sweep_runs_have_their_suites(run_axis, suite_run, corpus, pairs, tmp_path):
    """Two runs of a program, each with its own weights."""
    sweep = tree(corpus, pairs, optim_average='ema', kernels_run_axis=run_axis)
    assert train_sweep(sweep, [{'train.seed': seed} for seed in range(2)], tmp_path) == DONE
    first, second = (
        [row for row in rows if 'suite_layers_ce' in row] for rows in curves(tmp_path).values()
    )
    for row, expected, second_row in zip(first, suite_rows(suite_run), second, strict=True):
        assert row == pytest.approx(expected, rel=0 if run_axis == 'loop' else 1e-4, abs=1e-6)
        assert second_row['suite_layers_ce'] != row['suite_layers_ce']


def test_dict_names_suites(pairs):
    text = f"{{'a': 'minimal_pairs:{pairs}', 'b': 'minimal_pairs:other'}}"
    options = {'eval.suite_options': 'b.limit=3,a.end=True'}
    requests = during_training.read_requests(tiny_config({'eval.suites': text, **options}))
    assert [requests[name].options['limit'] for name in 'ab'] == [0, 3]
    assert requests['a'].options['end'] is True and requests['a'].options['path'] == str(pairs)


WRONG = {
    'blimp': r"eval.suites must be one of .*; got 'blimp'",
    'minimal_pair': "Did you mean 'minimal_pairs'",
    'layers:3': 'layers takes no value after a colon',
    'minimal_pairs:a,minimal_pairs:b': 'a suite twice',
    "{'a b': 'layers'}": 'one word of letters',
    "{'a': 'layers', 'b': 'layers'}": 'List it once',
    'harness:arc_easy': 'harness does not run during training: another library',
    'ngram': 'ngram does not run during training: its numbers do not depend on the weights',
    'influence': 'influence does not run during training',
    'sharpness': 'sharpness does not run during training',
}
WRONG_OPTIONS = {
    'limit=3': 'must be NAME.OPTION=VALUE',
    'minimal_pairs.limit': 'must be NAME.OPTION=VALUE',
    'layer.tokens=3': "names of eval.suites must be one of .*Did you mean 'layers'",
    'layers.token=3': "options of layers must be one of .*Did you mean 'tokens'",
    'layers.tokens=-3': r'eval.suite_options, layers.tokens must be at least 0; got -3',
    'layers.tokens=many': 'layers.tokens must be int',
}


@pytest.mark.usefixtures('nothing_is_traced')
@pytest.mark.parametrize('text', WRONG)
def test_wrong_suites_are_refused(text):
    """Before anything is read or compiled."""
    with pytest.raises(ValueError, match=WRONG[text]):
        lm_suites.check_suites(tiny_config({'eval.suites': text}), LOADER)


@pytest.mark.usefixtures('nothing_is_traced')
@pytest.mark.parametrize('text', WRONG_OPTIONS)
def test_wrong_options_are_refused(text):
    recipe = tiny_config({'eval.suites': 'layers,minimal_pairs:x', 'eval.suite_options': text})
    with pytest.raises(ValueError, match=WRONG_OPTIONS[text]):
        lm_suites.check_suites(recipe, LOADER)


@pytest.mark.usefixtures('nothing_is_traced')
def test_perplexity_text_is_refused():
    changes = {'eval.suites': 'perplexity', 'eval.suite_options': 'perplexity.source=text:x'}
    with pytest.raises(ValueError, match=r'Name the text in eval.texts'):
        lm_suites.check_suites(tiny_config(changes), LOADER)


def test_suites_need_a_loader_and_one_process(monkeypatch):
    recipe = tiny_config({'eval.suites': 'layers'})
    with pytest.raises(ValueError, match=r'eval\.suites needs train\.py'):
        lm_suites.check_suites(recipe, None)
    monkeypatch.setattr(lm_suites, 'is_multiprocess', lambda: True)
    with pytest.raises(ValueError, match=r'eval\.suites needs a run of one process'):
        lm_suites.check_suites(recipe, LOADER)


@pytest.mark.parametrize('content', [None, 'no json'])
def test_suite_data_are_read_at_the_start(content, corpus, tmp_path):
    """An error before the first step, and not at the first evaluation."""
    path = tmp_path / 'pairs.jsonl'
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r'eval\.suites, minimal_pairs: '):
        train(cell_config(tree(corpus, path), {}), tmp_path / 'run')
    assert not Run(tmp_path / 'run').rows()


def test_suite_that_fails_does_so_before_the_first_step(corpus, tmp_path):
    """The model has not been trained on regression."""
    changes = {'eval.suites': 'in_context', 'eval.suite_options': None}
    changes |= {'eval.suites_every': None}
    plain = base(corpus)
    with pytest.raises(ValueError, match=r'eval\.suites, in_context: '):
        train(cell_config(plain, changes), tmp_path / 'run')
    assert not Run(tmp_path / 'run').rows()


@pytest.mark.full
def test_vanished_data_do_not_matter_once_read(pairs, corpus, tmp_path, monkeypatch):
    copied = tmp_path / 'pairs.jsonl'
    copied.write_text(pairs.read_text())

    def remove(wave):
        copied.unlink(missing_ok=True)

    before_step(monkeypatch, remove)
    assert train(cell_config(tree(corpus, copied), {}), tmp_path / 'run') == DONE
    assert [row['step'] for row in suite_rows(tmp_path / 'run')] == [0, 3, 6, 8]
