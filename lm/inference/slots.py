"""Programs of the engine: a cache of many rows, of which one reads a prompt or all go on.

The cache of each layer is an array of its own here, so that XLA writes it in place. A cache stacked
along the layers is copied whole for each token: of 100 MB, 60% of the time of a step on a CPU.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.config.resolve import update_recipe
from lm.inference.decoding import Cache, extend, init_cache
from lm.inference.sampling import SamplingBatch, sample_tokens
from lm.training.state import Learner

TOKENS_PER_CALL = 16  # tokens of a row that a call makes at most
MAX_ALTERNATIVES = 20  # likeliest tokens that may be asked for with each one
SMALL_CACHE_BYTES = 1 << 25  # a cache of no more has room for all it may hold from the beginning
MIN_CACHE_LENGTH = 128  # tokens of a row that any cache has room for
MAX_CACHE_LENGTHS = 5  # the most that an engine has: each is a program of its own


class DecodedTokens(NamedTuple):
    """Tokens that a call made, T being AT_ONCE, and K MOST_ALTERNATIVES at most."""

    ids_TB: jax.Array  # -1: none
    log_p_TB: jax.Array
    top_ids_TBK: jax.Array  # the likeliest tokens, the likeliest first; zeros where none asks
    top_log_p_TBK: jax.Array


class Programs:
    """The jitted functions of a learner, which are compiled once for each shape."""

    def __init__(self, learner: Learner):
        self.learner = learner
        options = {'donate_argnums': 1, 'static_argnums': 2}
        self.prefill = jax.jit(functools.partial(prefill, learner), **options)
        self.decode = jax.jit(functools.partial(decode, unroll_layers(learner)), **options)

    def layer_shapes(self, variables: Any, slots: int, length: int) -> Any:
        """Returns the shapes of a cache's layers with room for `room` tokens a row, split."""
        cache = jax.eval_shape(lambda v: init_cache(self.learner, v, slots, length), variables)
        return jax.tree.map(
            lambda s: (jax.ShapeDtypeStruct(s.shape[1:], s.dtype),) * s.shape[0], cache.layers
        )

    def cache_shapes(self, variables: Any, slots: int, capacity: int) -> dict[int, Any]:
        """Returns the shapes of a cache's layers by the room that it may have, least first: halves
        of the capacity, of LEAST_ROOM at least, until it has no more than SMALL_BYTES.
        """
        found = {capacity: self.layer_shapes(variables, slots, capacity)}
        room = capacity
        while (
            _count_bytes(found[room]) > SMALL_CACHE_BYTES
            and len(found) < MAX_CACHE_LENGTHS
            and room // 2 >= MIN_CACHE_LENGTH
        ):
            half = self.layer_shapes(variables, slots, room // 2)
            if _count_bytes(half) == _count_bytes(found[room]):  # a state of fixed size
                break
            room //= 2
            found[room] = half
        return dict(sorted(found.items()))


def _count_bytes(shapes: Any) -> int:
    return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shapes))


def unroll_layers(learner: Learner) -> Learner:
    """Returns the learner without a loop over its layers, which would need the stacked cache."""
    recipe = update_recipe(learner.recipe, {'model.scan_layers': False})
    return dataclasses.replace(learner, model=learner.model.clone(recipe=recipe))


def split_layers(layers: Any) -> Any:
    """Makes a tuple of arrays, one a layer, of each array of a cache."""
    return jax.tree.map(tuple, layers)


def stack_layers(layers: Any) -> Any:
    """Stacks what `split_layers` made."""
    return jax.tree.map(jnp.stack, layers, is_leaf=lambda x: isinstance(x, tuple))


@functools.partial(jax.jit, static_argnums=1)
def _resize(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    kept = x[tuple(slice(min(old, new)) for old, new in zip(x.shape, shape, strict=True))]
    return jnp.pad(kept, [(0, new - old) for old, new in zip(kept.shape, shape, strict=True)])


def resize_layers(layers: Any, shapes: Any) -> Any:
    """Returns the layers with room for fewer or more tokens, array by array."""
    return jax.tree.map(
        lambda x, s: x if x.shape == s.shape else _resize(x, s.shape), layers, shapes
    )


def prefill(
    learner: Learner,
    variables: Any,
    layers: Any,
    capacity: int,
    tokens_1T: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> Any:
    """Returns the layers with `count` tokens of the row in `slot` behind the `start` it has."""
    own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), layers)
    cache = Cache(stack_layers(own), jnp.full(1, start), capacity)
    _, cache = extend(learner, variables, cache, tokens_1T, jnp.full(1, count))
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, slot, 0),
        layers,
        split_layers(cache.layers),
    )


def decode(
    learner: Learner,
    variables: Any,
    layers: Any,
    capacity: int,
    last_B: jax.Array,
    length_B: jax.Array,
    position_B: jax.Array,
    remaining_B: jax.Array,
    samplings: SamplingBatch,
    end_ids_E: jax.Array,
    n_top: jax.Array,
) -> tuple[DecodedTokens, Any]:
    """Makes up to left_B tokens of each row, and none behind a token that ends it.

    Args:
      learner: its layers are unrolled.
      variables: as `learner.variables` gives them.
      layers: the cache of each layer (`split_layers`).
      capacity: the most tokens that a row may have.
      last_B: the last token of each row, which is not in the cache.
      length_B: the tokens of each row that are in the cache.
      place_B: the place of the next token in its row, which its random number depends on.
      left_B: at most AT_ONCE; 0: the row is left as it is.
      samplings: how tokens are drawn.
      ends_E: tokens, each of which ends a row.
      most: of the likeliest tokens that a row asks for.

    Returns:
      (what was made, the layers, in which the last token made of each row is not).
    """
    batch, kept = len(last_B), min(MAX_ALTERNATIVES, learner.model.vocab_size)

    def has_remaining(carry):
        i, _, _, left_B, _ = carry
        return (i < TOKENS_PER_CALL) & jnp.any(left_B > 0)

    def decode_token(carry):
        i, cache, last_B, left_B, made = carry
        goes_B = left_B > 0
        cache = cache.replace(layers=stack_layers(cache.layers))
        counts_B = goes_B.astype(jnp.int32)
        logits_B1V, cache = extend(learner, variables, cache, last_B[:, None], counts_B)
        cache = cache.replace(layers=split_layers(cache.layers))
        logits_BV = logits_B1V[:, 0]
        token_B = sample_tokens(logits_BV, samplings, position_B + i)
        found = DecodedTokens(
            jnp.where(goes_B, token_B, -1), *compute_log_probs(logits_BV, token_B, n_top, kept)
        )
        made = jax.tree.map(lambda x_T, x: x_T.at[i].set(x), made, found)
        left_B = jnp.where(goes_B & ~jnp.isin(token_B, end_ids_E), left_B - 1, 0)
        return i + 1, cache, jnp.where(goes_B, token_B, last_B), left_B, made

    shape = (TOKENS_PER_CALL, batch)
    alternatives = jnp.zeros((*shape, kept), jnp.int32), jnp.zeros((*shape, kept))
    made = DecodedTokens(jnp.full(shape, -1, jnp.int32), jnp.zeros(shape), *alternatives)
    carry = (jnp.int32(0), Cache(layers, length_B, capacity), last_B, remaining_B, made)
    _, cache, _, _, made = jax.lax.while_loop(has_remaining, decode_token, carry)
    return made, cache.layers


def compute_log_probs(
    logits_BV: jax.Array, token_B: jax.Array, n_top: jax.Array, max_top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (log-probabilities of the tokens, the `kept` likeliest [B, K], and theirs); the last
    two are zeros where `most` is 0.
    """
    total_B = jax.nn.logsumexp(logits_BV, -1)
    log_p_B = jnp.take_along_axis(logits_BV, token_B[:, None], -1)[:, 0] - total_B

    def top_tokens(logits_BV):
        values_BK, ids_BK = jax.lax.top_k(logits_BV, max_top)
        return ids_BK, values_BK - total_B[:, None]

    def no_top(logits_BV):
        shape = (len(logits_BV), max_top)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits_BV.dtype)

    return log_p_B, *jax.lax.cond(n_top > 0, top_tokens, no_top, logits_BV)
