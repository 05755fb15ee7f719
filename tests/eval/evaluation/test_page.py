"""The page of an evaluation: the contents of its tables and charts."""

import math

import pytest

from eval.charts import chart_spec
from eval.evaluation.page import FEW_ROWS, MAX_ROWS, write_evaluation_page
from eval.evaluation.suite_flags import read_suites
from eval.evaluation.targets import Evaluation
from eval.suites.base import SuiteResult, Table


def evaluation(run: str, step: int) -> Evaluation:
    many = list(range(2 * MAX_ROWS))
    tables = {
        'By position': Table({'x': many, 'y': [step + i for i in many]}, 'x', 'y'),
        'By task': Table(
            {'task': ['<b>', 'c'], 'right': [0.5, math.nan], 'n': [1, 2]}, 'task', 'right'
        ),
        'Words': Table({'word': ['a & b'], 'n': [3]}),
        'Both': Table({'x': [1, 2], 'y': [3.0, 4.0], 'of': ['p', 'q']}, 'x', 'y', 'of'),
    }
    numbers = {'loss': 5 / step, 'lost': float('nan'), 'tokens': 9}
    config = {'model.norm': 'rmsnorm', 'train.seed': len(run)}
    return Evaluation(run, step, config, {'perplexity': SuiteResult(numbers, {}, tables)})


def chart_data(chart) -> list[dict]:
    return chart_spec(chart)['data']['values']


def test_page_with_one_checkpoint(tmp_path):
    path = tmp_path / 'deep' / 'page.html'
    charts = write_evaluation_page(path, [evaluation('runs/a', 10)], read_suites('perplexity', {}))
    assert [*charts] == ['table_0_0', 'table_0_1', 'table_0_3']
    assert [row['y'] for row in chart_data(charts['table_0_0'])][:2] == [10, 11]
    assert [row['x'] for row in chart_data(charts['table_0_1'])] == ['<b>']  # nan has no bar
    assert {row['by'] for row in chart_data(charts['table_0_3'])} == {'p', 'q'}
    kinds = [chart_spec(charts[name])['mark']['type'] for name in charts]
    assert kinds == ['line', 'bar', 'line']
    page = path.read_text()
    assert '<td>&lt;b&gt;</td>' in page and '<td>a &amp; b</td>' in page and '<h1>a</h1>' in page
    assert all(f'id="{name}"' in page for name in charts) and 'id="traces' not in page
    assert '<td>loss</td><td>0.5</td>' in page
    assert page.count('<details>') == 1 and FEW_ROWS - 11 < 2
    assert f'{MAX_ROWS} more rows are in the result' in page


def test_page_with_several_checkpoints(tmp_path):
    evaluations = [evaluation(run, step) for run in ('runs/a', 'runs/bb') for step in (10, 20)]
    path = tmp_path / 'page.html'
    charts = write_evaluation_page(path, evaluations, read_suites('perplexity', {}))
    assert len(chart_spec(charts['traces_0'])['concat']) == 1  # neither of constants nor of nan
    rows = chart_data(charts['traces_0'])
    assert {(row['run'], row['step'], row['value']) for row in rows} == {
        (run, step, 5 / step) for run in ('a', 'bb') for step in (10, 20)
    }
    last = chart_data(charts['table_0_0'])
    assert len(last) == 4 * MAX_ROWS and {row['by'] for row in last} == {'a', 'bb'}
    assert last[0]['y'] == 20  # of the last step
    series = {row['by'] for row in chart_data(charts['table_0_3'])}
    assert series == {'p, a', 'q, a', 'p, bb', 'q, bb'}
    page = path.read_text()
    assert '<th scope="col">seed std</th>' in page
    assert '<th scope="col">of which' not in page


def test_title_counts_many_runs(tmp_path):
    evaluations = [evaluation(f'runs/{"x" * n}', 10) for n in range(1, 7)]
    write_evaluation_page(tmp_path / 'page.html', evaluations, read_suites('perplexity', {}))
    assert '<h1>6 runs</h1>' in (tmp_path / 'page.html').read_text()


@pytest.mark.parametrize('name', ['perplexity', 'ngram'])
def test_suite_section_has_first_sentence(name, tmp_path):
    only_evaluation = Evaluation('a', 1, {}, {name: SuiteResult({'n': 1.0})})
    write_evaluation_page(tmp_path / 'page.html', [only_evaluation], read_suites(name, {}))
    page = (tmp_path / 'page.html').read_text()
    has_options = name == 'perplexity'
    assert f'<h2>{name}</h2>' in page
    # An empty source is not listed.
    assert ('Options: stride=0, documents=0.' in page) == has_options
