"""Programs of the engine: a cache of many rows, of which one reads a prompt or all go on.

The cache of each layer is an array of its own here, so that XLA writes it in place. A cache stacked
along the layers is copied whole for each token: of 100 MB, 60% of the time of a step on a CPU.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.config.resolve import replaced
from lm.inference.decoding import Cache, extend, init_cache
from lm.inference.sampling import Samplings, draw
from lm.training.state import Learner

AT_ONCE = 16  # tokens of a row that a call makes at most
MOST_ALTERNATIVES = 20  # likeliest tokens that may be asked for with each one
SMALL_BYTES = 1 << 25  # a cache of no more has room for all it may hold from the beginning
LEAST_ROOM = 128  # tokens of a row that any cache has room for
ROOMS = 5  # the most that an engine has: each is a program of its own


class Made(NamedTuple):
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
        self.read = jax.jit(functools.partial(read, learner), **options)
        self.decode = jax.jit(functools.partial(decode, unrolled(learner)), **options)

    def shapes(self, variables: Any, slots: int, room: int) -> Any:
        """Returns the shapes of a cache's layers with room for `room` tokens a row, split."""
        cache = jax.eval_shape(lambda v: init_cache(self.learner, v, slots, room), variables)
        return jax.tree.map(
            lambda s: (jax.ShapeDtypeStruct(s.shape[1:], s.dtype),) * s.shape[0], cache.layers
        )

    def rooms(self, variables: Any, slots: int, capacity: int) -> dict[int, Any]:
        """Returns the shapes of a cache's layers by the room that it may have, least first: halves
        of the capacity, of LEAST_ROOM at least, until it has no more than SMALL_BYTES.
        """
        found = {capacity: self.shapes(variables, slots, capacity)}
        room = capacity
        while _bytes(found[room]) > SMALL_BYTES and len(found) < ROOMS and room // 2 >= LEAST_ROOM:
            half = self.shapes(variables, slots, room // 2)
            if _bytes(half) == _bytes(found[room]):  # a state of fixed size
                break
            room //= 2
            found[room] = half
        return dict(sorted(found.items()))


def _bytes(shapes: Any) -> int:
    return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shapes))


def unrolled(learner: Learner) -> Learner:
    """Returns the learner without a loop over its layers, which would need the stacked cache."""
    recipe = replaced(learner.recipe, {'model.scan_layers': False})
    return dataclasses.replace(learner, model=learner.model.clone(recipe=recipe))


def split_layers(layers: Any) -> Any:
    """Makes a tuple of arrays, one a layer, of each array of a cache."""
    return jax.tree.map(tuple, layers)


def stack_layers(layers: Any) -> Any:
    """Stacks what `split_layers` made."""
    return jax.tree.map(jnp.stack, layers, is_leaf=lambda x: isinstance(x, tuple))


@functools.partial(jax.jit, static_argnums=1)
def _resized(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    kept = x[tuple(slice(min(old, new)) for old, new in zip(x.shape, shape, strict=True))]
    return jnp.pad(kept, [(0, new - old) for old, new in zip(kept.shape, shape, strict=True)])


def resized(layers: Any, shapes: Any) -> Any:
    """Returns the layers with room for fewer or more tokens, array by array."""
    return jax.tree.map(
        lambda x, s: x if x.shape == s.shape else _resized(x, s.shape), layers, shapes
    )


def read(
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
    place_B: jax.Array,
    left_B: jax.Array,
    samplings: Samplings,
    ends_E: jax.Array,
    most: jax.Array,
) -> tuple[Made, Any]:
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
    batch, kept = len(last_B), min(MOST_ALTERNATIVES, learner.model.vocab_size)

    def goes_on(carry):
        i, _, _, left_B, _ = carry
        return (i < AT_ONCE) & jnp.any(left_B > 0)

    def one(carry):
        i, cache, last_B, left_B, made = carry
        goes_B = left_B > 0
        cache = cache.replace(layers=stack_layers(cache.layers))
        counts_B = goes_B.astype(jnp.int32)
        logits_B1V, cache = extend(learner, variables, cache, last_B[:, None], counts_B)
        cache = cache.replace(layers=split_layers(cache.layers))
        logits_BV = logits_B1V[:, 0]
        token_B = draw(logits_BV, samplings, place_B + i)
        found = Made(jnp.where(goes_B, token_B, -1), *described(logits_BV, token_B, most, kept))
        made = jax.tree.map(lambda x_T, x: x_T.at[i].set(x), made, found)
        left_B = jnp.where(goes_B & ~jnp.isin(token_B, ends_E), left_B - 1, 0)
        return i + 1, cache, jnp.where(goes_B, token_B, last_B), left_B, made

    shape = (AT_ONCE, batch)
    alternatives = jnp.zeros((*shape, kept), jnp.int32), jnp.zeros((*shape, kept))
    made = Made(jnp.full(shape, -1, jnp.int32), jnp.zeros(shape), *alternatives)
    carry = (jnp.int32(0), Cache(layers, length_B, capacity), last_B, left_B, made)
    _, cache, _, _, made = jax.lax.while_loop(goes_on, one, carry)
    return made, cache.layers


def described(
    logits_BV: jax.Array, token_B: jax.Array, most: jax.Array, kept: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (log-probabilities of the tokens, the `kept` likeliest [B, K], and theirs); the last
    two are zeros where `most` is 0.
    """
    total_B = jax.nn.logsumexp(logits_BV, -1)
    log_p_B = jnp.take_along_axis(logits_BV, token_B[:, None], -1)[:, 0] - total_B

    def likeliest(logits_BV):
        values_BK, ids_BK = jax.lax.top_k(logits_BV, kept)
        return ids_BK, values_BK - total_B[:, None]

    def nothing(logits_BV):
        shape = (len(logits_BV), kept)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, logits_BV.dtype)

    return log_p_B, *jax.lax.cond(most > 0, likeliest, nothing, logits_BV)
