"""Incremental decoding: rows read in parts, each token once, with a cache."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from lm.training.state import Learner
from modules.attention.base import CACHE


class Cache(struct.PyTreeNode):
    """The layers' state for the tokens read so far, and the number of tokens read in each row.

    capacity: the most tokens that a row may have. The arrays of `layers` may be shorter
    (`resize_layers`); attention then reads only their length.
    """

    layers: Any
    lengths_B: jax.Array
    capacity: int = struct.field(pytree_node=False)


def init_cache(learner: Learner, variables: Any, batch: int, capacity: int) -> Cache:
    """Returns an empty cache.

    Args:
      learner: the learner.
      variables: as `learner.variables` gives them.
      batch: number of rows.
      capacity: the most tokens that a row may have.

    Returns:
      The cache, with room for `capacity` tokens.

    Raises:
      ValueError: if the model has fewer positions than `capacity`.
    """
    recipe = learner.recipe
    if recipe.position.row.is_limited and capacity > recipe.data.seq_len:
        raise ValueError(
            f'{recipe.position} has data.seq_len={recipe.data.seq_len} positions; got a cache for '
            f'{capacity} tokens. Use rows of at most {recipe.data.seq_len} tokens.'
        )
    zeros_B = jnp.zeros(batch, jnp.int32)
    cache = Cache({}, zeros_B, capacity)
    tokens_B1 = jnp.zeros((batch, 1), jnp.int32)
    _, cache_shapes = jax.eval_shape(
        lambda variables: extend(learner, variables, cache, tokens_B1, zeros_B), variables
    )
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cache_shapes)


def extend(
    learner: Learner,
    variables: Any,
    cache: Cache,
    tokens_BT: jax.Array,
    counts_B: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Reads further tokens of each row. Pure, so that callers can jit it.

    The logits are the same as in evaluation, which reads each row whole, as a single document.
    Tokens beyond the capacity are dropped silently.

    Args:
      learner: the learner.
      variables: as `learner.variables` gives them.
      cache: the tokens read so far.
      tokens_BT: token ids that follow.
      counts_B: how many of the T columns to read; the others are padding, and their logits are
        meaningless. None: all.

    Returns:
      (logits [B, T, V] of the token after each, the cache with these tokens).
    """
    if counts_B is None:
        counts_B = jnp.full(len(tokens_BT), tokens_BT.shape[1], jnp.int32)
    (x_BTD, readout), collections = learner.model.apply(
        variables | ({CACHE: cache.layers} if cache.layers else {}),
        tokens_BT,
        cache.lengths_B,
        counts_B,
        cache.capacity,
        method='extend',
        mutable=(CACHE,),
    )
    lengths_B = cache.lengths_B + counts_B
    return readout(x_BTD), Cache(collections[CACHE], lengths_B, cache.capacity)
