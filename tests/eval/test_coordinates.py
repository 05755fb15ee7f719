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
    parse_sizes,
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


def slope(value, spread=0.0, quantity=SIZE, lower_limit=0.0):
    return Slope('final', quantity, value, spread, np.ones((1, 2)), lower_limit)


def test_fitted_slope_is_the_exponent(monkeypatch):
    """Sizes c m^a have slope a, with their spread over seeds. Catches logs of one side alone."""

    def power_law(config, seeds, steps, n_positions, by_group):
        rng = np.random.default_rng(config.model.d_model)
        noise = 1 + 1e-3 * rng.standard_normal(seeds)
        return {('final', SIZE): 3 * config.model.d_model**0.5 * noise}

    monkeypatch.setattr(coordinates, 'measure_sizes', power_law)
    (fitted,) = fit_slopes(tiny_config(), 'width', WIDTHS, 3, 1)
    assert fitted.value == pytest.approx(0.5, abs=1e-2) and 0 < fitted.spread < 1e-2
    assert fitted.verdict(0.05) == 'grows' and fitted.is_failure(0.05)


def test_slope_verdicts_use_the_interval():
    """The whole interval must be outside of the tolerance. Logits may shrink as far as noise does,
    and a value that is not finite fails.
    """
    assert slope(0.04).verdict(0.05) == 'flat'
    assert slope(0.2, 0.16).verdict(0.05) == 'flat' and slope(0.2, 0.1).verdict(0.05) == 'grows'
    assert slope(-0.2, 0.1).is_failure(0.05) and not slope(-0.2, 0.16).is_failure(0.05)
    logits = slope(-0.5, quantity=CHANGE, lower_limit=lower_slope_limit('width', 'logits', CHANGE))
    assert not logits.is_failure(0.05) and logits._replace(value=-1.0).is_failure(0.05)
    assert logits._replace(value=0.5).is_failure(0.05)
    assert slope(math.nan).verdict(0.05) == 'not finite' and slope(math.nan).is_failure(0.05)
    assert lower_slope_limit('width', 'attention logits 1/2', SIZE) == -0.5
    assert (
        lower_slope_limit('depth', 'final', SIZE),
        lower_slope_limit('depth', 'final', CHANGE),
    ) == (-0.5, 0)


HYPERSPHERE = {
    'optim.name': 'muon',
    'optim.lr': 0.02,
    'optim.others_lr': 0.01,
    'data.batch_size': 32,
    'optim.weight_decay': 0.0,
    'optim.match_norm': 1.0,
    'optim.match_norm_roles': 'hidden+readout',
    'model.reparam': 'normalize_and_project',
    'reparam.roles': 'hidden+readout',
}
FLAT_ROWS = {
    'mup': {'scaling.base_width': 32},
    'complete_p': {'scaling.base_width': 32, 'scaling.base_depth': 1},
    'unit': {'optim.lr': 0.5, 'optim.weight_decay': 0.0},
}


@pytest.mark.full
@pytest.mark.parametrize('name', FLAT_ROWS)
def test_stays_flat_in_width(name):
    """Every activation of the model and its change, with attention, norms and gated MLPs.

    Except the change of embeddings under `unit`, whose rate falls as 1 / sqrt(D).
    """
    base = {'scaling.name': name, 'model.activation': 'swiglu', **FLAT_ROWS[name]}
    fits = fit_slopes(tiny_config(SMALL | base), 'width', WIDTHS, 2, 3)
    assert len(fits) == 11
    moving = {
        (fit.activation, fit.quantity)
        for fit in fits
        if not fit.lower_limit - 0.15 < fit.value < 0.15
    }
    assert moving == ({('embedding', CHANGE)} if name == 'unit' else set())


@pytest.mark.full
def test_hyper_p_is_flat_but_for_its_published_readout(monkeypatch):
    """Rates of relative updates need no factor of the width, if gradients have full rank: with
    more tokens, and a larger vocabulary, than the model is wide.
    """
    monkeypatch.setattr(coordinates, 'VOCAB', 512)
    base = SMALL | HYPERSPHERE | {'scaling.base_width': 32, 'scaling.base_depth': 1}
    slopes = {}
    for factor in ('none', 'width'):
        changes = {'scaling.name': 'hyper_p', 'scaling.readout_factor': factor}
        fits = fit_slopes(tiny_config(base | changes), 'width', (32, 128), 2, 3)
        slopes[factor] = {(fit.activation, fit.quantity): fit for fit in fits}
    # Constant weights of a readout add up to the root of the width.
    assert 0.3 < slopes['none']['logits', SIZE].value < 0.7
    for fit in slopes['width'].values():
        assert fit.lower_limit - 0.15 < fit.value < 0.15, fit


@pytest.mark.full
def test_change_by_group_names_the_wrong_rate():
    """Under `standard` the change of the logits by hidden matrices grows with the width; under
    `mup` that of no group does.
    """

    def slopes(changes):
        recipe = tiny_config(SMALL | changes)
        fits = fit_slopes(recipe, 'width', WIDTHS, 2, 3, by_group=True)
        return {
            fit.activation.removeprefix('logits by '): fit.value
            for fit in fits
            if ' by ' in fit.activation
        }

    standard, mup = (
        slopes(changes)
        for changes in ({}, {'scaling.name': 'mup', 'scaling.base_width': WIDTHS[0]})
    )
    assert standard.keys() == mup.keys() == {'embedding', 'hidden', 'norm', 'readout'}
    assert standard['hidden'] > 0.4 and standard['readout'] > 0.4
    assert max(mup.values()) < 0.15


@pytest.mark.full
def test_standard_fails_coordinate_check():
    """The contribution of a layer grows with width at one learning rate."""
    fits = fit_slopes(tiny_config(SMALL), 'width', WIDTHS, 2, 3)
    grown = {
        fit.activation for fit in fits if fit.quantity == CHANGE and fit.verdict(0.1) == 'grows'
    }
    assert 'after_mlp 1/1' in grown or 'after_attention 1/1' in grown


@pytest.mark.full
def test_complete_p_is_flat_in_depth():
    """The change by training at the last block grows with depth under `standard`, but not under
    `complete_p`.

    Catches blocks of a deep model that are not measured.
    """
    deep = SMALL | {'optim.lr': 0.01, 'scaling.base_width': 32, 'scaling.base_depth': 2}
    changes = {}
    for name in ('standard', 'complete_p'):
        changes_of_name = (
            SMALL | {'optim.lr': 0.01} if name == 'standard' else deep | {'scaling.name': name}
        )
        fits = fit_slopes(tiny_config(changes_of_name), 'depth', (2, 8), 2, 3)
        assert {fit.activation for fit in fits} >= {'after_mlp 1/2', 'after_mlp 2/2'}
        (changes[name],) = [
            fit for fit in fits if fit.activation == 'after_mlp 2/2' and fit.quantity == CHANGE
        ]
    assert changes['standard'].value > 0.4 and changes['complete_p'].value < 0.1


def test_heads_grow_in_number_or_width():
    wider = resize_recipe(tiny_config(), 'width', 32)
    assert (wider.model.n_heads, wider.model.d_ff) == (4, 64)
    changes = {'scaling.name': 'mup', 'scaling.base_width': 8, 'scaling.base_heads': 2}
    assert resize_recipe(tiny_config(changes), 'width', 32).model.n_heads == 2
    assert resize_recipe(tiny_config(), 'depth', 5).model.n_layers == 5


@pytest.mark.default_rows('html')
@pytest.mark.parametrize('suffix', ['html', 'svg', 'png'])
def test_write_page_or_figure(tmp_path, suffix):
    fits = [slope(0.0, quantity=CHANGE), slope(0.5)]
    path = tmp_path / f'page.{suffix}'
    write_figures(path, '<title>', 'about', fits, 'width', (8, 16), 0.05)
    text = path.read_bytes().decode(errors='replace')
    assert ('grows (fails)' in text) == (suffix == 'html') and len(text) > 1000
    if suffix == 'html':
        assert '1 of 2 fail: ' in text and '&lt;title&gt;' in text and '2 widths over' in text
        assert text.index('grows (fails)') < text.index('>flat<')  # what fails comes first


def test_figure_shows_seeds_and_failures():
    fits = [slope(0.0, quantity=CHANGE), slope(0.5)]
    charts = build_panels(fits, 'width', (8, 16), 0.05)
    for fit, chart in zip(fits, (charts[CHANGE], charts[SIZE]), strict=True):
        spec = chart_spec(chart)
        rows = spec['data']['values']
        assert len(rows) == fit.sizes.size and {row['fails'] for row in rows} == {
            fit.is_failure(0.05)
        }
        assert [layer['mark']['type'] for layer in spec['layer']] == ['line', 'point', 'text']


@pytest.mark.parametrize(
    ('values', 'message'),
    [((64, 128), '2 widths over a factor of 2'), ((64, 96, 128), '3 widths'), ((64, 128, 256), '')],
)
def test_too_few_sizes_are_reported(values, message):
    warnings = ''.join(size_warnings('width', values))
    assert message in warnings and bool(warnings) == bool(message)


def test_errors_invalid_sizes():
    with pytest.raises(ValueError, match=r'at least two widths, better four; got \[64, 64\]'):
        fit_slopes(tiny_config(), 'width', (64, 64), 2, 1)
    with pytest.raises(ValueError, match=r'at a width of 20, model.n_heads=2 would become 2.5'):
        fit_slopes(tiny_config(), 'width', (20, 40), 2, 1)


@pytest.mark.parametrize('words', [['0', '64'], ['64', 'abc'], ['-8'], ['64', ''], ['8.5']])
@pytest.mark.parametrize('name', ['widths', 'depths'])
def test_sizes_are_whole_numbers(name, words):
    with pytest.raises(ValueError, match=rf'^--{name} must be whole numbers from 1, such as ') as e:
        parse_sizes(name, words)
    assert str(e.value).endswith(f'; got {",".join(words)}')
    assert parse_sizes(name, ['64', '128']) == [64, 128]


@pytest.mark.full
@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ([], 'set exactly one of --widths=64,128,256,512 and --depths=2,4,8'),
        (['--widths=0,64'], '--widths must be whole numbers from 1, such as 64,128,256,512; got 0'),
        (['--widths=32,64', '--tolerance=nan'], '--tolerance must be a finite number; got nan'),
        (['--widths=32,64', '--out=x.pdf'], '--out must end in .html, .png, .svg; got x.pdf'),
        (['--widths=32,64', '--out=gs://b/x.png'], '--out=gs://b/x.png must be a path on this'),
    ],
)
def test_invalid_input_is_one_line(words, message):
    process = run_module('eval.coordinates', '--config=configs/default.py', *words)
    assert process.returncode == 1 and process.stdout == ''
    assert process.stderr.startswith(f'error: {message}') and process.stderr.count('\n') == 1
