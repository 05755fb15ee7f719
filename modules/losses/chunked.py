"""Losses computed in chunks of tokens, so that no array holds the logits of all tokens."""

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

MAX_LOGITS = 2**25  # of a chunk, per device: 128 MB in float32
# The least tokens of a chunk, per device. The matmul of the readout's gradient [D, V] reads and
# writes its sum in each chunk: 8 D V bytes for 2 D V c flop of c tokens. Both take equally long at
# c = 2,242 on a TPU v6e, and at 664 on a v5p (peak over bandwidth).
MIN_TOKENS, MIN_TOKENS_BY_DEVICE = 1024, {'tpu': 2048, 'TPU v6 lite': 4096}


def select_chunk_size(
    tokens: int, vocab_size: int, pieces: int = 1, platform: str = 'cpu', kind: str = ''
) -> int:
    """Returns the tokens of a chunk, over all devices; 0 if a single chunk holds all tokens.

    Each device has MAX_LOGITS logits of a chunk, or its least number of tokens if that is more.

    Args:
      tokens: of a microbatch, B T.
      vocab_size: V.
      pieces: the number of devices over which tokens are sharded.
      platform: of the devices.
      kind: of the devices, as JAX names it.
    """
    min_tokens = MIN_TOKENS_BY_DEVICE.get(kind, MIN_TOKENS_BY_DEVICE.get(platform, MIN_TOKENS))
    chunk = pieces * max(MAX_LOGITS // vocab_size, min_tokens)
    return 0 if tokens <= chunk else chunk


class ChunkLoop(NamedTuple):
    """A loop over chunks of about `chunk` tokens, along `axis` of the labels.

    partition: the sharding of the labels, if each device takes chunks of its tokens (`token_spec`);
    else None.
    """

    axis: int
    chunk: int
    partition: PartitionSpec | None

    def split(self, x: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Splits x [..., D] and arrays with the same leading axes into [count, ...] each."""
        count = count_chunks(x.shape[:-1], self.axis, self.chunk)
        return tuple(split_chunks(array, self.axis, count) for array in (x, *arrays))

    def run(self, compute: Callable[..., Any], kinds: tuple[str, ...], *arrays: Any) -> Any:
        """Returns compute(*arrays), computed by all devices together or by each for its own tokens.

        Args:
          compute: maps arrays to a tuple.
          kinds: of the entries of that tuple (`modules.parallel.loss_sums`).
          *arrays: the arguments.
        """
        if self.partition is None:
            return compute(*arrays)
        return map_token_shards(compute, self.partition, kinds, *arrays)


def chunk_loss(loss: Any, chunk: int) -> Loss:
    """Computes the sums of `loss` for about `chunk` tokens at a time.

    x [..., T, D] is split along T, so that each chunk has tokens of every row and spreads evenly
    over devices; for a loss of whole rows (`by_rows`) it is split along the first axis. If tokens
    are sharded, each device loops over its tokens, and the sums over devices are computed once,
    after the last chunk (`map_token_shards`).

    The gradient of `objective` in x and the readout is computed in the forward pass, while the
    logits of a chunk are in memory. The backward pass multiplies it by the cotangent, so that no
    matmul is computed twice. Gradients of other terms are recomputed if they have a cotangent.
    Labels, weights and numbers have no gradient. There is no forward-mode differentiation.

    Args:
      loss: a row of `LOSSES`.
      chunk: tokens of a chunk, over all devices; 0: a single chunk.

    Returns:
      A loss of the same arguments, with the same sums.
    """
    if not chunk:
        return loss

    @functools.wraps(loss)
    def chunked_loss(x, readout, labels, weights, **numbers) -> Sums:
        partition = token_spec(x.shape[:-1], loss.by_rows)
        local_chunk = max(1, chunk // count_token_shards(partition))
        loop = ChunkLoop(0 if loss.by_rows else x.ndim - 2, local_chunk, partition)
        traced = {name: value for name, value in numbers.items() if isinstance(value, jax.Array)}
        static = {name: value for name, value in numbers.items() if name not in traced}
        part_loss = functools.partial(loss, **static)
        return _chunked_sums(part_loss, loop, x, readout, labels, weights, traced)

    return chunked_loss


def count_chunks(shape: tuple[int, ...], axis: int, chunk: int) -> int:
    """Returns the number of chunks of about `chunk` tokens along an axis.

    Args:
      shape: of the labels.
      axis: the split axis.
      chunk: tokens of a chunk; 0: a single chunk.
    """
    length = shape[axis]
    tokens_per_index = math.prod(shape) // length
    return math.ceil(length / max(1, min(length, chunk // tokens_per_index))) if chunk else 1


def split_chunks(array: jax.Array, axis: int, count: int) -> jax.Array:
    """Splits an array along an axis into chunks, padded with zeros.

    Chunk i has the indices i, count + i, ..., so that a sharded axis spreads evenly over the
    chunks.

    Args:
      array: [..., length, ...].
      axis: the split axis.
      count: the number of chunks.

    Returns:
      [count, ..., size, ...], with size = ceil(length / count).
    """
    length = array.shape[axis]
    size = math.ceil(length / count)
    widths = [(0, count * size - length if i == axis else 0) for i in range(array.ndim)]
    shape = (*array.shape[:axis], size, count, *array.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(array, widths).reshape(shape), axis + 1, 0)


def join_chunks(parts: jax.Array, axis: int, length: int) -> jax.Array:
    """Inverts `split_chunks`.

    Args:
      parts: [count, ..., size, ...].
      axis: the split axis.
      length: its length before padding.

    Returns:
      [..., length, ...].
    """
    parts = jnp.moveaxis(parts, 0, axis + 1)
    shape = (*parts.shape[:axis], -1, *parts.shape[axis + 2 :])
    return jax.lax.slice_in_dim(parts.reshape(shape), 0, length, axis=axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_sums(loss, loop, x, readout, labels, weights, numbers):
    types = jax.tree.map(lambda leaf: leaf.dtype, readout)

    def compute(x, readout, labels, weights, numbers):
        def part_sums(part):
            x, labels, weights = part
            return loss(x, _cast_like(types, readout), labels, weights, **numbers)

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, part_sums(part)), None

        parts = loop.split(x, labels, weights)
        return (jax.lax.scan(add, _zero_sums(part_sums, parts), parts)[0],)

    return loop.run(compute, (SUMS,), x, readout, labels, weights, numbers)[0]


def _chunked_gradients(loss, loop, cotangents, x, readout, labels, weights, numbers):
    """Returns (sums, gradient in x, in the readout) of sum_n cotangents[n] * term n.

    cotangents: None for the gradient of the objective alone.
    """
    types = jax.tree.map(lambda leaf: leaf.dtype, readout)

    def compute(x, readout, labels, weights, numbers, cotangents):
        def part_total(part, readout):
            x, labels, weights = part
            sums = loss(x, readout, labels, weights, **numbers)
            if cotangents is None:
                return sums['objective'], sums
            return sum(number * sums[name] for name, number in cotangents.items()), sums

        def add(carry, part):
            sums, readout_grad = carry

            def chunk_total(x, readout):
                return part_total((x, *part[1:]), readout)

            gradients = jax.grad(chunk_total, argnums=(0, 1), has_aux=True)
            (x_grad, grad), terms = gradients(part[0], _cast_like(types, readout))
            return jax.tree.map(jnp.add, (sums, readout_grad), (terms, grad)), x_grad

        parts, cast_readout = loop.split(x, labels, weights), _cast_like(types, readout)
        zeros = _zero_sums(lambda part: part_total(part, cast_readout)[1], parts)
        start = zeros, jax.tree.map(jnp.zeros_like, cast_readout)
        (sums, readout_grad), x_grad = jax.lax.scan(add, start, parts)
        return sums, join_chunks(x_grad, loop.axis, x.shape[loop.axis]), readout_grad

    kinds = (SUMS, PER_TOKEN, READOUT_GRADIENT)
    return loop.run(compute, kinds, x, readout, labels, weights, numbers, cotangents)


def _cast_like(types, readout):
    # Matmuls round the weight; the gradients of all chunks are summed before they are rounded.
    return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), readout, types)


def _zero_sums(part_fn, parts):
    shapes = jax.eval_shape(part_fn, jax.tree.map(lambda array: array[0], parts))
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _forward(loss, loop, *differentiated):
    # With symbolic_zeros JAX passes each array as a pair of value and `perturbed`.
    primals = jax.tree.map(
        lambda argument: argument.value,
        differentiated,
        is_leaf=lambda argument: hasattr(argument, 'perturbed'),
    )
    sums, *gradients = _chunked_gradients(loss, loop, None, *primals)
    return sums, (gradients, primals)


def _backward(loss, loop, residuals, cotangents: dict[str, Any]):
    gradients, primals = residuals
    term_cotangents = {n: c for n, c in cotangents.items() if not isinstance(c, SymbolicZero)}
    cotangent = term_cotangents.pop('objective', None)

    def scale(grad):
        return jnp.zeros_like(grad) if cotangent is None else (cotangent * grad).astype(grad.dtype)

    gradients = jax.tree.map(scale, gradients)
    # The forward pass has computed the gradient of the objective. Other terms need a second pass.
    if term_cotangents:
        _, *more_gradients = _chunked_gradients(loss, loop, term_cotangents, *primals)
        gradients = jax.tree.map(jnp.add, gradients, more_gradients)
    return *gradients, None, None, None


_chunked_sums.defvjp(_forward, _backward, symbolic_zeros=True)
