"""Property: a plan is drawn and written with every program, and programs that do not fit are
marked.
"""

from types import SimpleNamespace

import pytest

from eval.charts import FAIL_COLOUR, PASS_COLOUR, chart_spec
from tpu.figures import draw_panels, write_plan
from tpu.trials import TIME_COLUMNS, Trial

GIB = 2**30
STEPS = {'step_seconds_hidden': 1.0, 'step_seconds_exposed': 3.0, 'bound_seconds': 0.5}
SHARES = {'mfu': 0.5, 'mfu_bound': 0.6}
ESTIMATE = SimpleNamespace(
    **dict.fromkeys(TIME_COLUMNS.values(), 2.0) | STEPS | SHARES, limit='communication'
)
TRIALS = {
    'fast': Trial({}, ESTIMATE, needed=8 * GIB, available=16 * GIB),
    'large': Trial({}, needed=20 * GIB, available=16 * GIB),
    'refused': Trial({}, refusal='7 does not divide 8'),
}


def test_figure_shows_compiled_programs():
    """Catches a missing bar, and a program that does not fit drawn like the others."""
    for x, panel in zip(('GiB', 'ms'), draw_panels(TRIALS).values(), strict=True):
        spec = chart_spec(panel)
        bars = spec['layer'][0]
        rows = {row['program']: row for row in spec['data']['values']}
        assert bars['encoding']['x']['field'] == x and rows.keys() == {'fast', 'large'}
        assert (rows['fast']['GiB'], rows['fast']['ms'], rows['fast']['fits']) == (8, 2000, True)
        assert [rows['fast'][name] for name in ('bound', 'hidden', 'exposed')] == [500, 1000, 3000]
        assert (rows['large']['GiB'], rows['large']['there'], rows['large']['fits']) == (
            20,
            16,
            False,
        )
        scale = bars['encoding']['color']['scale']
        assert dict(zip(scale['domain'], scale['range'], strict=True)) == {
            True: PASS_COLOUR,
            False: FAIL_COLOUR,
        }


def test_long_names_take_several_lines():
    """Catches labels that are cut, and bars that are nearer to each other than their labels."""
    name = 'fsdp=32 tensor=2 remat=attention microbatches=4'
    panel = chart_spec(draw_panels({name: TRIALS['fast']})['memory'])
    (row,) = panel['data']['values']
    lines = row['program'].splitlines()
    assert ' '.join(lines) == name and len(lines) == 3 and max(map(len, lines)) <= 24
    axis = panel['layer'][0]['encoding']['y']['axis']
    assert axis['labelOffset'] == -12 and panel['height']['step'] > 3 * 12
    short = chart_spec(draw_panels({'a': TRIALS['fast']})['memory'])
    assert short['layer'][0]['encoding']['y']['axis']['labelOffset'] == 0


def test_fitting_programs_have_bound_ticks():
    step = chart_spec(draw_panels(TRIALS)['step'])
    (tick,) = [layer for layer in step['layer'] if layer['mark']['type'] == 'tick']
    assert tick['encoding']['x']['field'] == 'bound'
    assert 'fits' in str(tick['transform'])


def test_no_step_panel_if_nothing_fits():
    assert list(draw_panels({'large': TRIALS['large']})) == ['memory']


@pytest.mark.parametrize('suffix', ['html', 'svg'])
def test_page_and_figure_are_written(tmp_path, suffix):
    """Catches a failing row placed last, where the page takes it for one that passes."""
    path = tmp_path / f'plan.{suffix}'
    write_plan(path, 'a.py on v5e:2x2', TRIALS, '1 of 3 fit', True, ['a note'])
    text = path.read_text()
    assert 'a.py on v5e:2x2' in text and 'does not fit' in text
    if suffix == 'html':
        assert '<div class="verdict bad"><p><b>1 of 3 fit</b></p>\n<p>a note</p>' in text
        rows = [line for line in text.splitlines() if line.startswith('<tr class=')]
        marks = ['bad' in row.partition('>')[0] for row in rows]
        assert marks == [True, True, False] and '<td>fast</td><td>8.00</td>' in rows[2]
        assert '7 does not divide 8' in rows[1]
