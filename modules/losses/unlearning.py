"""Unlearning: losses that make a model stop giving answers that it has learnt.

They are functions of probabilities and losses of whole answers, without a row in `LOSSES`: two
answers to a question, or a model before and after, are no sum over the tokens of a batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from modules.choices import choose
from modules.losses.base import cross_entropies


class Divergence(NamedTuple):
    """A row of DIVERGENCES: g of the answer to give, and f*(g) of the answer to forget.

    The f-divergence is at least the mean of g minus the mean of f*(g).
    """

    preferred: Callable[[jax.Array], jax.Array]
    forgotten: Callable[[jax.Array], jax.Array]


DIVERGENCES = {
    'total_variation': Divergence(lambda p: jnp.tanh(p) / 2, lambda p: jnp.tanh(p) / 2),
    'kl': Divergence(lambda p: p, lambda p: jnp.exp(p - 1)),
    'jensen_shannon': Divergence(
        lambda p: jnp.log(2.0) - jax.nn.softplus(-p), lambda p: jax.nn.softplus(p) - jnp.log(2.0)
    ),
    'pearson': Divergence(lambda p: p, lambda p: p + p**2 / 4),
}


def flat_loss(
    preferred: jax.Array, forgotten: jax.Array, divergence: str = 'total_variation'
) -> jax.Array:
    """Returns -g(P) + f*(g(P')), small if a model prefers the first answer to the second.

    It needs neither data to retain nor a reference model. All g are nearly linear for probabilities
    in [0, 1], so that divergences differ little. The gradient in logits has the factor p: it
    vanishes for a forgotten answer, and for a preferred answer that the model never gives. Source:
    arXiv:2410.11143, and https://github.com/UCSC-REAL/FLAT.

    Args:
      preferred: P, the mean over tokens and answers of `mean_probabilities` of answers to give.
      forgotten: P', of the answers to forget to the same questions.
      divergence: a row of DIVERGENCES; the default of the authors' code.

    Returns:
      The loss, of the shape of both.
    """
    row = choose(DIVERGENCES, divergence, 'divergence')
    return row.forgotten(forgotten) - row.preferred(preferred)


def mean_probabilities(
    logits_RTV: jax.Array, labels_RT: jax.Array, weights_RT: jax.Array
) -> jax.Array:
    """Returns the mean probability of the tokens of each answer, [R].

    The mean is over weighted tokens alone; the authors' code counts other tokens as 0, which makes
    the mean smaller in longer rows.

    Args:
      logits_RTV: of the labels.
      labels_RT: the tokens of the answers.
      weights_RT: 1 for tokens of an answer, else 0.
    """
    p_RT = jnp.exp(-answer_losses(logits_RTV, labels_RT))
    return jnp.sum(weights_RT * p_RT, -1) / jnp.sum(weights_RT, -1)


def answer_losses(logits_RTV: jax.Array, labels_RT: jax.Array) -> jax.Array:
    """Returns -log p of the labels_RT under the logits_RTV, [R, T]."""
    flat_MV = logits_RTV.reshape(-1, logits_RTV.shape[-1])
    return cross_entropies(flat_MV, labels_RT.reshape(-1)).reshape(labels_RT.shape)


def npo_loss(losses_R: jax.Array, before_R: jax.Array, beta: float = 0.1) -> jax.Array:
    """(2 / beta) log(1 + exp(-beta (l - l'))), negative preference optimisation, [R].

    It is gradient ascent on l as beta goes to 0, and stops where l is far above l'. Source:
    arXiv:2404.05868; beta and the factor as in the code that `flat_loss` names.

    Args:
      losses_R: l, sums of -log p over the tokens of each answer to forget.
      before_R: l', likewise of the model before.
      beta: the temperature.
    """
    return 2 / beta * jax.nn.softplus(-beta * (losses_R - before_R))
