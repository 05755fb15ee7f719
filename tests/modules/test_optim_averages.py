"""Averages of the weights. Reference: the authors' Schedule-Free, and a closed form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.optim import AVERAGES
from modules.optim.classic import adamw, sgd
from modules.optim.schedules import constant
from tests.fixtures.optim import problem
from tests.modules.optim_trajectories import MATRIX, VECTOR, assert_follows

ADAM = functools.partial(adamw, b1=0.0)
SGD = functools.partial(sgd, momentum=0.0)
AS_PUBLISHED = {  # the optimizer, weight decay, warm-up, numbers of the average
    'adamw/wide': (functools.partial(ADAM, b2=0.95), 0.1, 0, {}),
    'adamw_warmup/tall': (
        functools.partial(ADAM, b2=0.99),
        0.5,
        12,
        {'schedule_free_beta': 0.95, 'schedule_free_lr_power': 1.0},
    ),
    'sgd/vector': (SGD, 0.1, 0, {}),
    'sgd_powers/square': (
        SGD,
        0.0,
        20,
        {'schedule_free_beta': 0.5, 'schedule_free_power': 1.5, 'schedule_free_lr_power': 0.7},
    ),
}


def points(average, make, shape, decay, warmup, lr=0.05):
    """Returns ({step: w}, {step: averaged w}), with w += the average's map of the optimizer's
    update.
    """
    tx = make({'w': VECTOR if shape == 'vector' else MATRIX})
    grads = jnp.float32([problem.gradient(shape, t) for t in range(1, problem.STEPS + 1)])

    def step(carry, batch):
        params, state, average_state = carry
        grad, t = batch
        direction, state = tx.update({'w': grad}, state, params)
        fraction = constant(t, problem.STEPS, warmup_steps=warmup)
        updates = jax.tree.map(lambda d, w: -lr * fraction * (d + decay * w), direction, params)
        updates, average_state = average.adjust_updates(updates, params, average_state, fraction)
        params = jax.tree.map(jnp.add, params, updates)
        average_state = average.update_average(params, average_state)
        return (params, state, average_state), (
            params['w'],
            average.evaluation_weights(params, average_state)['w'],
        )

    start = {'w': jnp.float32(problem.start(shape))}

    def run():
        carry = start, tx.init(start), average.init(start)
        return jax.lax.scan(step, carry, (grads, jnp.arange(problem.STEPS)))[1]

    trained, averaged = jax.jit(run)()
    return tuple({t: np.asarray(w[t - 1]) for t in problem.KEPT} for w in (trained, averaged))


@pytest.mark.parametrize('case', AS_PUBLISHED)
def test_schedule_free_follows_authors_code(case):
    """Compares the points of gradients and of evaluation. Catches decay of z in place of y, the
    weight of a warm-up, x for z, and a first step that is not all of the mean.
    """
    make, decay, warmup, options = AS_PUBLISHED[case]
    shape = case.split('/')[1]
    average = AVERAGES['schedule_free'](**options)
    trajectories = points(average, make, shape, decay, warmup)
    for point, trajectory in zip(('y', 'x'), trajectories, strict=True):
        assert_follows(trajectory, 'make_schedule_free', f'{point}_{case}', shape)


@pytest.mark.parametrize('decay', [0.0, 0.9, 0.9999])
def test_ema_matches_closed_form(decay):
    """Training is as without it. Catches a share of the initial weights, and a share that ends."""
    average = AVERAGES['ema'](average_decay=jnp.float32(decay))
    trained, averaged = points(average, SGD, 'wide', 0.1, 0)
    plain, same = points(AVERAGES['none'](), SGD, 'wide', 0.1, 0)
    weights = [plain[1], plain[2], plain[3]]
    for t in problem.KEPT:
        np.testing.assert_array_equal(trained[t], plain[t])
        np.testing.assert_array_equal(same[t], plain[t])
    for t in (1, 2, 3):
        shares = np.float64(decay) ** np.arange(t - 1, -1, -1)
        expected = np.tensordot(shares / shares.sum(), np.float64(weights[:t]), 1)
        np.testing.assert_allclose(averaged[t], expected, rtol=1e-5, atol=1e-6)
    if decay == 0.9999:  # nearly the mean of all, none of which is the start
        assert np.abs(averaged[50] - plain[50]).max() > 0.1


@pytest.mark.parametrize('name', AVERAGES)
def test_constant_weights_average_to_themselves(name):
    """Equality is bitwise, over many steps. Catches averages that do not begin at the weights."""
    average = AVERAGES[name]()
    params = {'w': jnp.float32(np.random.default_rng(0).normal(size=(4, 6)))}
    zeros = jax.tree.map(jnp.zeros_like, params)

    def step(carry, fraction):
        params, state = carry
        updates, state = average.adjust_updates(zeros, params, state, fraction)
        params = jax.tree.map(jnp.add, params, updates)
        return (params, average.update_average(params, state)), None

    def run():
        carry = params, average.init(params)
        carry, _ = jax.lax.scan(step, carry, jnp.linspace(0.1, 1.0, 40))
        return carry[0], average.evaluation_weights(*carry)

    for averaged in jax.jit(run)():
        np.testing.assert_array_equal(averaged['w'], params['w'])
