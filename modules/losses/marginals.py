"""Marginals: the log probability of any part of a row as one number, consistent with conditionals.

A network reads a row with hidden tokens, without a causal mask. Its logits are the conditional
distributions of hidden tokens, and a number per row is the log probability of the visible tokens.
These functions have no row in `LOSSES`: rows there predict tokens from earlier tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from modules.losses.base import cross_entropies

# tokens [B, T], some hidden -> logits [B, T, V] of every position
Conditionals = Callable[[jax.Array], jax.Array]


class RandomCut(NamedTuple):
    """A cut of rows in random orders: the known positions, and the next position; both bool."""

    known_BT: jax.Array
    next_BT: jax.Array


def random_ranks(key: jax.Array, rows: int, length: int) -> jax.Array:
    """Draws an order per row: the rank of each position, from 0.

    Args:
      key: a random key.
      rows: B.
      length: T.

    Returns:
      Ranks, int32 [B, T].
    """
    positions_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
    return jax.random.permutation(key, positions_BT, axis=1, independent=True)


def random_cut(key: jax.Array, rows: int, length: int) -> RandomCut:
    """Draws an order per row, and the number of known positions, uniform from 0 to length - 1.

    Args:
      key: a random key.
      rows: B.
      length: T.

    Returns:
      The cut.
    """
    order_key, cut_key = jax.random.split(key)
    ranks_BT = random_ranks(order_key, rows, length)
    count_B1 = jax.random.randint(cut_key, (rows, 1), 0, length)
    return RandomCut(ranks_BT < count_B1, ranks_BT == count_B1)


def hide_tokens(tokens_BT: jax.Array, known_BT: jax.Array, mask: int) -> jax.Array:
    """Replaces tokens at unknown positions.

    Args:
      tokens_BT: the rows.
      known_BT: from `random_cut`.
      mask: the token in hidden positions.

    Returns:
      The rows, [B, T].
    """
    return jnp.where(known_BT, tokens_BT, mask)


def log_conditionals(logits_BTV: jax.Array, tokens_BT: jax.Array, next_BT: jax.Array) -> jax.Array:
    """Returns log p of the token at the next position of each row, [B].

    Args:
      logits_BTV: of rows with hidden tokens.
      tokens_BT: the rows.
      next_BT: from `random_cut`.
    """
    return -jnp.sum(jnp.where(next_BT, jax.vmap(cross_entropies)(logits_BTV, tokens_BT), 0.0), -1)


def conditional_losses(
    logits_BTV: jax.Array, tokens_BT: jax.Array, known_BT: jax.Array
) -> jax.Array:
    """Returns the mean of -log p over the hidden tokens of each row, [B], in nats.

    Its mean over random cuts is -1 / T log p(row), the mean over orders of the sum of conditionals.
    The authors' code for text averages over all hidden tokens too. Source: arXiv:2310.12920, its
    first step.

    Args:
      logits_BTV: of rows with hidden tokens (`hide_tokens`).
      tokens_BT: the rows.
      known_BT: from `random_cut`; each row has an unknown position.

    Returns:
      The losses, float32 at least.
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

    It is 0 at all cuts only if f is the logarithm of the marginals, and the conditionals belong to
    them. The conditionals are constants: log_p_B has no gradient. Source: arXiv:2310.12920, and
    https://github.com/PrincetonLIPS/MaM, for the factor T.

    Args:
      before_B: f of rows with known positions S.
      log_p_B: `log_conditionals` of the next position i, from the same rows.
      after_B: f of rows in which i is known too.
      empty: f of a row without known positions, a scalar.
      length: T, of a row.

    Returns:
      The losses, of the type of f.
    """
    error_B = after_B - before_B - jax.lax.stop_gradient(log_p_B)
    return length * error_B**2 + empty**2


def chain_conditionals(
    conditionals: Conditionals, tokens_BT: jax.Array, ranks_BT: jax.Array, count: int, mask: int
) -> jax.Array:
    """Returns log p of the first `count` positions of an order, the sum of their conditionals, [B].

    It takes `count` passes, each with one more visible position.

    Args:
      conditionals: maps rows with hidden tokens to logits.
      tokens_BT: the rows.
      ranks_BT: from `random_ranks`.
      count: the number of positions, from 1 to T.
      mask: the token in hidden positions.

    Returns:
      The sums, float32 at least.

    Raises:
      ValueError: for a count outside of 1 to T.
    """
    length = tokens_BT.shape[1]
    if not 1 <= count <= length:
        raise ValueError(f'count must be between 1 and the length of a row, {length}; got {count}')

    def log_p(rank):
        logits_BTV = conditionals(hide_tokens(tokens_BT, ranks_BT < rank, mask))
        return log_conditionals(logits_BTV, tokens_BT, ranks_BT == rank)

    return jnp.sum(jax.lax.map(log_p, jnp.arange(count)), 0)
