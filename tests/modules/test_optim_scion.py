"""Scion. Reference: the authors' equations in float64. Property: sign descent, and steps whose
effect does not depend on the width. Equivalence: stacked = per layer.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.optim.muon import COEFFICIENTS
from modules.optim.scion import ENTRYWISE, choose_step, scion
from modules.params import ParamSpec
from tests.fixtures.optim import problem
from tests.modules.optim_trajectories import MATRIX, VECTOR, trajectory

EMBEDDING = ParamSpec('embedding', ('vocab', 'embed'))
READOUT = ParamSpec('readout', ('embed', 'vocab'), ('embed',))
LR, RADIUS = 0.02, 3.0


def spectral(g):
    """zeropower_via_newtonschulz5 without its cast to bfloat16, for [out, in]."""
    a, b, c = COEFFICIENTS
    x = (g if g.shape[0] <= g.shape[1] else g.T) / (np.linalg.norm(g) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if g.shape[0] <= g.shape[1] else x.T) * np.sqrt(g.shape[0] / g.shape[1])


def col_norm(g, normalized):
    rms = np.sqrt(np.sum(g**2, 0, keepdims=True)) / np.sqrt(g.shape[0])
    return g / (rms * (g.shape[1] if normalized else 1) + 1e-8)


def row_norm(g, normalized):
    length = np.sqrt(np.sum(g**2, -1, keepdims=True))
    return g / (length * (np.sqrt(g.shape[1]) if normalized else 1) + 1e-8)


# The lmo of scion.py: weights of torch are [out, in], and those of an embedding [token, feature],
# which `transpose=True` turns. Ours are [in, out], so an embedding has the same layout.
LMO = {
    'hidden/spectral': lambda g: spectral(g.T).T,
    'hidden/sign': lambda g: np.sign(g) / g.shape[0],
    'hidden/input': lambda g: col_norm(g.T, True).T,
    'hidden/output': lambda g: row_norm(g.T, True).T,
    'embedding/sign': np.sign,
    'embedding/input': lambda g: col_norm(g.T, False).T,
    'embedding/output': lambda g: row_norm(g.T, False).T,
    'readout/spectral': lambda g: spectral(g.T).T,
    'readout/sign': lambda g: np.sign(g) / g.shape[0],
    'readout/output': lambda g: row_norm(g.T, True).T,
    'vector/rms': lambda g: g / (np.sqrt(np.mean(g**2)) + 1e-8),
}
SPECS = {'hidden': MATRIX, 'embedding': EMBEDDING, 'readout': READOUT, 'vector': VECTOR}


def constrained_weights(lmo, shape, share):
    """Returns {step: weight} of the constrained form: Scion.step with unconstrained=False."""
    weight, mean, weights = problem.start(shape), 0.0, {}
    for t in range(1, problem.STEPS + 1):
        mean = (1 - share) * mean + share * problem.gradient(shape, t)
        weight = weight * (1 - LR) - LR * RADIUS * lmo(mean)
        weights[t] = weight
    return weights


@pytest.mark.parametrize('shape', ['tall', 'wide'])
@pytest.mark.parametrize('case', LMO)
def test_scion_follows_authors_code(case, shape):
    """In float64, with decay 1 / radius. Catches a transposed norm or factor, an average of the
    wrong share, and a factor 1 / I of an embedding.
    """
    role, norm = case.split('/')
    shape = 'vector' if role == 'vector' else shape
    options = {} if role == 'vector' else {f'scion_{role}': norm}
    with jax.enable_x64(True):
        actual = trajectory(
            functools.partial(scion, momentum=0.8, **options),
            shape,
            lr=LR * RADIUS,
            decay=1 / RADIUS,
            spec=SPECS[role],
            dtype=jnp.float64,
        )
    expected = constrained_weights(LMO[case], shape, 0.2)
    for step, weight in actual.items():
        np.testing.assert_allclose(weight, expected[step], rtol=1e-9, err_msg=f'step {step}')


def test_signs_without_momentum_are_sign_descent():
    """With one size for all entries of a parameter. Catches a momentum that is left."""
    specs = {name: SPECS[name] for name in ('hidden', 'embedding', 'readout')}
    params = {name: jnp.zeros((4, 6)) for name in specs}
    norms = {f'scion_{name}': 'sign' for name in specs}
    tx = scion(specs, momentum=0.0, **norms)
    state = tx.init(params)
    for t in (1, 2):
        grad = jnp.float32(problem.gradient('wide', t))
        steps, state = tx.update(dict.fromkeys(specs, grad), state, params)
        for name, factor in {'hidden': 4, 'embedding': 1, 'readout': 4}.items():
            np.testing.assert_allclose(factor * steps[name], np.sign(grad), rtol=1e-6)


@pytest.mark.parametrize('width', [8, 64])
def test_step_has_the_same_effect_at_any_width(width):
    """The largest effect on outputs, of inputs as large as the norm assumes, is 1 (spectral: of
    Newton-Schulz's values, near 1). Catches a missing factor of the width.
    """
    mean = jnp.float32(np.random.default_rng(0).normal(size=(width, 2 * width)))
    step = {
        norm: np.asarray(choose_step(MATRIX, norm, mean, 5)) for norm in ('spectral', *ENTRYWISE)
    }
    np.testing.assert_allclose(np.abs(step['sign']).sum(0), 1, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(step['output'], axis=0) * width**0.5, 1, rtol=1e-5)
    rms_of_inputs = np.sqrt(np.mean(step['input'] ** 2, 1))
    np.testing.assert_allclose(rms_of_inputs.sum(), 1, rtol=1e-5)
    largest = np.linalg.norm(step['spectral'], 2) / 2**0.5
    assert 0.68 < largest < 1.203
    token = np.asarray(choose_step(EMBEDDING, 'input', mean, 5))
    np.testing.assert_allclose(np.sqrt(np.mean(token**2, 1)), 1, rtol=1e-5)


@pytest.mark.parametrize('norm', ['spectral', *ENTRYWISE])
def test_stacked_layers_are_separate_with_heads_merged(norm):
    """Catches a norm over layers or of single heads."""
    axes = ('layer', 'heads', 'head_dim', 'embed')
    spec = ParamSpec('hidden', axes, ('heads', 'head_dim'))
    sizes = np.reshape([1.0, 30.0], (2, 1, 1, 1))
    mean = jnp.float32(sizes * np.random.default_rng(0).normal(size=(2, 2, 3, 5)))
    stacked = choose_step(spec, norm, mean, 5)
    for layer in range(2):
        single = choose_step(MATRIX, norm, mean[layer].reshape(6, 5), 5)
        np.testing.assert_allclose(stacked[layer].reshape(6, 5), single, rtol=1e-4, atol=1e-6)


def test_stacked_vectors_are_separate():
    """A layer of small gradients moves as far as the other. Catches a norm over layers."""
    mean = jnp.float32([[1.0, -1.0], [1e-3, 3e-3]])
    step = choose_step(ParamSpec('vector', ('layer', 'embed')), 'rms', mean, 5)
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(step), 1)), 1, rtol=1e-4)
