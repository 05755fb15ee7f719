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


def drawn(*leading):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(*leading, *shape)) for name, shape in SHAPES.items()}


def laid_out(name, mesh, names=tuple(SPECS)):
    """(the optimizer, shardings of the parameters and of its state, shapes of both)."""
    specs = {n: SPECS[n] for n in names}
    shapes = {n: jax.ShapeDtypeStruct(SHAPES[n], jnp.float32) for n in names}
    tx = ROWS[name](specs)
    boxed = jax.eval_shape(tx.init, shapes)
    kept = unbox_state(boxed)

    def placed(shape, spec):
        return param_sharding(mesh, spec, shape.shape)

    of_state = jax.tree.map(placed, kept, state_specs(boxed, shapes, specs))
    return tx, jax.tree.map(placed, shapes, specs), of_state, (shapes, kept)


def directions(name, mesh, gradients):
    """(of each update, the state after them)."""
    tx, of_params, of_state, _ = laid_out(name, mesh)
    weights = jax.device_put({n: g[0] for n, g in gradients.items()}, of_params)
    update = jax.jit(
        trace_on_mesh(mesh, tx.update),
        in_shardings=(of_params, of_state, of_params),
        out_shardings=(of_params, of_state),
    )
    state, found = jax.device_put(unbox_state(tx.init(weights)), of_state), []
    for i in range(UPDATES):
        direction, state = update({n: g[i] for n, g in gradients.items()}, state, weights)
        found.append(jax.device_get(direction))
    return found, state


@pytest.fixture
def of_float64():
    """Eigenvectors of eigenvalues that are close multiply what is rounded."""
    with jax.enable_x64(True):
        yield


@functools.cache
def directions_alone(name):
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    found, state = directions(name, mesh, drawn(UPDATES))
    return found, jax.device_get(state)


def assert_close(found, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7), found, right)


@pytest.mark.full
@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('sizes', MESHES, ids=str)
def test_directions_and_state_are_those_of_one_device(name, sizes, of_float64):
    """Layers that all devices divide, some or none; experts; and heads. Catches matrices that are
    put back in another order, and state of other layers.
    """
    mesh = make_mesh(MeshConfig(**{'data': 1} | sizes))
    found, state = directions(name, mesh, drawn(UPDATES))
    right, right_state = directions_alone(name)
    assert_close(found, right)
    assert_close(jax.device_get(state), right_state)


@pytest.mark.full
@pytest.mark.parametrize('name', ROWS)
def test_each_matrix_is_exchanged_once_in_and_once_out(name):
    """Property of the program. Catches state that lies where its matrix is not, products that
    devices share, and experts that stay together as their layers do not divide.
    """
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    names = 'up', 'query', 'out', 'experts'
    tx, of_params, of_state, (shapes, kept) = laid_out(name, mesh, names)
    program = jax.jit(
        trace_on_mesh(mesh, tx.update),
        in_shardings=(of_params, of_state, of_params),
        out_shardings=(of_params, of_state),
    )
    found = list_collectives(Module(program.lower(shapes, kept, shapes).compile().as_text()))
    exchanged = sorted(one.bytes for one in found if one.kind == 'all-to-all')
    of_each = [4 * int(np.prod(SHAPES[n])) // 4 for n in names]
    assert exchanged == sorted(2 * of_each)
    assert {one.kind for one in found} & set(KINDS) == {'all-to-all'}
    for one, over in zip(*map(jax.tree.leaves, (kept, of_state)), strict=True):
        parts = zip(one.shape, over.shard_shape(one.shape), strict=True)
        cut = [i for i, (length, own) in enumerate(parts) if own != length]
        assert cut == ([] if not one.shape else [0] if one.shape[0] == 4 else [1])  # or experts


@pytest.mark.full
@pytest.mark.parametrize('name', ROWS)
def test_runs_side_by_side_are_each_alone(name, of_float64):
    """Catches numbers of a run, its count among them, that are those of another."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, run=2), runs=2)
    tx, of_params, of_state, _ = laid_out(name, mesh)
    gradients = drawn(UPDATES)
    eps_R = jnp.array([1e-3, 1e-1])

    def update(grads, state, eps):
        return ROWS[name](SPECS, eps=eps).update(grads, state, grads)

    one, of_runs = jax.jit(update), jax.vmap(update, spmd_axis_name='run')
    of_params_R, of_state_R = jax.tree.map(stacked_sharding, (of_params, of_state))
    over = stacked_sharding(replicated_sharding(mesh))
    many = jax.jit(
        trace_on_mesh(mesh, of_runs),
        in_shardings=(of_params_R, of_state_R, over),
        out_shardings=(of_params_R, of_state_R),
    )
    begun = unbox_state(tx.init(jax.tree.map(lambda g: g[0], gradients)))
    later = one(jax.tree.map(lambda g: -g[0], gradients), begun, eps_R[1])[1]
    states = [begun, later]  # the second run is an update ahead
    state_R = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    for i in range(UPDATES):
        grads = [jax.tree.map(lambda g, i=i, f=f: f * g[i], gradients) for f in (1, -2)]
        grads_R = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
        alone = [one(g, s, e) for g, s, e in zip(grads, states, eps_R, strict=True)]
        found_R, state_R = many(grads_R, state_R, eps_R)
        states = [state for _, state in alone]
        for run, (right, _) in enumerate(alone):
            assert_close(jax.tree.map(lambda leaf, r=run: leaf[r], jax.device_get(found_R)), right)
