"""Losses some tokens at a time, so that no array has the logits of all."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from modules.losses.base import Loss, Sums

LOGITS = 2**25  # at a time, where the number of tokens is chosen: 128 MB in float32


def tokens_at_a_time(tokens: int, vocab_size: int) -> int:
    """How many of `tokens` have at most LOGITS logits; 0 where that is all of them."""
    return 0 if tokens * vocab_size <= LOGITS else max(1, LOGITS // vocab_size)


def by_chunks(loss: Loss, chunk: int) -> Loss:
    """The same sums over tokens, of about `chunk` of them at a time; of all at once where it is 0.

    x [..., T, D] is cut along T, so that each chunk has tokens of every row, as many on each device
    as it has rows; along its first axis for a loss that is of whole rows (`by_rows`). The gradient
    of `objective` in x and the readout is made beside its value, while a chunk's logits are there:
    the backward pass multiplies it by the objective's own, and no product is computed twice. Those
    of the other terms are computed anew where they are asked for. Labels, weights and numbers have
    none. There is no forward-mode differentiation.
    """
    if not chunk:
        return loss

    @functools.wraps(loss)
    def chunked(x, readout, labels, weights, **numbers) -> Sums:
        axis = 0 if getattr(loss, 'by_rows', False) else labels.ndim - 1
        count = chunks_of(labels.shape, axis, chunk)
        parts = (cut(labels, axis, count), cut(weights, axis, count))
        traced = {name: value for name, value in numbers.items() if isinstance(value, jax.Array)}
        static = {name: value for name, value in numbers.items() if name not in traced}
        of_part = functools.partial(loss, **static)
        return _sums(of_part, cut(x, axis, count), readout, parts, traced)

    return chunked


def chunks_of(shape: tuple[int, ...], axis: int, chunk: int) -> int:
    """How many parts tokens of such a shape are cut into along an axis, for about `chunk` of them
    in each; one where it is 0.
    """
    length = shape[axis]
    across = math.prod(shape) // length
    return math.ceil(length / max(1, min(length, chunk // across))) if chunk else 1


def cut(array: jax.Array, axis: int, count: int) -> jax.Array:
    """[count, ..., size, ...] of [..., length, ...], filled up with zeros; part i has the places
    i, count + i, ...

    Strided, so that an axis that is cut over devices spreads evenly over the parts.
    """
    length = array.shape[axis]
    size = math.ceil(length / count)
    widths = [(0, count * size - length if i == axis else 0) for i in range(array.ndim)]
    shape = (*array.shape[:axis], size, count, *array.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(array, widths).reshape(shape), axis + 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(loss, x, readout, parts, numbers):
    def add(sums, part):
        x, (labels, weights) = part
        found = loss(x, readout, labels, weights, **numbers)
        return jax.tree.map(jnp.add, sums, found), None

    return jax.lax.scan(add, _zeros(loss, x, readout, parts, numbers), (x, parts))[0]


def _zeros(loss, x, readout, parts, numbers):
    labels, weights = jax.tree.map(lambda array: array[0], parts)
    shapes = jax.eval_shape(lambda: loss(x[0], readout, labels, weights, **numbers))
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _forward(loss, *differentiated):
    x, readout, parts, numbers = jax.tree.map(
        lambda one: one.value, differentiated, is_leaf=lambda one: hasattr(one, 'perturbed')
    )

    def add(carry, part):
        sums, of_readout = carry
        x, (labels, weights) = part

        def objective(x, readout):
            found = loss(x, readout, labels, weights, **numbers)
            return found['objective'], found

        grad = jax.grad(objective, argnums=(0, 1), has_aux=True)
        (of_x, more), found = grad(x, readout)
        return jax.tree.map(jnp.add, (sums, of_readout), (found, more)), of_x

    start = _zeros(loss, x, readout, parts, numbers), jax.tree.map(jnp.zeros_like, readout)
    (sums, of_readout), of_x = jax.lax.scan(add, start, (x, parts))
    return sums, (of_x, of_readout, x, readout, parts, numbers)


def _backward(loss, residuals, cotangents: dict[str, Any]):
    *grads, x, readout, parts, numbers = residuals
    asked = {n: c for n, c in cotangents.items() if not isinstance(c, SymbolicZero)}
    own = asked.pop('objective', None)
    grads = jax.tree.map(jnp.zeros_like if own is None else functools.partial(_times, own), grads)
    if asked:

        @jax.checkpoint
        def of_chunk(x, readout, part):
            found = loss(x, readout, *part, **numbers)
            return sum(cotangent * found[name] for name, cotangent in asked.items())

        def total(x, readout):
            chunks = jax.lax.map(lambda both: of_chunk(both[0], readout, both[1]), (x, parts))
            return jnp.sum(chunks)

        grads = jax.tree.map(jnp.add, grads, list(jax.grad(total, argnums=(0, 1))(x, readout)))
    return *grads, None, None


def _times(cotangent, grad):
    return (cotangent * grad).astype(grad.dtype)


_sums.defvjp(_forward, _backward, symbolic_zeros=True)
