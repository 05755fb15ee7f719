"""Reference and property: maps from stored to used weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import NORM, ParamSpec, named_leaves
from modules.reparam import REPARAMS, Reparam, chain, multiply_weights, reparametrise
from modules.reparam.base import shared

SPECS = {
    'table': ParamSpec('embedding', ('vocab', 'embed')),
    'up': ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',)),
    'out': ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim')),
    'scale': ParamSpec('vector', ('layer', 'embed')),
}
SHAPES = {'table': (5, 6), 'up': (3, 6, 7), 'out': (3, 2, 3, 6), 'scale': (3, 6)}
SUMMED = {'up': (1,), 'out': (1, 2)}  # of hidden matrices
# They cannot represent every matrix: they fix a largest singular value, or a mean of columns.
CHANGING = ('spectral_cap', 'spectral_norm', 'weight_standardization')
HOLDING = [name for name in REPARAMS if name not in CHANGING]


def sample(seed=0):
    rng = np.random.default_rng(seed)
    return {key: jnp.float32(rng.normal(size=shape)) for key, shape in SHAPES.items()}


def param_shapes(tree):
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), tree)


@pytest.mark.parametrize('name', HOLDING)
def test_reparam_changes_nothing_at_the_start(name):
    """Matrices are equal in all layers, as shared matrices have to be."""
    same = {k: jnp.broadcast_to(v[:1], v.shape) if k in SUMMED else v for k, v in sample().items()}
    reparam = REPARAMS[name](SPECS, param_shapes(same))
    stored, state = jax.jit(reparam.init)(same)
    for train in (True, False):
        used, _ = jax.jit(functools.partial(reparam.apply, train=train))(stored, state)
        assert used.keys() == SHAPES.keys()
        for key, value in same.items():
            np.testing.assert_allclose(used[key], value, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize('name', REPARAMS)
def test_every_reparam_describes_its_stored_arrays(name):
    """specs and stored are parallel trees, and each axis has its name."""
    reparam = REPARAMS[name](SPECS, param_shapes(sample()))
    stored, _ = jax.eval_shape(reparam.init, sample())
    assert jax.tree.structure(stored) == jax.tree.structure(reparam.specs)
    for path, spec in named_leaves(reparam.specs).items():
        assert named_leaves(stored)[path].ndim == len(spec.axes), path


@pytest.mark.parametrize('name', REPARAMS)
def test_evaluation_does_not_change_state(name):
    reparam = REPARAMS[name](SPECS, param_shapes(sample()))
    stored, state = jax.jit(reparam.init)(sample())
    _, after = reparam.apply(stored, state, False)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.parametrize('name', REPARAMS)
def test_smallest_init_scale_is_finite(name):
    """Value and gradient are finite at the least scale that the row declares; 0 if it declares
    none.
    """
    min_scale = REPARAMS[name].least_init_scale
    small = jax.tree.map(lambda w: w * min_scale, sample())
    reparam = REPARAMS[name](SPECS, param_shapes(small))
    stored, state = jax.jit(reparam.init)(small)

    def total(stored):
        return sum(map(jnp.sum, jax.tree.leaves(reparam.apply(stored, state, True)[0])))

    assert all(map(jnp.all, map(jnp.isfinite, jax.tree.leaves(jax.jit(jax.grad(total))(stored)))))


def test_none_stores_unchanged_parameters():
    reparam = REPARAMS['none'](SPECS, param_shapes(sample()))
    stored, state = jax.jit(reparam.init)(sample())
    assert reparam.specs == SPECS
    assert jax.tree.leaves(state) == []
    jax.tree.map(np.testing.assert_array_equal, stored, sample())


def weight_norm_with_gains(scale=1.0):
    """Returns stored weights with other gains than at the start."""
    reparam = REPARAMS['weight_norm'](SPECS, param_shapes(sample()))
    stored, state = jax.jit(reparam.init)(sample())
    for key in SUMMED:
        gain = stored[key]['gain']
        random = np.random.default_rng(1).uniform(0.5, 2, gain.shape)
        stored[key] = {'direction': scale * stored[key]['direction'], 'gain': jnp.float32(random)}
    return reparam, stored, state


def test_weight_norm_column_length_is_the_gain():
    """Whatever the length of the direction. Catches a norm over another axis."""
    for scale in (1.0, 10.0):
        reparam, stored, state = weight_norm_with_gains(scale)
        used, _ = reparam.apply(stored, state, True)
        for key, axes in SUMMED.items():
            norms = np.sqrt(np.sum(np.square(used[key]), axes))
            np.testing.assert_allclose(norms, stored[key]['gain'], rtol=1e-5)


def test_weight_norm_gains_are_vectors():
    """Gains do not decay; directions keep the roles of the matrices."""
    reparam = REPARAMS['weight_norm'](SPECS, param_shapes(sample()))
    assert reparam.specs['up'] == {
        'direction': SPECS['up'],
        'gain': ParamSpec('vector', ('layer', 'mlp')),
    }
    assert reparam.specs['out']['gain'] == ParamSpec('vector', ('layer', 'embed'))
    assert reparam.specs['table'] == SPECS['table']
    assert reparam.specs['scale'] == SPECS['scale']


@pytest.mark.full
def test_weight_norm_gradient():
    """With dW the gradient of the used weight: dg = dW . V/|V|, and dV = g/|V| (dW - dg V/|V|),
    which is orthogonal to V (arXiv:1602.07868, equation 3).
    """
    reparam, stored, state = weight_norm_with_gains()
    grad_used = sample(seed=2)
    _, pull = jax.vjp(lambda stored: reparam.apply(stored, state, True)[0], stored)
    (grads,) = pull(grad_used)
    for key, axes in SUMMED.items():
        direction, dw = np.float64(stored[key]['direction']), np.float64(grad_used[key])
        length = np.sqrt(np.sum(direction**2, axes, keepdims=True))
        unit = direction / length
        d_gain = np.sum(dw * unit, axes, keepdims=True)
        gain = np.float64(stored[key]['gain']).reshape(length.shape)
        np.testing.assert_allclose(
            grads[key]['gain'], d_gain.reshape(grads[key]['gain'].shape), rtol=1e-4, atol=1e-5
        )
        expected = gain / length * (dw - d_gain * unit)
        np.testing.assert_allclose(grads[key]['direction'], expected, rtol=1e-4, atol=1e-5)
        radial = np.sum(np.float64(grads[key]['direction']) * direction, axes)
        np.testing.assert_allclose(radial, 0, atol=1e-4)


def test_reparam_without_matrices_is_refused():
    vectors = {'scale': SPECS['scale']}
    with pytest.raises(ValueError, match="no parameter has the role 'hidden'"):
        REPARAMS['weight_norm'](vectors, param_shapes(sample()))


GATE = ParamSpec('hidden', ('layer', 'embed', 'rank'), ('embed',), part=NORM)
SHARED_SPECS = SPECS | {'gate': GATE}


def sample_shared():
    return sample() | {'gate': jnp.float32(np.random.default_rng(9).normal(size=(3, 6, 2)))}


def test_shared_hidden_matrices_are_stored_once():
    """Hidden matrices outside of norms; the first layer at the start."""
    sampled = sample_shared()
    reparam = shared(SHARED_SPECS, param_shapes(sampled))
    stored, state = reparam.init(sampled)
    used, _ = reparam.apply(stored, state, True)
    for key, value in sampled.items():
        if key in SUMMED:
            np.testing.assert_array_equal(stored[key], value[0])
            assert reparam.specs[key] == SPECS[key].drop_axis('layer')
            assert stored[key].ndim == len(reparam.specs[key].axes)
            np.testing.assert_array_equal(used[key], np.broadcast_to(value[:1], value.shape))
        else:
            np.testing.assert_array_equal(stored[key], value)
            np.testing.assert_array_equal(used[key], value)
            assert reparam.specs[key] == SHARED_SPECS[key]
    assert 'layer' not in reparam.specs['up'].axes


def test_shared_gradient_is_the_sum_over_layers():
    sampled = sample_shared()
    reparam = shared(SHARED_SPECS, param_shapes(sampled))
    stored, state = reparam.init(sampled)
    _, pull = jax.vjp(lambda stored: reparam.apply(stored, state, True)[0], stored)
    (grads,) = pull(sample_shared())
    for key in SUMMED:
        np.testing.assert_allclose(grads[key], np.sum(sampled[key], 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(grads['gate'], sampled['gate'])


def test_chain_applies_far_before_near():
    """Shared weights that are stored with weight normalization: a gain for all layers."""
    sampled = sample()
    near = shared(SPECS, param_shapes(sampled))
    reparam = chain(near, REPARAMS['weight_norm'](near.specs, param_shapes(sample())))
    stored, state = reparam.init(sampled)
    assert stored['up']['direction'].shape == (6, 7)
    assert reparam.specs['up']['gain'] == ParamSpec('vector', ('mlp',))
    stored['up']['gain'] = 2 * stored['up']['gain']
    used, after = reparam.apply(stored, state, True)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for layer in range(3):
        np.testing.assert_allclose(used['up'][layer], 2 * sampled['up'][0], rtol=1e-5)
        np.testing.assert_allclose(used['out'][layer], sampled['out'][0], rtol=1e-5)


def test_reparametrise_chains_nearest_first():
    """Equals `chain` of both; the options of a row reach it."""
    reparam = reparametrise(['shared', 'weight_norm'], SPECS, param_shapes(sample()), {})
    stored, state = reparam.init(sample())
    assert stored['up']['direction'].shape == (6, 7)
    used, _ = reparam.apply(stored, state, True)
    np.testing.assert_allclose(used['up'][2], sample()['up'][0], rtol=1e-5)


def test_factors_multiply_used_weights():
    """The stored weight is divided by its factor, and its gradient passes through the factor."""
    factors = {key: float(i + 1) for i, key in enumerate(SPECS)}
    reparam = multiply_weights(SPECS, factors)
    stored, state = jax.jit(reparam.init)(sample())
    for key, factor in factors.items():
        np.testing.assert_allclose(stored[key] * factor, sample()[key], rtol=1e-6)
    used, _ = reparam.apply(stored, state, True)
    assert_close(used, sample())
    _, pull = jax.vjp(lambda stored: reparam.apply(stored, state, True)[0], stored)
    (grads,) = pull(sample())
    assert_close(grads, {key: factors[key] * value for key, value in sample().items()})


def assert_close(actual, expected):
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=1e-6, err_msg=key)


def test_after_update_maps_stored_weights():
    """Behind another reparametrisation too."""
    halved = Reparam(
        init=lambda params: (params, 0),
        apply=lambda stored, state, train: (stored, state),
        specs=SPECS,
        after_update=lambda stored, state: (jax.tree.map(lambda w: w / 2, stored), state + 1),
    )
    reparam = chain(multiply_weights(SPECS, dict.fromkeys(SPECS, 4.0)), halved)
    stored, state = reparam.init(sample())
    after, (_, count) = reparam.after_update(stored, state)
    assert count == 1
    assert_close(after, {key: value / 8 for key, value in sample().items()})
