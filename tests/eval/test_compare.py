"""Runs compared item by item, and what is said of them."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from eval import compare as program
from eval.compare import compare, comparison_sentence, decide_verdict, main
from eval.evaluation.paired import Difference
from eval.evaluation.suite_flags import read_suites
from eval.suites import SUITES
from eval.suites.base import Suite, SuiteResult
from tests.commands import tiny
from train import DONE, train

N = 60
SHIFTS = {'base': 0.0, 'same': 0.0, 'low': -0.1, 'high': 0.1}  # nats a byte


def documents(checkpoint) -> SuiteResult:
    """Returns items whose nats a byte the folder's name decides; 'few' lacks the last twenty."""
    name = checkpoint.path.parents[1].name
    rng = np.random.default_rng(7)
    n_bytes, hard = rng.integers(10, 500, N), rng.normal(1, 0.3, N)
    own = np.random.default_rng([*name.encode()]).normal(0, 0.05, N)
    nats = n_bytes * (hard + own + SHIFTS.get(name, 0.0))
    kept = slice(0, 40 if name == 'few' else N)
    names = [f'{"x" if name == "others" else ""}{i}' for i in range(N)]
    return SuiteResult({}, {'item': names[kept], 'nats': nats[kept], 'bytes': n_bytes[kept]})


@pytest.fixture
def runs(whole, tmp_path, monkeypatch):
    """Copies of a run by name, and the suite above."""
    suite = Suite(
        documents, score='nats', weight='bytes', unit='nats a byte', item_noun='documents'
    )
    monkeypatch.setitem(SUITES, 'documents', suite)
    for name in (*SHIFTS, 'few', 'others'):
        shutil.copytree(whole, tmp_path / name)
    return tmp_path


def compared(folder, *names, suite='documents', say=lambda line: None):
    (asked,) = read_suites(suite, {})
    return compare([str(folder / name) for name in names], asked, say)


def test_each_run_is_compared_with_the_first(runs):
    found = compared(runs, 'base', 'same', 'low', 'high/checkpoints/12')
    assert [one.verdict for one in found] == ['within noise', 'better', 'worse']
    same, low, high = found
    assert low.difference.low < -0.1 < low.difference.high < 0 < high.difference.low
    assert low.difference.p == pytest.approx(3 / 10_001)  # of three tests, the smallest there is
    for one in found:
        assert one.line.startswith(f'{runs}/') and f' {runs}/base: 0.' in one.line
        assert f'over {N} documents, p = ' in one.line
    assert ' nats a byte lower over' in low.line and ' nats a byte higher over' in high.line
    assert 'is within noise of' in same.line


@pytest.mark.full
def test_items_that_one_has_alone_are_said_and_other_items_refused(runs):
    lines = []
    (one,) = compared(runs, 'few', 'low', say=lines.append)
    assert one.n_items == 40 and '0 more are of' in lines[-1] and 'and 20 of' in lines[-1]
    with pytest.raises(ValueError, match=r'others does not compare with .*/base: they have no doc'):
        compared(runs, 'base', 'others')


def test_what_does_not_compare_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match=r'ngram has no score of single items.*perplexity'):
        compared(runs, 'base', 'low', suite='ngram')
    with pytest.raises(ValueError, match='nothing holds no checkpoint'):
        compared(runs, 'base', 'nothing')
    (tmp_path / 'sweep').mkdir()
    (runs / 'low').rename(tmp_path / 'sweep' / 'cell')
    (tmp_path / 'sweep' / 'sweep.json').write_text('{}')
    with pytest.raises(ValueError, match=r'sweep is a sweep, .* such as .*sweep/cell; .*report'):
        compared(runs, 'base', 'sweep')
    assert compared(runs, 'base', 'sweep/cell')[0].n_items == N


def test_the_program_takes_two_runs_or_a_tuned_sweep(runs, capsys, monkeypatch):
    monkeypatch.setattr(program.flags, 'FLAGS', SimpleNamespace(suite='documents', again=False))
    monkeypatch.setattr(program, 'read_option_flags', dict)
    main(['', str(runs / 'base'), str(runs / 'low')])
    assert f'{runs}/low is better than {runs}/base: ' in capsys.readouterr().out
    with pytest.raises(ValueError, match=r'^give two runs at least: .*, or one sweep with'):
        main(['', str(runs / 'base')])
    monkeypatch.setattr(program, 'compare_arms', lambda run, say: [f'the arms of {run}'])
    main(['', 'sweep'])
    assert capsys.readouterr().out == 'the arms of sweep\n'


def test_the_sentence_by_hand():
    """The example of DESIGN's; and a score of which more is better."""
    one, suite = Difference(-0.012, -0.016, -0.008, 0.0004), SUITES['perplexity']
    verdict = decide_verdict(one, suite)
    assert comparison_sentence('runs/b', 'runs/a', verdict, one, 412, suite) == (
        'runs/b is better than runs/a: 0.012 [0.008, 0.016] bits per byte lower over 412 '
        'documents, p = 0.0004'
    )
    right = Suite(documents, score='right', lower_is_better=False)
    assert decide_verdict(one, right) == 'worse'
    assert comparison_sentence('b', 'a', 'worse', one, 9, right) == (
        'b is worse than a: 0.012 [0.008, 0.016] right lower over 9 items, p = 0.0004'
    )
    for p in (0.051, float('nan')):
        assert decide_verdict(Difference(-1, -2, 0, p), suite) == 'within noise'


@pytest.mark.full
def test_another_tokenizer_is_compared_by_bytes(corpus, tmp_path):
    """The documents of both have the same names and bytes."""
    for name, tokenizer in (('bytes', 'byte'), ('words', 'bpe:300')):
        config = tiny(corpus, data_tokenizer=tokenizer, train_steps=4)
        assert train(config, tmp_path / name) == DONE
    (one,) = compared(tmp_path, 'bytes', 'words', suite='perplexity')
    assert one.n_items > 1 and 'bits per byte' in one.line
