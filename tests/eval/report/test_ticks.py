"""Property: labels of an axis have room, in wide and in narrow charts."""

import re
import xml.etree.ElementTree as ET

import altair as alt
import pytest
import vl_convert

from eval.charts import LIGHT, chart_spec
from eval.report.arm_charts import draw_tuned_losses
from eval.report.figures import (
    collect_runs,
    draw_differences,
    draw_final_losses,
    draw_learning_rates,
    draw_loss_curves,
)
from eval.report.layers import build_axis
from eval.report.series import read_series
from eval.report.subject import read_subject
from lm.study.tables.comparison import compare_variants
from tests.eval import sweep_fixture as fixture
from tests.eval import tuned_fixture as tuned

DIGIT, POINT = 0.556, 0.278  # widths in font sizes (Helvetica); other characters as digits
GAP = 6  # pixels between two labels: less reads as one number
SEEDS = {'model.norm': fixture.NORMS, 'train.seed': fixture.SEEDS}
NARROW = 230  # pixels of a panel on a phone of 400


def label_boxes(svg):
    """Returns (left, right, top, bottom) of the labels of each axis."""
    axes = []

    def walk(node, x, y, labels):
        shift = re.match(r'translate\(([-\d.]+),([-\d.]+)\)', node.get('transform', ''))
        if shift:
            x, y = x + float(shift[1]), y + float(shift[2])
        classes = node.get('class', '')
        if 'role-axis-label' in classes:
            labels = []
            axes.append(labels)
        if node.tag.endswith('}text') and labels is not None and node.get('opacity') != '0':
            size = float(re.match(r'[\d.]+', node.get('font-size'))[0])
            width = size * sum(POINT if c in '.,' else DIGIT for c in node.text)
            start = x - width * {'middle': 0.5, 'end': 1.0}.get(node.get('text-anchor'), 0.0)
            labels.append((start, start + width, y - size, y))
        for child in node:
            walk(child, x, y, labels)

    walk(ET.fromstring(svg), 0.0, 0.0, None)
    return [labels for labels in axes if labels]


def collisions(labels):
    pairs = [(a, b) for i, a in enumerate(labels) for b in labels[i + 1 :]]
    return [
        (a, b)
        for a, b in pairs
        if max(a[0], b[0]) < min(a[1], b[1]) + GAP and max(a[2], b[2]) < min(a[3], b[3])
    ]


def resize(spec, width):
    """Returns the specification with panels of at most this width, one below the other."""
    parts = spec.get('concat') or ([spec['spec']] if 'spec' in spec else None)
    if parts:
        return spec | {'columns': 1, 'concat': [resize(part, width) for part in parts]}
    return spec | {'width': min(width, spec['width'])}


@pytest.fixture(scope='module')
def charts(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    fixture.write_sweep(folder / 'seeds', SEEDS, {})
    fixture.write_sweep(folder / 'rates')
    losses = {'rmsnorm': tuned.bowl(3.0, 0.5, 0.01, 1), 'dyt': tuned.bowl(3.1, -2.0, 0.01, 2)}
    tuned.write_tuned(folder / 'tuned', losses, {'optim.lr': None})
    subjects = [read_subject([folder / name]) for name in ('seeds', 'rates')]
    seeds, rates = (compare_variants(subject.variants, 'ce') for subject in subjects)
    series = {record['workdir']: read_series(record) for record in subjects[0].records}
    return {
        'differences': draw_differences(seeds, 'ce'),
        'final_losses': draw_final_losses(seeds, 'ce'),
        'loss_curves': draw_loss_curves(seeds, collect_runs(seeds, series)),
        'learning_rates': draw_learning_rates(rates, 'ce'),
        'tuned_losses': draw_tuned_losses(read_subject([folder / 'tuned']).ablation),
    }


@pytest.mark.parametrize('width', [1000, NARROW])
@pytest.mark.parametrize(
    'name', ['differences', 'final_losses', 'loss_curves', 'learning_rates', 'tuned_losses']
)
def test_labels_do_not_collide(charts, name, width):
    spec = resize(chart_spec(charts[name]), width)
    axes = label_boxes(vl_convert.vegalite_to_svg(spec, config=LIGHT))
    assert len(axes) >= 2 and max(map(len, axes)) > 2
    assert [collisions(labels) for labels in axes] == [[]] * len(axes)


@pytest.mark.parametrize('domain', [(-0.13, 0.03), (2.66, 2.86), (0, 4e5)])
def test_labels_have_gaps_at_every_width(domain):
    """Catches labels that do not overlap, but read as one number."""
    x = {'field': 'x', 'type': 'quantitative', 'scale': {'domain': domain, 'nice': False}}
    spec = {'data': {'values': []}, 'mark': 'point', 'encoding': {'x': x}}
    for width in range(150, 600, 30):
        svg = vl_convert.vegalite_to_svg(spec | {'width': width}, config=LIGHT)
        ((*labels,),) = label_boxes(svg)
        assert len(labels) > 1 and collisions(labels) == []


@pytest.mark.parametrize(
    ('values', 'labels'),
    [
        ([0.3, 7.0], ['0.5', '1', '2', '5']),
        ([1e-4, 1.0], ['0.0001', '0.001', '0.01', '0.1', '1']),
    ],
)
def test_logarithmic_axis_has_round_labels(values, labels):
    """Catches an axis on which Vega's own choice leaves 0.2, 0.6 and 4, or a single label."""
    scale = alt.Scale(type='log', domain=values, nice=False)
    y = alt.Y('y:Q', scale=scale, axis=build_axis('log', values))
    chart = alt.Chart(alt.Data(values=[])).mark_point().encode(y=y).properties(height=190)
    svg = vl_convert.vegalite_to_svg(chart_spec(chart), config=LIGHT)
    texts = re.findall(r'<text[^>]*opacity="1"[^>]*>([\d.]+)<', svg)
    assert sorted(texts, key=float) == labels


def test_finds_collisions():
    near = [(0, 20, 0, 11), (22, 40, 0, 11)]
    assert collisions(near) == [tuple(near)]
    assert collisions([(0, 20, 0, 11), (30, 40, 0, 11)]) == []
    assert collisions([(0, 20, 0, 11), (0, 20, 12, 23)]) == []  # one above the other
