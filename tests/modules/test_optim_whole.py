"""Equivalence: SOAP and Shampoo on meshes that cut parameters, where matrices lie whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.fields import MeshConfig
from lm.devices.mesh import (
    make_mesh,
    param_sharding,
    replicated_sharding,
    stacked_sharding,
    trace_on_mesh,
)
from modules.optim import OPTIMIZERS, state_specs, unbox_state
from modules.params import ParamSpec
from tpu.collectives import KINDS, list_collectives
from tpu.hlo import Module

UPDATES = 4
ROWS = {
    'soap': functools.partial(OPTIMIZERS['soap'], soap_every=2, soap_max_dim=8, eps=1e-3),
    'shampoo': functools.partial(OPTIMIZERS['shampoo'], shampoo_every=2, eps=1e-3),
}
SPECS = {
    'up': ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',)),
    'query': ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',)),
    'out': ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim')),
    'experts': ParamSpec('hidden', ('layer', 'expert', 'embed', 'mlp'), ('embed',)),
    'odd': ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',)),
    'alone': ParamSpec('hidden', ('embed', 'mlp'), ('embed',)),
}
SHAPES = {  # no rotated side is the longer one: its null space has no eigenvectors of its own
    'up': (4, 8, 12),
    'query': (4, 8, 4, 2),
    'out': (4, 4, 2, 8),
    'experts': (2, 4, 8, 8),
    'odd': (3, 8, 8),
    'alone': (8, 8),
}
MESHES = [
    {'data': 2, 'fsdp': 4},
    {'data': 2, 'fsdp': 2, 'tensor': 2},
    {'fsdp': 2, 'expert': 2, 'tensor': 2},
    {'fsdp': 8},
]


def draw(*leading):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(*leading, *shape)) for name, shape in SHAPES.items()}


def lay_out(name, mesh, names=tuple(SPECS)):
    """Returns (the optimizer, shardings of the parameters and of its state, shapes of both)."""
    specs = {n: SPECS[n] for n in names}
    shapes = {n: jax.ShapeDtypeStruct(SHAPES[n], jnp.float32) for n in names}
    tx = ROWS[name](specs)
    boxed = jax.eval_shape(tx.init, shapes)
    state = unbox_state(boxed)

    def shard(shape, spec):
        return param_sharding(mesh, spec, shape.shape)

    state_shardings = jax.tree.map(shard, state, state_specs(boxed, shapes, specs))
    return tx, jax.tree.map(shard, shapes, specs), state_shardings, (shapes, state)


def directions(name, mesh, gradients):
    """Returns (the direction of each update, the last state)."""
    tx, param_shardings, state_shardings, _ = lay_out(name, mesh)
    weights = jax.device_put({n: g[0] for n, g in gradients.items()}, param_shardings)
    update = jax.jit(
        trace_on_mesh(mesh, tx.update),
        in_shardings=(param_shardings, state_shardings, param_shardings),
        out_shardings=(param_shardings, state_shardings),
    )
    state, updates = jax.device_put(unbox_state(tx.init(weights)), state_shardings), []
    for i in range(UPDATES):
        direction, state = update({n: g[i] for n, g in gradients.items()}, state, weights)
        updates.append(jax.device_get(direction))
    return updates, state


@pytest.fixture
def float64():
    """Enables float64: eigenvectors of close eigenvalues amplify rounding."""
    with jax.enable_x64(True):
        yield


@functools.cache
def directions_alone(name):
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    updates, state = directions(name, mesh, draw(UPDATES))
    return updates, jax.device_get(state)


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7), actual, expected
    )


@pytest.mark.full
@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('sizes', MESHES, ids=str)
def test_directions_and_state_equal_one_device(name, sizes, float64):
    """Layers that all devices divide, some or none; experts; and heads. Catches matrices that are
    put back in another order, and state of other layers.
    """
    mesh = make_mesh(MeshConfig(**{'data': 1} | sizes))
    actual, state = directions(name, mesh, draw(UPDATES))
    expected, expected_state = directions_alone(name)
    assert_close(actual, expected)
    assert_close(jax.device_get(state), expected_state)


@pytest.mark.full
@pytest.mark.parametrize('name', ROWS)
def test_matrices_are_exchanged_once_in_and_once_out(name):
    """Property of the program. Catches state that lies where its matrix is not, products that
    devices share, and experts that stay together as their layers do not divide.
    """
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    names = 'up', 'query', 'out', 'experts'
    tx, param_shardings, state_shardings, (shapes, state) = lay_out(name, mesh, names)
    program = jax.jit(
        trace_on_mesh(mesh, tx.update),
        in_shardings=(param_shardings, state_shardings, param_shardings),
        out_shardings=(param_shardings, state_shardings),
    )
    collectives = list_collectives(Module(program.lower(shapes, state, shapes).compile().as_text()))
    exchanged = sorted(c.bytes for c in collectives if c.kind == 'all-to-all')
    matrix_bytes = [4 * int(np.prod(SHAPES[n])) // 4 for n in names]
    assert exchanged == sorted(2 * matrix_bytes)
    assert {c.kind for c in collectives} & set(KINDS) == {'all-to-all'}
    for leaf, sharding in zip(*map(jax.tree.leaves, (state, state_shardings)), strict=True):
        parts = zip(leaf.shape, sharding.shard_shape(leaf.shape), strict=True)
        cut = [i for i, (length, local) in enumerate(parts) if local != length]
        assert cut == ([] if not leaf.shape else [0] if leaf.shape[0] == 4 else [1])  # or experts


@pytest.mark.full
@pytest.mark.parametrize('name', ROWS)
def test_parallel_runs_equal_single_runs(name, float64):
    """Catches numbers of another run, its count among them."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, run=2), runs=2)
    tx, param_shardings, state_shardings, _ = lay_out(name, mesh)
    gradients = draw(UPDATES)
    eps_R = jnp.array([1e-3, 1e-1])

    def update(grads, state, eps):
        return ROWS[name](SPECS, eps=eps).update(grads, state, grads)

    update_run, update_runs = jax.jit(update), jax.vmap(update, spmd_axis_name='run')
    param_shardings_R, state_shardings_R = jax.tree.map(
        stacked_sharding, (param_shardings, state_shardings)
    )
    eps_sharding = stacked_sharding(replicated_sharding(mesh))
    many = jax.jit(
        trace_on_mesh(mesh, update_runs),
        in_shardings=(param_shardings_R, state_shardings_R, eps_sharding),
        out_shardings=(param_shardings_R, state_shardings_R),
    )
    initial = unbox_state(tx.init(jax.tree.map(lambda g: g[0], gradients)))
    ahead = update_run(jax.tree.map(lambda g: -g[0], gradients), initial, eps_R[1])[1]
    states = [initial, ahead]  # the second run is an update ahead
    state_R = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    for i in range(UPDATES):
        grads = [jax.tree.map(lambda g, i=i, f=f: f * g[i], gradients) for f in (1, -2)]
        grads_R = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
        single = [update_run(g, s, e) for g, s, e in zip(grads, states, eps_R, strict=True)]
        actual_R, state_R = many(grads_R, state_R, eps_R)
        states = [state for _, state in single]
        for run, (expected, _) in enumerate(single):
            assert_close(
                jax.tree.map(lambda leaf, r=run: leaf[r], jax.device_get(actual_R)), expected
            )
