"""Reference: stage boundaries, and the numbers of held-out texts and suites, among the figures."""

import dataclasses
import json
from pathlib import Path

import pytest

from eval.charts import chart_spec
from eval.report.figures import collect_runs, draw_loss_curves
from eval.report.series import build_choices, quantity_names, read_series
from lm.config.recipe import build_recipe, update_config
from lm.record.run import Run
from tests.eval import sweep_fixture as fixture


@pytest.fixture(scope='module')
def comparisons(tmp_path_factory):
    folder = tmp_path_factory.mktemp('stages') / 'sweep'
    fixture.write_sweep(folder, {'model.norm': ('rmsnorm', 'layernorm')}, {})
    return fixture.compare_sweep(folder)


def test_stage_boundaries_are_lines_over_both_losses(comparisons):
    """One for each step at which any run begins a stage; none without stages."""
    records = [record for c in comparisons for record in c.variant.records]
    series = {record['workdir']: read_series(record) for record in records}
    plain = chart_spec(draw_loss_curves(comparisons, collect_runs(comparisons, series)))
    assert '"rule"' not in json.dumps(plain)
    starts = ((50, 100), (100, 150))
    for workdir, steps in zip(series, starts, strict=True):
        series[workdir] = dataclasses.replace(series[workdir], stage_starts=steps)
    spec = chart_spec(draw_loss_curves(comparisons, collect_runs(comparisons, series)))
    assert len(spec['concat']) == 2
    for panel in spec['concat']:
        *_, rule = panel['layer']
        assert rule['mark']['type'] == 'rule' and rule['encoding'].keys() == {'x'}
        table = rule.get('data', {})
        values = table.get('values') or spec['datasets'][table['name']]
        assert [row['step'] for row in values] == [50, 100, 150]


def test_series_has_stages_texts_and_suites(comparisons, monkeypatch):
    record = comparisons[0].variant.records[0]
    rows = [
        {'step': 10, 'text_wiki_ce': 2.0, 'texts_ce': 2.0, 'suite_bytes_x': 0.5, 'ce': 3.0},
        {'step': 20, 'text_wiki_ce': 1.5, 'texts_ce': 1.5, 'suite_bytes_x': None, 'ce': 2.5},
    ]
    monkeypatch.setattr(Run, 'rows', lambda run: rows)
    series = read_series(record)
    assert series.scalars == {
        'text_wiki_ce': ([10, 20], [2.0, 1.5]),
        'texts_ce': ([10, 20], [2.0, 1.5]),
        'suite_bytes_x': ([10, 20], [0.5, None]),
    }
    assert series.stage_starts == []
    groups = [choice['group'] for choice in build_choices(quantity_names([series]))]
    assert 'held-out texts' in groups and 'suites' in groups
    stages = '0.25: batch_size=4; 1:'
    recipe = Run(Path(record['workdir'])).read_recipe()
    staged = build_recipe(update_config(recipe.config, {'train.stages': stages}))
    monkeypatch.setattr(Run, 'read_recipe', lambda run: staged)
    (boundary,) = read_series(record | {'train_stages': stages}).stage_starts
    assert boundary == staged.stages[0].stop > 0
