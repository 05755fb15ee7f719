"""Samples tokens from logits: temperature, top_k, top_p, min_p and a seed for each row of a
batch.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

BLOCK = 64  # tokens whose probabilities are summed at once
MAX_UNIFORM = 1 - 2**-23  # the largest float32 that jax.random.uniform returns
SEED_RANGE = 2**64  # seeds that differ by a multiple of this give the same numbers


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of sampling; the filters apply in this order, each to the tokens that remain.

    temperature: divides the logits; 0 takes the likeliest token. top_k: keeps the k likeliest
    tokens, 0: all. top_p: keeps the fewest likeliest tokens whose probabilities sum to p (nucleus
    sampling, arXiv:1904.09751). min_p: keeps tokens with at least min_p times the largest
    probability (arXiv:2407.01082). Tokens as likely as the last kept token are kept too.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        bounds = {
            'temperature': (0 <= self.temperature < math.inf, 'a finite number of at least 0'),
            'top_k': (self.top_k >= 0, 'at least 0 (0 keeps all tokens)'),
            'top_p': (0 < self.top_p <= 1, 'above 0 and at most 1 (1 keeps all tokens)'),
            'min_p': (0 <= self.min_p <= 1, 'between 0 and 1 (0 keeps all tokens)'),
        }
        for name, (is_valid, range_text) in bounds.items():
            if not is_valid:
                raise ValueError(f'{name} must be {range_text}; got {getattr(self, name)}')


class SamplingBatch(struct.PyTreeNode):
    """The Sampling of each row of a batch, as arrays, so that no value needs its own program."""

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    seed_B2: jax.Array  # uint32, the two halves of the seed, high half first

    @classmethod
    def stack(cls, samplings: list[Sampling]) -> 'SamplingBatch':
        """Stacks one Sampling per row into arrays."""
        seeds = [divmod(sampling.seed % SEED_RANGE, 2**32) for sampling in samplings]
        largest = np.iinfo(np.int32).max
        # NumPy arrays: they move to the device with the program's other arguments.
        fields: list[Any] = [
            np.array([sampling.temperature for sampling in samplings], np.float32),
            np.array([min(sampling.top_k, largest) for sampling in samplings], np.int32),
            np.array([sampling.top_p for sampling in samplings], np.float32),
            np.array([sampling.min_p for sampling in samplings], np.float32),
            np.array(seeds, np.uint32),
        ]
        return cls(*fields)


def sample_tokens(logits_BV: jax.Array, rows: SamplingBatch, position_B: jax.Array) -> jax.Array:
    """Samples a token for each row, [B] int32.

    The random number of a row depends only on its seed and position.

    Args:
      logits_BV: logits of the next token.
      rows: sampling options.
      position_B: position of the token in its row.

    Returns:
      Token ids.
    """
    likeliest_B = find_largest(logits_BV)

    def sample_rows():
        filtered_BV = filter_logits(logits_BV, rows)
        keys_B = jax.random.wrap_key_data(rows.seed_B2, impl='threefry2x32')
        keys_B = jax.vmap(jax.random.fold_in)(keys_B, position_B)
        sampled_B = invert_cdf(filtered_BV, jax.vmap(jax.random.uniform)(keys_B))
        return jnp.where(rows.temperature_B == 0, likeliest_B, sampled_B).astype(jnp.int32)

    # A batch of greedy rows skips the exponentials and sums.
    return jax.lax.cond(jnp.any(rows.temperature_B > 0), sample_rows, lambda: likeliest_B)


def find_largest(logits_BV: jax.Array) -> jax.Array:
    """Computes `jnp.argmax` of each row, [B] int32; of a row with NaNs, the first NaN.

    XLA's CPU compiler computes two reductions of a number faster than one of a pair.
    """
    n_tokens = logits_BV.shape[-1]
    largest_B1 = jnp.max(logits_BV, -1, keepdims=True)
    is_largest_BV = (logits_BV == largest_B1) | jnp.isnan(logits_BV)
    token_V = jnp.arange(n_tokens, dtype=jnp.int32)
    return jnp.min(jnp.where(is_largest_BV, token_V, n_tokens - 1), -1)


def invert_cdf(logits_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Returns the token at which the cumulative probability exceeds a number in [0, 1), [B].

    On a CPU, a random number per row takes a tenth of the time of a random number per logit. Sums
    are over blocks first, and then within a block.
    """
    weights_BV = jnp.exp(logits_BV - jnp.max(logits_BV, -1, keepdims=True))
    n_blocks = math.ceil(weights_BV.shape[-1] / BLOCK)
    padding = n_blocks * BLOCK - weights_BV.shape[-1]
    weights_BKC = jnp.pad(weights_BV, ((0, 0), (0, padding))).reshape(-1, n_blocks, BLOCK)
    sum_BK = jnp.cumsum(jnp.sum(weights_BKC, -1), -1)
    target_B = uniform_B * sum_BK[:, -1]
    block_B1 = jnp.sum(sum_BK <= target_B[:, None], -1, keepdims=True)
    before_B = jnp.take_along_axis(jnp.pad(sum_BK, ((0, 0), (1, 0))), block_B1, -1)[:, 0]
    sum_BC = jnp.cumsum(jnp.take_along_axis(weights_BKC, block_B1[..., None], 1)[:, 0], -1)
    # Both sums are rounded, so the target may exceed the block's own sum; it is kept below it.
    within_B = jnp.minimum(target_B - before_B, sum_BC[:, -1] * MAX_UNIFORM)
    return block_B1[:, 0] * BLOCK + jnp.sum(sum_BC <= within_B[:, None], -1)


def filter_logits(logits_BV: jax.Array, rows: SamplingBatch) -> jax.Array:
    """Divides by the temperature, and sets the logits of filtered tokens to -inf."""
    scaled_BV = logits_BV / jnp.maximum(rows.temperature_B, 1e-6)[:, None]
    has_top_k_B = (rows.top_k_B > 0) & (rows.top_k_B < logits_BV.shape[-1])
    has_top_p_B = rows.top_p_B < 1
    # A batch without top_k or top_p skips the 32 sums of `keep_largest`.
    scaled_BV = jax.lax.cond(
        jnp.any(has_top_k_B),
        lambda x: keep_top_k(x, rows.top_k_B, has_top_k_B),
        lambda x: x,
        scaled_BV,
    )
    scaled_BV = jax.lax.cond(
        jnp.any(has_top_p_B),
        lambda x: keep_top_p(x, rows.top_p_B, has_top_p_B),
        lambda x: x,
        scaled_BV,
    )
    min_logit_B = jnp.max(scaled_BV, -1) + jnp.log(rows.min_p_B)
    return jnp.where(scaled_BV < min_logit_B[:, None], -jnp.inf, scaled_BV)


def keep_top_k(logits_BV: jax.Array, k_B: jax.Array, is_active_B: jax.Array) -> jax.Array:
    """Keeps the k largest logits of each active row.

    Args:
      logits_BV: logits.
      k_B: number of tokens to keep.
      is_active_B: whether the row is filtered.

    Returns:
      Logits, -inf for the others.
    """
    ones_BV = jnp.ones_like(logits_BV)
    return keep_largest(logits_BV, ones_BV, k_B.astype(logits_BV.dtype), is_active_B)


def keep_top_p(logits_BV: jax.Array, p_B: jax.Array, is_active_B: jax.Array) -> jax.Array:
    """Keeps the fewest likeliest tokens with a probability of p in each active row.

    Args:
      logits_BV: logits.
      p_B: probability to keep.
      is_active_B: whether the row is filtered.

    Returns:
      Logits, -inf for the others.
    """
    return keep_largest(logits_BV, jax.nn.softmax(logits_BV, -1), p_B, is_active_B)


def keep_largest(
    logits_BV: jax.Array, weights_BV: jax.Array, mass_B: jax.Array, is_active_B: jax.Array
) -> jax.Array:
    """Keeps the largest logits of each row, as few as reach a sum of weights; ties stay together.

    The threshold is found bit by bit, in 32 sums over the row: on a CPU this takes a sixteenth of
    the time of a sort.

    Args:
      logits_BV: logits.
      weights_BV: weight of each token.
      mass_B: sum of weights to reach.
      is_active_B: whether the row is filtered.

    Returns:
      Logits, -inf for the others.
    """
    bits_BV = jax.lax.bitcast_convert_type(logits_BV.astype(jnp.float32), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order_BV = jnp.where(bits_BV < sign, bits_BV | sign, ~bits_BV)  # monotone in the logits

    def refine_threshold(i, threshold_B):
        candidate_B = threshold_B | (sign >> i.astype(jnp.uint32))
        sum_B = jnp.sum(jnp.where(order_BV >= candidate_B[:, None], weights_BV, 0), -1)
        return jnp.where(sum_B >= mass_B, candidate_B, threshold_B)

    threshold_B = jax.lax.fori_loop(0, 32, refine_threshold, jnp.zeros(len(mass_B), jnp.uint32))
    threshold_B = jnp.where(is_active_B, threshold_B, 0)
    return jnp.where(order_BV < threshold_B[:, None], -jnp.inf, logits_BV)
