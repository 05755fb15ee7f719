"""Reference: with every word once as noise, losses from noise have the gradient of -log p, and none
if the table is the truth.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims.measures import unnormalised

WORDS = 5


@pytest.fixture(autouse=True)
def use_all_words_as_noise(monkeypatch):
    monkeypatch.setattr(unnormalised, 'VOCAB', WORDS)
    monkeypatch.setattr(unnormalised, 'NOISE', WORDS)


def make_pairs(x, y):
    noise = np.broadcast_to(np.arange(WORDS), (len(x), WORDS))
    log_q = jnp.full(WORDS, -np.log(WORDS), jnp.float32)
    return unnormalised.NoisyPairs(jnp.int32(x), jnp.int32(y), jnp.int32(noise), log_q)


def compute_gradient(method, table, x, y, weights, log_z):
    def loss(table):
        return jnp.vdot(jnp.float32(weights), method(table, make_pairs(x, y), log_z)[0])

    return jax.jit(jax.grad(loss))(table)


TABLE = jnp.float32(np.random.default_rng(0).normal(size=(WORDS, WORDS)))
LOG_Z = jax.nn.logsumexp(TABLE, -1)


def test_exact_average_gives_exact_gradient():
    """Contexts 1, 1 and 3: the loss is -log p, with the gradient p minus the word."""
    contexts, words, weights = [1, 1, 3], [0, 2, 4], np.array([1.0, 2.0, 0.5])
    p = np.exp(TABLE - LOG_Z[:, None])
    expected = np.zeros((WORDS, WORDS))
    for x, y, weight in zip(contexts, words, weights, strict=True):
        expected[x] += weight * (p[x] - np.eye(WORDS)[y])
    grads = compute_gradient(unnormalised.moving_average, TABLE, contexts, words, weights, LOG_Z)
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-6)


def test_noise_contrast_is_minimal_at_truth():
    """Words of context 2 weighted by their probabilities have the slope 0 here, not elsewhere."""
    arguments = [2] * WORDS, np.arange(WORDS), np.exp(TABLE - LOG_Z[:, None])[2], LOG_Z
    grads = compute_gradient(unnormalised.noise_contrastive, TABLE, *arguments)
    np.testing.assert_allclose(grads, 0, atol=1e-6)
    assert (
        np.abs(compute_gradient(unnormalised.noise_contrastive, TABLE + 1, *arguments)[2]).min()
        > 0.01
    )


def test_average_moves_for_drawn_contexts():
    """u starts at 1: 0.9 + 0.1 Z for context 1, drawn twice, and unchanged for the others."""
    _, average = unnormalised.moving_average(TABLE, make_pairs([1, 1], [0, 2]), jnp.zeros(WORDS))
    expected = np.zeros(WORDS)
    expected[1] = np.log(0.9 + 0.1 * np.exp(LOG_Z[1]))
    np.testing.assert_allclose(average, expected, rtol=1e-5)
