"""`eval.rules`: published tables, exponents, ranges, and invalid numbers."""

import json
import math
import runpy

import pytest

from eval.rules import BEYOND, UNKNOWN, WITHIN, RuleInputs, apply_rules, format_rules, write_rules
from lm.config.resolve import resolve
from modules.scaling import rules
from modules.scaling.transfer import TRANSFERS, TunedSettings, transfer_settings
from tests.eval.programs import run_module

GOPHER_FLOPS = 5.76e23


def rules_by_key(**inputs):
    """Returns {(rule, description): Rule}."""
    return {(rule.name, rule.what): rule for rule in apply_rules(RuleInputs(**inputs))}


# Table A3 of arXiv:2203.15556, approach 3: the rows with models of 0.4e9 to 67e9 parameters.
@pytest.mark.parametrize(
    ('flops', 'parameters', 'tokens'),
    [
        (2.21e19, 4e8, 9.2e9),
        (1.62e20, 1e9, 27.1e9),
        (2.46e22, 1e10, 410.1e9),
        (1.71e24, 67e9, 4.1e12),
    ],
)
def test_chinchilla_matches_its_table(flops, parameters, tokens):
    """Reference. Catches rounded exponents (off by a fifth), and alpha in the place of beta."""
    best = rules.chinchilla_allocation(flops, rules.HOFFMANN_SURFACE)
    assert best.parameters == pytest.approx(parameters, rel=0.06)
    assert best.tokens == pytest.approx(tokens, rel=0.06)


def test_refit_recovers_chinchilla():
    """Reference: 70e9 parameters on 1.4e12 tokens were trained with Gopher's compute."""
    best = rules.chinchilla_allocation(GOPHER_FLOPS, rules.BESIROGLU_SURFACE)
    assert best.parameters == pytest.approx(70e9, rel=0.06)
    assert best.tokens == pytest.approx(1.4e12, rel=0.06)


@pytest.mark.parametrize('surface', [rules.HOFFMANN_SURFACE, rules.BESIROGLU_SURFACE])
def test_chinchilla_minimizes_the_loss(surface):
    """Property: no slightly smaller or larger model of the same compute has less loss."""
    best = rules.chinchilla_allocation(1e21, surface)
    assert rules.training_flops(*best) == pytest.approx(1e21)

    def loss(parameters):
        tokens = 1e21 / 6 / parameters
        return surface.a * parameters**-surface.alpha + surface.b * tokens**-surface.beta

    assert loss(best.parameters) < min(loss(best.parameters * 1.01), loss(best.parameters / 1.01))


# Table 3 of arXiv:2203.15556, approach 1.
@pytest.mark.parametrize(
    ('parameters', 'tokens'), [(4e8, 8e9), (1e9, 20.2e9), (1e10, 205.1e9), (67e9, 1.5e12)]
)
def test_twenty_tokens_match_the_table(parameters, tokens):
    assert rules.twenty_tokens(parameters) == pytest.approx(tokens, rel=0.12)


def test_step_law_matches_its_fits():
    """Reference: the mean of the authors' bootstrap fits, exp(c + n ln N + d ln D)."""
    n, d = math.log(1e9), math.log(1e11)
    rate = math.exp(0.5863 - 0.7129 * n + 0.3075 * d)
    assert rules.step_law_rate(1e9, 1e11) == pytest.approx(rate, rel=0.02)
    assert rules.step_law_batch(1e11) == pytest.approx(math.exp(-0.5435 + 0.5709 * d), rel=0.02)


@pytest.mark.parametrize(
    ('parameters', 'tokens', 'rate', 'batch'),
    [(2.15e8, 2e10, 3.91e-3, 5.24e5), (4.29e8, 2.27e10, 1.95e-3, 3.93e5)],
)
def test_step_law_near_the_best_runs(parameters, tokens, rate, batch):
    """Reference: the best cells of the authors' table, two cells of sqrt(2) away at most.

    Catches a batch in sequences, and the two powers exchanged.
    """
    assert 0.5 < rules.step_law_rate(parameters, tokens) / rate < 2
    assert 0.5 < rules.step_law_batch(tokens) / batch < 2


def test_kaplan_at_one_pf_day():
    """Reference: the scales of tables 5 and 6, and D = 2 C / (6 N). Catches FLOPs taken as days."""
    best = rules.kaplan_allocation(8.64e19)
    assert best == pytest.approx((1.3e9, 2e10)) and rules.kaplan_batch(8.64e19) == 2e6
    assert best.tokens == pytest.approx(2 * 8.64e19 / 6 / best.parameters, rel=0.12)
    assert rules.critical_batch(1.0) == 2.1e8


def test_critical_batch_doubles_at_13_percent_less_loss():
    """Reference: the text on figure 10 of arXiv:2001.08361."""
    assert rules.critical_batch(0.87 * 3) / rules.critical_batch(3) == pytest.approx(2, rel=0.05)


def test_rules_scale_with_their_exponents():
    """Property: the effect of doubling on each rule."""

    def power(function):
        return math.log2(function(2e9) / function(1e9))

    assert power(lambda x: rules.step_law_rate(x, 1e10)) == pytest.approx(-0.713)
    assert power(lambda x: rules.step_law_rate(1e9, x)) == pytest.approx(0.307)
    assert power(rules.step_law_batch) == pytest.approx(0.571)
    assert power(lambda x: rules.linear_rate(0.1, 1e9, x)) == pytest.approx(1)
    assert power(lambda x: rules.sqrt_rate(0.1, 1e9, x)) == pytest.approx(0.5)
    assert power(lambda x: rules.kaplan_allocation(x).parameters) == pytest.approx(0.73)
    assert power(lambda x: rules.kaplan_allocation(x).tokens) == pytest.approx(0.27)
    assert power(rules.kaplan_batch) == pytest.approx(0.24)
    assert power(rules.one_epoch_tokens) == pytest.approx(1)


def test_steps_and_tokens_around_critical_batch():
    """Property: linear far below it, flat far above; twice the fewest steps and tokens at it."""
    assert rules.saturating_rate(0.1, 1.0, 2.0, 1e9) == pytest.approx(0.2)
    assert rules.saturating_rate(0.1, 1e9, 2e9, 1.0) == pytest.approx(0.1)
    assert rules.overhead(3e5, 3e5) == (2, 2)
    steps, tokens = rules.overhead(1e5, 3e5)
    assert (steps - 1) * (tokens - 1) == pytest.approx(1) and steps > tokens


def test_rules_state_their_ranges():
    """Contract: small models are beyond Step Law's range, and the text states the quantities."""
    small = rules_by_key(parameters=124e6, tokens=2.5e9)
    rate = small['step_law', 'learning rate, AdamW']
    assert rate.holds == BEYOND and rate.value == pytest.approx(2.33e-3, rel=0.01)
    assert rate.outside == 'parameters 1.24e8 (2.14e8 to 1.08e9), tokens 2.5e9 (4e9 to 1e11)'
    epoch = small['one_epoch', 'data for these parameters']
    assert (epoch.holds, epoch.range) == (UNKNOWN, UNKNOWN)
    inside = rules_by_key(parameters=4e8, tokens=2e10)
    assert inside['step_law', 'learning rate, AdamW'].holds == WITHIN
    text = format_rules(list(small.values()))
    assert f'outside the range of its experiments: {rate.outside}' in text
    epoch_source = 'constants from others that cite it, not the paper'
    assert f'one_epoch: arXiv:1906.06669; experiments: unknown; {epoch_source}' in text
    assert rate.range in text
    table, *_ = text.split('\n\n')
    assert max(map(len, table.splitlines())) <= 80
    assert 'beyond' not in format_rules([inside['step_law', 'learning rate, AdamW']])


def test_range_applies_to_the_allocation():
    """The given size may differ from the allocation for its compute."""
    large = rules_by_key(parameters=1e9, tokens=3e14)
    for quantity in ('model', 'data'):
        assert large['chinchilla', f'{quantity} for this compute'].holds == BEYOND
        assert 'parameters' in large['chinchilla', f'{quantity} for this compute'].outside


def test_batch_and_rate_add_rules():
    """A rate tuned at 1e5 tokens, at 64 times as many: beyond the tested range of the scaling
    rules.
    """
    size = {'parameters': 4e8, 'tokens': 2e10}
    bare, batch = rules_by_key(**size), rules_by_key(**size, batch_tokens=6.4e6)
    rate = rules_by_key(**size, batch_tokens=6.4e6, base_lr=1e-3, base_batch=1e5)
    assert len(batch) == len(bare) + 2 and len(rate) == len(batch) + 9
    assert rate['sqrt', 'learning rate, Adam'].value == pytest.approx(8e-3)
    assert rate['linear', 'learning rate, SGD'].value == pytest.approx(64e-3)
    assert rate['linear', 'learning rate, SGD'].outside == 'batch ratio 64 (0.25 to 32)'
    assert rate['sqrt', 'learning rate, Adam'].holds == UNKNOWN
    lower = rules_by_key(**size, loss=2.5)['kaplan', 'critical batch for this loss']
    assert lower.value == pytest.approx(2.1e8 / 2.5 ** (1 / 0.21))


def test_transfers_scale_every_tuned_setting():
    """Reference: ArchScale's apply_batch_size_scaling and nanochat's base_train.py, at four times
    the batch and twice the tokens. Catches a ratio that is turned over, and b2 instead of 1 - b2.
    """
    base = {'base_lr': 1e-3, 'base_batch': 1e5, 'base_tokens': 1e10}
    base |= {'base_weight_decay': 0.1, 'base_b2': 0.95, 'base_eps': 1e-8}
    rows = rules_by_key(parameters=4e8, tokens=2e10, batch_tokens=4e5, **base)
    expected = {
        'sde': {'learning rate': 2e-3, 'b2': 0.8, 'eps': 5e-9},
        'sdew': {'learning rate': 1e-3, 'b2': 0.9, 'eps': 5e-9, 'weight decay': 0.2},
        'timescale': {'learning rate': 1e-3, 'weight decay': 0.2},
        'nanochat': {'learning rate': 2e-3, 'weight decay': 0.1},
        'hyper_p': {'learning rate': 2e-3 * 2**-0.32},
    }
    actual = {
        name: {what: rule.value for (row, what), rule in rows.items() if row == name}
        for name in expected
    }
    assert actual == {name: pytest.approx(values) for name, values in expected.items()}


def test_transfer_keeps_the_averaging_time():
    """Property: `timescale` keeps B / (lr weight_decay D); at equal sizes no rule changes
    anything.
    """
    tuned = TunedSettings(lr=1e-3, weight_decay=0.1, b2=0.95, eps=1e-8)
    moved = transfer_settings('timescale', tuned, batch_ratio=3.0, token_ratio=5.0)
    before, after = (1 / (s.lr * s.weight_decay) for s in (tuned, moved))
    assert after * 3.0 / 5.0 == pytest.approx(before)
    for name in TRANSFERS:
        assert transfer_settings(name, tuned, 1.0) == tuned
    with pytest.raises(ValueError, match=r'b2=0.95 would become -0.6 at 32 times'):
        transfer_settings('sde', tuned, 32.0)


@pytest.mark.parametrize(
    ('inputs', 'message'),
    [
        ({'parameters': 1e9, 'tokens': 1e9, 'base_b2': 0.9}, '--base_b2 belongs to a tuned'),
        ({}, '--parameters and --tokens missing'),
        ({'parameters': 1e9}, '--tokens missing'),
        ({'parameters': 0.0, 'tokens': 1e9}, 'parameters must be a positive number, got 0'),
        ({'parameters': 1e9, 'tokens': math.nan}, 'tokens must be a positive number, got nan'),
        ({'parameters': 1e9, 'tokens': math.inf}, 'tokens must be a positive number, got inf'),
        ({'parameters': 1e9, 'tokens': 1e9, 'loss': -1.0}, 'loss must be a positive number'),
        ({'parameters': 1e9, 'tokens': 1e9, 'loss': 1e-80}, 'loss must be from 0.01 to 100 nats'),
        ({'parameters': 1e9, 'tokens': 1e9, 'loss': 1e300}, 'loss must be from 0.01 to 100 nats'),
        (
            {'parameters': 1e9, 'tokens': 1e9, 'base_b2': 5.0},
            '--base_b2 must be above 0 and below 1, such as 0.95; got 5',
        ),
        ({'parameters': 1e9, 'tokens': 1e9, 'base_b2': 1.0}, '--base_b2 must be .* below 1'),
        (
            {'parameters': 1e9, 'tokens': 1e9, 'base_lr': 0.1},
            'base_lr and --base_batch together',
        ),
        (
            {'parameters': 1e9, 'tokens': 1e9, 'base_lr': 0.1, 'base_batch': 1.0},
            'needs --batch_tokens',
        ),
    ],
)
def test_errors_invalid_inputs(inputs, message):
    with pytest.raises(ValueError, match=message):
        RuleInputs(**inputs)


def test_functions_refuse_invalid_numbers():
    for bad in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match='tokens must be a positive number'):
            rules.step_law_rate(1e9, bad)
        with pytest.raises(ValueError, match='flops must be a positive number'):
            rules.kaplan_allocation(bad)


def test_rules_are_written_as_json(tmp_path):
    """Every digit, and the inputs."""
    inputs = RuleInputs(parameters=1e9, tokens=2e10)
    write_rules(tmp_path / 'rules.json', inputs, apply_rules(inputs))
    record = json.loads((tmp_path / 'rules.json').read_text())
    assert record['given']['tokens'] == 2e10 and record['rules'][0]['name'] == 'step_law'
    assert record['rules'][0]['value'] == rules.step_law_rate(1e9, 2e10)
    with pytest.raises(ValueError, match=r'must end in \.json; got .*rules.txt'):
        write_rules(tmp_path / 'rules.txt', inputs, apply_rules(inputs))


def test_config_file_may_call_rules(tmp_path):
    """Contract: they return plain floats, which a field accepts."""
    path = tmp_path / 'mine.py'
    path.write_text(
        'from configs import default\n'
        'from modules.scaling.rules import step_law_rate\n\n\n'
        'def get_config():\n'
        '    config = default.get_config()\n'
        '    config.optim.lr = step_law_rate(4e8, 2e10)\n'
        '    return config\n'
    )
    config = resolve(runpy.run_path(str(path))['get_config']())
    assert config.optim.lr == rules.step_law_rate(4e8, 2e10)


@pytest.mark.full
def test_invalid_input_is_one_line():
    """One line, exit status 1."""
    process = run_module('eval.rules', '--parameters=124e6')
    assert process.returncode == 1 and process.stdout == ''
    assert process.stderr.splitlines() == [
        'error: --tokens missing: set both, such as --parameters=124e6 --tokens=2.5e9'
    ]
