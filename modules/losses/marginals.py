"""Marginals: the probability of any part of a row as one number, which agrees with conditionals.

A network sees a row in which tokens are hidden, with no causal mask. Its logits are the conditional
distributions of hidden tokens, and a number a row is the logarithm of the probability of what is
shown. These are functions of both, without a row in `LOSSES`, whose tokens are predicted from those
before them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from modules.losses.base import cross_entropies

# tokens [B, T], some of them hidden -> logits [B, T, V] of every place
Conditionals = Callable[[jax.Array], jax.Array]


class RandomCut(NamedTuple):
    """A cut of rows in an order: which places are known, and which one is next; both bool."""

    known_BT: jax.Array
    next_BT: jax.Array


def random_ranks(key: jax.Array, rows: int, length: int) -> jax.Array:
    """Draws an order a row: the rank of each place in it, from 0, int32 [rows, length]."""
    places_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
    return jax.random.permutation(key, places_BT, axis=1, independent=True)


def random_cut(key: jax.Array, rows: int, length: int) -> RandomCut:
    """Draws an order a row, and how many places are known, uniform from 0 to length - 1."""
    of_order, of_cut = jax.random.split(key)
    ranks_BT = random_ranks(of_order, rows, length)
    count_B1 = jax.random.randint(of_cut, (rows, 1), 0, length)
    return RandomCut(ranks_BT < count_B1, ranks_BT == count_B1)


def hide_tokens(tokens_BT: jax.Array, known_BT: jax.Array, mask: int) -> jax.Array:
    """Returns the rows with the token `mask` in places that are not known."""
    return jnp.where(known_BT, tokens_BT, mask)


def log_conditionals(logits_BTV: jax.Array, tokens_BT: jax.Array, next_BT: jax.Array) -> jax.Array:
    """Returns log p of the token in the place that is next in each row, [B]."""
    return -jnp.sum(jnp.where(next_BT, jax.vmap(cross_entropies)(logits_BTV, tokens_BT), 0.0), -1)


def conditional_losses(
    logits_BTV: jax.Array, tokens_BT: jax.Array, known_BT: jax.Array
) -> jax.Array:
    """Returns -log p of a hidden token, the mean over those of each row, [B], in nats.

    Over random cuts its mean is -1 / T log p(row), the mean over orders of the sum of conditionals.
    The authors' code takes the token that is next alone, and so has more variance about one mean.

    Args:
      logits_BTV: of rows with `hidden` tokens.
      tokens_BT: the rows themselves.
      known_BT: of `random_cut`; at least one place of each row is not known.

    Returns:
      The losses, float32 at least.

    Source: arXiv:2310.12920, of its first step.
    """
    losses_BT = jax.vmap(cross_entropies)(logits_BTV, tokens_BT)
    return jnp.mean(losses_BT, -1, where=~known_BT)


def consistency_losses(
    before_B: jax.Array,
    log_p_B: jax.Array,
    after_B: jax.Array,
    empty: jax.Array,
    length: int,
) -> jax.Array:
    """T (f(x_S and x_i) - f(x_S) - log p(x_i | x_S))^2 + f(nothing)^2, [B], in nats^2.

    It is 0 at all cuts only where f is the logarithm of the marginals, and the conditionals are
    theirs. The conditionals stay as they are: log_p_B has no gradient.

    Args:
      before_B: f of rows in which the places S are known.
      log_p_B: `log_conditionals` of the next place i, from the same rows.
      after_B: f of rows in which i is known too.
      of_nothing: f of a row in which nothing is known, a scalar.
      length: T, of a row.

    Returns:
      The losses, of the type of f.

    Source: arXiv:2310.12920, and https://github.com/PrincetonLIPS/MaM, for the factor T.
    """
    apart_B = after_B - before_B - jax.lax.stop_gradient(log_p_B)
    return length * apart_B**2 + empty**2


def chain_conditionals(
    conditionals: Conditionals, tokens_BT: jax.Array, ranks_BT: jax.Array, count: int, mask: int
) -> jax.Array:
    """Returns log p of the first `count` places of an order, the sum of their conditionals, [B].

    It takes `count` passes, each of which shows one place more.

    Args:
      conditionals: maps rows with hidden tokens to logits.
      tokens_BT: the rows.
      ranks_BT: of `random_ranks`.
      count: how many places, from 1 to T.
      mask: the token in hidden places.

    Returns:
      The sums, float32 at least.

    Raises:
      ValueError: for a count that no part of the row has.
    """
    length = tokens_BT.shape[1]
    if not 1 <= count <= length:
        raise ValueError(f'a part of rows of {length} has 1 to {length} places; got {count=}')

    def log_p(rank):
        logits_BTV = conditionals(hide_tokens(tokens_BT, ranks_BT < rank, mask))
        return log_conditionals(logits_BTV, tokens_BT, ranks_BT == rank)

    return jnp.sum(jax.lax.map(log_p, jnp.arange(count)), 0)
