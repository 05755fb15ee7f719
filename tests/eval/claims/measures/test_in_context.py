"""Reference: the loss and the size of the best step against moments of drawn regressions, and the
layer that takes the step against sums by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims.measures import in_context
from eval.claims.measures.in_context import (
    BEST_LOSS,
    BEST_STEP,
    DEVIATIONS,
    DIM,
    compare_steps,
    draw_prompts,
    gradient_step,
    predict,
)

ROWS = 2**16


@pytest.fixture(scope='module')
def drawn():
    """{name: prompts, plain step, preconditioned step} of each kind of input."""
    made = {}
    for name, deviations in DEVIATIONS.items():
        deviations_D = jnp.array(deviations)
        prompts = draw_prompts(jax.random.key(5), ROWS, deviations_D)
        steps = (gradient_step(prompts.tokens_BTE, w) for w in (jnp.ones(DIM), deviations_D**-2))
        made[name] = prompts, *(np.float64(x) for x in steps)
    return made


@pytest.mark.full
@pytest.mark.parametrize('inputs', DEVIATIONS)
def test_the_best_step_and_its_loss_are_those_of_the_moments(drawn, inputs):
    prompts, _, best_B = drawn[inputs]
    target_B = np.float64(prompts.target_B)
    products_B, squares_B = best_B * target_B, best_B**2
    fitted = products_B.mean() / squares_B.mean()
    error = np.std(products_B - fitted * squares_B) / np.sqrt(ROWS) / squares_B.mean()
    assert abs(fitted - BEST_STEP) < 4 * error < 0.05 * BEST_STEP
    losses_B = (BEST_STEP * best_B - target_B) ** 2
    error = losses_B.std() / np.sqrt(ROWS)
    assert abs(losses_B.mean() - BEST_LOSS) < 4 * error < 0.05 * BEST_LOSS


def layer(weights):
    """A layer that takes the step of size BEST_STEP with x times weights."""
    of_x = jnp.diag(jnp.array([*weights, 0.0]))
    of_y = jnp.zeros((DIM + 1, DIM + 1)).at[-1, -1].set(BEST_STEP)
    return {'query': of_x, 'key': jnp.eye(DIM + 1), 'value': of_y}


@pytest.mark.parametrize('inputs', DEVIATIONS)
def test_a_layer_that_takes_the_step_is_found_to(drawn, inputs):
    prompts, plain_B, best_B = drawn[inputs]
    params = layer(np.array(DEVIATIONS[inputs]) ** -2.0)
    found_B = np.float64(predict(params, prompts.tokens_BTE))
    np.testing.assert_allclose(found_B, BEST_STEP * best_B, rtol=1e-3, atol=1e-4)
    found = compare_steps(found_B, plain_B, best_B, np.float64(prompts.target_B))
    assert abs(found['excess_loss']) < 1e-6 and abs(found['step_over_best'] - 1) < 1e-5
    assert found['unexplained_by_preconditioned'] < 1e-8
    assert (found['unexplained_by_plain'] > 0.3) == (inputs == 'stretched')


def test_a_query_does_not_see_itself(drawn):
    """A layer whose values read x would see it: then its own products are no part of the sum."""
    prompts, *_ = drawn['alike']
    tokens_BTE = prompts.tokens_BTE[:8]
    params = {
        name: jax.random.normal(jax.random.key(i), (DIM + 1, DIM + 1))
        for i, name in enumerate(('query', 'key', 'value'))
    }
    q, k, v = (np.float64(tokens_BTE) @ np.float64(params[n]) for n in ('query', 'key', 'value'))
    wanted = [(q[b, -1] @ k[b, :-1].T) @ v[b, :-1, -1] for b in range(8)]
    np.testing.assert_allclose(predict(params, tokens_BTE), wanted, rtol=1e-3, atol=1e-3)


def test_other_steps_have_an_excess(drawn):
    prompts, plain_B, best_B = drawn['alike']
    target_B = np.float64(prompts.target_B)
    found = compare_steps(1.2 * BEST_STEP * best_B, plain_B, best_B, target_B)
    # d n / (n + d + 1 + s2) (1.2 - 1)^2 over the loss
    wanted = DIM * in_context.PAIRS * BEST_STEP * 0.2**2 / BEST_LOSS
    np.testing.assert_allclose(found['excess_loss'], wanted, rtol=0.1)
    np.testing.assert_allclose(found['step_over_best'], 1.2, rtol=1e-6)


@pytest.mark.full
def test_training_comes_near_the_step():
    found = in_context.train_and_compare(DEVIATIONS['alike'], seed=9, steps=1000)
    untrained = in_context.train_and_compare(DEVIATIONS['alike'], seed=9, steps=1)
    assert found['excess_loss'] < 0.1 < untrained['excess_loss']
