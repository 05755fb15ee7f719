"""Reference: the largest singular value, and what is made of it, in float64 numpy.

The power iteration is that of the published code, one step at a time.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import ParamSpec
from modules.reparam import REPARAMS, reparametrise
from modules.reparam.spectral import MIN_INIT_SCALE
from modules.spectrum import first_right_vector, power_iteration
from tests.modules.test_reparam import SPECS, SUMMED, sample, shapes_of


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def iterate(matrix, u):
    """(sigma, v, u): one power iteration of one matrix [I, O], as arXiv:2303.06296 has it."""
    v = matrix @ u
    v = v / np.linalg.norm(v)
    u = matrix.T @ v
    u = u / np.linalg.norm(u)
    return v @ matrix @ u, v, u


def matrices_of(key, weight):
    """The three layers' matrices [I, O] of a parameter of SPECS."""
    weight = np.float64(weight)
    return [layer.reshape(6, -1) if key == 'out' else layer for layer in weight]


def made(name='sigma', params=None, **options):
    params = sample() if params is None else params
    reparam = REPARAMS[name](SPECS, shapes_of(params), **options)
    return reparam, *reparam.init(params)


def matrix_of(stored):
    return stored['matrix'] if isinstance(stored, dict) else stored


def test_power_iteration_is_the_published_one_step_by_step():
    """Of weights that change between steps, each layer and each parameter on its own."""
    reparam, stored, state = made()
    vectors = {k: [np.linalg.svd(m)[2][0] for m in matrices_of(k, sample()[k])] for k in SUMMED}
    for key in SUMMED:  # a singular vector may point either way
        signs = np.sign(np.sum(np.stack(vectors[key]) * state[key], -1))
        vectors[key] = [s * u for s, u in zip(signs, vectors[key], strict=True)]
        np.testing.assert_allclose(state[key], np.stack(vectors[key]), rtol=1e-4, atol=1e-5)
    for seed in range(1, 5):
        for key in SUMMED:
            stored[key]['matrix'] += 0.5 * sample(seed)[key]
        used, state = reparam.apply(stored, state, True)
        for key in SUMMED:
            layers = matrices_of(key, stored[key]['matrix'])
            found = [iterate(m, u) for m, u in zip(layers, vectors[key], strict=True)]
            vectors[key] = [u for *_, u in found]
            np.testing.assert_allclose(state[key], np.stack(vectors[key]), rtol=1e-4, atol=1e-5)
            for layer, (largest, *_) in enumerate(found):
                gamma = np.float64(stored[key]['gain'][layer])
                wanted = gamma / largest * np.float64(stored[key]['matrix'][layer])
                np.testing.assert_allclose(used[key][layer], wanted, rtol=2e-5, atol=1e-6)


def test_many_steps_find_the_power_iteration():
    """Against numpy's decomposition, from any vector, in one call and in many."""
    matrices, u = np.float32(draw(2, 3, 9, 5)), np.float32(draw(2, 3, 5, seed=1))
    wanted = np.linalg.svd(np.float64(matrices), compute_uv=False)[..., 0]
    found, at_once = power_iteration(matrices, u, 300)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    step = jax.jit(power_iteration)
    for _ in range(300):
        found, u = step(matrices, u)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(u, at_once, rtol=1e-5, atol=1e-6)


def test_the_first_step_from_the_decomposition_is_already_there():
    matrices = np.float32(draw(4, 9, 5))
    found, _ = power_iteration(matrices, first_right_vector(matrices))
    wanted = np.linalg.svd(np.float64(matrices), compute_uv=False)[..., 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_sigma_gradient():
    """With G that of W_used: dgamma = <G, W> / sigma, and dW = gamma / sigma (G - dgamma v u^T).

    Catches a sigma without gradient, and one that flows into u and v.
    """
    reparam, stored, state = made()
    rng = np.random.default_rng(5)
    for key in SUMMED:
        stored[key]['gain'] = jnp.float32(rng.uniform(0.5, 2, 3))
        state[key] = state[key] + jnp.float32(0.3 * rng.normal(size=state[key].shape))
    grad_used = sample(seed=2)
    _, pull = jax.vjp(lambda stored: reparam.apply(stored, state, True)[0], stored)
    (grads,) = pull(grad_used)
    for key in SUMMED:
        layers, grad_layers = (matrices_of(key, w) for w in (stored[key]['matrix'], grad_used[key]))
        found = matrices_of(key, grads[key]['matrix'])
        for i, (matrix, grad) in enumerate(zip(layers, grad_layers, strict=True)):
            largest, v, u = iterate(matrix, np.float64(state[key][i]))
            d_gamma = np.sum(grad * matrix) / largest
            gamma = np.float64(stored[key]['gain'][i])
            np.testing.assert_allclose(grads[key]['gain'][i], d_gamma, rtol=1e-4)
            wanted = gamma / largest * (grad - d_gamma * np.outer(v, u))
            np.testing.assert_allclose(found[i], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(('start', 'options'), [('sigma', {}), ('one', {'gamma_start': 'one'})])
def test_both_starts_of_gamma(start, options):
    """The spectral norm of what is used is gamma, whichever it starts as."""
    _, stored, _ = reparam = made(**options)
    used, _ = reparam[0].apply(*reparam[1:], False)
    for key in SUMMED:
        largest = [np.linalg.norm(m, 2) for m in matrices_of(key, sample()[key])]
        wanted = np.ones(3) if start == 'one' else largest
        np.testing.assert_allclose(stored[key]['gain'], wanted, rtol=1e-6)
        norms = [np.linalg.norm(m, 2) for m in matrices_of(key, used[key])]
        np.testing.assert_allclose(norms, wanted, rtol=1e-6)
        assert reparam[0].specs[key]['gain'] == ParamSpec('vector', ('layer',))
        assert reparam[0].specs[key]['matrix'] == SPECS[key]


def test_evaluation_iterates_from_the_stored_vectors():
    """As training does, and keeps nothing of it. Catches an evaluation by last step's sigma."""
    reparam, stored, state = made()
    for key in SUMMED:
        stored[key]['matrix'] += sample(seed=3)[key]
    trained, after = reparam.apply(stored, state, True)
    evaluated, kept = reparam.apply(stored, state, False)
    jax.tree.map(np.testing.assert_array_equal, trained, evaluated)
    jax.tree.map(np.testing.assert_array_equal, kept, state)
    assert all(np.any(after[key] != state[key]) for key in SUMMED)


def test_a_matrix_of_zeros_keeps_its_vector():
    """Otherwise nothing would ever be found once it is a matrix again."""
    reparam, stored, state = made('spectral_cap')
    zeros = jax.tree.map(jnp.zeros_like, stored)
    used, after = reparam.apply(zeros, state, True)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    grads = jax.grad(lambda s: jnp.sum(reparam.apply(s, state, True)[0]['up']))(zeros)
    np.testing.assert_array_equal(used['up'], 0)
    np.testing.assert_array_equal(grads['up'], 1)


def test_spectral_norm_is_one_in_every_layer():
    reparam, stored, state = made('spectral_norm')
    used, _ = reparam.apply(stored, state, True)
    for key in SUMMED:
        norms = [np.linalg.norm(m, 2) for m in matrices_of(key, used[key])]
        np.testing.assert_allclose(norms, 1, rtol=1e-6)
        np.testing.assert_array_equal(stored[key], sample()[key])


def test_spectral_cap_leaves_matrices_below_the_bound_as_they_are():
    """To the bit, and their gradient; those above have the bound."""
    params = sample()
    scales = np.float32([0.01, 1, 10]).reshape(3, 1, 1)
    params['up'] = params['up'] * scales / np.float32(np.linalg.norm(params['up'][1], 2))
    reparam, stored, state = made('spectral_cap', params, spectral_bound=1.5)
    used, pull = jax.vjp(lambda stored: reparam.apply(stored, state, True)[0], stored)
    np.testing.assert_array_equal(used['up'][:2], params['up'][:2])
    np.testing.assert_allclose(np.linalg.norm(used['up'][2], 2), 1.5, rtol=1e-6)
    (grads,) = pull(sample(seed=1))
    np.testing.assert_array_equal(grads['up'][:2], sample(seed=1)['up'][:2])
    assert np.all(grads['up'][2] != sample(seed=1)['up'][2])


@pytest.mark.parametrize('name', ['sigma', 'spectral_norm'])
def test_the_least_scale_is_large_enough_for_what_is_divided_by(name):
    """At it, singular values are those of any other scale. Catches a least scale below EPS."""
    small = jax.tree.map(lambda w: w * np.float32(MIN_INIT_SCALE), sample())
    reparam, stored, state = made(name, small)
    used, _ = reparam.apply(stored, state, True)
    norms = [np.linalg.norm(m, 2) for m in matrices_of('up', used['up'])]
    wanted = [np.linalg.norm(m, 2) for m in matrices_of('up', small['up'])]
    np.testing.assert_allclose(norms, wanted if name == 'sigma' else 1, rtol=1e-5)


def measured(names):
    reparam = reparametrise(names, SPECS, shapes_of(sample()), {})
    return reparam.measures(*reparam.init(sample()))


def test_measures_are_by_path_of_the_used_weight():
    """One number for each matrix; through a chain too."""
    largest = {k: [np.linalg.norm(m, 2) for m in matrices_of(k, sample()[k])] for k in SUMMED}
    found = measured(['sigma'])
    assert found.keys() == {'sigma', 'gamma'}
    for name in found:
        assert found[name].keys() == SUMMED.keys()
        for key in SUMMED:
            np.testing.assert_allclose(found[name][key], largest[key], rtol=1e-6)
    found = measured(['shared', 'sigma'])
    np.testing.assert_allclose(found['sigma']['up'], largest['up'][0], rtol=1e-6)
    found = measured(['weight_norm', 'sigma'])
    np.testing.assert_allclose(found['gamma']['out'], largest['out'], rtol=1e-6)
    found = measured(['spectral_cap', 'normalize_and_project'])
    assert found.keys() == {'sigma'} and found['sigma'].keys() == SUMMED.keys()
    assert measured(['weight_norm']) == measured(['none']) == {}
