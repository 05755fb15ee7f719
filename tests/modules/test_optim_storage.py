"""Moments in bfloat16: against AdamW in numpy, and in the optimizer of a run."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lm.devices.shardings import state_layout
from lm.model.check import check
from lm.record.checkpoint import tree_record
from lm.training.state import make_hyper
from lm.training.step import make_train_step
from modules.optim.classic import adamw
from modules.optim.storage import (
    MOMENTUM,
    NEAREST,
    SECOND,
    STOCHASTIC,
    narrow_moments,
    round_weights,
)
from tests.helpers import initial_state, tiny_batch, tiny_config, tiny_learner

B1, B2, EPS = 0.9, 0.95, 1e-8


def narrow_adamw(dtype=jnp.bfloat16):
    return narrow_moments(adamw(None, b1=B1, b2=B2, eps=EPS), {MOMENTUM: dtype}, 'optim.name=adamw')


def test_direction_has_the_average_before_rounding():
    """Reference: AdamW in float64, whose m is rounded to bfloat16 after each step.

    Catches a direction of the rounded average (off by 2^-9), and a second moment that is rounded.
    """
    grads = np.random.default_rng(0).standard_normal((6, 32))
    optimizer, m, v = narrow_adamw(), np.zeros(32), np.zeros(32)
    state = optimizer.init(jnp.zeros(32))
    for t, g in enumerate(grads, 1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        expected = m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS)
        direction, state = optimizer.update(jnp.asarray(g, jnp.float32), state)
        np.testing.assert_allclose(direction, expected, rtol=1e-4, atol=1e-5)
        m = m.astype(ml_dtypes.bfloat16).astype(float)
    assert state.mu.dtype == jnp.bfloat16 and state.nu.dtype == jnp.float32


def test_float32_changes_nothing():
    grad = jnp.asarray(np.random.default_rng(1).standard_normal(32), jnp.float32)
    plain, same = adamw(None, b1=B1, b2=B2, eps=EPS), narrow_adamw(jnp.float32)
    expected, _ = plain.update(grad, plain.init(grad))
    direction, _ = same.update(grad, same.init(grad))
    np.testing.assert_array_equal(direction, expected)


@pytest.mark.full
@pytest.mark.parametrize('name', ['adamw', 'muon', 'normuon', 'lion', 'soap', 'ademamix'])
def test_a_run_stores_every_first_moment_in_bfloat16(name):
    """The optimizers of both roles, and no other array of their state."""
    changes = {'optim.name': name, 'optim.others': 'adamw'}
    wide, narrow = (
        initial_state(tiny_config(changes | {'optim.momentum_dtype': dtype})).opt_state
        for dtype in ('float32', 'bfloat16')
    )
    for (path, leaf), stored in zip(
        jax.tree_util.tree_leaves_with_path(wide), jax.tree.leaves(narrow), strict=True
    ):
        text = jax.tree_util.keystr(path)
        is_momentum = "'momentum'" in text or '.mu' in text
        assert (stored.dtype == jnp.bfloat16) == is_momentum, text
        assert stored.shape == leaf.shape


@pytest.mark.full
def test_first_steps_equal_float32():
    """The first direction is bit for bit the same, since the average starts at 0; the third is not,
    but near. Steps of a run pass the loss and other arguments.
    """
    weights = {}
    for dtype in ('float32', 'bfloat16'):
        learner = tiny_learner(tiny_config({'optim.name': 'muon', 'optim.momentum_dtype': dtype}))
        hyper, step = make_hyper(learner.recipe), jax.jit(make_train_step(learner))
        state, weights[dtype] = initial_state(learner.recipe), []
        for _ in range(3):
            state, _ = step(state, tiny_batch(), hyper)
            weights[dtype].append(jax.flatten_util.ravel_pytree(state.params)[0])
    np.testing.assert_array_equal(weights['float32'][0], weights['bfloat16'][0])
    last, narrow = weights['float32'][2], weights['bfloat16'][2]
    assert 0 < jnp.max(jnp.abs(last - narrow)) < 1e-2 * jnp.max(jnp.abs(last))


def test_optimizer_without_momentum_is_refused():
    changes = {'optim.name': 'adafactor', 'optim.others': 'adamw'}
    with pytest.raises(ValueError, match=r'momentum_dtype=bfloat16 has no effect: .*adafactor'):
        initial_state(tiny_config(changes | {'optim.momentum_dtype': 'bfloat16'}))


@pytest.mark.parametrize('b2', [0.95, 0.999])
def test_second_moments_keep_their_expectation(b2):
    """Of squares of normal numbers: 1, within 3 percent of the mean over 4,000 parameters. A twin
    that rounds to nearest is a fifth too high with b2 = 0.999. Catches a key that stays the same.
    """
    n, steps = 4000, 3000
    optimizer = adamw(None, b1=0.0, b2=b2, eps=EPS)
    narrow = narrow_moments(optimizer, {SECOND: jnp.bfloat16}, 'optim.name=adamw')

    def step(carry, i):
        state, nearest = carry
        grad = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (n,))
        _, state = narrow.update(grad, state)
        v = b2 * nearest.astype(jnp.float32) + (1 - b2) * grad**2
        return (state, v.astype(jnp.bfloat16)), None

    start = narrow.init(jnp.zeros(n)), jnp.zeros(n, jnp.bfloat16)
    (state, nearest), _ = jax.lax.scan(step, start, jnp.arange(steps))
    assert state.nu.dtype == jnp.bfloat16 and state.mu.dtype == jnp.float32
    expected = 1 - b2**steps
    assert abs(np.mean(np.float64(state.nu)) / expected - 1) < 0.03
    if b2 == 0.999:
        assert np.mean(np.float64(nearest)) / expected > 1.2


@pytest.mark.full
@pytest.mark.parametrize('name', ['adamw', 'soap', 'muon'])
def test_run_has_narrow_second_moments(name):
    """Only second moments are narrow, and weights change little by it."""
    changes, weights = {'optim.name': name, 'optim.others': 'adamw', 'optim.eps': 1e-8}, {}
    for dtype in ('float32', 'bfloat16'):
        learner = tiny_learner(tiny_config(changes | {'optim.second_moment_dtype': dtype}))
        hyper, step = make_hyper(learner.recipe), jax.jit(make_train_step(learner))
        state = initial_state(learner.recipe)
        for _ in range(4):
            state, _ = step(state, tiny_batch(), hyper)
        weights[dtype] = jax.flatten_util.ravel_pytree(state.params)[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
            text = jax.tree_util.keystr(path)
            is_second = "'second'" in text or '.nu' in text
            assert (leaf.dtype == jnp.bfloat16) == (is_second and dtype == 'bfloat16'), text
    difference = jnp.max(jnp.abs(weights['float32'] - weights['bfloat16']))
    assert 0 < difference < 1e-2 * jnp.max(jnp.abs(weights['float32']))


@pytest.mark.parametrize('rounding', [STOCHASTIC, NEAREST])
def test_narrow_weights_keep_small_updates(rounding):
    """Updates of an eighth of the distance between two values: nearest weights stand still, and
    stochastic ones have the expectation of float32, each leaf by its own random numbers.
    """
    n, steps, update = 4096, 64, 2.0**-10
    start = {'a': jnp.ones(n), 'b': jnp.ones(n)}

    def step(params, i):
        params = jax.tree.map(lambda x: x + update, params)
        return round_weights(params, rounding, i), None

    params, _ = jax.lax.scan(step, start, jnp.arange(steps))
    for leaf in params.values():
        np.testing.assert_array_equal(leaf, leaf.astype(jnp.bfloat16).astype(jnp.float32))
        moved = np.mean(np.float64(leaf)) - 1
        assert moved == 0 if rounding == NEAREST else abs(moved / (steps * update) - 1) < 0.02
    assert rounding == NEAREST or np.any(params['a'] != params['b'])


def test_wide_weights_are_not_rounded():
    with pytest.raises(ValueError, match=r'no effect with optim\.weight_dtype=float32'):
        check(tiny_config({'optim.weight_rounding': NEAREST}))


@pytest.mark.full
@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_run_has_narrow_weights(name):
    """The loss is close to that of float32 weights. Catches gradients and moments in bfloat16, and
    weights that are narrow in the step alone.
    """
    changes, losses = {'optim.name': name, 'optim.average': 'ema'}, {}
    for dtype in ('float32', 'bfloat16'):
        learner = tiny_learner(tiny_config(changes | {'optim.weight_dtype': dtype}))
        hyper, step = make_hyper(learner.recipe), jax.jit(make_train_step(learner))
        state = initial_state(learner.recipe)
        shapes, _ = state_layout(learner)
        for _ in range(4):
            assert tree_record(state.params) == tree_record(shapes.params)
            assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {dtype}
            moments = jax.tree.leaves((state.opt_state, state.average))
            assert {leaf.dtype.name for leaf in moments} <= {'float32', 'int32', 'uint32'}
            state, metrics = step(state, tiny_batch(), hyper)
        weights = learner.select_eval_weights(state.weights, state.average, hyper)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(weights.params)} == {'float32'}
        losses[dtype] = float(metrics['loss'])
    assert 0 < abs(losses['float32'] - losses['bfloat16']) < 5e-3


def test_missing_second_moments_are_refused():
    with pytest.raises(ValueError, match=r'second_moment_dtype=bfloat16 has no effect: .*lion'):
        changes = {'optim.name': 'lion', 'optim.others': 'lion', 'optim.eps': None}
        initial_state(tiny_config(changes | {'optim.second_moment_dtype': 'bfloat16'}))
