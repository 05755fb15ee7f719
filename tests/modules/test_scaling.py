"""Reference: initial scale, learning rate and weight decay of each role."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import ROLES, ParamSpec
from modules.scaling import DECAY_RULES, PARAMETRIZATIONS

CASES = {  # spec, shape
    'embedding': (ParamSpec('embedding', ('vocab', 'embed')), (50, 16)),
    'readout': (ParamSpec('readout', ('embed', 'vocab'), ('embed',)), (16, 50)),
    'vector': (ParamSpec('vector', ('layer', 'embed')), (3, 16)),
    'up': (ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',)), (3, 16, 64)),
    'query': (
        ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',)),
        (3, 16, 2, 8),
    ),
    'out': (
        ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim')),
        (3, 2, 9, 16),
    ),
}


def test_what_a_description_asks_for():
    """init_gain multiplies the deviation of a matrix; a vector decays only where it says so."""
    spec, shape = CASES['up']
    halved = PARAMETRIZATIONS['standard'](dataclasses.replace(spec, init_gain=0.5), shape)
    assert (halved.init_std, halved.lr_factor, halved.decay_factor) == (1 / 8, 1, 1)
    spec, shape = CASES['vector']
    decayed = PARAMETRIZATIONS['standard'](dataclasses.replace(spec, decayed=True), shape)
    assert (decayed.init_std, decayed.lr_factor, decayed.decay_factor) == (None, 1, 1)


def test_standard():
    """1/sqrt(fan_in); stacking changes nothing. Catches a fan-in read off the shape."""
    wanted = {
        'embedding': (1 / 4, 1, 1),
        'readout': (1 / 4, 1, 1),
        'vector': (None, 1, 0),
        'up': (1 / 4, 1, 1),
        'query': (1 / 4, 1, 1),
        'out': (18**-0.5, 1, 1),
    }
    for name, case in CASES.items():
        scaling = PARAMETRIZATIONS['standard'](*case)
        assert (scaling.init_std, scaling.lr_factor, scaling.decay_factor) == pytest.approx(
            wanted[name]
        ), name


@pytest.mark.parametrize('name', PARAMETRIZATIONS)
def test_every_parametrization_covers_every_role(name):
    """Vectors keep their declared value and never decay."""
    assert {spec.role for spec, _ in CASES.values()} == set(ROLES)
    for spec, shape in CASES.values():
        scaling = PARAMETRIZATIONS[name](spec, shape)
        assert (scaling.init_std is None) == (spec.role == 'vector')
        assert scaling.lr_factor > 0
        if spec.role == 'vector':
            assert scaling.decay_factor == 0


@pytest.mark.parametrize(
    ('name', 'share'),
    [('decoupled', 0.1 * 0.02), ('independent', 0.1 * 0.5)],
)
def test_decay_rule(name, share):
    """A decay of 0.1, a peak of 0.04, half way down the schedule; a peak of 0 is no 0 / 0."""
    rule = DECAY_RULES[name]
    np.testing.assert_allclose(rule(*map(jnp.float32, (0.1, 0.04, 0.5))), share, rtol=1e-6)
    assert jnp.isfinite(rule(*map(jnp.float32, (0.1, 0.0, 0.5))))


def test_every_decay_rule_is_tested():
    assert DECAY_RULES.keys() == {'decoupled', 'independent'}
