"""How far a step goes, in the radius within which a softmax is known to behave."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from modules.losses import chunks_of, cut
from modules.optim.base import along


def ghost_radius(asked: Any, params: Any, change: Any, chunk: int) -> jax.Array:
    """r = max over target tokens of (max_v a_v - min_v a_v), over pi.

    a is the derivative of a token's logits along the full change of the parameters, learning rate
    and decay included, by one forward-mode pass of the batch. r is linear in the change; beyond 1
    the cross-entropy's series along it no longer converges. The logits are those of the training
    pass, where the authors take the evaluation's, and of `chunk` tokens at a time (0: all). asked:
    an `lm.training.update.Asked`. ValueError where the model has no forward-mode derivative. Source:
    arXiv:2603.13552, and https://github.com/piyush314/ghosts-of-softmax.
    """

    def of_rows(part):
        rows, weights_BT = part
        (x_BTD, readout), (moved_BTD, moved) = along(
            lambda params: asked.activations_fn(params, rows), params, change
        )

        def of_chunk(part):
            x_BTD, moved_BTD, weights_BT = part
            _, a_BTV = jax.jvp(lambda x, r: r(x), (x_BTD, readout), (moved_BTD, moved))
            spread_BT = jnp.max(a_BTV, -1) - jnp.min(a_BTV, -1)
            return jnp.max(jnp.where(weights_BT > 0, spread_BT, 0.0))

        count = chunks_of(weights_BT.shape, 1, chunk)
        parts = jax.tree.map(lambda x: cut(x, 1, count), (x_BTD, moved_BTD, weights_BT))
        return jnp.max(jax.lax.map(of_chunk, parts))

    return jnp.max(jax.lax.map(of_rows, (asked.rows, asked.weights))) / math.pi
