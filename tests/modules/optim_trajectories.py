"""Optimizers followed for 50 steps of fixed gradients, beside what published code did."""

import jax
import jax.numpy as jnp
import numpy as np

from modules.optim import as_direction, unbox_state
from modules.params import ParamSpec
from tests.fixtures.optim import problem

MATRIX = ParamSpec('hidden', ('embed', 'mlp'), ('embed',))
VECTOR = ParamSpec('vector', ('embed',))


def trajectory(make, shape: str, lr: float, decay: float = 0.0, spec=None, dtype=jnp.float32):
    """{step: weight}: w -= lr * direction + lr * decay * w, with `make(specs)` the optimizer, which
    may take off a share of that decay.
    """
    spec = spec or (VECTOR if shape == 'vector' else MATRIX)
    tx = make({'w': spec})
    grads = jnp.stack(
        [jnp.asarray(problem.gradient(shape, t), dtype) for t in range(1, problem.STEPS + 1)]
    )

    def step(carry, grad):
        params, state = carry
        extra = {'value': 0.0, 'grad': {'w': grad}, 'value_fn': None}
        direction, state = tx.update({'w': grad}, state, params, **extra)
        direction, share = as_direction(direction['w'])
        params = {'w': params['w'] - lr * direction - lr * decay * share * params['w']}
        return (params, state), params['w']

    start = {'w': jnp.asarray(problem.start(shape), dtype)}
    run = jax.jit(
        lambda: jax.lax.scan(step, (start, unbox_state(tx.init(start))), grads)[1],
    )
    weights = np.asarray(run())
    return {t: weights[t - 1] for t in problem.KEPT}


def assert_follows(actual, name: str, case: str, shape: str, rtol: float = 1e-5):
    """Relative to the largest weight, at each stored step."""
    for step, expected in problem.read(name, case, shape).items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            actual[step], expected, rtol=0, atol=rtol * scale, err_msg=f'{case}, step {step}'
        )
