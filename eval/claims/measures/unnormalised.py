"""Tables of bigrams learnt with noise words: a moving average of the normaliser against NCE."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure

VOCAB, PAIRS = 128, 65_536
NOISE = 16  # words drawn for each pair, by their frequency in the training text
BATCH, STEPS = 256, 1500
RATES = (0.03, 0.1, 0.3)  # of Adam, falling to 0 along a line
AVERAGE_DECAY = 0.9  # of the moving average of normalisers, at each of a context's batches
SEEDS = 8


class NoisyPairs(NamedTuple):
    """Pairs and their noise: contexts x_B, words y_B, noise_BK; log_q_V of the noise."""

    x_B: jax.Array
    y_B: jax.Array
    noise_BK: jax.Array
    log_q_V: jax.Array

    def scores(self, table_VV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns log(p / q) up to the normaliser, of words [B] and of noise [B, K]."""
        word_scores_B = table_VV[self.x_B, self.y_B] - self.log_q_V[self.y_B]
        return word_scores_B, table_VV[self.x_B[:, None], self.noise_BK] - self.log_q_V[
            self.noise_BK
        ]


# Each maps (table, pairs, log Z by context) to (losses [B], the next log Z); the first is exact.
Method = Callable[[jax.Array, NoisyPairs, jax.Array], tuple[jax.Array, jax.Array]]


def noise_contrastive(
    table_VV: jax.Array, pairs: NoisyPairs, log_z_V: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the logistic loss of telling a word from K noise words (arXiv:1206.6426).

    The table learns how its normaliser differs from that of its start.

    Args:
      table_VV: scores of words by context.
      pairs: a batch.
      log_z_V: log normaliser of each context at the start, returned unchanged. Without it the
        scores would have to fall by about log(VOCAB) first.
    """
    log_z_B, n_noise = log_z_V[pairs.x_B], pairs.noise_BK.shape[1]
    words_B, noise_BK = pairs.scores(table_VV)
    words_B = words_B - log_z_B - np.log(n_noise)
    noise_BK = noise_BK - log_z_B[:, None] - np.log(n_noise)
    return jax.nn.softplus(-words_B) + jnp.sum(jax.nn.softplus(noise_BK), -1), log_z_V


def contrast_with_one_word(
    table_VV: jax.Array, pairs: NoisyPairs, log_z_V: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of `noise_contrastive` with only the first noise word of each pair.

    Args:
      table_VV: scores of words by context.
      pairs: words with their contexts and noise words.
      log_z_V: as in `noise_contrastive`.
    """
    pairs = pairs._replace(noise_BK=pairs.noise_BK[:, :1])
    return noise_contrastive(table_VV, pairs, log_z_V)


def moving_average(
    table_VV: jax.Array, pairs: NoisyPairs, log_z_V: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns -log p; the gradient divides mean_K e^s / q by its moving average for the context.

    This is arXiv:2306.07485, which has a single distribution: the mean is an unbiased estimate of
    the normaliser, but its logarithm, and the gradient of the logarithm, are not.

    Args:
      table_VV: scores of words by context.
      pairs: a batch.
      log_z_V: moving average of the log normaliser of each context.

    Returns:
      (losses [B], the next moving average [V]).
    """
    words_B, noise_BK = pairs.scores(table_VV)
    log_q_B = pairs.log_q_V[pairs.y_B]
    log_mean_B = jax.nn.logsumexp(noise_BK, -1) - np.log(NOISE)
    relative_B = jnp.exp(jax.lax.stop_gradient(log_mean_B) - log_z_V[pairs.x_B])
    count_V = jnp.zeros(VOCAB).at[pairs.x_B].add(1.0)
    mean_V = jnp.zeros(VOCAB).at[pairs.x_B].add(relative_B) / jnp.maximum(count_V, 1)
    next_log_z_V = log_z_V + jnp.where(
        count_V > 0, jnp.log(AVERAGE_DECAY + (1 - AVERAGE_DECAY) * mean_V), 0.0
    )
    ratio_B = jnp.exp(log_mean_B - next_log_z_V[pairs.x_B])
    return ratio_B - (words_B + log_q_B), next_log_z_V


@measure('excess_of_moving_average_over_noise_contrastive', 'excess_of_all_noise_words_over_one')
def bigrams() -> Iterator[Estimate]:
    """Yields ratios of excess losses of bigram tables by two methods.

    The excess is the cross-entropy of softmax(table) on the training pairs minus the entropy of
    their frequencies, in nats, after STEPS of BATCH pairs, at the best rate of RATES. The first
    ratio is of the moving average to noise-contrastive estimation, with the same NOISE words. The
    second is of noise-contrastive estimation with NOISE words to that with one.
    """
    average, contrast, one_word = (
        lab.tune(compute_excess(method), lowest=True).scores
        for method in (moving_average, noise_contrastive, contrast_with_one_word)
    )
    yield mean_over_seeds(average / contrast, 'log')
    yield mean_over_seeds(contrast / one_word, 'log')


def compute_excess(method: Method) -> np.ndarray:
    """Returns the excess loss [seed, rate] of tables by a method."""

    def prepare(key):
        pair_key, training_key = jax.random.split(key)
        x, y = _draw_pairs(pair_key)
        counts_VV = jnp.zeros((VOCAB, VOCAB)).at[x, y].add(1.0)
        log_q_V = jnp.log(jnp.sum(counts_VV, 0) + 1) - jnp.log(float(PAIRS + VOCAB))
        entropy = -jnp.sum(counts_VV * _safe_log(counts_VV / jnp.sum(counts_VV, 1, keepdims=True)))

        def loss(table_VV, key, log_z_V):
            row_key, noise_key = jax.random.split(key)
            rows = jax.random.randint(row_key, (BATCH,), 0, PAIRS)
            noise_BK = _draw_words(noise_key, (BATCH, NOISE), jnp.cumsum(jnp.exp(log_q_V)))
            pairs = NoisyPairs(x[rows], y[rows], noise_BK, log_q_V)
            losses_B, next_log_z_V = method(table_VV, pairs, log_z_V)
            return jnp.mean(losses_B), jax.lax.stop_gradient(next_log_z_V)

        def run(rate):
            scheduled = optax.adam(optax.linear_schedule(1.0, 0.0, STEPS))
            start, log_z_V = jnp.zeros((VOCAB, VOCAB)), jnp.full(VOCAB, jnp.log(float(VOCAB)))
            batches = jax.random.split(training_key, STEPS)
            optimizer = optax.chain(scheduled, optax.scale(rate))
            table_VV = lab.train(loss, start, optimizer, batches, loss_state=log_z_V).params
            return (-jnp.sum(counts_VV * jax.nn.log_softmax(table_VV)) - entropy) / PAIRS

        return run

    return lab.map_rates(prepare, jax.random.split(jax.random.key(0), SEEDS), RATES)


def _draw_pairs(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws contexts and words, both with frequencies 1 / rank, times a log-normal factor for each
    pair.
    """
    table_key, context_key, word_key = jax.random.split(key, 3)
    zipf_V = 1 / jnp.arange(1.0, VOCAB + 1)
    p_VV = jax.nn.softmax(jnp.log(zipf_V)[None] + jax.random.normal(table_key, (VOCAB, VOCAB)))
    x = _draw_words(context_key, (PAIRS,), jnp.cumsum(zipf_V / jnp.sum(zipf_V)))
    below = jnp.cumsum(p_VV, 1)[x] < jax.random.uniform(word_key, (PAIRS, 1))
    return x, jnp.minimum(jnp.sum(below, 1), VOCAB - 1)


def _draw_words(key: jax.Array, shape: tuple[int, ...], cumulative_V: jax.Array) -> jax.Array:
    """Draws words by their cumulative probabilities."""
    indices = jnp.searchsorted(cumulative_V, jax.random.uniform(key, shape))
    return jnp.minimum(indices, VOCAB - 1)


def _safe_log(x: jax.Array) -> jax.Array:
    """Returns log x, and 0 where x is 0, as 0 log 0 = 0."""
    return jnp.log(jnp.where(x > 0, x, 1.0))
