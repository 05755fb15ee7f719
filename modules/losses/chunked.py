"""Losses computed some tokens at a time, so that no array holds the logits of all."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from modules.losses.base import Loss, Sums
from modules.parallel.loss_sums import (
    PER_TOKEN,
    READOUT_GRADIENT,
    SUMS,
    count_token_shards,
    map_token_shards,
    token_spec,
)

MAX_LOGITS = 2**25  # most on a device at a time: 128 MB in float32
# Least tokens on a device at a time, and where they are others. The product that makes the
# readout's gradient [D, V] reads and writes its sum in each round, 8 D V bytes for 2 D V c flop of
# c tokens. Both take as long at c = 2,242 on a TPU v6e, and at 664 on a v5p (peak over bandwidth).
MIN_TOKENS, MIN_TOKENS_BY_DEVICE = 1024, {'tpu': 2048, 'TPU v6 lite': 4096}


def select_chunk_size(
    tokens: int, vocab_size: int, pieces: int = 1, platform: str = 'cpu', kind: str = ''
) -> int:
    """Returns how many tokens have LOGITS logits on each device, or are LEAST on each where that is
    more; 0 where that is all of them.

    Args:
      tokens: of a microbatch, B T.
      vocab_size: V.
      pieces: the number of devices that tokens are cut over.
      platform: of the devices.
      kind: of the devices, as JAX names it.
    """
    least = MIN_TOKENS_BY_DEVICE.get(kind, MIN_TOKENS_BY_DEVICE.get(platform, MIN_TOKENS))
    chunk = pieces * max(MAX_LOGITS // vocab_size, least)
    return 0 if tokens <= chunk else chunk


class ChunkLoop(NamedTuple):
    """Rounds over tokens: along `axis` of the labels, about `chunk` of them at a time.

    over: how the labels lie on the devices, where each takes its own (`token_spec`); else None.
    """

    axis: int
    chunk: int
    partition: PartitionSpec | None

    def split(self, labels: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Cuts arrays whose first axes are those of the labels into [count, ...] each."""
        count = count_chunks(labels.shape, self.axis, self.chunk)
        return tuple(split_chunks(array, self.axis, count) for array in arrays)

    def run(self, compute: Callable[..., Any], kinds: tuple[str, ...], *arrays: Any) -> Any:
        """Returns compute(*arrays), run by all devices together or by each on its own tokens."""
        if self.partition is None:
            return compute(*arrays)
        return map_token_shards(compute, self.partition, kinds, *arrays)


def chunk_loss(loss: Loss, chunk: int) -> Loss:
    """Computes the sums of `loss` about `chunk` tokens at a time.

    x [..., T, D] is cut along T, so that each chunk has tokens of every row, as many on each device
    as it has rows; a loss of whole rows (`by_rows`) is cut along the first axis. Where tokens lie
    on several devices, each takes its own, by its share of a chunk, and the sums over devices are
    taken once, after the last round (`map_token_shards`).

    The gradient of `objective` in x and the readout is computed with its value, while a chunk's
    logits are there: the backward pass multiplies it by the cotangent, and no product is computed
    twice. Gradients of other terms are computed anew where they are asked for. Labels, weights and
    numbers have none. There is no forward-mode differentiation.

    Args:
      loss: a row of `LOSSES`.
      chunk: tokens at a time, over all devices; 0: all at once.

    Returns:
      A loss of the same arguments and results.
    """
    if not chunk:
        return loss

    @functools.wraps(loss)
    def chunked(x, readout, labels, weights, **numbers) -> Sums:
        over = token_spec(labels.shape, loss.by_rows)
        own = max(1, chunk // count_token_shards(over))
        rounds = ChunkLoop(0 if loss.by_rows else labels.ndim - 1, own, over)
        traced = {name: value for name, value in numbers.items() if isinstance(value, jax.Array)}
        static = {name: value for name, value in numbers.items() if name not in traced}
        of_part = functools.partial(loss, **static)
        return _chunked_sums(of_part, rounds, x, readout, labels, weights, traced)

    return chunked


def count_chunks(shape: tuple[int, ...], axis: int, chunk: int) -> int:
    """Returns into how many parts of about `chunk` tokens a shape is cut along an axis.

    Args:
      shape: of the labels.
      axis: that is cut.
      chunk: tokens of a part; 0: there is one part.
    """
    length = shape[axis]
    across = math.prod(shape) // length
    return math.ceil(length / max(1, min(length, chunk // across))) if chunk else 1


def split_chunks(array: jax.Array, axis: int, count: int) -> jax.Array:
    """Cuts an array along an axis into parts, padded with zeros.

    Part i has the places i, count + i, ..., so that an axis that is cut over devices spreads evenly
    over the parts.

    Args:
      array: [..., length, ...].
      axis: that is cut.
      count: the number of parts.

    Returns:
      [count, ..., size, ...], with size the least that holds length / count.
    """
    length = array.shape[axis]
    size = math.ceil(length / count)
    widths = [(0, count * size - length if i == axis else 0) for i in range(array.ndim)]
    shape = (*array.shape[:axis], size, count, *array.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(array, widths).reshape(shape), axis + 1, 0)


def join_chunks(parts: jax.Array, axis: int, length: int) -> jax.Array:
    """Inverts `cut`."""
    parts = jnp.moveaxis(parts, 0, axis + 1)
    shape = (*parts.shape[:axis], -1, *parts.shape[axis + 2 :])
    return jax.lax.slice_in_dim(parts.reshape(shape), 0, length, axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_sums(loss, rounds, x, readout, labels, weights, numbers):
    types = jax.tree.map(lambda leaf: leaf.dtype, readout)

    def compute(x, readout, labels, weights, numbers):
        def of_part(part):
            x, labels, weights = part
            return loss(x, _cast_like(types, readout), labels, weights, **numbers)

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, of_part(part)), None

        parts = rounds.split(labels, x, labels, weights)
        return (jax.lax.scan(add, _zero_sums(of_part, parts), parts)[0],)

    return rounds.run(compute, (SUMS,), x, readout, labels, weights, numbers)[0]


def _chunked_gradients(loss, rounds, cotangents, x, readout, labels, weights, numbers):
    """Returns (sums, gradient in x, in the readout) of the objective or sum_n asked[n] * term n."""
    types = jax.tree.map(lambda leaf: leaf.dtype, readout)

    def compute(x, readout, labels, weights, numbers, asked):
        def of_part(part, readout):
            x, labels, weights = part
            found = loss(x, readout, labels, weights, **numbers)
            if asked is None:
                return found['objective'], found
            return sum(number * found[name] for name, number in asked.items()), found

        def add(carry, part):
            sums, of_readout = carry

            def total(x, readout):
                return of_part((x, *part[1:]), readout)

            gradients = jax.grad(total, argnums=(0, 1), has_aux=True)
            (of_x, more), found = gradients(part[0], _cast_like(types, readout))
            return jax.tree.map(jnp.add, (sums, of_readout), (found, more)), of_x

        parts, whole = rounds.split(labels, x, labels, weights), _cast_like(types, readout)
        zeros = _zero_sums(lambda part: of_part(part, whole)[1], parts)
        start = zeros, jax.tree.map(jnp.zeros_like, whole)
        (sums, of_readout), of_x = jax.lax.scan(add, start, parts)
        return sums, join_chunks(of_x, rounds.axis, x.shape[rounds.axis]), of_readout

    made = (SUMS, PER_TOKEN, READOUT_GRADIENT)
    return rounds.run(compute, made, x, readout, labels, weights, numbers, cotangents)


def _cast_like(types, readout):
    # Products round the weight; the gradients of all rounds are summed before they are rounded.
    return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), readout, types)


def _zero_sums(part_fn, parts):
    shapes = jax.eval_shape(part_fn, jax.tree.map(lambda array: array[0], parts))
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _forward(loss, rounds, *differentiated):
    given = jax.tree.map(
        lambda one: one.value, differentiated, is_leaf=lambda one: hasattr(one, 'perturbed')
    )
    sums, *gradients = _chunked_gradients(loss, rounds, None, *given)
    return sums, (gradients, given)


def _backward(loss, rounds, residuals, cotangents: dict[str, Any]):
    gradients, given = residuals
    asked = {n: c for n, c in cotangents.items() if not isinstance(c, SymbolicZero)}
    own = asked.pop('objective', None)

    def times_own(grad):
        return jnp.zeros_like(grad) if own is None else (own * grad).astype(grad.dtype)

    gradients = jax.tree.map(times_own, gradients)
    if asked:
        _, *others = _chunked_gradients(loss, rounds, asked, *given)
        gradients = jax.tree.map(jnp.add, gradients, others)
    return *gradients, None, None, None


_chunked_sums.defvjp(_forward, _backward, symbolic_zeros=True)
