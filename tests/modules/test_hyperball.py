"""Hyperball forms: `optim.match_norm` with the projection of `normalize_and_project`. Reference:
the published step in float64 numpy. Property: norms, angles, and the size of a direction.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from modules.optim import OPTIMIZERS
from modules.optim.stages import STAGES
from modules.params import ParamSpec
from modules.reparam import reparametrise

SPECS = {
    'up': ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',)),
    'readout': ParamSpec('readout', ('embed', 'vocab'), ('embed',)),
    'scale': ParamSpec('vector', ('embed',)),
}
SHAPES = {'up': (2, 8, 12), 'readout': (8, 10), 'scale': (8,)}
ROLES = 'hidden+readout'
ETA = 0.05


def draw(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


WEIGHTS = draw(0)
WEIGHTS['up'][1] *= 20  # layers of different norms


def norms(x):
    return np.sqrt(np.sum(np.square(np.asarray(x, np.float64)), (-2, -1), keepdims=True))


def train(optimizer, grads, factor=1.0):
    """Returns the weights after each gradient [T, ...], of `factor` times the directions."""
    weights = jax.tree.map(jnp.float32, WEIGHTS)
    options = {'normalize_and_project': {'roles': ROLES}}
    shapes = jax.eval_shape(lambda: weights)
    reparam = reparametrise(['normalize_and_project'], SPECS, shapes, options)
    stored, state = reparam.init(weights)
    stages = optax.chain(
        optimizer,
        optax.scale(factor),
        STAGES['resize'](SPECS, tuple(ROLES.split('+')), match_norm=jnp.float32(1)),
        STAGES['scale_by_learning_rate'](jax.tree.map(lambda _: jnp.float32(ETA), SPECS)),
    )

    def step(carry, grads):
        params, opt_state = carry
        updates, opt_state = stages.update(grads, opt_state, params)
        params, _ = reparam.after_update(optax.apply_updates(params, updates), state)
        return (params, opt_state), params

    def run(grads):
        return jax.lax.scan(step, (stored, stages.init(stored)), grads)[1]

    return jax.jit(run)(jax.tree.map(jnp.float32, grads))


def stacked_gradients(steps):
    draws = [draw(i + 1) for i in range(steps)]
    return {name: np.stack([g[name] for g in draws]) for name in SHAPES}


def hidden_or_adam(name):
    """The optimizer of hidden matrices, with Adam for the rest."""
    hidden = {n: spec for n, spec in SPECS.items() if spec.role == 'hidden'}
    if name == 'adamw':
        return OPTIMIZERS['adamw'](SPECS)
    remaining = {n: spec for n, spec in SPECS.items() if n not in hidden}
    masked = dict.fromkeys(SPECS, optax.MaskedNode())
    return optax.partition(
        {
            'hidden': OPTIMIZERS[name](masked | hidden),
            'others': OPTIMIZERS['adamw'](masked | remaining),
        },
        {n: 'hidden' if n in hidden else 'others' for n in SPECS},
    )


@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_norms_stay_and_direction_sizes_do_not_matter(name):
    """Over 100 steps, of each layer and of the readout. The vector moves by its own direction.

    Catches a norm over layers, a role that is matched and not projected, and a projection without
    float32 norms.
    """
    grads = stacked_gradients(100)
    weights = train(hidden_or_adam(name), grads)
    for path in ('up', 'readout'):
        np.testing.assert_allclose(norms(weights[path]) / norms(WEIGHTS[path]), 1, rtol=1e-6)
        turned = np.asarray(weights[path])[-1] - WEIGHTS[path]
        assert np.all(norms(turned) > 0.1 * norms(WEIGHTS[path]))
    larger = train(hidden_or_adam(name), grads, 1000.0)
    for path in ('up', 'readout'):
        np.testing.assert_allclose(larger[path], weights[path], rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(larger['scale']) - weights['scale']).max() > 1


def test_step_is_the_published_one():
    """`W <- R (W - eta R u / |u|) / |same|` of each matrix, and with `u` orthogonal to `W` the
    angle of the step is atan(eta). Catches a rate that is multiplied after the projection.
    """
    direction = draw(5)
    for path in ('up', 'readout'):
        along = np.sum(direction[path] * WEIGHTS[path], (-2, -1), keepdims=True)
        direction[path] -= along * WEIGHTS[path] / norms(WEIGHTS[path]) ** 2
    actual = train(optax.identity(), jax.tree.map(lambda u: u[None], direction))
    for path in ('up', 'readout'):
        weight, size = WEIGHTS[path], norms(WEIGHTS[path])
        moved = weight - ETA * size * direction[path] / norms(direction[path])
        np.testing.assert_allclose(
            actual[path][0], size * moved / norms(moved), rtol=1e-4, atol=1e-5
        )
        product = np.sum(np.asarray(actual[path][0]) * weight, (-2, -1), keepdims=True)
        np.testing.assert_allclose(
            np.sqrt(np.maximum(0, 1 - (product / size**2) ** 2)), np.sin(np.arctan(ETA)), rtol=1e-4
        )
