"""Reference: standardized, companded and projected matrices, in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import ParamSpec
from modules.reparam import REPARAMS, reparametrise
from modules.reparam.magnitude import STANDARDIZATION_EPS
from tests.modules.test_reparam import SPECS, SUMMED, param_shapes, sample


def init_reparam(name, params=None, **options):
    params = sample() if params is None else params
    reparam = REPARAMS[name](SPECS, param_shapes(params), **options)
    return reparam, *reparam.init(params)


def test_standardized_columns_have_mean_0_and_std_gain():
    """Catches a mean over outputs, a biased variance, a gain for all columns."""
    reparam, stored, state = init_reparam('weight_standardization')
    rng = np.random.default_rng(1)
    for key, axes in SUMMED.items():
        matrix = np.float64(3 * stored[key]['matrix'] + 1)
        gain = rng.uniform(0.5, 2, stored[key]['gain'].shape)
        stored[key] = {'matrix': jnp.float32(matrix), 'gain': jnp.float32(gain)}
        used, _ = reparam.apply(stored, state, True)
        centred = matrix - matrix.mean(axes, keepdims=True)
        spread = np.sqrt(matrix.var(axes, ddof=1, keepdims=True) + STANDARDIZATION_EPS)
        expected = np.expand_dims(gain, axes) / np.sqrt(6) * centred / spread
        np.testing.assert_allclose(used[key], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.mean(used[key], axes), 0, atol=1e-6)
        std = np.sqrt(6) * np.std(np.float64(used[key]), axes, ddof=1)
        np.testing.assert_allclose(std, gain, rtol=1e-4)


def test_initial_standardization_only_removes_the_mean():
    """The scale of any parametrisation holds, and a matrix of zeros stays zero."""
    reparam, stored, state = init_reparam('weight_standardization')
    used, _ = reparam.apply(stored, state, True)
    for key, axes in SUMMED.items():
        expected = sample()[key] - np.mean(sample()[key], axes, keepdims=True)
        np.testing.assert_allclose(used[key], expected, rtol=1e-5, atol=1e-6)
        gain_axes = tuple(a for i, a in enumerate(SPECS[key].axes) if i not in axes)
        assert reparam.specs[key]['gain'] == ParamSpec('vector', gain_axes)
    zeros = jax.tree.map(jnp.zeros_like, sample())
    reparam, stored, state = init_reparam('weight_standardization', zeros)
    np.testing.assert_array_equal(reparam.apply(stored, state, True)[0]['up'], 0)


def test_one_row_has_no_spread():
    specs = {'up': SPECS['up']}
    shapes = {'up': jax.ShapeDtypeStruct((3, 1, 7), jnp.float32)}
    with pytest.raises(ValueError, match='matrices with at least two rows, but up has one'):
        REPARAMS['weight_standardization'](specs, shapes)


def test_companded_weights_follow_the_arctan():
    """w = a arctan(v / b) with a per layer; slope a / b at 0; bounded by a pi / 2, odd."""
    reparam, stored, a = init_reparam('weight_compander', compander_width=3.0, compander_slope=5.0)
    for key in SUMMED:
        weight = np.float64(sample()[key])
        rms = np.sqrt(np.mean(weight**2, tuple(range(1, weight.ndim))))
        np.testing.assert_allclose(a[key], 3 * rms, rtol=1e-6)
        wide = np.float64(a[key]).reshape(-1, *(1,) * (weight.ndim - 1))
        np.testing.assert_allclose(
            stored[key], wide / 5 * np.tan(weight / wide), rtol=1e-4, atol=1e-6
        )
    used, pull = jax.vjp(lambda stored: reparam.apply(stored, a, True)[0], stored)
    (grads,) = pull(jax.tree.map(jnp.ones_like, used))
    wide = np.float64(a['up'])[:, None, None]
    slope = 5 / (1 + (np.float64(stored['up']) * 5 / wide) ** 2)
    np.testing.assert_allclose(grads['up'], slope, rtol=1e-4)
    huge = jax.tree.map(lambda w: -1e6 * jnp.sign(w), stored)
    used, _ = reparam.apply(huge, a, True)
    np.testing.assert_allclose(np.abs(used['up'] / wide), np.pi / 2, rtol=1e-5)
    np.testing.assert_array_equal(np.sign(used['up']), -np.sign(stored['up']))


def test_weights_beyond_the_bound_are_clipped():
    """Imported weights may be. Catches the tangent of an angle past its pole."""
    params = sample()
    params['up'] = params['up'].at[0, 0, 0].set(1e3)
    reparam, stored, state = init_reparam('weight_compander', params)
    used, _ = reparam.apply(stored, state, True)
    assert 0.9 * np.pi / 2 < used['up'][0, 0, 0] / state['up'][0] < np.pi / 2
    np.testing.assert_allclose(used['up'][1:], params['up'][1:], rtol=1e-4, atol=1e-4)


def norms(key, weight):
    return np.linalg.norm(np.float64(weight).reshape(3, -1), axis=1)


def test_projection_restores_initial_norms():
    """Only after the update, in the present direction; vectors and embeddings stay."""
    reparam, stored, state = init_reparam('normalize_and_project')
    moved = jax.tree.map(lambda w, n: 3 * w + n, stored, sample(seed=1))
    after, next_state = reparam.after_update(moved, state)
    jax.tree.map(np.testing.assert_array_equal, next_state, state)
    for key in SUMMED:
        expected = norms(key, sample()[key])
        np.testing.assert_allclose(norms(key, after[key]), expected, rtol=1e-6)
        factor = (expected / norms(key, moved[key])).reshape(-1, *(1,) * (moved[key].ndim - 1))
        np.testing.assert_allclose(after[key], moved[key] * factor, rtol=1e-5)
    np.testing.assert_array_equal(after['table'], moved['table'])
    np.testing.assert_array_equal(after['scale'], moved['scale'])
    used, _ = reparam.apply(moved, state, True)
    jax.tree.map(np.testing.assert_array_equal, used, moved)


def test_projection_comes_last():
    """The stored arrays of sigma are projected; in front of sigma it is refused."""
    reparam = reparametrise(['sigma', 'normalize_and_project'], SPECS, param_shapes(sample()), {})
    stored, state = reparam.init(sample())
    doubled = jax.tree.map(lambda w: 2 * w, stored)
    after, _ = reparam.after_update(doubled, state)
    np.testing.assert_allclose(after['up']['matrix'], sample()['up'], rtol=1e-6)
    np.testing.assert_allclose(after['up']['gain'], 2 * stored['up']['gain'])
    message = r'must come last. Write sigma\+normalize_and_project.$'
    with pytest.raises(ValueError, match=message):
        reparametrise(['normalize_and_project', 'sigma'], SPECS, param_shapes(sample()), {})
