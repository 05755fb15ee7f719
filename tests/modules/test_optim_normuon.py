"""NorMuon. Reference: the authors' formula in float64 numpy. Property: its invariants.
Equivalence: stacked = per layer, transposed = transposed for the longer side.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.optim import OPTIMIZERS, unbox_state
from modules.params import ParamSpec
from tests.modules.optim_trajectories import MATRIX

STEPS = 4


def gradients(*shape):
    """Draws gradients with a common part, and outputs of different sizes."""
    rng = np.random.default_rng(0)
    return (0.3 * rng.normal(size=shape) + rng.normal(size=(STEPS, *shape))) * np.geomspace(
        0.1, 3, shape[-1]
    )


def directions(grads, spec=MATRIX, name='normuon', **options):
    """Returns the direction after each gradient [T, ...], and the last state."""
    tx = OPTIMIZERS[name]({'w': spec}, **options)
    weights = {'w': jnp.zeros(grads.shape[1:])}

    def step(state, grad):
        direction, state = tx.update({'w': grad}, state, weights)
        return state, direction['w']

    state, updates = jax.jit(
        lambda grads: jax.lax.scan(step, unbox_state(tx.init(weights)), grads)
    )(jnp.float32(grads))
    return np.asarray(updates, np.float64), state.of


def orthogonalize(matrix, steps=5):
    """Newton-Schulz of the authors' code, as a map of singular values."""
    left_vectors, values, right_vectors = np.linalg.svd(matrix, full_matrices=False)
    values = values / (np.sqrt(np.sum(values**2)) + 1e-7)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left_vectors * values @ right_vectors


def reference(grads, b2=0.95, beta=0.95, nesterov=True, longer=False):
    """`normuon_update` of the authors, of matrices [out, in]; the longer side as in nanochat."""
    momentum, squares, updates = 0, 0, []
    for grad in np.swapaxes(grads, -2, -1):
        momentum = beta * momentum + (1 - beta) * grad
        update = orthogonalize(beta * momentum + (1 - beta) * grad if nesterov else momentum)
        norm = np.linalg.norm(update)
        summed = 0 if longer and update.shape[0] < update.shape[1] else 1
        mean = np.mean(update * update, summed, keepdims=True)
        squares = b2 * squares + (1 - b2) * mean
        update = update / (np.sqrt(squares) + 1e-10)
        update = update * norm / (np.linalg.norm(update) + 1e-10)
        updates.append(update.T * max(1, update.shape[0] / update.shape[1]) ** 0.5)
    return np.array(updates)


@pytest.mark.parametrize('axis', ['output', 'longer'])
@pytest.mark.parametrize('shape', [(6, 9), (9, 6)])
def test_normuon_follows_authors_formula(shape, axis):
    """Catches the wrong axis, a mean in place of the root, a corrected second moment, a norm
    that is not restored, and a factor of the transposed shape.
    """
    grads = gradients(*shape)
    for options in ({}, {'b2': 0.5, 'nesterov': False}):
        expected = reference(grads, longer=axis == 'longer', **options)
        actual, _ = directions(grads, normuon_axis=axis, **options)
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_normuon_keeps_muon_norm():
    """The Frobenius norm of each direction is Muon's, and the direction is another."""
    grads = gradients(7, 5)
    plain, _ = directions(grads, name='muon')
    actual, _ = directions(grads)
    norms = [np.linalg.norm(u, axis=(-2, -1)) for u in (actual, plain)]
    np.testing.assert_allclose(*norms, rtol=1e-5)
    assert np.abs(actual - plain).max() > 0.05


def test_outputs_have_equal_size_without_memory():
    """With b2=0 the root mean square is the same for each output, and not for each input."""
    updates, _ = directions(gradients(5, 9), b2=0.0)
    sizes = np.sqrt(np.mean(updates**2, -2))
    np.testing.assert_allclose(sizes, sizes[:, :1] * np.ones(9), rtol=1e-4)
    assert np.ptp(np.mean(updates**2, -1)) > 1e-3


def test_transposed_gradient_has_transposed_update_for_the_longer_side():
    """And another one for outputs."""
    grads = gradients(6, 9)
    for axis in ('longer', 'output'):
        options = {'normuon_axis': axis, 'muon_scale': 'none'}
        transposed, _ = directions(grads.swapaxes(-1, -2), **options)
        difference = np.abs(transposed.swapaxes(-1, -2) - directions(grads, **options)[0]).max()
        assert difference < 1e-5 if axis == 'longer' else difference > 0.05


HEADS = {  # axes and fan_in of a stacked parameter of heads, its shape, and that of its matrix
    'query': (('layer', 'embed', 'heads', 'head_dim'), ('embed',), (2, 6, 2, 4), (6, 8)),
    'out': (('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim'), (2, 2, 4, 6), (8, 6)),
}


@pytest.mark.parametrize('axis', ['output', 'longer'])
@pytest.mark.parametrize('part', HEADS)
def test_stacked_layers_are_separate_with_heads_merged(part, axis):
    """A number per unit and layer. Catches a norm over layers, and units of a single head."""
    axes, fan_in, shape, matrix = HEADS[part]
    grads = gradients(*shape) * np.array([1.0, 30.0]).reshape(-1, *(1,) * (len(shape) - 1))
    stacked, state = directions(grads, ParamSpec('hidden', axes, fan_in), normuon_axis=axis)
    units = max(matrix) if axis == 'longer' else matrix[1]
    assert state['squares']['w'].shape[0] == 2 and state['squares']['w'].size == 2 * units
    for layer in range(2):
        single, _ = directions(grads[:, layer].reshape(STEPS, *matrix), normuon_axis=axis)
        np.testing.assert_allclose(stacked[:, layer].reshape(STEPS, *matrix), single, atol=1e-5)


def test_zero_gradient_has_zero_direction():
    updates, _ = directions(np.zeros((STEPS, 3, 4)))
    assert not updates.any()
