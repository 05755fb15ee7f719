"""Reference: optimizers and schedules against numpy. Contract: hyperparameters may be traced."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.optim import OPTIMIZERS, SCHEDULES
from modules.optim.adamw import adamw

STEPS, WARMUP, FINAL, DECAY = 20, 4, 0.1, 0.25


def hyper(**changes):
    names = dict(
        warmup_steps=WARMUP,
        steps=STEPS,
        final_lr_fraction=FINAL,
        decay_fraction=DECAY,
        b1=0.9,
        b2=0.95,
        eps=1e-2,
    )
    return SimpleNamespace(**{k: jnp.float32(v) for k, v in (names | changes).items()})


def numpy_adam(grads, b1, b2, eps):
    """m_hat / (sqrt(v_hat) + eps) after each of `grads` (arXiv:1412.6980, algorithm 1)."""
    m = v = 0.0
    for t, grad in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        yield (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)


def test_adamw_direction():
    """Over several steps. Catches a missing bias correction, or eps inside the root."""
    grads = np.random.default_rng(0).normal(size=(5, 3)) * 0.1
    tx = adamw(hyper())
    state = tx.init(jnp.zeros(3))
    for grad, wanted in zip(grads, numpy_adam(grads, 0.9, 0.95, 1e-2), strict=True):
        direction, state = tx.update(jnp.float32(grad), state)
        np.testing.assert_allclose(direction, wanted, rtol=1e-4)


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_no_gradient_gives_no_direction(name):
    """So that weight decay alone moves a parameter without gradient."""
    tx = OPTIMIZERS[name](hyper())
    params = {'w': jnp.ones((2, 3))}
    direction, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_array_equal(direction['w'], 0)


def cosine(progress):
    return FINAL + (1 - FINAL) * (1 + np.cos(np.pi * progress)) / 2


FRACTIONS = {  # of the peak: step -> value; first, last of the warm-up, the next, middle, last
    'constant': {0: 1 / 4, 2: 3 / 4, 3: 1, 4: 1, 11: 1, 19: 1},
    'warmup_cosine': {0: 1 / 4, 3: 1, 4: cosine(1 / 16), 11: cosine(1 / 2), 19: FINAL},
    'warmup_stable_decay': {0: 1 / 4, 3: 1, 4: 1, 14: 1, 15: 1 - 0.9 / 5, 17: 0.46, 19: FINAL},
}


def test_every_schedule_has_its_values():
    assert FRACTIONS.keys() == SCHEDULES.keys()


@pytest.mark.parametrize('name', SCHEDULES)
def test_schedule_at_its_boundaries(name):
    """Catches a warm-up that starts at 0, and a decay that ends a step early or late."""
    for step, wanted in FRACTIONS[name].items():
        value = SCHEDULES[name](jnp.int32(step), hyper())
        np.testing.assert_allclose(value, wanted, rtol=1e-5, err_msg=f'step {step}')


@pytest.mark.parametrize('name', SCHEDULES)
def test_schedule_stays_between_nothing_and_the_peak(name):
    """Also without warm-up, without decay, and beyond the last step."""
    for changes in ({}, {'warmup_steps': 0}, {'decay_fraction': 0}, {'steps': 1}):
        values = SCHEDULES[name](jnp.arange(2 * STEPS), hyper(**changes))
        assert np.all((values > 0) & (values <= 1))
    assert SCHEDULES[name](jnp.int32(0), hyper(warmup_steps=0)) > 0.9


@pytest.mark.parametrize('name', SCHEDULES)
def test_schedule_of_traced_lengths(name):
    """vmapped over runs of other lengths, jitted: the same as one at a time."""
    runs = [hyper(), hyper(steps=10, warmup_steps=0, final_lr_fraction=0, decay_fraction=0.5)]
    stacked = {k: jnp.stack([vars(r)[k] for r in runs]) for k in vars(runs[0])}
    steps = jnp.arange(STEPS)
    mapped = jax.jit(jax.vmap(lambda h: SCHEDULES[name](steps, SimpleNamespace(**h))))(stacked)
    for run, values in zip(runs, mapped, strict=True):
        np.testing.assert_allclose(values, SCHEDULES[name](steps, run), rtol=1e-6, atol=1e-7)
