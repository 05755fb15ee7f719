"""Reference: with every word once as noise, losses from noise have the gradient of -log p, or none
where the table is the truth.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims.measures import unnormalised

WORDS = 5


@pytest.fixture(autouse=True)
def all_words_are_noise(monkeypatch):
    monkeypatch.setattr(unnormalised, 'VOCAB', WORDS)
    monkeypatch.setattr(unnormalised, 'NOISE', WORDS)


def drawn(x, y):
    noise = np.broadcast_to(np.arange(WORDS), (len(x), WORDS))
    log_q = jnp.full(WORDS, -np.log(WORDS), jnp.float32)
    return unnormalised.NoisyPairs(jnp.int32(x), jnp.int32(y), jnp.int32(noise), log_q)


def gradient(method, table, x, y, weights, log_z):
    def loss(table):
        return jnp.vdot(jnp.float32(weights), method(table, drawn(x, y), log_z)[0])

    return jax.jit(jax.grad(loss))(table)


TABLE = jnp.float32(np.random.default_rng(0).normal(size=(WORDS, WORDS)))
LOG_Z = jax.nn.logsumexp(TABLE, -1)


def test_a_moving_average_that_is_right_has_the_exact_gradient():
    """Contexts 1, 1 and 3: the loss is -log p, whose gradient is p less the word."""
    contexts, words, weights = [1, 1, 3], [0, 2, 4], np.array([1.0, 2.0, 0.5])
    p = np.exp(TABLE - LOG_Z[:, None])
    wanted = np.zeros((WORDS, WORDS))
    for x, y, weight in zip(contexts, words, weights, strict=True):
        wanted[x] += weight * (p[x] - np.eye(WORDS)[y])
    found = gradient(unnormalised.moving_average, TABLE, contexts, words, weights, LOG_Z)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_noise_contrast_is_least_at_the_normalised_truth():
    """Words of context 2 weighed by their probabilities: the slope is 0, and is not elsewhere."""
    truth = TABLE - LOG_Z[:, None]
    given = [2] * WORDS, np.arange(WORDS), np.exp(truth[2]), LOG_Z
    found = gradient(unnormalised.noise_contrastive, truth, *given)
    np.testing.assert_allclose(found, 0, atol=1e-6)
    assert np.abs(gradient(unnormalised.noise_contrastive, truth + 1, *given)[2]).min() > 0.01


def test_the_average_moves_by_contexts_that_are_drawn():
    """u from 1: 0.9 + 0.1 Z for context 1, drawn twice, and unchanged for the others."""
    _, moved = unnormalised.moving_average(TABLE, drawn([1, 1], [0, 2]), jnp.zeros(WORDS))
    wanted = np.zeros(WORDS)
    wanted[1] = np.log(0.9 + 0.1 * np.exp(LOG_Z[1]))
    np.testing.assert_allclose(moved, wanted, rtol=1e-5)
