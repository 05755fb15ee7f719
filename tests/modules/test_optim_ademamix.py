"""AdEMAMix. Reference: optax.contrib, and the paper's equations of the warm-up in float64.
Property: no weight of the slow average is AdamW.
"""

import functools

import jax
import numpy as np
import optax
import pytest

from modules.optim.classic import adamw
from modules.optim.variants import ademamix
from tests.fixtures.optim import problem
from tests.modules.optim_trajectories import MATRIX, VECTOR, trajectory

NUMBERS = {'b1': 0.8, 'b2': 0.95, 'eps': 1e-3}


def assert_close(actual, expected, rtol):
    for step, weight in expected.items():
        scale = np.abs(weight).max()
        np.testing.assert_allclose(actual[step], weight, rtol=0, atol=rtol * scale)


@pytest.mark.parametrize('shape', ['wide', 'vector'])
def test_ademamix_follows_optax(shape):
    """Catches a slow average that is corrected, or m and v that are not."""
    ours = functools.partial(ademamix, **NUMBERS, ademamix_b3=0.99, ademamix_alpha=4.0)

    def theirs(specs):
        tx = optax.contrib.scale_by_ademamix(**NUMBERS, b3=0.99, alpha=4.0)
        return optax.with_extra_args_support(tx)

    assert_close(trajectory(ours, shape, lr=0.05), trajectory(theirs, shape, lr=0.05), 1e-5)


def test_no_slow_average_is_adamw():
    """Catches a fast average that differs from Adam's."""
    ours = functools.partial(ademamix, **NUMBERS, ademamix_alpha=0.0, ademamix_warmup=7)
    adam = functools.partial(adamw, **NUMBERS)

    def with_batch(specs):
        return optax.with_extra_args_support(adam(specs))

    assert_close(
        trajectory(ours, 'wide', 0.05, 0.1), trajectory(with_batch, 'wide', 0.05, 0.1), 1e-7
    )


def numpy_directions(grads, warmup, alpha, b3):
    """Returns the direction of each step by algorithm 1 and the schedules of section 3 (f of a rate
    is its half-life, which grows linearly).
    """
    b1, b2, eps = NUMBERS.values()
    half_life = lambda rate: np.log(0.5) / np.log(rate)  # noqa: E731
    fast = slow = second = 0.0
    for t, grad in enumerate(grads, start=1):
        done = min(t / warmup, 1.0)
        rate = 0.5 ** (1 / ((1 - done) * half_life(b1) + done * half_life(b3)))
        fast, second = b1 * fast + (1 - b1) * grad, b2 * second + (1 - b2) * grad**2
        slow = rate * slow + (1 - rate) * grad
        root = np.sqrt(second / (1 - b2**t)) + eps
        yield (fast / (1 - b1**t) + done * alpha * slow) / root


@pytest.mark.parametrize('warmup', [1, 20, 300])
def test_warm_up_follows_the_paper(warmup):
    """In float64. Catches a decay rate that is interpolated itself, a warm-up that starts a step
    late, and one that goes on beyond its end.
    """
    with jax.enable_x64(True):
        grads = np.stack([problem.gradient('wide', t) for t in range(1, problem.STEPS + 1)])
        options = {'ademamix_alpha': 5.0, 'ademamix_b3': 0.999, 'ademamix_warmup': warmup}
        tx = ademamix({'w': MATRIX}, **NUMBERS, **options)
        params = {'w': np.zeros(grads[0].shape)}

        def step(state, grad):
            direction, state = tx.update({'w': grad}, state, params)
            return state, direction['w']

        actual = jax.jit(lambda g: jax.lax.scan(step, tx.init(params), g)[1])(grads)
    expected = np.stack(list(numpy_directions(grads, warmup, 5.0, 0.999)))
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


def test_slower_rate_than_the_fast_one_is_reached_at_once():
    """The paper's minimum: a b3 below b1 has no warm-up from above. Catches its loss."""
    grads = [problem.gradient('vector', t) for t in (1, 2, 3)]
    options = {'ademamix_b3': 0.3, 'ademamix_warmup': 100, 'ademamix_alpha': 1.0}
    tx, params = ademamix({'w': VECTOR}, **NUMBERS, **options), {'w': np.float32(np.zeros(7))}
    state, slow = tx.init(params), 0.0
    for grad in grads:
        _, state = tx.update({'w': np.float32(grad)}, state, params)
        slow = 0.3 * slow + 0.7 * grad
    np.testing.assert_allclose(state.of['slow']['w'], slow, rtol=1e-5)
