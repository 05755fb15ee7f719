"""Contract: what programs print with --json can be read, and is the last line."""

import json
import math
from types import SimpleNamespace

import pytest

import train as program
from eval.console.json_line import print_json
from eval.report.page import list_verdicts
from tests.eval import sweep_fixture as fixture


def test_line_has_no_number_that_json_lacks(capsys):
    print_json({'ce': math.nan, 'by_seed': [1.5, math.inf], 'text': 'a\nb'})
    text = capsys.readouterr().out
    assert text.count('\n') == 1
    assert json.loads(text) == {'ce': None, 'by_seed': [1.5, None], 'text': 'a\nb'}


@pytest.mark.parametrize('is_asked', [False, True])
def test_train_prints_results_only_with_the_flag(whole, monkeypatch, capsys, is_asked):
    monkeypatch.setattr(program, 'JSON', SimpleNamespace(value=is_asked))
    assert program.report_json(whole, 2) == 2
    text = capsys.readouterr().out
    if not is_asked:
        assert text == ''
        return
    record = json.loads(text)
    (run,) = record['runs']
    summary = json.loads((whole / 'summary.json').read_text())
    assert (record['workdir'], record['exit_status']) == (str(whole), 2)
    assert (run['status'], run['step']) == ('done', 12)
    assert run['ce'] == pytest.approx(summary['validation_ce'])
    assert run['seconds'] == summary['seconds'] and run['suites'] is None


def test_sweep_verdicts_equal_its_page(tmp_path):
    axes = {'model.norm': fixture.NORMS, 'train.seed': fixture.SEEDS}
    fixture.write_sweep(tmp_path / 'norms', axes, {})
    first, second = list_verdicts([tmp_path / 'norms'])
    assert first['is_baseline'] and first['verdict'] is None and first['difference'] is None
    assert not second['is_baseline'] and second['verdict'] in ('better', 'worse', 'inconclusive')
    assert second['difference'] == pytest.approx(second['loss'] - first['loss'])
    again, turned = list_verdicts([tmp_path / 'norms'], second['variant'])
    base, variant = (again, turned) if again['is_baseline'] else (turned, again)
    assert base['variant'] == second['variant']
    assert variant['difference'] == pytest.approx(-second['difference'])
    json.dumps([first, second])
