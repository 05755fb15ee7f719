"""Runs compared item by item, and the sentences about them."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from eval import compare as program
from eval.compare import compare, comparison_sentence, decide_verdict, find_target, main
from eval.evaluation.paired import Difference, Pairs, compute_difference
from eval.evaluation.suite_flags import read_suites
from eval.suites import SUITES
from eval.suites.base import Suite, SuiteResult
from tests.commands import tiny
from train import DONE, train

N = 60
SHIFTS = {'base': 0.0, 'same': 0.0, 'low': -0.1, 'high': 0.1}  # nats a byte


def documents(checkpoint) -> SuiteResult:
    """Returns items whose nats per byte depend on the folder's name; 'few' lacks the last
    twenty.
    """
    name = checkpoint.path.parents[1].name
    rng = np.random.default_rng(7)
    n_bytes, hard = rng.integers(10, 500, N), rng.normal(1, 0.3, N)
    noise = np.random.default_rng([*name.encode()]).normal(0, 0.05, N)
    nats = n_bytes * (hard + noise + SHIFTS.get(name, 0.0))
    part = slice(0, 40 if name == 'few' else N)
    names = [f'{"x" if name == "others" else ""}{i}' for i in range(N)]
    return SuiteResult({}, {'item': names[part], 'nats': nats[part], 'bytes': n_bytes[part]})


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


def compare_runs(folder, *names, suite='documents', say=lambda line: None):
    (request,) = read_suites(suite, {})
    return compare([find_target(str(folder / name), say) for name in names], request, say)


def test_runs_are_compared_with_the_first(runs):
    comparisons = compare_runs(runs, 'base', 'same', 'low', 'high/checkpoints/12')
    assert [comparison.verdict for comparison in comparisons] == ['within noise', 'better', 'worse']
    same, low, high = comparisons
    assert low.difference.low < -0.1 < low.difference.high < 0 < high.difference.low
    assert low.difference.p == pytest.approx(3 / 10_001)  # of three tests, the smallest there is
    for comparison in comparisons:
        assert comparison.line.startswith(f'{runs}/') and f' {runs}/base ' in comparison.line
        assert comparison.line.endswith(f', {N} documents')
    for comparison, verb in ((low, 'better'), (high, 'worse')):
        assert '/base by 0.' in comparison.line and f' is {verb} than ' in comparison.line
        assert ' nats a byte (95% interval 0.' in comparison.line
    assert f' vs {runs}/base is inconclusive: p = ' in same.line


@pytest.mark.full
def test_unpaired_items_are_reported_or_refused(runs):
    lines = []
    (comparison,) = compare_runs(runs, 'few', 'low', say=lines.append)
    assert comparison.n_items == 40 and '0 only in' in lines[-1] and '20 only in' in lines[-1]
    with pytest.raises(
        ValueError, match=r'others cannot be compared with .*/base: they share no doc'
    ):
        compare_runs(runs, 'base', 'others')


def test_incomparable_runs_are_refused(runs, tmp_path):
    with pytest.raises(ValueError, match=r'ngram cannot be compared: .*perplexity'):
        compare_runs(runs, 'base', 'low', suite='ngram')
    with pytest.raises(ValueError, match='nothing has no checkpoint'):
        compare_runs(runs, 'base', 'nothing')
    (tmp_path / 'sweep').mkdir()
    (runs / 'low').rename(tmp_path / 'sweep' / 'cell')
    (tmp_path / 'sweep' / 'sweep.json').write_text('{}')
    with pytest.raises(ValueError, match=r'sweep is a sweep; .* such as .*sweep/cell\. .*report'):
        compare_runs(runs, 'base', 'sweep')
    assert compare_runs(runs, 'base', 'sweep/cell')[0].n_items == N


def set_flags(monkeypatch, **values):
    defaults = {'suite': 'perplexity', 'again': False, 'json': False, 'figure': None}
    monkeypatch.setattr(program.flags, 'FLAGS', SimpleNamespace(**defaults | values))
    monkeypatch.setattr(program, 'read_option_flags', dict)


def test_figure_is_refused_unless_it_is_drawn(tmp_path, monkeypatch, capsys):
    """Catches a figure that is not written, with exit status 0."""
    set_flags(monkeypatch, figure='x.png')
    for name in 'ab':
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=r'^--figure=x.png draws .* several sweeps; got runs\.'):
        main(['', str(tmp_path / 'a'), str(tmp_path / 'b')])
    monkeypatch.setattr(program, 'compare_arms', lambda run, say: [f'the arms of {run}'])
    with pytest.raises(ValueError, match=r'^--figure=x.png draws .* several sweeps; got one\.'):
        main(['', 'sweep'])
    assert capsys.readouterr().out == ''


def test_unknown_suite_is_refused_for_sweeps(monkeypatch):
    set_flags(monkeypatch, suite='perplexty')
    monkeypatch.setattr(program, 'report_sweeps', lambda runs, say: True)
    for runs in (['sweep'], ['sweep', 'again']):
        with pytest.raises(ValueError, match="Did you mean 'perplexity'"):
            main(['', *runs])


def test_program_takes_runs_or_a_tuned_sweep(runs, capsys, monkeypatch):
    set_flags(monkeypatch, suite='documents', json=True)
    main(['', str(runs / 'base'), str(runs / 'low')])
    *_, sentence, last = capsys.readouterr().out.splitlines()
    assert sentence.startswith(f'{runs}/low is better than {runs}/base by ')
    record = json.loads(last)
    (comparison,) = record['comparisons']
    assert record['runs'] == [str(runs / 'base'), str(runs / 'low')]
    assert comparison['verdict'] == 'better' and comparison['line'] == sentence
    assert comparison['difference']['value'] < 0 and comparison['n_items'] == N
    with pytest.raises(ValueError, match=r'^name at least two runs: .*, or one sweep with'):
        main(['', str(runs / 'base')])
    monkeypatch.setattr(program, 'compare_arms', lambda run, say: [f'the arms of {run}'])
    main(['', 'sweep'])
    record = '{"runs": ["sweep"], "verdicts": ["the arms of sweep"]}'
    assert capsys.readouterr().out == f'the arms of sweep\n{record}\n'


def test_comparison_sentence():
    """An example, and a score that is better if higher."""
    effect, suite = Difference(-0.012, -0.016, -0.008, 0.0004), SUITES['perplexity']
    verdict = decide_verdict(effect, suite)
    assert comparison_sentence('runs/b', 'runs/a', verdict, effect, 412, suite) == (
        'runs/b is better than runs/a by 0.012 bits per byte (95% interval 0.008 to 0.016), '
        'p = 0.0004, 412 documents'
    )
    accuracy = Suite(documents, score='right', lower_is_better=False)
    assert decide_verdict(effect, accuracy) == 'worse'
    assert comparison_sentence('b', 'a', 'worse', effect, 9, accuracy) == (
        'b is worse than a by 0.012 right (95% interval 0.008 to 0.016), p = 0.0004, 9 items'
    )
    same = Difference(-0.002, -0.005, 0.001, 0.21)
    assert comparison_sentence('b', 'a', 'within noise', same, 412, suite) == (
        'b vs a is inconclusive: p = 0.21, needs p < 0.05; difference -0.002 bits per byte '
        '(95% interval -0.005 to +0.001), 412 documents'
    )
    single = compute_difference(
        Pairs((np.array([1.0]), np.array([1.5])), (np.array([4.0]), np.array([4.0])), 0, 0)
    )
    assert comparison_sentence('b', 'a', 'within noise', single, 1, suite) == (
        'b vs a is inconclusive: one item has no interval; difference +0.125 bits per byte'
    )
    broken = Difference(float('nan'), *[float('nan')] * 3)
    assert comparison_sentence('b', 'a', 'within noise', broken, 9, suite) == (
        'b vs a is inconclusive: a score is not finite, 9 documents'
    )
    for p in (0.051, float('nan')):
        assert decide_verdict(Difference(-1, -2, 0, p), suite) == 'within noise'


@pytest.mark.full
def test_other_tokenizers_are_compared_by_bytes(corpus, tmp_path):
    """The documents of both have the same names and bytes."""
    for name, tokenizer in (('bytes', 'byte'), ('words', 'bpe:300')):
        config = tiny(corpus, data_tokenizer=tokenizer, train_steps=4)
        assert train(config, tmp_path / name) == DONE
    (comparison,) = compare_runs(tmp_path, 'bytes', 'words', suite='perplexity')
    assert comparison.n_items > 1 and 'bits per byte' in comparison.line
