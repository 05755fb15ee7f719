"""What a loss is, and losses on logits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Sums = dict[str, jax.Array]
Loss = Callable[..., Sums]


def logits_loss(per_token: Callable[..., Sums]) -> Loss:
    """A loss from one on logits: per_token(logits [M, V], labels [M], **numbers) -> {term: [M]}.

    The result is loss(x [..., D], readout, labels [...], weights [...], **numbers) -> {term: sum
    over tokens of weight * term}. The whole array of logits is made.
    """

    @functools.wraps(per_token)
    def loss(x, readout: Callable[[Any], jax.Array], labels, weights, **numbers) -> Sums:
        logits = readout(x)
        terms = per_token(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), **numbers)
        return {name: jnp.sum(weights.reshape(-1) * term) for name, term in terms.items()}

    return loss
