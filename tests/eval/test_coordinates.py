"""`eval.coordinates`: slopes of known sizes, verdicts, and the parametrisations themselves."""

import math

import numpy as np
import pytest

from eval import coordinates
from eval.charts import chart_spec
from eval.coordinates import (
    CHANGE,
    SIZE,
    Slope,
    build_panels,
    fit_slopes,
    lower_slope_limit,
    resize_recipe,
    size_warnings,
    write_figures,
)
from tests.eval.programs import run_module
from tests.helpers import tiny_config

SMALL = {
    'model.d_model': 32,
    'model.n_heads': 4,
    'model.n_kv_heads': 4,
    'model.d_ff': 64,
    'model.n_layers': 1,
    'data.batch_size': 4,
    'optim.lr': 0.02,
    'optim.eps': 1e-8,
}
WIDTHS = (32, 256)  # two programs, as far apart as a slope needs


def slope(value, spread=0.0, of=SIZE, least=0.0):
    return Slope('final', of, value, spread, np.ones((1, 2)), least)


def test_a_power_of_the_width_is_found(monkeypatch):
    """Sizes of c m^a have slope a, over seeds with their spread. Catches logs of one side alone."""

    def sizes_of(config, seeds, steps, places):
        rng = np.random.default_rng(config.model.d_model)
        noise = 1 + 1e-3 * rng.standard_normal(seeds)
        return {('final', SIZE): 3 * config.model.d_model**0.5 * noise}

    monkeypatch.setattr(coordinates, 'measure_sizes', sizes_of)
    (found,) = fit_slopes(tiny_config(), 'width', WIDTHS, 3, 1)
    assert found.value == pytest.approx(0.5, abs=1e-2) and 0 < found.spread < 1e-2
    assert found.verdict(0.05) == 'grows' and found.is_failure(0.05)


def test_verdicts():
    """The whole interval must be outside of the tolerance; logits may shrink, as far as noise does,
    and what is no number fails.
    """
    assert slope(0.04).verdict(0.05) == 'flat'
    assert slope(0.2, 0.16).verdict(0.05) == 'flat' and slope(0.2, 0.1).verdict(0.05) == 'grows'
    assert slope(-0.2, 0.1).is_failure(0.05) and not slope(-0.2, 0.16).is_failure(0.05)
    logits = slope(-0.5, of=CHANGE, least=lower_slope_limit('width', 'logits', CHANGE))
    assert not logits.is_failure(0.05) and logits._replace(value=-1.0).is_failure(0.05)
    assert logits._replace(value=0.5).is_failure(0.05)
    assert slope(math.nan).verdict(0.05) == 'not finite' and slope(math.nan).is_failure(0.05)
    assert lower_slope_limit('width', 'attention logits 1/2', SIZE) == -0.5
    assert (
        lower_slope_limit('depth', 'final', SIZE),
        lower_slope_limit('depth', 'final', CHANGE),
    ) == (-0.5, 0)


FLAT_ROWS = {
    'mup': {'scaling.base_width': 32},
    'complete_p': {'scaling.base_width': 32, 'scaling.base_depth': 1},
    'unit': {'optim.lr': 0.5, 'optim.weight_decay': 0.0},
}


@pytest.mark.full
@pytest.mark.parametrize('name', FLAT_ROWS)
def test_stays_flat_in_width(name):
    """Every activation of the model and its change, with attention, norms and gated MLPs; but for
    the change of embeddings under `unit`, whose rate falls as 1 / sqrt(D).
    """
    base = {'scaling.name': name, 'model.activation': 'swiglu', **FLAT_ROWS[name]}
    found = fit_slopes(tiny_config(SMALL | base), 'width', WIDTHS, 2, 3)
    assert len(found) == 11
    moving = {
        (one.activation, one.quantity)
        for one in found
        if not one.lower_limit - 0.15 < one.value < 0.15
    }
    assert moving == ({('embedding', CHANGE)} if name == 'unit' else set())


@pytest.mark.full
def test_standard_fails():
    """What a layer adds grows with width at one learning rate."""
    found = fit_slopes(tiny_config(SMALL), 'width', WIDTHS, 2, 3)
    grown = {
        one.activation for one in found if one.quantity == CHANGE and one.verdict(0.1) == 'grows'
    }
    assert 'after_mlp 1/1' in grown or 'after_attention 1/1' in grown


@pytest.mark.full
def test_depth():
    """At the last block what training changes grows with depth under `standard`, and under
    `complete_p` it does not. Catches blocks of a deep model that are not looked at.
    """
    deep = SMALL | {'optim.lr': 0.01, 'scaling.base_width': 32, 'scaling.base_depth': 2}
    changes = {}
    for name in ('standard', 'complete_p'):
        own = SMALL | {'optim.lr': 0.01} if name == 'standard' else deep | {'scaling.name': name}
        found = fit_slopes(tiny_config(own), 'depth', (2, 8), 2, 3)
        assert {one.activation for one in found} >= {'after_mlp 1/2', 'after_mlp 2/2'}
        (changes[name],) = [
            one for one in found if one.activation == 'after_mlp 2/2' and one.quantity == CHANGE
        ]
    assert changes['standard'].value > 0.4 and changes['complete_p'].value < 0.1


def test_heads_grow_in_number_or_in_width():
    more = resize_recipe(tiny_config(), 'width', 32)
    assert (more.model.n_heads, more.model.d_ff) == (4, 64)
    asked = {'scaling.name': 'mup', 'scaling.base_width': 8, 'scaling.base_heads': 2}
    assert resize_recipe(tiny_config(asked), 'width', 32).model.n_heads == 2
    assert resize_recipe(tiny_config(), 'depth', 5).model.n_layers == 5


@pytest.mark.default_rows('html')
@pytest.mark.parametrize('ending', ['html', 'svg', 'png'])
def test_a_page_or_a_figure(tmp_path, ending):
    found = [slope(0.0, of=CHANGE), slope(0.5)]
    path = tmp_path / f'page.{ending}'
    write_figures(path, '<title>', 'about', found, 'width', (8, 16), 0.05)
    text = path.read_bytes().decode(errors='replace')
    assert ('grows (fails)' in text) == (ending == 'html') and len(text) > 1000
    if ending == 'html':
        assert '1 of 2 fail: ' in text and '&lt;title&gt;' in text and '2 widths over' in text
        assert text.index('grows (fails)') < text.index('>flat<')  # what fails comes first


def test_the_figure_has_each_seed_and_names_what_fails():
    found = [slope(0.0, of=CHANGE), slope(0.5)]
    charts = build_panels(found, 'width', (8, 16), 0.05)
    for one, chart in zip(found, (charts[CHANGE], charts[SIZE]), strict=True):
        spec = chart_spec(chart)
        rows = spec['data']['values']
        assert len(rows) == one.sizes.size and {row['fails'] for row in rows} == {
            one.is_failure(0.05)
        }
        assert [layer['mark']['type'] for layer in spec['layer']] == ['line', 'point', 'text']


@pytest.mark.parametrize(
    ('values', 'said'),
    [((64, 128), '2 widths over a factor of 2'), ((64, 96, 128), '3 widths'), ((64, 128, 256), '')],
)
def test_too_few_sizes_are_said(values, said):
    found = ''.join(size_warnings('width', values))
    assert said in found and bool(found) == bool(said)


def test_sizes_that_cannot_be():
    with pytest.raises(ValueError, match=r'two widths and better four; got \[64, 64\]'):
        fit_slopes(tiny_config(), 'width', (64, 64), 2, 1)
    with pytest.raises(ValueError, match=r'at a width of 20 .* 2.5 for model.n_heads=2'):
        fit_slopes(tiny_config(), 'width', (20, 40), 2, 1)


@pytest.mark.full
def test_bad_input_ends_with_a_line():
    done = run_module('eval.coordinates', '--config=configs/default.py')
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.startswith('error: give --widths=64,128,256,512 or --depths=2,4,8')
