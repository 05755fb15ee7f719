"""Reference: the growth benchmark's fits of known power laws, its marks, and its pictures."""

import math

import pytest

from tests.bench.growth import draw_group, fit_growth, is_too_fast, load_points, table_rows
from tests.bench.growth_curves import CURVES, GROUPS, Point, build_shape

SIZES = 10, 100, 1000


def make_points(law, work=None) -> list[Point]:
    return [Point(n, {'read': law(n)}, {} if work is None else {'read': work(n)}) for n in SIZES]


def test_fits_a_power_law():
    growth = fit_growth(SIZES, [0.5 * n**1.5 for n in SIZES])
    assert growth.exponent == pytest.approx(1.5) and growth.end == pytest.approx(1.5)
    assert math.isnan(fit_growth([10], [1.0]).end)


def test_end_shows_a_term_that_fixed_costs_hide():
    growth = fit_growth(SIZES, [10 + 1e-4 * n**2 for n in SIZES])
    assert growth.exponent < 0.6 < 0.9 < growth.end


@pytest.mark.parametrize(
    ('law', 'work', 'mark'),
    [
        (lambda n: 2.0 * n, None, ''),
        (lambda n: n**1.1, None, ''),
        (lambda n: n**1.3, None, 'too fast'),
        (lambda n: n**2.0, lambda n: n**2, ''),
        (lambda n: n**0.5, lambda n: 1.0, 'too fast'),
        (lambda n: 3.0, lambda n: 1.0, ''),
    ],
)
def test_marks_what_grows_faster_than_its_work(law, work, mark):
    [row] = table_rows('cells', make_points(law, work))
    assert row[-1] == mark
    assert is_too_fast(fit_growth(SIZES, [n**1.3 for n in SIZES]), fit_growth(SIZES, SIZES))


def test_draws_each_curve_and_its_work():
    spec = draw_group({'cells': make_points(lambda n: n**1.3)}).to_dict()
    [panel] = spec['concat']
    points, ideal = (layer['data']['values'] for layer in panel['layer'])
    assert [row['size'] for row in points] == [*SIZES]
    assert ideal[-1] == points[-1]
    assert ideal[0]['seconds'] == pytest.approx(points[-1]['seconds'] / 100)


def test_every_curve_is_in_one_picture():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(CURVES)
    assert all(list(curve.sizes) == sorted(set(curve.sizes)) for curve in CURVES.values())


def test_shapes_and_files(tmp_path):
    assert build_shape(width=512) == (512, 8, 2, 2048, 256, 1024, 4)
    assert build_shape(vocabulary=64, rows=8)[5:] == (64, 8)
    assert load_points(tmp_path / 'growth.json') == {}
