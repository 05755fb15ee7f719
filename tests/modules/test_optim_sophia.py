"""Reference: Sophia-H against its algorithm in numpy. Property: its estimate of the curvature."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from modules.optim import partition_by_role, unbox_state
from modules.optim.beyond_gradients import estimate_curvature, random_like, sophia
from modules.params import ParamSpec

STEPS, LR, EVERY, GAMMA, EPS = 50, 0.05, 5, 0.3, 1e-3
SPECS = {
    'a': ParamSpec('vector', ('embed',)),
    'b': ParamSpec('hidden', ('embed', 'mlp'), ('embed',)),
}
RNG = np.random.default_rng(0)
START = {'a': RNG.normal(size=4), 'b': RNG.normal(size=(3, 2))}
COUPLING = RNG.normal(size=(10, 10))


def loss(params):
    """|C w|^2 / 20 + |w|^4 / 8 - |w|^2 / 2: coupled, its curvature too, and concave near 0."""
    w = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])
    return jnp.sum((COUPLING @ w) ** 2) / 20 + (w @ w) ** 2 / 8 - (w @ w) / 2


def gradient(w):
    return COUPLING.T @ COUPLING @ w / 10 + (w @ w / 2 - 1) * w


def hessian(w):
    return COUPLING.T @ COUPLING / 10 + np.outer(w, w) + (w @ w / 2 - 1) * np.eye(10)


def flat(tree):
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


def run_updates(tx, start, steps=STEPS, lr=LR):
    """Returns the weights after each update by -lr times the direction, flat [steps, 10]."""

    def update(carry, _):
        params, state = carry
        direction, state = tx.update(jax.grad(loss)(params), state, params, value_fn=loss)
        params = jax.tree.map(lambda w, d: w - lr * d, params, direction)
        return (params, state), params

    start = jax.tree.map(jnp.asarray, start)
    run = jax.jit(
        lambda: jax.lax.scan(update, (start, unbox_state(tx.init(start))), None, length=steps)[1],
    )
    weights = run()
    return np.stack([flat(jax.tree.map(lambda leaf, t=t: leaf[t], weights)) for t in range(steps)])


def run_published(is_sophia, steps=STEPS, b1=0.9, b2=0.8):
    """Yields the weights of algorithm 3: Sophia updates the parameters `is_sophia`, the others
    stay; with the same random vectors, float64.
    """
    w, m, h = flat(START), np.zeros(10), np.zeros(10)
    sophia_params = {name: leaf for name, leaf in START.items() if is_sophia[name]}
    mask = flat({name: np.full(leaf.shape, is_sophia[name]) for name, leaf in START.items()})
    for t in range(1, steps + 1):
        m = b1 * m + (1 - b1) * gradient(w)
        if t % EVERY == 1:
            u = np.zeros(10)
            u[mask > 0] = flat(random_like(jax.tree.map(jnp.asarray, sophia_params), jnp.int32(t)))
            h = b2 * h + (1 - b2) * u * (hessian(w) @ u)
        w = w - LR * mask * np.clip(m / np.maximum(GAMMA * h, EPS), -1, 1)
        yield w


ROW = functools.partial(
    sophia, b1=0.9, b2=0.8, sophia_gamma=GAMMA, sophia_eps=EPS, sophia_every=EVERY
)


def test_sophia_follows_published_algorithm():
    """50 steps, float64 as clipping is steep. Catches an estimate in another update, an average
    that moves without an estimate, the sum of the denominators in place of their maximum, and lost
    signs.
    """
    with jax.enable_x64(True):
        actual = run_updates(ROW(SPECS), START)
        expected = np.stack(list(run_published({'a': True, 'b': True})))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)
    steps = np.abs(np.diff(expected, axis=0)) / LR
    assert np.any(steps < 0.9) and np.any(steps > 0.999)  # clipped or not


def test_single_role_uses_total_loss():
    """Behind a partition the other parameters are fixed. Catches a loss of its part alone, and
    others at 0.
    """
    with jax.enable_x64(True):
        partitioned = partition_by_role(SPECS, lambda specs: optax.set_to_zero(), hidden=ROW)
        actual = run_updates(partitioned, START, steps=12)
        expected = np.stack(list(run_published({'a': False, 'b': True}, steps=12)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def test_estimate_averages_to_the_diagonal():
    """Over 4,000 updates, in five standard errors. Catches numbers that are drawn once for all."""
    params = jax.tree.map(jnp.float32, START)
    trees = jax.jit(
        jax.vmap(lambda t: estimate_curvature(loss, params, random_like(params, t))),
    )(jnp.arange(4000))
    estimates = np.concatenate([np.reshape(leaf, (4000, -1)) for leaf in jax.tree.leaves(trees)], 1)
    diagonal = np.diag(hessian(flat(START)))
    assert np.all(np.abs(estimates.mean(0) - diagonal) < 5 * estimates.std(0) / np.sqrt(4000))


def test_random_numbers_differ_by_parameter_and_update():
    like = {'a': jnp.zeros(8), 'b': jnp.zeros(8)}
    samples = [leaf.tobytes() for t in (1, 2) for leaf in jax.tree.leaves(random_like(like, t))]
    assert len(set(samples)) == 4


def test_missing_loss_is_refused():
    tx = sophia(SPECS)
    with pytest.raises(ValueError, match=r'pass `update` the parameters and value_fn\(params\)'):
        tx.update(START, tx.init(START), START)


def test_gradient_without_derivative_is_refused():
    """As a kernel's backward pass may have none. Catches JAX's own words alone."""
    opaque = jax.custom_vjp(jnp.sin)
    opaque.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (opaque_cos(x) * g,))
    opaque_cos = jax.custom_vjp(jnp.cos)
    opaque_cos.defvjp(lambda x: (jnp.cos(x), x), lambda x, g: (-g,))
    x = jnp.ones(3)
    with pytest.raises(ValueError, match=r'choose kernels.attention=reference or blocked'):
        estimate_curvature(lambda x: jnp.sum(opaque(x)), x, x)
