"""Reference: initial scale, learning rate and weight decay of each role."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import ROLES, ParamSpec
from modules.scaling import DECAY_RULES, PARAMETRIZATIONS, Decay, Growth, growth_of

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


def standard(spec, shape):
    return PARAMETRIZATIONS['standard'](spec, shape, Growth(), 'adam')


def test_what_a_description_asks_for():
    """init_gain multiplies the deviation of a matrix; a vector decays only where it says so."""
    spec, shape = CASES['up']
    halved = standard(dataclasses.replace(spec, init_gain=0.5), shape)
    assert (halved.init_std, halved.lr_factor, halved.decay_factor) == (1 / 8, 1, 1)
    spec, shape = CASES['vector']
    decayed = standard(dataclasses.replace(spec, decayed=True), shape)
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
        scaling = standard(*case)
        assert (scaling.init_std, scaling.lr_factor, scaling.decay_factor) == pytest.approx(
            wanted[name]
        ), name


def test_growth_is_by_sums_and_by_outputs():
    """Four times the width: the terms of a sum, and what it has of outputs; layers apart."""
    spec, _ = CASES['out']
    assert growth_of(spec, (6, 8, 9, 64), (3, 2, 9, 16), depth=2.0) == Growth(4, 4, 2)
    spec, _ = CASES['up']
    assert growth_of(spec, (3, 16, 192), (3, 16, 64)) == Growth(1, 3, 1)
    spec, shape = CASES['embedding']
    assert growth_of(spec, (50, 32), shape) == Growth(1, 2, 1)


def test_roles_are_all_there():
    assert {spec.role for spec, _ in CASES.values()} == set(ROLES)


@pytest.mark.parametrize(
    ('name', 'share'),
    [('decoupled', 0.1 * 0.02), ('independent', 0.1 * 0.5)],
)
def test_decay_rule(name, share):
    """A decay of 0.1, a peak of 0.04, half way down the schedule; a peak of 0 is no 0 / 0."""
    rule = DECAY_RULES[name]

    def share_of(*numbers):
        return rule(Decay(*map(jnp.float32, numbers), steps=100))

    np.testing.assert_allclose(share_of(0.1, 0.04, 0.5), share, rtol=1e-6)
    assert jnp.isfinite(share_of(0.1, 0.0, 0.5))


def test_every_decay_rule_is_tested():
    assert DECAY_RULES.keys() == {'decoupled', 'independent'}
