"""Softmax on one TPU."""

import functools

import jax
import jax.numpy as jnp

from modules.kernels.common.exponentials import add, nothing, probabilities
from modules.kernels.common.rows import itemsize
from modules.kernels.common.tpu_rows import most_columns
from modules.kernels.softmax.base import BESIDE, FORMS, SUMS, beside_x, logits_of
from modules.kernels.softmax.tpu_blocks import COLUMNS, LEAST_ROWS, Blocks, call_in_blocks, merged


def _blocks(shape, moved, how):
    """Returns the blocks of an array, `moved` bytes an entry of all that come and go."""
    # They count twice; the rest is the compiler's temporaries.
    needed = 2 * moved + (18 if how.form == 'two_pass' else 8) + (4 if how.softcap else 0)
    is_whole = shape[-1] <= most_columns(LEAST_ROWS, needed)
    return Blocks.of(shape, shape[-1] if is_whole else COLUMNS, needed)


def _shape(x, others):
    """Returns x's shape in kernels: queries keep an axis where they are given something."""
    return x.shape if any(array is not None for array in others) else merged(x.shape)


def _beside(blocks, others, names=tuple(BESIDE)):
    """Returns the arrays beside x that are given, by name, with their blocks."""
    cut = {'mask': blocks.matrix, 'sink': blocks.of_rows}
    return {name: cut[name](array) for name, array in beside_x(others, names).items()}


def _numbers(shape):
    return jax.ShapeDtypeStruct(shape[:-1], jnp.float32)


def forward_rows(x, *others, how, saves):
    shape = _shape(x, others)
    moved = 2 * itemsize(x) + (others[0] is not None)
    blocks = _blocks(shape, moved, how)
    given = {'x': blocks.matrix(x.reshape(shape)), **_beside(blocks, others)}
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


def backward_rows(x_or_p, g, sums, *others, how):
    shape = _shape(g, others)
    has_mask, has_sink = others[0] is not None, others[-1] is not None
    moved = itemsize(x_or_p, g, x_or_p) + bool(has_mask and how.softcap)
    blocks = _blocks(shape, moved, how)
    arrays = {'x' if how.softcap else 'p': x_or_p, 'g': g}
    given = {name: blocks.matrix(array.reshape(shape)) for name, array in arrays.items()}
    given |= _beside(blocks, others, BESIDE if how.softcap else ('sink',))
    given |= {name: blocks.of_rows(sums[name].reshape(shape[:-1])) for name in sums}
    made = {'dx': blocks.matrix(jax.ShapeDtypeStruct(shape, x_or_p.dtype), written=True)}
    if has_sink:
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
