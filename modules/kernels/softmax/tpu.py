"""Softmax on one TPU."""

import functools

import jax
import jax.numpy as jnp

from modules.kernels.common.exponentials import add, nothing, probabilities
from modules.kernels.common.rows import itemsize
from modules.kernels.common.tpu_rows import most_columns
from modules.kernels.softmax.base import FORMS, SUMS, logits_of
from modules.kernels.softmax.tpu_blocks import COLUMNS, LEAST_ROWS, Tiling, call_in_blocks, merged


def _blocks(shape, moved, how):
    """Returns the blocks of an array, `moved` bytes an entry of all that come and go."""
    # They count twice; the rest is the compiler's temporaries.
    needed = 2 * moved + (18 if how.form == 'two_pass' else 8) + (4 if how.softcap else 0)
    is_whole = shape[-1] <= most_columns(LEAST_ROWS, needed)
    return Tiling.of(shape, shape[-1] if is_whole else COLUMNS, needed)


def _shape(x, mask, sink):
    """Returns x's shape in kernels: queries keep an axis where they are given something."""
    return merged(x.shape) if mask is None and sink is None else x.shape


def _beside(blocks, mask, sink):
    """Returns the arrays beside x that are given, by name, with their blocks."""
    given = {} if mask is None else {'mask': blocks.matrix(mask)}
    return given if sink is None else {**given, 'sink': blocks.of_rows(sink)}


def _numbers(shape):
    return jax.ShapeDtypeStruct(shape[:-1], jnp.float32)


def forward_rows(x, mask, sink, *, how, saves):
    shape, moved = _shape(x, mask, sink), 2 * itemsize(x) + (mask is not None)
    blocks = _blocks(shape, moved, how)
    given = {'x': blocks.matrix(x.reshape(shape)), **_beside(blocks, mask, sink)}
    made = {'p': blocks.matrix(jax.ShapeDtypeStruct(shape, x.dtype), written=True)}
    if saves:
        made |= dict.fromkeys(SUMS, blocks.of_rows(_numbers(shape)))
    body = functools.partial(_forward_block, how=how)
    return call_in_blocks(body, blocks, given, made, 'softmax', totals=2)


def _forward_block(refs, here, how):
    base = FORMS[how.form]
    z, _ = logits(refs, here, how)

    def start():
        sinks = [_sink(refs, here)] if 'sink' in refs else []
        return add(base, nothing((here.blocks.size, 1)), sinks)

    def write(total):
        refs['p'][...] = probabilities(base, z, total).astype(refs['p'].dtype)
        for name, values in zip(SUMS, total, strict=True):
            if name in refs:
                here.write_rows(refs[name], values)

    here.reduce_row(refs, start, lambda total: add(base, total, [z], axis=-1), write)


def _sink(refs, here):
    sink = here.read_rows(refs['sink']).astype(jnp.float32)
    return jnp.broadcast_to(sink, (here.blocks.size, 1))


def logits(refs, here, how):
    """Returns `logits_of` a block."""
    x, seen = refs['x'][...].astype(jnp.float32), [here.inside()]
    if 'mask' in refs:
        seen.append(jnp.broadcast_to(refs['mask'][...].astype(jnp.int32), here.shape) != 0)
    return logits_of(x, seen, how.softcap, lambda x, softcap: jnp.tanh(x / softcap))


def backward_rows(x_or_p, g, sums, mask, sink, *, how):
    shape, mask = _shape(g, mask, sink), mask if how.softcap else None
    moved = itemsize(x_or_p, g, x_or_p) + (mask is not None)
    blocks = _blocks(shape, moved, how)
    arrays = {'x' if how.softcap else 'p': x_or_p, 'g': g}
    given = {name: blocks.matrix(array.reshape(shape)) for name, array in arrays.items()}
    given |= _beside(blocks, mask, sink)
    given |= {name: blocks.of_rows(sums[name].reshape(shape[:-1])) for name in sums}
    made = {'dx': blocks.matrix(jax.ShapeDtypeStruct(shape, x_or_p.dtype), written=True)}
    if sink is not None:
        made['dsink'] = blocks.of_rows(_numbers(shape))
    body = functools.partial(_backward_block, how=how)
    return call_in_blocks(body, blocks, given, made, 'softmax_backward', totals=1)


def _backward_block(refs, here, how):
    """Computes dx = p (g - sum p g) dz/dx; dsink = - p_sink sum p g."""
    base, slope = FORMS[how.form], None
    g = refs['g'][...].astype(jnp.float32)
    total = tuple(here.read_rows(refs[name]) for name in SUMS if name in refs)
    if how.softcap:
        z, slope = logits(refs, here, how)
        p = probabilities(base, z, total)
    else:
        p = refs['p'][...].astype(jnp.float32)

    def start():
        return (jnp.zeros((here.blocks.size, 1), jnp.float32),)

    def add(mean):
        terms = p * g if here.inside() is None else jnp.where(here.inside(), p * g, 0.0)
        return (mean[0] + jnp.sum(terms, -1, keepdims=True),)

    def write(mean):
        dx = p * (g - mean[0])
        refs['dx'][...] = (dx if slope is None else dx * slope).astype(refs['dx'].dtype)
        if 'dsink' in refs:
            taken = probabilities(base, _sink(refs, here), total)
            here.write_rows(refs['dsink'], -taken * mean[0])

    here.reduce_row(refs, start, add, write)
