"""Reference tests of a sweep's comparison: closed forms and numbers worked out by hand."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from eval import runs
from lm.study.tables import comparison, results
from lm.study.tables.columns import columns, schema
from lm.study.tables.comparison import best_lr, sensitivity
from lm.study.tables.variants import select_baseline
from tests.eval import sweep_fixture as fixture


def test_best_lr_minimizes_mean_over_seeds():
    losses = {0.1: {0: 2.0, 1: 3.0}, 0.01: {0: 2.4, 1: 2.4}, 0.001: {0: 2.4, 1: 2.4}, 1.0: {}}
    assert best_lr(losses) == 0.001
    assert best_lr({}) is best_lr({0.1: {}}) is None


def test_sensitivity_by_hand():
    losses = {0.001: {0: 3.0}, 0.01: {0: 2.5}, 0.1: {0: 12.0}}  # 12 is worse than 9 at the start
    assert sensitivity(losses, 9.0) == pytest.approx((3.0 + 2.5 + 9.0) / 3 - 2.5)
    seeds = {0.001: {0: 3.0, 1: 4.0}, 0.01: {0: 2.0, 1: 12.0}}  # means 3.5 and 5.5, capped
    assert sensitivity(seeds, 9.0) == pytest.approx(4.5 - 3.5)
    assert sensitivity({0.001: {0: 2.0}, 0.01: {0: 2.0}}, 9.0) == 0
    assert math.isnan(sensitivity({0.01: {0: 2.0}}, 9.0))
    assert math.isnan(sensitivity(losses, math.nan))


@pytest.fixture(scope='module')
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'norms'
    fixture.write_sweep(folder)
    return runs.gather(folder), results.read_sweep(folder)


def test_compare_lists_variants(sweep):
    rms, layer = comparison.compare(*sweep)
    assert [c.variant.name for c in (rms, layer)] == ['rmsnorm', 'layernorm']
    assert rms.variant.is_baseline and not layer.variant.is_baseline
    assert rms.best_lr == layer.best_lr == 0.003
    assert (rms.loss.mean, rms.loss.n) == (pytest.approx(2.89), 3)
    assert rms.loss.half_width == pytest.approx(
        4.302653 * 0.01 / math.sqrt(3), rel=1e-6
    )  # t, 2 d.o.f.
    assert rms.verdict == '' and layer.verdict == 'worse'
    assert layer.difference.mean == pytest.approx(0.08 + 0.002 / 3)
    spread = np.std([0.08, 0.08, 0.082], ddof=1)
    assert layer.difference.half_width == pytest.approx(4.302653 * spread / math.sqrt(3), rel=1e-6)
    assert (rms.diverged, layer.diverged) == (0, 1)
    per_byte = 2.89 / math.log(2) / fixture.BYTES_PER_TOKEN
    assert rms.bits_per_byte.mean == pytest.approx(per_byte)


def test_compare_counts_divergence_and_skips_unfinished(sweep):
    layer = comparison.compare(*sweep)[1]
    far = 0.2 * math.log10(0.03 / 0.003) ** 2
    assert layer.losses[0.03] == {  # of seeds 0, diverged; 1, done; 2 waits
        (0, 0): fixture.INITIAL_CE,
        (1, 0): pytest.approx(2.9 + 0.08 - 0.01 + far),
    }
    assert set(layer.losses[0.01]) == {(0, 0), (1, 0)}  # seed 2 goes on
    assert math.isnan(layer.sensitivity) and layer.notes == [
        'no sensitivity: lr 0.01 has not ended for 1 of 3 seeds; '
        'lr 0.03 has not ended for 1 of 3 seeds'
    ]


def test_sensitivity_needs_a_finished_grid(tmp_path):
    """The highest rates are the worst: without them the sensitivity would be too low."""
    axes = fixture.AXES | {'model.norm': ('rmsnorm',)}
    waits = {('rmsnorm', 0.03, seed): 'waiting' for seed in fixture.SEEDS}
    partly = {('rmsnorm', 0.03, 0): 'failed', ('rmsnorm', 0.03, 1): 'unfinished'}
    ends = {('rmsnorm', 0.03, seed): 'diverged' for seed in fixture.SEEDS}
    notes = {}
    for name, fates in (('waits', waits), ('partly', partly), ('ends', ends)):
        fixture.write_sweep(tmp_path / name, axes, fates)
        [variant] = fixture.compare_sweep(tmp_path / name)
        notes[name] = variant.notes
        assert math.isnan(variant.sensitivity) == (name != 'ends')
    assert notes == {
        'waits': ['no sensitivity: lr 0.03 has not ended'],
        'partly': [
            'no sensitivity: lr 0.03 failed for 1 of 3 seeds; '
            'lr 0.03 has not ended for 1 of 3 seeds'
        ],
        'ends': [],
    }
    by_hand = [2.89 + 0.2 * math.log10(lr / 0.003) ** 2 for lr in fixture.LRS[:3]]
    mean = (sum(by_hand) + fixture.INITIAL_CE) / 4
    assert variant.sensitivity == pytest.approx(mean - 2.89)


def test_sensitivities_over_different_grids_get_a_note(monkeypatch):
    monkeypatch.setattr(comparison, 'initial_loss', lambda records: 8.0)
    records = [ended_record(3.0 + lr, 0, lr=lr) for lr in (0.1, 0.2)]
    records += [ended_record(3.0 + lr, 0, lr=lr, norm='none') for lr in (0.1, 0.2)]
    records += [ended_record(3.0 + lr, 0, lr=lr, norm='layernorm') for lr in (0.1, 0.2, 0.4)]
    base, same, other_grid = comparison.compare(records, SWEEP)
    has_note = [
        any('is not comparable' in note for note in c.notes) for c in (base, same, other_grid)
    ]
    assert has_note == [False, False, True] and not math.isnan(other_grid.sensitivity)


def test_initial_loss_is_found_after_a_damaged_line(tmp_path):
    fixture.write_run(tmp_path / 'run', fixture.base_config())
    records = runs.gather(tmp_path / 'run')
    path = tmp_path / 'run' / 'metrics.jsonl'
    path.write_bytes(b'{"step": 1, "ce": \xff\n{"step": 1, "ce": NaN}\n' + path.read_bytes())
    assert comparison.initial_loss(records) == fixture.INITIAL_CE
    path.unlink()
    assert math.isnan(comparison.initial_loss(records))


def test_divergence_without_initial_loss_is_noted():
    records = [ended_record(3.0, seed) for seed in (0, 1)]
    records.append(ended_record(None, 2, status='diverged'))
    records.append(ended_record(4.0, 0, lr=0.1))
    [variant] = comparison.compare(records, SWEEP)
    assert variant.loss.n == 2 and variant.notes == [
        '1 of 3 diverged at its best learning rate; left out, as there is no record of the loss at '
        'initialisation',
        'best at the lowest learning rate tried',
        'no sensitivity: the loss at initialisation is not recorded',
    ]


def test_verdicts_are_adjusted_for_multiple_comparisons():
    """Each of three variants is worse with p = 0.03, which alone would give a verdict."""
    spread = np.array([-1.0, 0.0, 1.0])
    shift = stats.t.isf(0.015, 2) / 3**0.5
    base = [ended_record(3.0, seed) for seed in range(3)]
    worse = {
        norm: [ended_record(3.0 + x + shift, seed, norm=norm) for seed, x in enumerate(spread)]
        for norm in ('none', 'layernorm', 'dyt')
    }
    _, single = comparison.compare(base + worse['none'], SWEEP)
    assert (
        single.verdict == 'worse'
        and single.p == pytest.approx(0.03)
        and single.seeds_needed is None
    )
    variants = comparison.compare([*base, *itertools.chain(*worse.values())], SWEEP)
    assert [c.verdict for c in variants] == ['', *['within noise'] * 3] and math.isnan(
        variants[0].p
    )
    assert [c.p for c in variants[1:]] == pytest.approx([0.09] * 3)
    assert [c.difference.half_width for c in variants[1:]] == pytest.approx(
        [single.difference.half_width] * 3
    )
    assert {c.seeds_needed for c in variants[1:]} == {5}


RATES = {'base': fixture.base_config(), 'axes': {'optim.lr': [], 'train.seed': []}}


def test_rates_are_compared_if_only_they_were_swept():
    records = [
        ended_record(3.0 + 10 * lr + 0.001 * seed * lr, seed, lr=lr)
        for lr in (0.003, 0.001, 0.01)
        for seed in (0, 1)
    ]
    low, best, high = comparison.compare_rates(records, RATES)
    assert [c.variant.name for c in (low, best, high)] == ['lr 0.001', 'lr 0.003', 'lr 0.01']
    assert low.variant.is_baseline and low.verdict == ''  # that of the base
    assert high.difference.mean == pytest.approx(0.0900045) and high.verdict == 'worse'
    base = fixture.update_config(fixture.base_config(), {'optim.lr': 0.5})
    rates = comparison.compare_rates(records[:2] + records[4:], RATES | {'base': base})
    assert [c.variant.is_baseline for c in rates] == [True, False]  # the best of two
    assert comparison.compare_rates(records[:2], RATES) == []
    assert comparison.compare_rates(records, SWEEP) == []


def lr_choice_text(records, sweep):
    rates = comparison.compare_rates(records, sweep)
    return comparison.describe_lr_choice(comparison.compare(records, sweep), rates, sweep['base'])


def test_describe_lr_choice():
    """Catches verdicts on the seeds that chose a rate without a sentence on it."""
    pairs = [(seed, norm) for seed in (0, 1) for norm in ('rmsnorm', 'none')]
    one_rate = [ended_record(3.0 + 0.01 * seed, seed, norm=norm) for seed, norm in pairs]
    assert 'a single learning rate' in lr_choice_text(one_rate, SWEEP)
    two_rates = one_rate + [ended_record(3.1, seed, lr=0.02, norm=norm) for seed, norm in pairs]
    assert 'The same seeds chose' in lr_choice_text(
        two_rates, SWEEP
    ) and 'chance' not in lr_choice_text(two_rates, SWEEP)
    uneven = two_rates + [ended_record(3.1, seed, lr=0.04, norm='none') for seed in (0, 1)]
    assert 'Variants have 2 to 3 rates' in lr_choice_text(uneven, SWEEP)
    assert lr_choice_text(one_rate[::2], SWEEP) == ''
    rates = [ended_record(3.0 + lr, seed, lr=lr) for lr in (0.001, 0.01) for seed in (0, 1)]
    assert 'no result chose one' in lr_choice_text(rates, RATES)
    away = fixture.update_config(fixture.base_config(), {'optim.lr': 0.5})
    assert 'chose lr 0.001 as the best' in lr_choice_text(rates, RATES | {'base': away})


def ended_record(loss, seed, lr=0.01, norm='rmsnorm', status='done', **fields):
    record = dict.fromkeys(schema().names) | {'status': status, 'ce': loss, 'norm': norm}
    return record | {'lr': lr, 'train_seed': seed, 'data_seed': 0, 'workdir': '/none'} | fields


SWEEP = {'base': fixture.base_config(), 'axes': {'model.norm': [], 'train.seed': []}}


def make_variants(axes, listed):
    """Returns the variants of a sweep over these fields, with the listed values in its cells."""
    names = [columns()[path] for path in axes]
    records = [ended_record(3.0, 0) | dict(zip(names, values, strict=True)) for values in listed]
    return comparison.split_variants(records, SWEEP | {'axes': {path: [] for path in axes}})


def test_divergence_at_best_lr_is_noted(monkeypatch):
    monkeypatch.setattr(comparison, 'initial_loss', lambda records: 8.0)
    base = [ended_record(3.0 + 0.01 * seed, seed) for seed in range(3)]
    bad = [ended_record(2.0, seed, norm='none') for seed in range(2)]
    bad.append(ended_record(None, 2, norm='none', status='diverged'))
    variant = comparison.compare(base + bad, SWEEP)[1]
    assert variant.loss.mean == pytest.approx((2.0 + 2.0 + 8.0) / 3)
    assert variant.verdict == 'within noise'  # and not better by two lucky seeds
    assert variant.notes[0].startswith('1 of 3 diverged at its best learning rate')


def test_failed_or_stopped_run_is_not_divergence():
    for status in ('failed', 'stopped', 'unfinished', 'waiting'):
        assert not comparison.has_diverged(ended_record(None, 0, status=status))
    assert comparison.has_diverged(ended_record(None, 0, status='failed', diverged_step=7))
    assert comparison.has_diverged(ended_record(None, 0, validated_step=100))  # done, and NaN
    pair = [ended_record(3.0, 0), ended_record(2.0, 0, norm='none', status='stopped')]
    variant = comparison.compare(pair, SWEEP)[1]
    assert (
        variant.best_lr is None and variant.notes == ['no run has ended'] and variant.verdict == ''
    )


def test_one_seed_and_no_common_seed():
    records = [
        ended_record(3.0, 0),
        ended_record(2.0, 0, norm='none'),
        ended_record(2.0, 5, norm='layernorm'),
    ]
    _, one_seed, none = comparison.compare(records, SWEEP)
    assert one_seed.verdict == 'one seed' and one_seed.difference.mean == -1.0
    assert none.verdict == '' and 'no seed has ended' in none.notes[-1]


def test_first_or_selected_variant_is_the_baseline():
    records = [
        ended_record(3.0, 0, norm='none', cell='a'),
        ended_record(3.0, 0, norm='layernorm', cell='b'),
    ]
    variants = comparison.split_variants(records, SWEEP)
    assert [v.is_baseline for v in variants] == [True, False]
    for name in ('layernorm', 'norm layernorm', 'b'):
        assert [v.is_baseline for v in select_baseline(variants, name)] == [False, True]
    with pytest.raises(ValueError, match=r"is not a variant or a cell .* mean 'layernorm'"):
        select_baseline(variants, 'layernrm')


def test_ambiguous_value_keeps_its_field():
    """Catches two variants with one name, a 'none' without its field, and 'rmsnorm' alone for a
    norm of queries and keys.
    """
    axes = ('model.norm', 'model.qk_norm', 'model.d_model')
    listed = [('rmsnorm', 'none', 64), ('layernorm', 'rmsnorm', 64), ('dyt', 'none', 64)]
    variants = make_variants(axes, listed)
    assert [v.name for v in variants] == ['baseline', 'layernorm, qk_norm rmsnorm', 'dyt']
    assert [v.name for v in select_baseline(variants, 'dyt')] == [
        'the first',
        variants[1].name,
        'dyt',
    ]
    variants = make_variants(['model.qk_norm'], [('layernorm',), ('rmsnorm',)])
    assert [v.name for v in variants] == ['qk_norm layernorm', 'qk_norm rmsnorm']


def test_variant_name_omits_size_dependent_fields():
    """Catches names that repeat them, and two variants with one name."""
    axes = ('model.d_model', 'model.n_heads', 'scaling.base_width', 'model.norm')
    sizes = [(64, 1, None), (128, 2, 64)]
    grid = [(*size, norm) for size in sizes for norm in ('rmsnorm', 'layernorm')]
    variants = make_variants(axes, grid)
    expected = [
        f'd_model {size}, {norm}' for size in (64, 128) for norm in ('rmsnorm', 'layernorm')
    ]
    assert [v.name for v in variants] == expected
    variants = make_variants(axes[:2], [(64, 1), (64, 2)])
    assert [v.name for v in variants] == ['d_model 64, n_heads 1', 'd_model 64, n_heads 2']


def test_listed_variants_are_named_by_differences():
    """A full grid names all values of each variant."""
    axes = ('model.norm', 'model.placement', 'attention.gate')
    listed = [('rmsnorm', 'pre', 'none'), ('none', 'pre', 'none'), ('rmsnorm', 'post', None)]
    variants = make_variants(axes, listed)
    assert [v.name for v in variants] == ['baseline', 'norm none', 'post']
    assert variants[0].values_text == 'norm rmsnorm, placement pre, attention_gate none'
    grid = [(*pair, 'none') for pair in itertools.product(('rmsnorm', 'none'), ('pre', 'post'))]
    assert make_variants(axes, grid)[-1].name == 'norm none, post, attention_gate none'


def test_tokenizers_are_compared_in_bits_per_byte(monkeypatch):
    """The byte tokenizer has a lower loss per token, and a higher loss per byte."""
    monkeypatch.setattr(comparison, 'initial_loss', lambda records: 8.0)
    sweep = SWEEP | {'axes': {'data.tokenizer': ['bpe:4096', 'byte'], 'train.seed': [0, 1]}}
    records = []
    for seed in (0, 1):
        jitter = 0.001 * seed
        records.append(ended_record(3.0, seed, tokenizer='bpe:4096', bits_per_byte=1.5))
        records.append(ended_record(1.2, seed, tokenizer='byte', bits_per_byte=1.8 + jitter))
    variant = comparison.compare(records, sweep)[1]
    assert variant.verdict == 'worse' and variant.difference.mean == pytest.approx(0.3005)
    assert variant.initial == pytest.approx(8.0 * np.mean([1.8, 1.801]) / 1.2)
