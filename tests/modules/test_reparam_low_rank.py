"""Reference: low-rank factors, in float64 numpy, of stacked matrices and of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import LORA, ParamSpec
from modules.reparam import REPARAMS, reparametrise

SPECS = {
    'out': ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim')),
    'query': ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',)),
    'up': ParamSpec('hidden', ('layer', 'expert', 'embed', 'mlp'), ('embed',)),
    'table': ParamSpec('embedding', ('vocab', 'embed')),
}
SHAPES = {'out': (3, 2, 4, 6), 'query': (3, 6, 2, 4), 'up': (3, 2, 6, 5), 'table': (7, 6)}
# The product of a and b for each index of the stack, as a single einsum.
PRODUCTS = {
    'out': 'lnhr,lrd->lnhd',
    'query': 'ldr,lrnh->ldnh',
    'up': 'ledr,lerf->ledf',
    'table': 'vr,rd->vd',
}
ROLES = {'roles': 'hidden+embedding', 'rank': 2, 'alpha': 6.0}


def sample(seed=0):
    rng = np.random.default_rng(seed)
    return {name: jnp.float32(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def perturb(tree, seed=1):
    """Adds noise to all arrays, so that no factor is 0."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: w + jnp.float32(rng.normal(size=w.shape)), tree)


def param_shapes(tree):
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), tree)


@pytest.mark.default_rows('options1-4.242640687119285')
@pytest.mark.parametrize(('options', 'scale'), [({}, 3.0), ({'rslora': True}, 6 / np.sqrt(2))])
def test_lora_adds_factor_product(options, scale):
    """Catches a factor shared by a stack, the axes of several rows or columns, and the scale."""
    reparam = REPARAMS['lora'](SPECS, param_shapes(sample()), **ROLES, **options)
    stored = perturb(reparam.init(sample())[0])
    used, _ = reparam.apply(stored, {name: () for name in SPECS}, True)
    for name, product in PRODUCTS.items():
        parts = {key: np.float64(value) for key, value in stored[name].items()}
        expected = parts['base'] + scale * np.einsum(product, parts['a'], parts['b'])
        np.testing.assert_allclose(used[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.full
def test_weight_norm_and_lora_are_dora():
    """m V / ||V|| with V = W + s a b, the length over all inputs of an output."""
    options = {'weight_norm': {'roles': 'hidden'}, 'lora': ROLES | {'roles': 'hidden'}}
    reparam = reparametrise(['weight_norm', 'lora'], SPECS, param_shapes(sample()), options)
    stored, state = reparam.init(sample())
    stored = perturb(stored)
    used, _ = reparam.apply(stored, state, True)
    for name, inputs in {'out': (1, 2), 'query': (1,), 'up': (2,)}.items():
        parts = {key: np.float64(value) for key, value in stored[name]['direction'].items()}
        v = parts['base'] + 3.0 * np.einsum(PRODUCTS[name], parts['a'], parts['b'])
        m = np.expand_dims(np.float64(stored[name]['gain']), inputs)
        expected = m * v / np.sqrt(np.sum(v**2, inputs, keepdims=True))
        np.testing.assert_allclose(used[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_dora_gradients_hold_the_length_constant():
    """Reference: PEFT's gradients, with the norm detached (DoRA, section 4.3), in float64; with
    `norm_gradient` the gradients of the whole map, from which V / ||V|| removes a part, and for
    weight_norm alone as well. Catches a length that is differentiated by default, and the reverse.
    """
    specs = {'w': ParamSpec('hidden', ('embed', 'mlp'), ('embed',))}
    rng = np.random.default_rng(0)
    weight, slope = rng.normal(size=(2, 6, 5))
    stored = {'w': {'direction': {'base': weight}, 'gain': rng.uniform(0.5, 2.0, 5)}}
    stored['w']['direction'] |= {'a': rng.normal(size=(6, 2)), 'b': rng.normal(size=(2, 5))}
    stored = jax.tree.map(jnp.float32, stored)
    parts = jax.tree.map(np.float64, stored['w'])
    a, b, gain = parts['direction']['a'], parts['direction']['b'], parts['gain']
    v = parts['direction']['base'] + 3.0 * a @ b
    unit, length = v / np.linalg.norm(v, axis=0), np.linalg.norm(v, axis=0)
    constant = slope * gain / length
    full = (slope - unit * np.sum(unit * slope, 0)) * gain / length

    def gradients(names, stored, **options):
        options = {'weight_norm': options, 'lora': ROLES | {'roles': 'hidden'}}
        shapes = param_shapes({'w': jnp.float32(weight)})
        reparam = reparametrise(names, specs, shapes, options)
        state = reparam.init({'w': jnp.float32(weight)})[1]

        def loss(stored):
            return jnp.vdot(reparam.apply(stored, state, True)[0]['w'], jnp.float32(slope))

        return jax.jit(jax.value_and_grad(loss))(stored)

    for options, v_grad in (
        ({}, constant),
        ({'norm_gradient': 'constant'}, constant),
        ({'norm_gradient': 'full'}, full),
    ):
        value, grads = gradients(['weight_norm', 'lora'], stored, **options)
        np.testing.assert_allclose(value, np.sum(slope * gain * unit), rtol=1e-5)
        factors = grads['w']['direction']
        for ours, expected in (
            (factors['a'], 3.0 * v_grad @ b.T),
            (factors['b'], 3.0 * a.T @ v_grad),
            (factors['base'], v_grad),
            (grads['w']['gain'], np.sum(unit * slope, 0)),
        ):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
    plain = {'w': {'direction': jnp.float32(v), 'gain': stored['w']['gain']}}
    for options, v_grad in (({}, full), ({'norm_gradient': 'constant'}, constant)):
        _, grads = gradients(['weight_norm'], plain, **options)
        np.testing.assert_allclose(grads['w']['direction'], v_grad, rtol=1e-4, atol=1e-4)
    assert np.abs(full - constant).max() > 0.1


@pytest.mark.full
def test_lora_a_is_kaiming_and_b_is_0():
    """Kaiming: uniform within 1 / sqrt(inputs), and within 1 where rows are looked up."""
    reparam = REPARAMS['lora'](SPECS, param_shapes(sample()), **ROLES | {'rank': 400})
    stored, _ = reparam.init(sample())
    sampled, resampled = (reparam.draw(stored, jax.random.key(seed)) for seed in (0, 1))
    for name, inputs in {'out': 8, 'query': 6, 'up': 6, 'table': 1}.items():
        a = np.asarray(sampled[name]['a'])
        assert 0.97 < np.max(np.abs(a)) * np.sqrt(inputs) <= 1
        np.testing.assert_allclose(np.std(a) * np.sqrt(3 * inputs), 1, rtol=0.05)
        assert not np.array_equal(a, resampled[name]['a']) and not np.any(sampled[name]['b'])
        np.testing.assert_array_equal(sampled[name]['base'], sample()[name])
        assert reparam.specs[name]['a'].part == reparam.specs[name]['b'].part == LORA
    assert not np.array_equal(sampled['query']['a'][0, 0], sampled['out']['a'][0, 0, 0])
