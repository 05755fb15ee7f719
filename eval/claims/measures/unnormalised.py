"""Tables of bigrams learnt with their normaliser, without it, and from noise words."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims.estimates import Estimate, over_seeds
from modules.losses.base import cross_entropies

VOCAB, PAIRS = 128, 65_536
NOISE = 16  # words drawn for each pair, by the frequency of words in what is trained on
BATCH, STEPS = 256, 1500
RATES = (0.01, 0.03, 0.1)  # of Adam, falling to 0 along a line
KEPT = 0.9  # of the moving average of normalisers, at each of a context's batches
SEEDS = 5


class Drawn(NamedTuple):
    """Pairs and their noise: contexts x_B, words y_B, noise_BK; log_q_V of the noise."""

    x_B: jax.Array
    y_B: jax.Array
    noise_BK: jax.Array
    log_q_V: jax.Array

    def scores(self, table_VV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns log(p / q) up to the normaliser, of words [B] and of noise [B, K]."""
        of_words = table_VV[self.x_B, self.y_B] - self.log_q_V[self.y_B]
        return of_words, table_VV[self.x_B[:, None], self.noise_BK] - self.log_q_V[self.noise_BK]


# Each maps (table, Drawn, moving average of log Z by context) to (losses [B], the next average).
Method = Callable[[jax.Array, Drawn, jax.Array], tuple[jax.Array, jax.Array]]


def exact(table_VV, drawn, log_z_V):
    """-log p, over all words."""
    return cross_entropies(table_VV[drawn.x_B], drawn.y_B), log_z_V


def noise_contrastive(table_VV, drawn, log_z_V):
    """The logistic loss of telling a word from K words of noise (arXiv:1206.6426); the table learns
    its own normaliser.
    """
    words_B, noise_BK = (s - np.log(NOISE) for s in drawn.scores(table_VV))
    return jax.nn.softplus(-words_B) + jnp.sum(jax.nn.softplus(noise_BK), -1), log_z_V


def sampled_softmax(table_VV, drawn, log_z_V):
    """-log p among the word and its noise, without noise that is the word (arXiv:1412.2007)."""
    words_B, noise_BK = drawn.scores(table_VV)
    is_word_BK = drawn.noise_BK == drawn.y_B[:, None]
    all_BK = jnp.concatenate([words_B[:, None], jnp.where(is_word_BK, -jnp.inf, noise_BK)], 1)
    return jax.nn.logsumexp(all_BK, -1) - words_B, log_z_V


def moving_average(table_VV, drawn, log_z_V):
    """-log p, whose gradient divides mean_K e^s / q by a moving average of it, one a context.

    This is the form of arXiv:2306.07485, of one distribution there: the mean is an unbiased
    estimate of the normaliser, but its logarithm, and the gradient of that, are not.
    """
    words_B, noise_BK = drawn.scores(table_VV)
    log_q_B = drawn.log_q_V[drawn.y_B]
    log_mean_B = jax.nn.logsumexp(noise_BK, -1) - np.log(NOISE)
    found_B = jnp.exp(jax.lax.stop_gradient(log_mean_B) - log_z_V[drawn.x_B])
    count_V = jnp.zeros(VOCAB).at[drawn.x_B].add(1.0)
    mean_V = jnp.zeros(VOCAB).at[drawn.x_B].add(found_B) / jnp.maximum(count_V, 1)
    new_V = log_z_V + jnp.where(count_V > 0, jnp.log(KEPT + (1 - KEPT) * mean_V), 0.0)
    ratio_B = jnp.exp(log_mean_B - new_V[drawn.x_B])
    return ratio_B - (words_B + log_q_B), new_V


METHODS: dict[str, Method] = {
    'exact': exact,
    'noise_contrastive': noise_contrastive,
    'sampled_softmax': sampled_softmax,
    'moving_average': moving_average,
}


def bigrams() -> dict[str, Estimate]:
    """Returns by how much tables of bigrams are worse than the counts they are learnt from.

    excess: the cross-entropy of softmax(table) on the pairs that are trained on, less that of their
    own frequencies, in nats, after STEPS of BATCH pairs, by METHODS, at the rate of RATES at which
    its mean is least. All but `exact` have the same NOISE words. The ratio is that of each of the
    SEEDS.
    """
    keys = jax.random.split(jax.random.key(0), SEEDS)
    excess = {}
    for name, method in METHODS.items():
        each = jax.jit(lambda keys, method=method: jax.lax.map(lambda k: _excess(method, k), keys))
        excess_SR = np.float64(each(keys))
        excess[name] = excess_SR[:, np.argmin(excess_SR.mean(0))]
    found = {f'excess_of_{name}': over_seeds(values) for name, values in excess.items()}
    for other in ('noise_contrastive', 'sampled_softmax'):
        ratio = excess['moving_average'] / excess[other]
        found[f'excess_of_moving_average_over_{other}'] = over_seeds(ratio)
    return found


def _excess(method: Method, key: jax.Array) -> jax.Array:
    """At each of RATES."""
    of_pairs, of_training = jax.random.split(key)
    x, y = _pairs(of_pairs)
    counts_VV = jnp.zeros((VOCAB, VOCAB)).at[x, y].add(1.0)
    log_q_V = jnp.log(jnp.sum(counts_VV, 0) + 1) - jnp.log(float(PAIRS + VOCAB))
    least = -jnp.sum(counts_VV * _log(counts_VV / jnp.sum(counts_VV, 1, keepdims=True)))

    def at_rate(rate):
        transform = optax.adam(optax.linear_schedule(1.0, 0.0, STEPS))

        def step(carry, key):
            table_VV, log_z_V, state = carry
            of_rows, of_noise = jax.random.split(key)
            rows = jax.random.randint(of_rows, (BATCH,), 0, PAIRS)
            noise_BK = _words(of_noise, (BATCH, NOISE), jnp.cumsum(jnp.exp(log_q_V)))
            drawn = Drawn(x[rows], y[rows], noise_BK, log_q_V)

            def loss(table_VV):
                losses_B, new_V = method(table_VV, drawn, log_z_V)
                return jnp.mean(losses_B), jax.lax.stop_gradient(new_V)

            grads, log_z_V = jax.grad(loss, has_aux=True)(table_VV)
            updates, state = transform.update(grads, state)
            return (table_VV + rate * updates, log_z_V, state), None

        start = jnp.zeros((VOCAB, VOCAB)), jnp.full(VOCAB, jnp.log(float(VOCAB)))
        carry = *start, transform.init(start[0])
        (table_VV, *_), _ = jax.lax.scan(step, carry, jax.random.split(of_training, STEPS))
        found = -jnp.sum(counts_VV * jax.nn.log_softmax(table_VV))
        return (found - least) / PAIRS

    return jax.lax.map(at_rate, jnp.float32(RATES))


def _pairs(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Contexts and words: both as 1 / rank, times a log-normal factor of each pair."""
    of_table, of_contexts, of_words = jax.random.split(key, 3)
    zipf_V = 1 / jnp.arange(1.0, VOCAB + 1)
    p_VV = jax.nn.softmax(jnp.log(zipf_V)[None] + jax.random.normal(of_table, (VOCAB, VOCAB)))
    x = _words(of_contexts, (PAIRS,), jnp.cumsum(zipf_V / jnp.sum(zipf_V)))
    below = jnp.cumsum(p_VV, 1)[x] < jax.random.uniform(of_words, (PAIRS, 1))
    return x, jnp.minimum(jnp.sum(below, 1), VOCAB - 1)


def _words(key: jax.Array, shape: tuple[int, ...], cumulative_V: jax.Array) -> jax.Array:
    """Draws words by their cumulative probabilities."""
    found = jnp.searchsorted(cumulative_V, jax.random.uniform(key, shape))
    return jnp.minimum(found, VOCAB - 1)


def _log(x: jax.Array) -> jax.Array:
    """log x, and 0 where x is 0, as 0 log 0 is."""
    return jnp.log(jnp.where(x > 0, x, 1.0))
