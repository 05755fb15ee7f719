"""Reference: muon, auon and hybrid_auon against published code, Newton-Schulz against an SVD.
Property: singular values, the spectral bound, AuON's brake. Equivalence: stacked = per layer.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.optim import OPTIMIZERS, unbox_state
from modules.optim.muon import COEFFICIENTS, cosh_rms, newton_schulz
from modules.params import ParamSpec
from tests.modules.optim_trajectories import MATRIX, assert_follows, trajectory

LR = 0.1  # of the stored trajectories
TORCH = {  # case of make_muon.py: (shape, options, weight decay)
    'wide': ('wide', {}, 0.0),
    'tall': ('tall', {}, 0.0),
    'square': ('square', {'nesterov': False, 'momentum': 0.8}, 0.0),
    'three_steps': ('wide', {'muon_steps': 3}, 0.0),
    'rms': ('tall', {'muon_scale': 'rms'}, 0.1),
}
AUTHORS = {  # case of make_auon.py: (optimizer, shape, options)
    'auon': ('auon', 'wide', {}),
    'auon_gamma': ('auon', 'tall', {'auon_gamma': 4.0}),
    'hybrid': ('hybrid_auon', 'tall', {}),
    'hybrid_one': ('hybrid_auon', 'square', {'muon_steps': 1}),
    'paper_wide': ('auon', 'wide', {'auon_form': 'paper', 'auon_gamma': 1.0}),
    'paper_tall': ('auon', 'tall', {'auon_form': 'paper', 'auon_gamma': 1.0}),
}


@pytest.mark.parametrize('case', TORCH)
def test_muon_follows_torch(case):
    """In float32, torch in float64 without its cast to bfloat16: 1e-5 of the largest weight.

    Catches a factor of the transposed shape, a sum in the place of the average, Nesterov from the
    average of before.
    """
    shape, options, decay = TORCH[case]
    actual = trajectory(functools.partial(OPTIMIZERS['muon'], **options), shape, LR, decay)
    assert_follows(actual, 'make_muon', case, shape)


@pytest.mark.parametrize('case', AUTHORS)
def test_auon_follows_authors_code(case):
    """1e-5 of the largest weight. Catches gamma outside of cosh, and a length that is divided by
    where the code does not, or the other way round.
    """
    name, shape, options = AUTHORS[case]
    actual = trajectory(functools.partial(OPTIMIZERS[name], **options), shape, LR)
    assert_follows(actual, 'make_auon', case, shape)


def polynomial(values, steps=5):
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return values


@pytest.mark.parametrize('shape', [(4, 6), (6, 4)])
def test_newton_schulz_maps_singular_values_alone(shape):
    """U f(S / (|M| + eps)) V^T, of each matrix. Catches a norm over layers, a wrong transpose, and
    eps as the least norm.
    """
    matrices = np.random.default_rng(0).normal(size=(2, 3, *shape)) * [[[[0.1]]], [[[10.0]]]]
    left_vectors, values, right_vectors = np.linalg.svd(matrices, full_matrices=False)
    lengths = np.sqrt(np.sum(values**2, -1, keepdims=True)) + 0.5
    expected = np.einsum(
        '...ik,...k,...ko->...io', left_vectors, polynomial(values / lengths), right_vectors
    )
    np.testing.assert_allclose(newton_schulz(jnp.float32(matrices), 5, 0.5), expected, atol=1e-4)


def gradients(shape, steps):
    """Draws gradients with a common part."""
    rng = np.random.default_rng(0)
    return 0.3 * rng.normal(size=shape) + rng.normal(size=(steps, *shape))


def directions(name, grads, spec=MATRIX, right=None, **options):
    """Returns the direction after each gradient [step, ...]; `right`: initial vectors of
    muon_spectral.
    """
    tx = OPTIMIZERS[name]({'w': spec}, **options)
    params = {'w': jnp.zeros(grads.shape[1:])}

    def step(state, grad):
        direction, state = tx.update({'w': grad}, state, params)
        return state, direction['w']

    def run(grads):
        state = unbox_state(tx.init(params))
        if right is not None:
            state = state._replace(of=state.of | {'right': {'w': right}})
        return jax.lax.scan(step, state, grads)[1]

    updates = jax.jit(run)(jnp.float32(grads))
    return np.asarray(updates, np.float64)


# Where singular values of 1e-4, 1e-3 and 1e-2 of the norm end, and the range of those above 2e-3,
# from float64 numpy. Polar Express divides by 1.02 first, which these ends leave out.
POLYNOMIALS = {  # name: (steps, margin of the norm, ends, range)
    'quintic': (5, 1.0, (0.048, 0.471, 0.699), (0.681, 1.203)),
    'polar_express': (5, 1.02, (0.099, 0.859, 1.027), (0.858, 1.142)),
    'convergent': (12, 1.0, (0.393, 1.000, 1.000), (0.999, 1.001)),
}


@pytest.mark.parametrize('name', POLYNOMIALS)
def test_polynomials_map_singular_values(name):
    """A stack of diagonal matrices ends as its slices. Catches a coefficient, an order of the
    polynomials or a margin that differs from the published one, and a norm over the stack.
    """
    steps, margin, ends, (low, high) = POLYNOMIALS[name]
    values = np.append(np.geomspace(2e-3, 0.1, 60), 0.7)
    values = np.append(values, np.sqrt(1 - np.sum(values**2)))
    small = margin * np.array([1e-4, 1e-3, 1e-2])
    matrices = np.zeros((3, 62, 64))
    matrices[0, range(62), range(62)] = margin * values / 10  # of another size in each slice
    matrices[1, range(3), range(3)], matrices[1, 3, 3] = small, 1.0
    matrices[2, range(3), range(3)], matrices[2, 3, 3] = 10 * small, 10.0
    stack = newton_schulz(jnp.float32(matrices), steps, 0.0, name)
    for i, matrix in enumerate(matrices):
        mapped = newton_schulz(jnp.float32(matrix), steps, 0.0, name)
        np.testing.assert_allclose(stack[i], mapped, atol=1e-6)
    diagonals = np.diagonal(stack, axis1=-2, axis2=-1)
    np.testing.assert_allclose(diagonals[1:, :3], [ends, ends], atol=1e-3)
    assert low < diagonals[0].min() and diagonals[0].max() < high


def test_polar_express_repeats_its_last_polynomial():
    """Many steps end at 1.035, where the last polynomial is constant; 4 steps are refused.

    Catches a repeat of the first, and 4 steps with the constants of 5.
    """
    matrix = jnp.float32(np.random.default_rng(0).normal(size=(8, 16)))
    values = np.linalg.svd(newton_schulz(matrix, 25, 0.0, 'polar_express'), compute_uv=False)
    np.testing.assert_allclose(values, 1.035, atol=1e-3)
    with pytest.raises(ValueError, match=r'constants for 5 steps, .* got muon_steps=4'):
        newton_schulz(matrix, 4, 0.0, 'polar_express')


@pytest.mark.parametrize('shape', [(16, 32), (64, 96), (128, 64), (16, 128)])
def test_rectangles_have_singular_values_near_1(shape):
    """Between 0.68 and 1.203, where a random matrix has its smallest above 0.0015 of its length.

    Catches other coefficients, and fewer iterations.
    """
    updates = directions('muon', gradients(shape, 4), muon_scale='none')
    values = np.linalg.svd(updates, compute_uv=False)
    assert values.min() > 0.68 and values.max() < 1.203


@pytest.mark.parametrize('width', [16, 64, 128])
def test_squares_have_few_small_singular_values(width):
    """None above 1.203; at least 95% above 0.6: square Gaussians have some far below the others."""
    updates = directions('muon', gradients((width, width), 4), muon_scale='none')
    values = np.linalg.svd(updates, compute_uv=False)
    assert values.max() < 1.203
    assert np.mean(values > 0.6) > 0.95


@pytest.mark.parametrize('shape', [(64, 64), (96, 32), (32, 96)])
def test_muon_spectral_bounds_the_spectral_norm(shape):
    """At most 1.1 times sqrt(fan_out / fan_in), also below 1; muon has up to 1.2 times.

    Catches a factor of at least 1, and a bound that shrinks what is within it.
    """
    updates = directions('muon_spectral', gradients(shape, 20)) / np.sqrt(shape[1] / shape[0])
    norms = np.linalg.norm(updates, 2, (-2, -1))
    assert norms.min() > 0.999 and norms[3:].max() < 1.1


def test_muon_spectral_divides_muon_by_its_spectral_norm():
    """The same gradient repeats, so that a power iteration per step converges.

    Catches a vector that is not stored, a bound of each row, and a factor of the wrong side.
    """
    grads = np.repeat(gradients((12, 5), 1), 40, 0)
    free = directions('muon', grads, muon_scale='none')[-1]
    actual = directions('muon_spectral', grads, muon_power_steps=1)[-1]
    expected = np.sqrt(5 / 12) * free / max(1.0, np.linalg.norm(free, 2))
    assert np.linalg.norm(free, 2) > 1.05
    np.testing.assert_allclose(actual, expected, atol=1e-3)


@pytest.mark.parametrize('scale', ['rms', 'none'])
def test_transposed_gradient_has_transposed_update(scale):
    """If the factor is symmetric in both sides. Catches a factor of a single side."""
    grads = gradients((4, 6), 3)
    actual = directions('muon', grads.swapaxes(-1, -2), muon_scale=scale)
    expected = directions('muon', grads, muon_scale=scale).swapaxes(-1, -2)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


HEADS = {  # axes and fan_in of a stacked parameter of heads, its shape, and that of its matrix
    'query': (('layer', 'embed', 'heads', 'head_dim'), ('embed',), (2, 6, 2, 4), (6, 8)),
    'out': (('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim'), (2, 2, 4, 6), (8, 6)),
}


@pytest.mark.parametrize('part', ['query', pytest.param('out', marks=pytest.mark.full)])
@pytest.mark.parametrize('name', ['auon', 'hybrid_auon', 'muon', 'muon_spectral'])
def test_stacked_layers_are_separate_with_heads_merged(name, part):
    """Catches norms over layers, matrices of single heads, and the wrong side for the factor."""
    axes, fan_in, shape, matrix = HEADS[part]
    spec, grads = ParamSpec('hidden', axes, fan_in), gradients(shape, 3)
    stacked, right = directions(name, grads, spec), [None, None]
    if name == 'muon_spectral':  # each layer has a first vector of its own
        state = unbox_state(OPTIMIZERS[name]({'w': spec}).init({'w': jnp.zeros(shape)}))
        right = state.of['right']['w'].reshape(2, -1)
    for layer in range(2):
        single = directions(name, grads[:, layer].reshape(3, *matrix), right=right[layer])
        np.testing.assert_allclose(stacked[:, layer].reshape(3, *matrix), single, atol=1e-5)


@pytest.mark.parametrize('gamma', [0.5, 1.5, 4.0])
def test_auon_brake_is_near_1(gamma):
    """1 <= R <= 1 + gamma^2 / numel without a single large entry, and at most 1 + sinh(gamma)^2 /
    (2 numel), which a single entry comes close to.

    Catches a cosh of the raw gradient, and a mean over layers.
    """
    rng = np.random.default_rng(0)
    random = 1e3 * rng.normal(size=(2, 16, 24))
    spike = np.zeros((2, 16, 24))
    spike[0, 3, 5] = 2.0
    for matrices, bound in ((random, gamma**2), (spike, np.sinh(gamma) ** 2 / 2)):
        brake = np.asarray(cosh_rms(jnp.float32(matrices), gamma)[0])
        assert brake.shape == (2, 1, 1)
        assert brake.min() > 1 - 1e-6 and brake.max() < 1 + bound / (16 * 24) + 1e-6
    assert brake[0].item() > 1 + 0.95 * (np.sqrt(1 + np.sinh(gamma) ** 2 / 384) - 1)
    assert brake[1].item() == pytest.approx(1.0, abs=1e-6)
