"""Averages of the weights. Reference: the authors' Schedule-Free and their loops in float64, and a
closed form. Equivalence: outer steps that do nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.optim import AVERAGES
from modules.optim.classic import adamw, sgd
from modules.optim.schedules import constant
from modules.params import ParamSpec
from tests.fixtures.optim import problem
from tests.helpers import checked_config
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
    average = AVERAGES['schedule_free'](None, problem.STEPS, **options)
    trajectories = points(average, make, shape, decay, warmup)
    for point, trajectory in zip(('y', 'x'), trajectories, strict=True):
        assert_follows(trajectory, 'make_schedule_free', f'{point}_{case}', shape)


@pytest.mark.parametrize('decay', [0.0, 0.9, 0.9999])
def test_ema_matches_closed_form(decay):
    """Training is as without it. Catches a share of the initial weights, and a share that ends."""
    average = AVERAGES['ema'](None, problem.STEPS, average_decay=jnp.float32(decay))
    trained, averaged = points(average, SGD, 'wide', 0.1, 0)
    plain, same = points(AVERAGES['none'](None, problem.STEPS), SGD, 'wide', 0.1, 0)
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
    average = AVERAGES[name]({'w': MATRIX}, 40)
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


# Loops over (weights, gradient) as in the authors' code, with SGD inside: {step: (trained, used)}.
LR = 0.05


def inner_step(weight, t):
    """One step of plain SGD from `weight`, with the learning rate of a warm-up of 5."""
    return weight - LR * min(t / 5, 1) * problem.gradient('wide', t)


def outer_loop(period, lr, momentum):
    weight = snapshot = problem.start('wide')
    buffer = np.zeros_like(weight)
    for t in range(1, problem.STEPS + 1):
        weight = inner_step(weight, t)
        if t % period == 0:
            delta = snapshot - weight
            buffer = momentum * buffer + lr * delta
            weight = snapshot = snapshot - momentum * buffer - lr * delta
        yield t, weight, snapshot


def ahead_loop(beta, decay, start, stop):
    """EMA_Nesterov; the scale of a step ahead follows the learning rate of the step before it."""
    weight = problem.start('wide')
    average, before = np.zeros_like(weight), weight
    for t in range(1, problem.STEPS + 1):
        weight = inner_step(weight, t)
        average = decay * average + (1 - decay) * (weight - before)
        before = used = weight
        if start <= t < stop:  # t steps are done
            weight = weight + beta * min(t / 5, 1) * average
        yield t, weight, used


def tail_loop(start, horizon, share):
    weight = average = problem.start('wide')
    for t in range(1, problem.STEPS + 1):
        weight = inner_step(weight, t)
        average = weight if t <= start else average + (weight - average) / horizon
        yield t, weight, (1 - share) * weight + share * average


LOOPS = {  # the average, its numbers and the loop
    'outer_nesterov': (
        {'outer_every': 5, 'outer_lr': 0.7, 'outer_momentum': 0.5},
        lambda: outer_loop(5, 0.7, 0.5),
    ),
    'ema_nesterov': (
        {
            'ema_nesterov_beta': 0.6,
            'ema_nesterov_decay': 0.9,
            'ema_nesterov_start': 0.04,
            'ema_nesterov_stop': 0.7,
        },
        lambda: ahead_loop(0.6, 0.9, 2, 35),
    ),
    'ema_nesterov/no stop': (
        {'ema_nesterov_decay': 0.9, 'ema_nesterov_start': 0.0, 'ema_nesterov_stop': 1.0},
        lambda: ahead_loop(0.6, 0.9, 0, np.inf),
    ),
    'tail_ema': (
        {'tail_ema_fraction': 0.9, 'tail_ema_decay': 0.8, 'tail_ema_weight': 0.6},
        lambda: tail_loop(5, 5, 0.6),
    ),
}


@pytest.mark.parametrize('case', LOOPS)
def test_averages_follow_the_authors_loops(case):
    """Catches an outer step that is a step off or has the old momentum, a displacement without its
    step ahead, a window that is off by one, and a tail that starts at the initial weights.
    """
    numbers, loop = LOOPS[case]
    average = AVERAGES[case.split('/')[0]]({'w': MATRIX}, problem.STEPS, **numbers)
    trained, averaged = points(average, SGD, 'wide', 0.0, 5)
    for t, weight, used in loop():
        if t in problem.KEPT:
            np.testing.assert_allclose(trained[t], weight, atol=1e-5, err_msg=f'trained, step {t}')
            np.testing.assert_allclose(averaged[t], used, atol=1e-5, err_msg=f'used, step {t}')


def test_outer_step_at_rate_1_is_the_optimizer():
    """After each step, at rate 1 and without momentum. Catches a momentum that stays."""
    numbers = {'outer_every': 1, 'outer_lr': 1.0, 'outer_momentum': 0.0}
    average = AVERAGES['outer_nesterov'](None, problem.STEPS, **numbers)
    plain, _ = points(AVERAGES['none'](None, problem.STEPS), SGD, 'wide', 0.1, 5)
    for weights in points(average, SGD, 'wide', 0.1, 5):
        for t in problem.KEPT:
            np.testing.assert_allclose(weights[t], plain[t], atol=1e-5)


def test_tail_ema_leaves_embeddings_out():
    """They are evaluated as trained, without state. Catches a word table in the average."""
    specs = {'table': ParamSpec('embedding', ('vocab', 'embed')), 'w': MATRIX}
    average = AVERAGES['tail_ema'](specs, 4, tail_ema_fraction=1.0, tail_ema_decay=0.5)
    params = {name: jnp.ones((2, 3)) for name in specs}
    state = average.init(params)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(2, 3), ()]
    trained = jax.tree.map(lambda w: 3 * w, params)
    used = average.evaluation_weights(trained, average.update_average(trained, state))
    np.testing.assert_allclose(used['table'], 3)
    np.testing.assert_allclose(used['w'], 0.4 * 3 + 0.6 * 2, rtol=1e-6)


def test_outer_steps_must_end_with_the_run():
    """Catches last steps of a run that no evaluation sees."""
    fields = {'optim.average': 'outer_nesterov', 'optim.outer_every': 30, 'train.steps': 100}
    with pytest.raises(ValueError, match=r'must divide train.steps; got 30 and 100\. .*works: 90'):
        checked_config(fields)
    assert checked_config(fields | {'train.steps': 90}).average.options['outer_every'] == 30
