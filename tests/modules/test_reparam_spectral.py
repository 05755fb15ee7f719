"""Reference: the largest singular value, and the weights that depend on it, in float64 numpy.

The power iteration follows the published code, step by step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import ParamSpec
from modules.reparam import REPARAMS, reparametrise
from modules.reparam.spectral import MIN_INIT_SCALE
from modules.spectrum import first_right_vector, power_iteration
from tests.modules.test_reparam import SPECS, SUMMED, param_shapes, sample


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def iterate(matrix, u):
    """Returns (sigma, v, u) after a power iteration of a matrix [I, O], as in arXiv:2303.06296."""
    v = matrix @ u
    v = v / np.linalg.norm(v)
    u = matrix.T @ v
    u = u / np.linalg.norm(u)
    return v @ matrix @ u, v, u


def layer_matrices(key, weight):
    """Returns the matrices [I, O] of the three layers of a parameter of SPECS."""
    weight = np.float64(weight)
    return [layer.reshape(6, -1) if key == 'out' else layer for layer in weight]


def init_reparam(name='sigma', params=None, **options):
    params = sample() if params is None else params
    reparam = REPARAMS[name](SPECS, param_shapes(params), **options)
    return reparam, *reparam.init(params)


def stored_matrix(stored):
    return stored['matrix'] if isinstance(stored, dict) else stored


def test_power_iteration_follows_published_steps():
    """The weights change between steps; each layer and each parameter iterates separately."""
    reparam, stored, state = init_reparam()
    vectors = {k: [np.linalg.svd(m)[2][0] for m in layer_matrices(k, sample()[k])] for k in SUMMED}
    for key in SUMMED:  # a singular vector may point either way
        signs = np.sign(np.sum(np.stack(vectors[key]) * state[key], -1))
        vectors[key] = [s * u for s, u in zip(signs, vectors[key], strict=True)]
        np.testing.assert_allclose(state[key], np.stack(vectors[key]), rtol=1e-4, atol=1e-5)
    for seed in range(1, 5):
        for key in SUMMED:
            stored[key]['matrix'] += 0.5 * sample(seed)[key]
        used, state = reparam.apply(stored, state, True)
        for key in SUMMED:
            layers = layer_matrices(key, stored[key]['matrix'])
            iterations = [iterate(m, u) for m, u in zip(layers, vectors[key], strict=True)]
            vectors[key] = [u for *_, u in iterations]
            np.testing.assert_allclose(state[key], np.stack(vectors[key]), rtol=1e-4, atol=1e-5)
            for layer, (largest, *_) in enumerate(iterations):
                gamma = np.float64(stored[key]['gain'][layer])
                expected = gamma / largest * np.float64(stored[key]['matrix'][layer])
                np.testing.assert_allclose(used[key][layer], expected, rtol=2e-5, atol=1e-6)


def test_power_iteration_converges():
    """Reference: numpy's decomposition, from any vector, in a single call and in many."""
    matrices, u = np.float32(draw(2, 3, 9, 5)), np.float32(draw(2, 3, 5, seed=1))
    expected = np.linalg.svd(np.float64(matrices), compute_uv=False)[..., 0]
    actual, u_at_once = power_iteration(matrices, u, 300)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    step = jax.jit(power_iteration)
    for _ in range(300):
        actual, u = step(matrices, u)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    np.testing.assert_allclose(u, u_at_once, rtol=1e-5, atol=1e-6)


def test_singular_vector_start_is_converged():
    matrices = np.float32(draw(4, 9, 5))
    actual, _ = power_iteration(matrices, first_right_vector(matrices))
    expected = np.linalg.svd(np.float64(matrices), compute_uv=False)[..., 0]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_sigma_gradient():
    """With G the gradient of W_used: dgamma = <G, W> / sigma, and dW = gamma / sigma (G - dgamma v
    u^T).

    Catches a sigma without gradient, and a gradient that flows into u and v.
    """
    reparam, stored, state = init_reparam()
    rng = np.random.default_rng(5)
    for key in SUMMED:
        stored[key]['gain'] = jnp.float32(rng.uniform(0.5, 2, 3))
        state[key] = state[key] + jnp.float32(0.3 * rng.normal(size=state[key].shape))
    grad_used = sample(seed=2)
    _, pull = jax.vjp(lambda stored: reparam.apply(stored, state, True)[0], stored)
    (grads,) = pull(grad_used)
    for key in SUMMED:
        layers, grad_layers = (
            layer_matrices(key, w) for w in (stored[key]['matrix'], grad_used[key])
        )
        matrix_grads = layer_matrices(key, grads[key]['matrix'])
        for i, (matrix, grad) in enumerate(zip(layers, grad_layers, strict=True)):
            largest, v, u = iterate(matrix, np.float64(state[key][i]))
            d_gamma = np.sum(grad * matrix) / largest
            gamma = np.float64(stored[key]['gain'][i])
            np.testing.assert_allclose(grads[key]['gain'][i], d_gamma, rtol=1e-4)
            expected = gamma / largest * (grad - d_gamma * np.outer(v, u))
            np.testing.assert_allclose(matrix_grads[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(('start', 'options'), [('sigma', {}), ('one', {'gamma_start': 'one'})])
def test_gamma_is_the_spectral_norm_at_both_starts(start, options):
    """The spectral norm of the used weight is gamma, for either start."""
    _, stored, _ = reparam = init_reparam(**options)
    used, _ = reparam[0].apply(*reparam[1:], False)
    for key in SUMMED:
        largest = [np.linalg.norm(m, 2) for m in layer_matrices(key, sample()[key])]
        expected = np.ones(3) if start == 'one' else largest
        np.testing.assert_allclose(stored[key]['gain'], expected, rtol=1e-6)
        norms = [np.linalg.norm(m, 2) for m in layer_matrices(key, used[key])]
        np.testing.assert_allclose(norms, expected, rtol=1e-6)
        assert reparam[0].specs[key]['gain'] == ParamSpec('vector', ('layer',))
        assert reparam[0].specs[key]['matrix'] == SPECS[key]


def test_evaluation_iterates_from_the_stored_vectors():
    """Evaluation iterates as training does, without storing the result. Catches an evaluation by
    last step's sigma.
    """
    reparam, stored, state = init_reparam()
    for key in SUMMED:
        stored[key]['matrix'] += sample(seed=3)[key]
    trained, after = reparam.apply(stored, state, True)
    evaluated, next_state = reparam.apply(stored, state, False)
    jax.tree.map(np.testing.assert_array_equal, trained, evaluated)
    jax.tree.map(np.testing.assert_array_equal, next_state, state)
    assert all(np.any(after[key] != state[key]) for key in SUMMED)


def test_zero_matrix_keeps_its_vector():
    """Otherwise power iteration would never recover once the matrix is nonzero."""
    reparam, stored, state = init_reparam('spectral_cap')
    zeros = jax.tree.map(jnp.zeros_like, stored)
    used, after = reparam.apply(zeros, state, True)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    grads = jax.grad(lambda s: jnp.sum(reparam.apply(s, state, True)[0]['up']))(zeros)
    np.testing.assert_array_equal(used['up'], 0)
    np.testing.assert_array_equal(grads['up'], 1)


def test_spectral_norm_is_one_in_every_layer():
    reparam, stored, state = init_reparam('spectral_norm')
    used, _ = reparam.apply(stored, state, True)
    for key in SUMMED:
        norms = [np.linalg.norm(m, 2) for m in layer_matrices(key, used[key])]
        np.testing.assert_allclose(norms, 1, rtol=1e-6)
        np.testing.assert_array_equal(stored[key], sample()[key])


def test_spectral_cap_keeps_matrices_below_the_bound():
    """They and their gradients are bitwise equal; larger matrices get the bound."""
    params = sample()
    scales = np.float32([0.01, 1, 10]).reshape(3, 1, 1)
    params['up'] = params['up'] * scales / np.float32(np.linalg.norm(params['up'][1], 2))
    reparam, stored, state = init_reparam('spectral_cap', params, spectral_bound=1.5)
    used, pull = jax.vjp(lambda stored: reparam.apply(stored, state, True)[0], stored)
    np.testing.assert_array_equal(used['up'][:2], params['up'][:2])
    np.testing.assert_allclose(np.linalg.norm(used['up'][2], 2), 1.5, rtol=1e-6)
    (grads,) = pull(sample(seed=1))
    np.testing.assert_array_equal(grads['up'][:2], sample(seed=1)['up'][:2])
    assert np.all(grads['up'][2] != sample(seed=1)['up'][2])


@pytest.mark.parametrize('name', ['sigma', 'spectral_norm'])
def test_smallest_init_scale_exceeds_eps(name):
    """Singular values are equal to those at any other scale. Catches a least scale below EPS."""
    small = jax.tree.map(lambda w: w * np.float32(MIN_INIT_SCALE), sample())
    reparam, stored, state = init_reparam(name, small)
    used, _ = reparam.apply(stored, state, True)
    norms = [np.linalg.norm(m, 2) for m in layer_matrices('up', used['up'])]
    expected = [np.linalg.norm(m, 2) for m in layer_matrices('up', small['up'])]
    np.testing.assert_allclose(norms, expected if name == 'sigma' else 1, rtol=1e-5)


def measure(names):
    reparam = reparametrise(names, SPECS, param_shapes(sample()), {})
    return reparam.measures(*reparam.init(sample()))


def test_measures_use_weight_paths():
    """A number for each matrix; through a chain too."""
    largest = {k: [np.linalg.norm(m, 2) for m in layer_matrices(k, sample()[k])] for k in SUMMED}
    measures = measure(['sigma'])
    assert measures.keys() == {'sigma', 'gamma'}
    for name in measures:
        assert measures[name].keys() == SUMMED.keys()
        for key in SUMMED:
            np.testing.assert_allclose(measures[name][key], largest[key], rtol=1e-6)
    measures = measure(['shared', 'sigma'])
    np.testing.assert_allclose(measures['sigma']['up'], largest['up'][0], rtol=1e-6)
    measures = measure(['weight_norm', 'sigma'])
    np.testing.assert_allclose(measures['gamma']['out'], largest['out'], rtol=1e-6)
    measures = measure(['spectral_cap', 'normalize_and_project'])
    assert measures.keys() == {'sigma'} and measures['sigma'].keys() == SUMMED.keys()
    assert measure(['weight_norm']) == measure(['none']) == {}
