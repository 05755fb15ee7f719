"""Reference: GaLore, Fira and APOLLO against trajectories of their authors' code. Property:
projected gradients, subspaces, factors and the limit on growth.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.devices.mesh import RULES
from modules.optim import low_rank, partition_by_role, state_specs, unbox_state
from modules.optim.classic import adamw
from modules.optim.low_rank import apollo, fira, galore, limit_growth, singular_basis
from modules.params import ParamSpec, named_leaves
from modules.reparam.magnitude import weight_norm
from tests.fixtures.optim import make_galore
from tests.modules.optim_trajectories import MATRIX, assert_follows, trajectory

FIXED = {'rank': make_galore.RANK, 'projection_every': make_galore.EVERY}
MINI = {'rank': 1, 'apollo_factors': 'tensor', 'apollo_scale': 128.0}
ROWS = {
    'galore': functools.partial(galore, **FIXED),
    'fira': functools.partial(fira, **FIXED),
    'apollo': functools.partial(apollo, **FIXED),
    'apollo mini': functools.partial(apollo, **FIXED | MINI),
}


@pytest.fixture
def fixed_projections(monkeypatch):
    """Gives APOLLO the random numbers with which the stored trajectories were made."""

    def projection(number, period, shape, dtype):
        del number
        *_, rows, rank = shape
        projections = [make_galore.normal(rows, rank, p) for p in range(3)]
        return jnp.asarray(np.stack(projections), dtype)[period] / math.sqrt(rank)

    monkeypatch.setattr(low_rank, 'random_projection', projection)


@pytest.mark.parametrize('shape', make_galore.SHAPES)
@pytest.mark.parametrize('name', ROWS)
def test_low_rank_follows_published_code(fixed_projections, name, shape):
    """50 steps over three projections, in float32. Catches a projection of the longer side, another
    moment of refresh, turned moments, an epsilon under the bias correction, a limit after it.
    """
    assert_follows(
        trajectory(ROWS[name], shape, make_galore.LR), 'make_galore', f'{name} {shape}', shape
    )


LAYERS = ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',))
SHAPE = (2, 4, 3, 2)  # in each of two layers a matrix 4 x 6


def directions(make, specs, grads):
    """Returns (the direction after each of `grads`, the last state), in a single program."""
    tx = make(specs)

    def run():
        state, updates = unbox_state(tx.init(grads[0])), []
        for grad in grads:
            direction, state = tx.update(grad, state, grad)
            updates.append(direction)
        return updates, state

    return jax.jit(run)()


def gradients(number, shape=SHAPE):
    rng = np.random.default_rng(0)
    return [{'w': rng.normal(size=shape).astype(np.float32)} for _ in range(number)]


@pytest.mark.default_rows('apollo')
@pytest.mark.parametrize('name', ROWS)
def test_layers_are_separate_matrices(fixed_projections, name):
    """Catches a decomposition, a factor or a norm over layers, and heads that are not merged."""
    row = functools.partial(ROWS[name], projection_every=2)
    grads = gradients(3)
    stacked, _ = directions(row, {'w': LAYERS}, grads)
    for layer in range(SHAPE[0]):
        layer_directions, _ = directions(
            row, {'w': MATRIX}, [{'w': g['w'][layer].reshape(4, 6)} for g in grads]
        )
        for expected, direction in zip(layer_directions, stacked, strict=True):
            np.testing.assert_allclose(
                direction['w'][layer].reshape(4, 6), expected['w'], rtol=1e-4
            )


@pytest.mark.parametrize(('name', 'basis'), [('galore', 1), ('fira', 1), ('apollo', 0)])
@pytest.mark.parametrize('axes', [LAYERS.axes, ('layer', 'mlp', 'heads', 'embed')])
def test_state_has_published_size(name, basis, axes):
    """2 r N numbers for the moments of a matrix K x N, r K for GaLore's projection, a number for
    the norm of an update. Catches moments of the shape of the weight, and axes that no device has.
    """
    short, long, rank, layers = 4, 6, FIXED['rank'], SHAPE[0]
    fan_in = axes[1:-1] if axes[1] == 'mlp' else ('embed',)
    shape = (2, 3, 2, 4) if axes[1] == 'mlp' else SHAPE
    specs = {'w': ParamSpec('hidden', axes, fan_in)}
    shapes = {'w': jax.ShapeDtypeStruct(shape, jnp.float32)}
    boxed = jax.eval_shape(ROWS[name](specs).init, shapes)
    leaves = named_leaves(unbox_state(boxed))
    described = named_leaves(state_specs(boxed, shapes, specs))
    numbers = 2 * rank * long + basis * rank * short + (name != 'galore')
    assert sum(leaf.size for leaf in leaves.values()) == 1 + layers * numbers
    for path, leaf in leaves.items():
        assert len(described[path].axes) == len(leaf.shape)
        assert set(described[path].axes) <= set(RULES)
    assert described['of/momentum/w'].axes == ('layer', 'rank', 'long_side')


@pytest.mark.parametrize('row', [galore, fira, apollo])
def test_rank_is_at_most_the_shorter_side(row):
    grads = gradients(2)
    actual, state = directions(functools.partial(row, rank=100), {'w': LAYERS}, grads)
    expected, _ = directions(functools.partial(row, rank=4), {'w': LAYERS}, grads)
    assert state.of['momentum']['w'].shape == (2, 4, 6)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_galore_moves_in_subspace_and_fira_everywhere():
    """Rank 2 of 4; within a period the subspace comes from its first gradient."""
    grads = gradients(3, (4, 6))
    basis = np.linalg.svd(grads[0]['w'])[0][:, :2]
    for row, outside in ((galore, 0.0), (fira, 0.1)):
        updates, _ = directions(functools.partial(row, rank=2), {'w': MATRIX}, grads)
        residuals = [d['w'] - basis @ (basis.T @ d['w']) for d in updates]
        size = [
            np.linalg.norm(residual) / np.linalg.norm(d['w'])
            for residual, d in zip(residuals, updates, strict=True)
        ]
        assert min(size) >= outside and (outside or max(size) < 1e-5)


def test_singular_vector_signs_are_fixed():
    """Catches signs left to the decomposition, which differ between devices."""
    x = np.random.default_rng(1).normal(size=(5, 4, 6)).astype(np.float32)
    basis = np.asarray(singular_basis(jnp.asarray(x), 3))
    assert np.all(basis.max(-2) >= np.abs(basis).max(-2))
    np.testing.assert_allclose(np.swapaxes(basis, -1, -2) @ basis, [np.eye(3)] * 5, atol=1e-6)
    expected = np.linalg.svd(x)[0][..., :3]
    np.testing.assert_allclose(np.abs(basis), np.abs(expected), atol=1e-5)


@pytest.mark.full
def test_apollo_scales_channels_only():
    """f is a number per channel of the longer side, or a single number; with `tensor`, the scale is
    under a root.
    """
    grads = gradients(2, (4, 6))
    for options, axis in (({}, 0), ({'apollo_factors': 'tensor'}, None)):
        row = functools.partial(apollo, rank=2, **options)
        updates, _ = directions(row, {'w': MATRIX}, grads)
        fourfold, _ = directions(functools.partial(row, apollo_scale=4.0), {'w': MATRIX}, grads)
        for direction, scaled, grad in zip(updates, fourfold, grads, strict=True):
            ratio = np.asarray(direction['w'] / grad['w'])
            assert np.ptp(ratio, axis).max() < 1e-5 * ratio.max() and ratio.min() > 0
            np.testing.assert_allclose(scaled['w'], 2 * direction['w'], rtol=1e-5)


def test_projections_differ_by_parameter_layer_and_period():
    """The variance is 1 / r, so that |P^T g| is |g| on average. Catches a shared draw."""
    projections = [
        low_rank.random_projection(n, p, (2, 64, 16), jnp.float32) for n in (0, 1) for p in (0, 1)
    ]
    matrices = np.concatenate(projections)
    assert len({matrix.tobytes() for matrix in matrices}) == 8
    np.testing.assert_allclose(matrices.var() * 16, 1.0, atol=0.05)
    specs = low_rank.number_specs({'a': MATRIX, 'b': MATRIX})
    assert [leaf.number for leaf in jax.tree.leaves(specs)] == [0, 1]


def test_growth_is_limited():
    """The limit is `limit` times the previous norm, which is then the norm; a shrinking update is
    unchanged, and so is an update after 0. Catches a matrix that a first gradient of zero would
    hold for good.
    """
    x = np.ones((3, 2, 2), np.float32)  # of norm 2
    limited, norm = limit_growth(jnp.asarray(x), jnp.float32([1.0, 4.0, 0.0]), 1.5)
    np.testing.assert_allclose(norm, [1.5, 2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(limited, x * np.array([0.75, 1, 1])[:, None, None], rtol=1e-6)
    unlimited, _ = limit_growth(jnp.asarray(x), jnp.float32([1.0, 4.0, 0.0]), np.inf)
    np.testing.assert_array_equal(unlimited, x)


@pytest.mark.full
def test_galore_with_weight_norm_is_gradnormlorp():
    """W = g V / |V| for each output, as arXiv:2412.19616 has it, in numpy: Adam of
    g' = <G, V / |V|>, and GaLore of V' = g (G - g' V / |V|) / |V|. Catches norms of inputs.
    """
    rng, lr, period = np.random.default_rng(3), 0.1, 3
    grads, start = rng.normal(size=(5, 4, 6)), rng.normal(size=(4, 6))
    options = {'b1': 0.9, 'b2': 0.999, 'eps': 1e-6}
    with jax.enable_x64(True):
        map_ = weight_norm({'w': MATRIX}, None)
        row = functools.partial(galore, rank=2, projection_every=period, **options)
        tx = partition_by_role(map_.specs, functools.partial(adamw, **options), hidden=row)
        stored, carried = map_.init({'w': jnp.asarray(start)})
        state = unbox_state(tx.init(stored))

        @jax.jit
        def step(grad, state, stored):
            _, pull = jax.vjp(lambda s: map_.apply(s, carried, True)[0], stored)
            directions, state = tx.update(*pull({'w': grad}), state, stored)
            return state, jax.tree.map(lambda w, d: w - lr * d, stored, directions)

        for grad in grads:
            state, stored = step(jnp.asarray(grad), state, stored)
    v, g = start.copy(), np.linalg.norm(start, axis=0)
    v_moments, g_moments = np.zeros((2, 2, 6)), np.zeros((2, 6))  # both moments
    for t, grad in enumerate(grads, start=1):
        unit = v / np.linalg.norm(v, axis=0)
        grad_g = np.sum(grad * unit, 0)
        grad_v = g / np.linalg.norm(v, axis=0) * (grad - grad_g * unit)
        if t % period == 1:
            basis = np.asarray(singular_basis(jnp.asarray(grad_v), 2))
        low = basis.T @ grad_v
        for moments, x in ((v_moments, low), (g_moments, grad_g)):
            moments[0] += 0.1 * (x - moments[0])
            moments[1] += 0.001 * (x**2 - moments[1])
        first, second = 1 - 0.9**t, 1 - 0.999**t
        v -= (
            lr
            * 0.25
            * np.sqrt(second)
            / first
            * basis
            @ (v_moments[0] / (np.sqrt(v_moments[1]) + 1e-6))
        )
        g -= lr * g_moments[0] / first / (np.sqrt(g_moments[1] / second) + 1e-6)
    np.testing.assert_allclose(stored['w']['direction'], v, rtol=1e-5)
    np.testing.assert_allclose(stored['w']['gain'], g, rtol=1e-5)
