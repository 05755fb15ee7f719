"""Reference: standard deviations of initial matrices, and the share that decay removes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import ParamSpec, as_matrices
from modules.scaling import DECAY_RULES, INITS, DecayInputs, Growth
from modules.scaling.init import orthogonalize
from tests.modules.test_scaling import CASES


def test_initialisations():
    """For a 16 x 64 matrix, merged heads, and embeddings; the last matrices of two blocks."""
    up, out, table = (CASES[name] for name in ('up', 'out', 'embedding'))
    expected = {
        'fan_in': (1 / 4, 18**-0.5, 1 / 4),
        'xavier': ((2 / 80) ** 0.5, (2 / 34) ** 0.5, 1 / 4),
        'small': (0.02, 0.02, 0.02),
        'depth_scaled': (0.02, 0.01, 0.02),
        'orthogonal': (1 / 8, 18**-0.5, 1 / 4),
    }
    for name, expected_stds in expected.items():
        stds = tuple(INITS[name](*case, 2) for case in (up, out, table))
        assert stds == pytest.approx(expected_stds), name
    assert INITS.keys() == expected.keys()
    experts = ParamSpec('hidden', ('layer', 'expert', 'embed', 'mlp'), ('embed',))
    for name in ('xavier', 'orthogonal'):
        assert INITS[name](experts, (3, 5, 16, 64), 2) == pytest.approx(expected[name][0])


@pytest.mark.parametrize('name', ['up', 'out'])
def test_orthogonal_matrices(name):
    """All singular values are 1 after scaling, for each layer, wide or tall."""
    spec, shape = CASES[name]
    unit = jax.random.normal(jax.random.key(0), shape)
    matrices = INITS['orthogonal'](spec, shape, 2) * orthogonalize(spec, unit)
    values = np.linalg.svd(as_matrices(spec, matrices), compute_uv=False)
    np.testing.assert_allclose(values, 1.0, rtol=1e-5)


SHARES = {  # a decay of 0.1, a rate of 0.04, half way down the schedule of 100 steps
    'decoupled': 0.1 * 0.02 * 3,
    'adamc': 0.1 * 0.01 * 3,
    'constant': 0.1 * 0.02,
    'independent': 0.1 * 0.5,
    'l2': 0.1,
    'linear_width': 0.1 * 0.02 * 4,  # of hidden matrices, as sqrt_width
    'sqrt_width': 0.1 * 0.02 * 2,
    'timescale': 0.5 / 100,
}


@pytest.mark.parametrize('name', DECAY_RULES)
def test_decay_share_follows_fan_in(name):
    """At four times the fan-in, with a parametrisation's factor of 3; a peak of 0 gives no 0 /
    0.
    """

    def compute_share(*numbers, hidden=True):
        growth = Growth(fan_in=4.0)
        return DECAY_RULES[name](
            DecayInputs(*map(jnp.float32, numbers), 100, growth, factor=3.0, hidden=hidden)
        )

    np.testing.assert_allclose(compute_share(0.1, 0.04, 0.5), SHARES[name], rtol=1e-6)
    assert jnp.isfinite(compute_share(0.1, 0.0, 0.5))
    vector_rules = {'adamc': 'decoupled', 'linear_width': 'constant', 'sqrt_width': 'constant'}
    expected = SHARES[vector_rules.get(name, name)]
    np.testing.assert_allclose(compute_share(0.1, 0.04, 0.5, hidden=False), expected, rtol=1e-6)
