"""AdamP, SGDP, SCALE and Adafactor. Reference: published code. Property: what each is named for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from modules.optim import as_direction, partition_by_role, state_specs, unbox_state
from modules.optim.classic import adamw, scale
from modules.optim.stages import apply_decay
from modules.optim.variants import adafactor, adamp, remove_radial, sgdp
from modules.params import ParamSpec
from tests.modules.optim_trajectories import assert_follows, trajectory

EMBEDDING = ParamSpec('embedding', ('vocab', 'embed'))
READOUT = ParamSpec('readout', ('embed', 'vocab'), ('embed',))
STACKED = ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim'))


def normal(*shape, seed=0):
    return jnp.float32(np.random.default_rng(seed).normal(size=shape))


def first_step(make, spec, grad, weight):
    """The first direction for a parameter, and the state after it."""
    tx = make({'w': spec})

    def step(grad, weight):
        return tx.update({'w': grad}, unbox_state(tx.init({'w': weight})), {'w': weight})

    direction, state = jax.jit(step)(grad, weight)
    return as_direction(direction['w']).value, state


PROJECTING = {
    'adamp/tall': (adamp, {}),
    'adamp_projects/wide': (adamp, {'adamp_delta': 1.0}),
    'adamp_projects/tall': (adamp, {'adamp_delta': 1.0}),
    'adamp_projects/square': (adamp, {'adamp_delta': 1.0, 'nesterov': True, 'eps': 1e-2}),
    'adamp_projects/vector': (adamp, {'adamp_delta': 1.0}),
    'adamp_embedding/tall': (adamp, {'adamp_delta': 1.0}),
    'sgdp_projects/wide': (sgdp, {'adamp_delta': 1.0, 'momentum': 0.9}),
    'sgdp_projects/square': (
        sgdp,
        {'adamp_delta': 1.0, 'momentum': 0.8, 'dampening': 0.3, 'nesterov': True},
    ),
    'sgdp_embedding/tall': (sgdp, {'adamp_delta': 1.5, 'momentum': 0.9}),
    'adamp_decays/tall': (adamp, {'adamp_delta': 1.0}),
    'sgdp_decays/wide': (
        sgdp,
        {'adamp_delta': 1.0, 'momentum': 0.5, 'adamp_decay_ratio': 0.3},
    ),
}
DECAY = {'adamp_decays/tall': 0.5, 'sgdp_decays/wide': 0.5}


@pytest.mark.parametrize('case', PROJECTING)
def test_projections_follow_package(case):
    """Steps that project by unit, as a whole, and not at all. Catches the units of a transposed
    matrix or of an embedding, a cosine of the momentum, Nesterov's other bias correction, and a
    decay that is whole where it projects.
    """
    make, options = PROJECTING[case]
    shape = case.split('/')[1]
    spec = EMBEDDING if 'embedding' in case else None
    decay = DECAY.get(case, 0.0)
    actual = trajectory(functools.partial(make, **options), shape, lr=0.05, decay=decay, spec=spec)
    assert_follows(actual, 'make_adamp', case, shape)


@pytest.mark.parametrize('make', [adamp, sgdp])
def test_orthogonal_gradient_gives_orthogonal_direction(make):
    """Orthogonal for each output unit, in both layers. Catches a projection on the gradient, or of
    the gradient.
    """
    weight, grad = normal(2, 2, 3, 4), normal(2, 2, 3, 4, seed=1)
    axes = (1, 2)
    radial = jnp.sum(grad * weight, axes, keepdims=True)
    grad = grad - weight * radial / jnp.sum(weight**2, axes, keepdims=True)
    direction, _ = first_step(make, STACKED, grad, weight)
    along = jnp.sum(direction * weight, axes) / jnp.linalg.norm(weight.reshape(2, 6, 4), axis=1)
    np.testing.assert_allclose(along, 0, atol=1e-5)
    assert np.abs(direction).max() > 0.1


def test_stacked_matrices_are_tested_separately():
    """The gradient of a layer is orthogonal to its weight, the other layer's is along it and has
    Adam's direction. Catches a single test over the whole stack.
    """
    weight, grad = normal(2, 2, 3, 4), normal(2, 2, 3, 4, seed=1)
    radial = jnp.sum(grad * weight, (1, 2), keepdims=True)
    orthogonal = grad - weight * radial / jnp.sum(weight**2, (1, 2), keepdims=True)
    grad = jnp.stack([orthogonal[0], grad[1] + weight[1]])
    direction, _ = first_step(adamp, STACKED, grad, weight)
    adam, _ = first_step(adamw, STACKED, grad, weight)
    np.testing.assert_allclose(direction[1], adam[1], rtol=1e-5)
    assert np.abs(direction[0] - adam[0]).max() > 0.1


def test_whole_matrix_is_tested_after_its_units():
    """Two units with opposite radial parts. Catches a second view that is never tried."""
    weight = jnp.float32([[1.0, 1.0], [0.0, 0.0]])
    grad = jnp.float32([[1.0, -1.0], [1.0, 1.0]])
    spec = ParamSpec('hidden', ('embed', 'mlp'), ('embed',))
    project = jax.jit(functools.partial(remove_radial, spec))
    projected = project(grad + weight, grad, weight, 0.1, 1e-8, 0.25)
    np.testing.assert_allclose(projected.value, grad, atol=1e-6)
    np.testing.assert_array_equal(projected.decay_share, 0.25)


def test_projected_matrix_decays_less():
    """In float64, beside the closed form: a layer with an orthogonal gradient, and a layer with a
    gradient along its weight. Catches a lost share, also between two optimizers.
    """
    specs = {'up': STACKED, 'scale': ParamSpec('vector', ('layer', 'embed'))}
    with jax.enable_x64(True):
        params = {'up': np.ones((2, 1, 2, 2)), 'scale': np.ones((2, 2))}
        grads = {
            'up': np.float64([[[[1, 1], [-1, -1]]], [[[2, 2], [2, 2]]]]),
            'scale': np.ones((2, 2)),
        }
        spare = functools.partial(adamp, eps=1e-30, adamp_decay_ratio=0.25)
        tx = partition_by_role(specs, default=adamp, hidden=spare)
        direction, _ = tx.update(grads, unbox_state(tx.init(params)), params)
        decay = apply_decay({name: jnp.float64(0.5) for name in specs})
        updates, _ = decay.update(direction, decay.init(params), params)
    shares = np.array([0.25, 1.0]).reshape(2, 1, 1, 1)
    np.testing.assert_allclose(updates['up'], np.sign(grads['up']) - 0.5 * shares, rtol=1e-12)
    np.testing.assert_allclose(updates['scale'], 1 - 0.5, rtol=1e-6)


SCALED = {
    'hidden/wide': None,
    'hidden/tall': None,
    'embedding/tall': EMBEDDING,
    'readout/wide': READOUT,
    'vector/vector': None,
}


@pytest.mark.parametrize('case', SCALED)
def test_scale_follows_authors_code(case):
    """Catches rows for columns, momentum in another role, or a sum in place of a mean."""
    shape = case.split('/')[1]
    make = functools.partial(scale, scale_vector_factor=2.0)
    actual = trajectory(make, shape, lr=0.05, spec=SCALED[case])
    assert_follows(actual, 'make_scale', case, shape)


@pytest.mark.parametrize(
    ('spec', 'shape', 'axes'),
    [(EMBEDDING, (5, 4), 0), (READOUT, (4, 5), 0), (STACKED, (2, 2, 3, 4), (1, 2))],
)
def test_scale_columns_have_rms_1(spec, shape, axes):
    """Per layer, heads merged; a column without a gradient stays. Catches a norm over the stack."""
    sizes = np.float32([0, 0.01, 1, 100, 1000])[: shape[-1]]
    grad = jnp.asarray(np.asarray(normal(*shape)) * sizes)
    direction, state = first_step(scale, spec, grad, normal(*shape, seed=1))
    rms = np.sqrt(np.mean(np.square(direction), axes))
    np.testing.assert_allclose(rms[..., 1:], 1.0, rtol=1e-5)
    np.testing.assert_array_equal(rms[..., 0], 0.0)
    assert bool(state.of) == (spec is READOUT)  # other roles have no state


def optax_adafactor(min_size, relative):
    def make(specs):
        del specs
        stages = [
            optax.scale_by_factored_rms(min_dim_size_to_factor=min_size),
            optax.clip_by_block_rms(1.0),
            *([optax.scale_by_param_block_rms()] if relative else []),
        ]
        return optax.with_extra_args_support(optax.chain(*stages))

    return make


@pytest.mark.parametrize(
    ('shape', 'min_size', 'relative'),
    [('wide', 4, True), ('tall', 5, False), ('square', 5, False), ('vector', 1, True)],
)
def test_adafactor_follows_optax(shape, min_size, relative):
    """One side under the least size: unfactored. Catches means over the wrong side, a share that
    starts a step late, and a clipping or a scale that is left out.
    """
    ours = functools.partial(
        adafactor, adafactor_min_size=min_size, adafactor_absolute=not relative
    )
    actual = trajectory(ours, shape, lr=0.05)
    for step, expected in trajectory(optax_adafactor(min_size, relative), shape, lr=0.05).items():
        np.testing.assert_allclose(
            actual[step], expected, rtol=0, atol=1e-5 * np.abs(expected).max()
        )


LAYER_VECTOR = ParamSpec('vector', ('layer', 'embed'))


@pytest.mark.parametrize(('spec', 'shape'), [(STACKED, (2, 2, 3, 4)), (LAYER_VECTOR, (2, 5))])
def test_adafactor_treats_layers_separately(spec, shape):
    """Layers of other sizes, the second update of one clipped. Catches a root mean square over the
    stack, heads left apart, and a layer axis that is factored.
    """
    size = np.reshape(np.float32([1, 30]), (2,) + (1,) * (len(shape) - 1))
    weight, *grads = (normal(*shape, seed=seed) * size for seed in range(3))
    grads[1] = grads[1] * size

    def directions(spec, weight, *grads):
        tx = adafactor({'w': spec}, adafactor_min_size=4)
        state = unbox_state(tx.init({'w': weight}))
        for grad in grads:
            direction, state = tx.update({'w': grad}, state, {'w': weight})
        return direction['w']

    def both(weight, *grads):
        layers = [
            directions(spec.drop_axis('layer'), weight[i], *(g[i] for g in grads)) for i in (0, 1)
        ]
        return directions(spec, weight, *grads), jnp.stack(layers)

    stacked, layers = jax.jit(both)(weight, *grads)
    np.testing.assert_allclose(stacked, layers, rtol=1e-5)


def test_adafactor_stores_two_vectors_per_large_matrix():
    """They have the parameter's own axes, heads apart. Catches memory as large as Adam's."""
    params = {'w': jnp.zeros((2, 2, 3, 4))}
    for min_size, expected in [(4, [('layer', 'embed'), STACKED.axes[:3]]), (5, [STACKED.axes])]:
        state = adafactor({'w': STACKED}, adafactor_min_size=min_size).init(params)
        specs = jax.tree.leaves(state_specs(state, params, {'w': STACKED}).of)
        assert [spec.axes for spec in specs] == expected
