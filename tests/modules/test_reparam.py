"""Reference and property: maps from stored to used weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import NORM, ParamSpec, named_leaves
from modules.reparam import REPARAMS, chain, shared

SPECS = {
    'table': ParamSpec('embedding', ('vocab', 'embed')),
    'up': ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',)),
    'out': ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim')),
    'scale': ParamSpec('vector', ('layer', 'embed')),
}
SHAPES = {'table': (5, 6), 'up': (3, 6, 7), 'out': (3, 2, 3, 6), 'scale': (3, 6)}
SUMMED = {'up': (1,), 'out': (1, 2)}  # of the hidden ones


def draw(seed=0):
    rng = np.random.default_rng(seed)
    return {key: jnp.float32(rng.normal(size=shape)) for key, shape in SHAPES.items()}


@pytest.mark.parametrize('name', REPARAMS)
def test_every_reparam_changes_nothing_at_the_start(name):
    reparam = REPARAMS[name](SPECS)
    stored, state = jax.jit(reparam.init)(draw())
    for train in (True, False):
        used, _ = jax.jit(functools.partial(reparam.apply, train=train))(stored, state)
        assert used.keys() == SHAPES.keys()
        for key, value in draw().items():
            np.testing.assert_allclose(used[key], value, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize('name', REPARAMS)
def test_every_reparam_describes_what_it_stores(name):
    """specs and stored are parallel trees, and each axis has its name."""
    reparam = REPARAMS[name](SPECS)
    stored, _ = reparam.init(draw())
    assert jax.tree.structure(stored) == jax.tree.structure(reparam.specs)
    for path, spec in named_leaves(reparam.specs).items():
        assert named_leaves(stored)[path].ndim == len(spec.axes), path


@pytest.mark.parametrize('name', REPARAMS)
def test_evaluation_leaves_the_state_alone(name):
    reparam = REPARAMS[name](SPECS)
    stored, state = reparam.init(draw())
    _, after = reparam.apply(stored, state, False)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_none_stores_the_parameters_themselves():
    reparam = REPARAMS['none'](SPECS)
    stored, state = reparam.init(draw())
    assert reparam.specs == SPECS
    assert jax.tree.leaves(state) == []
    jax.tree.map(np.testing.assert_array_equal, stored, draw())


def weight_norm_with_gains(scale=1.0):
    """Stored weights whose gains are not those of the start, and what each hidden one is."""
    reparam = REPARAMS['weight_norm'](SPECS)
    stored, state = reparam.init(draw())
    for key in SUMMED:
        gain = stored[key]['gain']
        random = np.random.default_rng(1).uniform(0.5, 2, gain.shape)
        stored[key] = {'direction': scale * stored[key]['direction'], 'gain': jnp.float32(random)}
    return reparam, stored, state


def test_weight_norm_columns_have_the_length_of_their_gain():
    """Whatever the length of the direction. Catches a norm over another axis."""
    for scale in (1.0, 10.0):
        reparam, stored, state = weight_norm_with_gains(scale)
        used, _ = reparam.apply(stored, state, True)
        for key, axes in SUMMED.items():
            norms = np.sqrt(np.sum(np.square(used[key]), axes))
            np.testing.assert_allclose(norms, stored[key]['gain'], rtol=1e-5)


def test_weight_norm_gains_are_vectors_of_the_kept_axes():
    """So that they do not decay; directions stay what the matrices were."""
    reparam = REPARAMS['weight_norm'](SPECS)
    assert reparam.specs['up'] == {
        'direction': SPECS['up'],
        'gain': ParamSpec('vector', ('layer', 'mlp')),
    }
    assert reparam.specs['out']['gain'] == ParamSpec('vector', ('layer', 'embed'))
    assert reparam.specs['table'] == SPECS['table']
    assert reparam.specs['scale'] == SPECS['scale']


def test_weight_norm_gradient():
    """With dW the gradient of the used weight: dg = dW . V/|V|, and dV = g/|V| (dW - dg V/|V|),
    which is orthogonal to V (arXiv:1602.07868, equation 3).
    """
    reparam, stored, state = weight_norm_with_gains()
    grad_used = draw(seed=2)
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
        wanted = gain / length * (dw - d_gain * unit)
        np.testing.assert_allclose(grads[key]['direction'], wanted, rtol=1e-4, atol=1e-5)
        along = np.sum(np.float64(grads[key]['direction']) * direction, axes)
        np.testing.assert_allclose(along, 0, atol=1e-4)


def test_a_reparam_that_matches_nothing_is_an_error():
    vectors = {'scale': SPECS['scale']}
    with pytest.raises(ValueError, match="no parameter has the role 'hidden'"):
        REPARAMS['weight_norm'](vectors)


GATE = ParamSpec('hidden', ('layer', 'embed', 'rank'), ('embed',), part=NORM)
SHARED_SPECS = SPECS | {'gate': GATE}


def draw_shared():
    return draw() | {'gate': jnp.float32(np.random.default_rng(9).normal(size=(3, 6, 2)))}


def shapes_of(tree):
    return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), tree)


def test_shared_matrices_are_stored_once_and_used_by_all_layers():
    """Hidden ones that are no norm's; the first layer's at the start."""
    drawn = draw_shared()
    reparam = shared(SHARED_SPECS, shapes_of(drawn))
    stored, state = reparam.init(drawn)
    used, _ = reparam.apply(stored, state, True)
    for key, value in drawn.items():
        if key in SUMMED:
            np.testing.assert_array_equal(stored[key], value[0])
            assert reparam.specs[key] == SPECS[key].without('layer')
            assert stored[key].ndim == len(reparam.specs[key].axes)
            np.testing.assert_array_equal(used[key], np.broadcast_to(value[:1], value.shape))
        else:
            np.testing.assert_array_equal(stored[key], value)
            np.testing.assert_array_equal(used[key], value)
            assert reparam.specs[key] == SHARED_SPECS[key]
    assert 'layer' not in reparam.specs['up'].axes


def test_gradient_of_a_shared_matrix_is_the_sum_over_layers():
    drawn = draw_shared()
    reparam = shared(SHARED_SPECS, shapes_of(drawn))
    stored, state = reparam.init(drawn)
    _, pull = jax.vjp(lambda stored: reparam.apply(stored, state, True)[0], stored)
    (grads,) = pull(draw_shared())
    for key in SUMMED:
        np.testing.assert_allclose(grads[key], np.sum(drawn[key], 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(grads['gate'], drawn['gate'])


def test_chain_hands_what_the_far_one_makes_to_the_near_one():
    """Shared weights that are stored with weight normalization: one gain for all layers."""
    drawn = draw()
    near = shared(SPECS, shapes_of(drawn))
    reparam = chain(near, REPARAMS['weight_norm'](near.specs))
    stored, state = reparam.init(drawn)
    assert stored['up']['direction'].shape == (6, 7)
    assert reparam.specs['up']['gain'] == ParamSpec('vector', ('mlp',))
    stored['up']['gain'] = 2 * stored['up']['gain']
    used, after = reparam.apply(stored, state, True)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for layer in range(3):
        np.testing.assert_allclose(used['up'][layer], 2 * drawn['up'][0], rtol=1e-5)
        np.testing.assert_allclose(used['out'][layer], drawn['out'][0], rtol=1e-5)
