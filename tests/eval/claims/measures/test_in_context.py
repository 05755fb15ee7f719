"""Reference: the loss and the size of the best step against moments of random regressions, and the
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
    PAIRS,
    compare_steps,
    draw_prompts,
    gradient_step,
    predict,
)

ROWS = 2**16


@pytest.fixture(scope='module')
def prompts_and_steps():
    """Returns {name: (prompts, plain step, preconditioned step)} for each kind of input."""
    prompts_by_kind = {}
    for name, deviations in DEVIATIONS.items():
        deviations_D = jnp.array(deviations)
        prompts = draw_prompts(jax.random.key(5), ROWS, deviations_D)
        steps = (gradient_step(prompts.tokens_BTE, w) for w in (jnp.ones(DIM), deviations_D**-2))
        prompts_by_kind[name] = prompts, *(np.float64(x) for x in steps)
    return prompts_by_kind


@pytest.mark.full
@pytest.mark.parametrize('inputs', DEVIATIONS)
def test_best_step_and_loss_match_moments(prompts_and_steps, inputs):
    prompts, _, best_B = prompts_and_steps[inputs]
    target_B = np.float64(prompts.target_B)
    products_B, squares_B = best_B * target_B, best_B**2
    fitted_step = products_B.mean() / squares_B.mean()
    error = np.std(products_B - fitted_step * squares_B) / np.sqrt(ROWS) / squares_B.mean()
    assert abs(fitted_step - BEST_STEP) < 4 * error < 0.05 * BEST_STEP
    losses_B = (BEST_STEP * best_B - target_B) ** 2
    error = losses_B.std() / np.sqrt(ROWS)
    assert abs(losses_B.mean() - BEST_LOSS) < 4 * error < 0.05 * BEST_LOSS


def build_layer(weights):
    """Returns a layer that takes the step of size BEST_STEP with x times weights."""
    query = jnp.diag(jnp.array([*weights, 0.0]))
    value = jnp.zeros((DIM + 1, DIM + 1)).at[-1, -1].set(BEST_STEP)
    return {'query': query, 'key': jnp.eye(DIM + 1), 'value': value}


@pytest.mark.parametrize('inputs', DEVIATIONS)
def test_recognises_layer_that_takes_step(prompts_and_steps, inputs):
    prompts, plain_B, best_B = prompts_and_steps[inputs]
    params = build_layer(np.array(DEVIATIONS[inputs]) ** -2.0)
    predicted_B = np.float64(predict(params, prompts.tokens_BTE, PAIRS))
    np.testing.assert_allclose(predicted_B, BEST_STEP * best_B, rtol=1e-3, atol=1e-4)
    comparison = compare_steps(predicted_B, plain_B, best_B, np.float64(prompts.target_B))
    assert abs(comparison['excess_loss']) < 1e-6 and abs(comparison['step_over_best'] - 1) < 1e-5
    assert comparison['unexplained_by_preconditioned'] < 1e-8
    assert (comparison['unexplained_by_plain'] > 0.3) == (inputs == 'stretched')


@pytest.mark.parametrize('n_pairs', [PAIRS, PAIRS - 1])
def test_query_sees_pairs_only(prompts_and_steps, n_pairs):
    """A layer with values that read x would see it: its own products are not part of the sum."""
    prompts, *_ = prompts_and_steps['alike']
    tokens_BTE = prompts.tokens_BTE[:8]
    params = {
        name: jax.random.normal(jax.random.key(i), (DIM + 1, DIM + 1))
        for i, name in enumerate(('query', 'key', 'value'))
    }
    q, k, v = (np.float64(tokens_BTE) @ np.float64(params[n]) for n in ('query', 'key', 'value'))
    expected = [(q[b, -1] @ k[b, :n_pairs].T) @ v[b, :n_pairs, -1] for b in range(8)]
    predicted_B = predict(params, tokens_BTE, n_pairs)
    np.testing.assert_allclose(predicted_B, expected, rtol=1e-3, atol=1e-3)


def test_other_steps_have_an_excess(prompts_and_steps):
    prompts, plain_B, best_B = prompts_and_steps['alike']
    target_B = np.float64(prompts.target_B)
    comparison = compare_steps(1.2 * BEST_STEP * best_B, plain_B, best_B, target_B)
    # d n / (n + d + 1 + s2) (1.2 - 1)^2 over the loss
    expected = DIM * PAIRS * BEST_STEP * 0.2**2 / BEST_LOSS
    np.testing.assert_allclose(comparison['excess_loss'], expected, rtol=0.1)
    np.testing.assert_allclose(comparison['step_over_best'], 1.2, rtol=1e-6)


@pytest.mark.full
def test_training_approaches_step():
    trained = in_context.train_and_compare(DEVIATIONS['alike'], seed=9, steps=1000)
    untrained = in_context.train_and_compare(DEVIATIONS['alike'], seed=9, steps=1)
    assert trained['excess_loss'] < 0.1 < untrained['excess_loss']
