"""Schedules in stages. Equivalence: other schedules, spelt as stages. Reference: shapes, and WSD-S.
Contract: one program for runs of several lengths; errors name the stage.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.optim.schedules import SCHEDULES, parse_stages, stages
from tests.helpers import checked_config

SPELLINGS = {  # schedule and its options, the same as stages, with and without a stage of warm-up
    'warmup_cosine': ({'final_lr_fraction': 0.1}, 'rest cosine to 0.1'),
    'linear': ({}, 'rest linear to 0'),
    'warmup_stable_decay': (
        {'decay_fraction': 0.2, 'final_lr_fraction': 0.05},
        'rest constant, 20% linear to 0.05',
    ),
    'warmup_stable_decay/sqrt': (
        {'decay_fraction': 0.3, 'decay_shape': 'sqrt'},
        'rest constant, 0.3 sqrt to 0',
    ),
    'cyclic': (
        {'cycles': 3, 'final_lr_fraction': 0.2},
        'rest cosine to .2, rest cosine 1 to 2e-1, rest cosine 1 to 0.2',
    ),
    'exponential': ({'final_lr_fraction': 0.01}, 'rest exponential to 0.01'),
    'power': ({'decay_power': 1.2, 'final_lr_fraction': 0.1}, 'rest power:1.2 to 0.1'),
    'constant': ({}, 'rest constant'),
}


def values(text, steps, **numbers):
    return np.asarray(stages(jnp.arange(steps), steps, stages=text, **numbers))


@pytest.mark.parametrize('case', SPELLINGS)
@pytest.mark.parametrize('warmup', [0, 10])
def test_stages_equal_schedules(case, warmup):
    """At every step, and after the last one, for two lengths. Catches a stage that begins or ends a
    step off, a share of another length, and a restart that is late.
    """
    options, text = SPELLINGS[case]
    schedule = SCHEDULES[case.split('/')[0]]
    for steps in (60 + warmup, 990 + warmup):  # cycles of whole steps
        t = jnp.arange(steps + 5)
        expected = schedule(t, steps, warmup_steps=warmup, **options)
        actual = stages(t, steps, warmup_steps=warmup, stages=text)
        np.testing.assert_allclose(actual, expected, atol=1e-6)
        as_a_stage = stages(t, steps, stages=f'{warmup} linear 0 to 1, {text}')
        np.testing.assert_allclose(as_a_stage, expected, atol=1e-6)


def test_periods_end_in_a_decay_and_restart_at_the_peak():
    """WSD-S of two periods by hand; also a first rate that is inherited, and another shape. Catches
    stages that start anew at 0, at the peak, or a step late.
    """
    actual = values(
        '4 linear 0 to 1, 2 constant, 20% linear to 0, 2 constant .5, rest linear to 0.1', 20
    )
    periods = [0.25, 0.5, 0.75, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0.5, 0.5]
    np.testing.assert_allclose(actual, [*periods, *np.linspace(0.45, 0.1, 8)], atol=1e-6)


def test_rising_and_curved_stages():
    """p = 1/4 .. 1. Catches shapes that are only right when they fall from 1."""
    p = np.arange(1, 5) / 4
    for text, expected in {
        'rest power:2 0.2 to 1': 1 - 0.8 * (1 - p) ** 2,
        'rest sqrt 0.2 to 1': 0.2 + 0.8 * np.sqrt(p),
        'rest cosine 0.2 to 0.6': 0.4 - 0.2 * np.cos(np.pi * p),
        'rest exponential 0.01 to 1': 0.01 ** (1 - p),
        'rest constant 0.3': np.full(4, 0.3),
    }.items():
        np.testing.assert_allclose(values(text, 4), expected, atol=1e-6, err_msg=text)


def test_boundaries_are_rounded_and_fill_the_run():
    """Three thirds of 10 steps end after 3, 7 and 10; the last step has the end. Catches lengths
    that are rounded each for itself, which lose a step.
    """
    text = ', '.join(['rest linear 1 to 0'] * 3)
    (ends,) = np.nonzero(values(text, 10) == 0)
    np.testing.assert_array_equal(ends + 1, [3, 7, 10])


@pytest.mark.parametrize('steps', [1_000_000, 3_000_000])
def test_long_runs_switch_at_the_step(steps):
    """In float32. Catches a boundary that rounding moves by a step."""
    t = jnp.int32([0.6 * steps - 2, 0.6 * steps - 1, 0.6 * steps, steps - 1])
    actual = stages(t, jnp.float32(steps), stages='60% linear 1 to 0.5, rest constant 1')
    np.testing.assert_allclose(actual, [0.5, 0.5, 1, 1], atol=1e-6)
    assert actual[0] > actual[1]


def test_run_length_is_traced():
    """One program for two lengths. Catches a number of steps that is read while tracing."""
    text, traces = '5 linear 0 to 1, rest constant, 20% linear to 0', []

    @jax.jit
    def fractions(steps):
        traces.append(steps)
        return stages(jnp.arange(40), steps, stages=text)

    for steps in (20, 40):
        np.testing.assert_allclose(
            fractions(jnp.float32(steps))[:steps], values(text, steps), atol=1e-6
        )
    assert len(traces) == 1


REFUSED = {  # text -> the message behind the number of the stage, which quotes the stage
    'rest constant, rest sine to 0': r"'rest sine to 0': the shape .*\. Did you mean 'cosine'",
    'rest': r"'rest': a stage has the form LENGTH SHAPE FROM to END",
    'rest linear': r'linear needs the rate at its end, as in linear to 0',
    'rest linear 0 1': r'has the form',
    'rest constant to 0': r'constant has a single rate',
    'rest linear 0 to 1.5': r'a rate is a share of the peak, .* got 1.5',
    'rest linear 0 to -1': r"a rate must be a number of at least 0; got '-1'",
    '-5 constant': r"the length must be a number of at least 0, or rest; got '-5'",
    '120% constant': r'is a share of the run; got 120%',
    'all linear to 0': r"the length must be a number .*, or rest; got 'all'",
    'rest power to 0': r'an exponent belongs to power',
    'rest linear:2 to 0': r'an exponent belongs to power',
    'rest power:0 to 0': r'the exponent must be between',
    'rest linear to 0, 5 constant': r"'5 constant': a constant learning rate of 0",
    'rest exponential to 0': r'exponential multiplies .* above 0',
}


@pytest.mark.parametrize('text', REFUSED)
def test_errors_name_the_stage(text):
    with pytest.raises(ValueError, match=rf'optim.stages, stage \d, .*{REFUSED[text]}'):
        parse_stages(text)


UNFITTING = {
    '60% constant, 0.5 linear to 0': r'take 22 steps, but train.steps=20 leaves 20',
    '15 constant': r'take 15 steps, but train.steps=20 leaves 20\. Give one of them .* rest',
    '20 constant': '',
    '30% constant, rest linear to 0': '',
}


@pytest.mark.parametrize('text', UNFITTING)
def test_stages_fill_the_run(text):
    """Catches a run that ends within a stage, or behind the last one."""
    fields = {'optim.schedule': 'stages', 'train.steps': 20, 'optim.stages': text}
    if not UNFITTING[text]:
        assert checked_config(fields).schedule.options['stages'] == text
        return
    with pytest.raises(ValueError, match=UNFITTING[text]):
        checked_config(fields)


def test_second_warm_up_is_refused():
    """Catches a rate that rises, falls to 0 and rises again."""
    fields = {'optim.schedule': 'stages', 'optim.stages': '5 linear 0 to 1, rest constant'}
    with pytest.raises(ValueError, match=r'rises from 0 after optim.warmup_steps=3'):
        checked_config(fields | {'optim.warmup_steps': 3, 'train.steps': 20})
