"""The engine's programs over a cache of many rows: read prompts into rows, or decode all rows.

The cache of each layer is a separate array, so that XLA writes it in place. A cache stacked over
layers is copied whole for each token: at 100 MB, this took 60% of a step's time on a CPU.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.config.resolve import update_recipe
from lm.inference.decoding import Cache, extend, init_cache
from lm.inference.sampling import SamplingBatch, sample_tokens
from lm.model.pattern import block_groups
from lm.training.state import Learner

TOKENS_PER_CALL = 16  # the most tokens of a row that one call decodes
MAX_ALTERNATIVES = 20  # the most likeliest tokens that a request may report
SMALL_CACHE_BYTES = 1 << 24  # a cache up to this size is allocated in full at once
MIN_CACHE_LENGTH = 128  # tokens of a row for which every cache has room
MAX_CACHE_LENGTHS = 5  # each length is a separate program


class DecodedTokens(NamedTuple):
    """Tokens that a call decodes; T is TOKENS_PER_CALL, and K is at most MAX_ALTERNATIVES."""

    ids_TB: jax.Array  # -1: no token
    log_p_TB: jax.Array
    top_ids_TBK: jax.Array  # likeliest first; zeros if no row asks for them
    top_log_p_TBK: jax.Array


class Programs:
    """The jitted functions of a learner, compiled once for each shape."""

    def __init__(self, learner: Learner):
        self.learner = learner
        # The layers are donated, so that XLA writes the cache in place.
        options: dict[str, Any] = {'donate_argnums': 1, 'static_argnums': 2}
        self.prefill = jax.jit(functools.partial(prefill, learner), **options)
        self.decode = jax.jit(functools.partial(decode, unroll_layers(learner)), **options)
        self.split_blocks = jax.jit(functools.partial(split_blocks, learner))

    def layer_shapes(self, variables: Any, slots: int, length: int) -> Any:
        """Returns the shapes of an empty cache's layers, split (`split_layers`).

        Args:
          variables: as `learner.variables` gives them.
          slots: number of rows.
          length: tokens of a row.
        """
        cache = jax.eval_shape(lambda v: init_cache(self.learner, v, slots, length), variables)
        return jax.tree.map(
            lambda s: (jax.ShapeDtypeStruct(s.shape[1:], s.dtype),) * s.shape[0], cache.layers
        )

    def cache_shapes(self, variables: Any, slots: int, capacity: int) -> dict[int, Any]:
        """Returns the shapes of the layers for each length that the cache may have, shortest first.

        Lengths are the capacity halved repeatedly, down to MIN_CACHE_LENGTH tokens,
        SMALL_CACHE_BYTES, or MAX_CACHE_LENGTHS lengths.

        Args:
          variables: as `learner.variables` gives them.
          slots: number of rows.
          capacity: the most tokens that a row may have.
        """
        shapes_by_length = {capacity: self.layer_shapes(variables, slots, capacity)}
        length = capacity
        while (
            _count_bytes(shapes_by_length[length]) > SMALL_CACHE_BYTES
            and len(shapes_by_length) < MAX_CACHE_LENGTHS
            and length // 2 >= MIN_CACHE_LENGTH
        ):
            half = self.layer_shapes(variables, slots, length // 2)
            if _count_bytes(half) == _count_bytes(
                shapes_by_length[length]
            ):  # a state whose size is fixed
                break
            length //= 2
            shapes_by_length[length] = half
        return dict(sorted(shapes_by_length.items()))


def _count_bytes(shapes: Any) -> int:
    return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shapes))


def unroll_layers(learner: Learner) -> Learner:
    """Returns the learner without a scan over its layers, which would need a stacked cache."""
    recipe = update_recipe(learner.recipe, {'model.scan_layers': False})
    return dataclasses.replace(learner, model=learner.model.clone(recipe=recipe))


def split_layers(layers: Any) -> Any:
    """Splits each array of a cache into a tuple of arrays, one per layer."""
    return jax.tree.map(tuple, layers)


def stack_layers(layers: Any) -> Any:
    """Stacks the arrays that `split_layers` has split, and leaves other arrays as they are."""
    return jax.tree.map(
        lambda x: jnp.stack(x) if isinstance(x, tuple) else x,
        layers,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def split_blocks(learner: Learner, variables: Any) -> Any:
    """Applies `split_layers` to the parameters of the blocks.

    XLA's CPU compiler copies the slices that layers take from stacked weights, for each token that
    is decoded. It removes the slices of a stack.

    Args:
      learner: the learner.
      variables: as `learner.variables` gives them.
    """
    names = {group.name for group in block_groups(learner.recipe)}
    modules = variables['params'].items()
    params = {name: split_layers(x) if name in names else x for name, x in modules}
    return variables | {'params': params}


def stack_blocks(variables: Any) -> Any:
    """Stacks the parameters that `split_blocks` has split, if it has."""
    return variables | {'params': stack_layers(variables['params'])}


@functools.partial(jax.jit, static_argnums=1)
def _resize(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    cropped = x[
        tuple(slice(min(size, target)) for size, target in zip(x.shape, shape, strict=True))
    ]
    return jnp.pad(
        cropped, [(0, target - size) for size, target in zip(cropped.shape, shape, strict=True)]
    )


def resize_layers(layers: Any, shapes: Any) -> Any:
    """Crops or pads the layers to the shapes, array by array."""
    return jax.tree.map(
        lambda x, s: x if x.shape == s.shape else _resize(x, s.shape), layers, shapes
    )


def prefill(
    learner: Learner,
    variables: Any,
    layers: Any,
    capacity: int,
    tokens_RT: jax.Array,
    slot: jax.Array,
    start_R: jax.Array,
    count_R: jax.Array,
) -> Any:
    """Reads further tokens of the rows in R slots that follow each other.

    Args:
      learner: the learner.
      variables: as `learner.variables` gives them, or from `split_blocks`.
      layers: the cache of each layer (`split_layers`).
      capacity: the most tokens that a row may have.
      tokens_RT: token ids, padded.
      slot: the first of the slots.
      start_R: number of tokens of each row in the cache.
      count_R: number of tokens to read; 0 leaves the row unchanged.

    Returns:
      The layers with these tokens.
    """
    slot_layers = jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, slot, len(tokens_RT)), layers
    )
    cache = Cache(stack_layers(slot_layers), start_R, capacity)
    _, cache = extend(learner, stack_blocks(variables), cache, tokens_RT, count_R)
    return jax.tree.map(
        lambda x, update: jax.lax.dynamic_update_slice_in_dim(x, update, slot, 0),
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
    """Decodes up to remaining_B tokens of each row, and none after a token that ends it.

    Args:
      learner: has unrolled layers.
      variables: as `learner.variables` gives them, or from `split_blocks`.
      layers: the cache of each layer (`split_layers`).
      capacity: the most tokens that a row may have.
      last_B: the last token of each row, which is not yet in the cache.
      length_B: number of cached tokens of each row.
      position_B: position of the next token in its row, which its random number depends on.
      remaining_B: at most TOKENS_PER_CALL; 0 leaves the row unchanged.
      samplings: sampling options of each row.
      end_ids_E: tokens that end a row.
      n_top: the most likeliest tokens that any row reports.

    Returns:
      (decoded tokens, layers without the last decoded token of each row).
    """
    batch, max_top = len(last_B), min(MAX_ALTERNATIVES, learner.model.vocab_size)

    def has_remaining(carry):
        i, _, _, remaining_B, _ = carry
        return (i < TOKENS_PER_CALL) & jnp.any(remaining_B > 0)

    def decode_token(carry):
        i, cache, last_B, remaining_B, decoded = carry
        is_active_B = remaining_B > 0
        cache = cache.replace(layers=stack_layers(cache.layers))
        counts_B = is_active_B.astype(jnp.int32)
        stacked = stack_blocks(variables)
        logits_B1V, cache = extend(learner, stacked, cache, last_B[:, None], counts_B)
        cache = cache.replace(layers=split_layers(cache.layers))
        logits_BV = logits_B1V[:, 0]
        token_B = sample_tokens(logits_BV, samplings, position_B + i)
        step_tokens = DecodedTokens(
            jnp.where(is_active_B, token_B, -1),
            *compute_log_probs(logits_BV, token_B, n_top, max_top),
        )
        decoded = jax.tree.map(lambda x_T, x: x_T.at[i].set(x), decoded, step_tokens)
        remaining_B = jnp.where(is_active_B & ~jnp.isin(token_B, end_ids_E), remaining_B - 1, 0)
        return i + 1, cache, jnp.where(is_active_B, token_B, last_B), remaining_B, decoded

    shape = (TOKENS_PER_CALL, batch)
    alternatives = jnp.zeros((*shape, max_top), jnp.int32), jnp.zeros((*shape, max_top))
    decoded = DecodedTokens(jnp.full(shape, -1, jnp.int32), jnp.zeros(shape), *alternatives)
    carry = (jnp.int32(0), Cache(layers, length_B, capacity), last_B, remaining_B, decoded)
    _, cache, _, _, decoded = jax.lax.while_loop(has_remaining, decode_token, carry)
    return decoded, cache.layers


def compute_log_probs(
    logits_BV: jax.Array, token_B: jax.Array, n_top: jax.Array, max_top: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes log-probabilities of the sampled and of the likeliest tokens.

    Args:
      logits_BV: logits.
      token_B: the sampled tokens.
      n_top: 0 skips the likeliest tokens, which are then zeros.
      max_top: K, number of likeliest tokens.

    Returns:
      (log-probabilities of the sampled tokens [B], the likeliest ids [B, K], and theirs [B, K]).
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
