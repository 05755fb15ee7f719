"""Reference: the figure of learning rates by size."""

import numpy as np
import pytest

from eval.charts import chart_spec
from eval.report.figures import draw_rates_by_size, group_by_size
from tests.eval import sweep_fixture as fixture


def write_comparisons(folder, axes):
    fixture.write_sweep(folder, fixture.AXES | axes, {})
    return fixture.compare_sweep(folder)


def test_figure_has_panel_per_choice_and_line_per_size(tmp_path):
    """Fields that follow the width are not a choice. Catches sizes sorted as text, panels for each
    width, and a ring that is not at the lowest mean.
    """
    axes = {'model.d_model': (256, 32, 64), 'model.d_ff': (128,), 'scaling.base_width': (32,)}
    panels = group_by_size(write_comparisons(tmp_path / 'sweep', axes))
    assert list(panels) == [f'norm {norm}' for norm in fixture.NORMS]
    for lines in panels.values():
        assert [label for label, _ in lines] == ['d_model 32', 'd_model 64', 'd_model 256']
    spec = chart_spec(draw_rates_by_size(panels, 'ce'))
    assert spec['facet']['sort'] == list(panels)
    rows = spec['data']['values']
    rings = [row for row in rows if 'ring' in row]
    for ring in rings:
        line = [
            point
            for point in rows
            if all(point[k] == ring[k] for k in ('panel', 'size')) and 'loss' in point
        ]
        by_rate = {
            row['lr']: [point['loss'] for point in line if point['lr'] == row['lr']] for row in line
        }
        lowest = min(by_rate, key=lambda lr: np.mean(by_rate[lr]))
        assert ring['lr'] == lowest and ring['ring'] == pytest.approx(np.mean(by_rate[lowest]))
    assert len(rings) == 2 * 3


def test_single_size_has_no_figure(tmp_path):
    assert (
        group_by_size(write_comparisons(tmp_path / 'sweep', {'model.activation': ('gelu', 'relu')}))
        == {}
    )
