"""Softmax on one TPU."""

import functools

import jax
import jax.numpy as jnp

from modules.kernels.common.exponentials import add_terms, empty_sum, probabilities
from modules.kernels.common.rows import itemsize
from modules.kernels.common.tpu_rows import max_columns
from modules.kernels.softmax.base import FORMS, SUMS, capped_logits
from modules.kernels.softmax.tpu_blocks import COLUMNS, MIN_ROWS, Tiling, call_in_blocks, merge_axes


def _make_tiling(shape, moved, options):
    """Returns the blocks of an array, `moved` bytes an entry of all that come and go."""
    # They count twice; the rest is the compiler's temporaries.
    needed = 2 * moved + (18 if options.form == 'two_pass' else 8) + (4 if options.softcap else 0)
    is_whole = shape[-1] <= max_columns(MIN_ROWS, needed)
    return Tiling.for_shape(shape, shape[-1] if is_whole else COLUMNS, needed)


def _kernel_shape(x, mask, sink):
    """Returns x's shape in kernels: queries keep an axis where they are given something."""
    return merge_axes(x.shape) if mask is None and sink is None else x.shape


def _side_operands(blocks, mask, sink):
    """Returns the arrays beside x that are given, by name, with their blocks."""
    given = {} if mask is None else {'mask': blocks.matrix_operand(mask)}
    return given if sink is None else {**given, 'sink': blocks.row_operand(sink)}


def _row_number_shape(shape):
    return jax.ShapeDtypeStruct(shape[:-1], jnp.float32)


def forward_rows(x, mask, sink, *, how, saves):
    shape, moved = _kernel_shape(x, mask, sink), 2 * itemsize(x) + (mask is not None)
    blocks = _make_tiling(shape, moved, how)
    given = {'x': blocks.matrix_operand(x.reshape(shape)), **_side_operands(blocks, mask, sink)}
    made = {'p': blocks.matrix_operand(jax.ShapeDtypeStruct(shape, x.dtype), is_output=True)}
    if saves:
        made |= dict.fromkeys(SUMS, blocks.row_operand(_row_number_shape(shape)))
    body = functools.partial(_forward_block, how=how)
    return call_in_blocks(body, blocks, given, made, 'softmax', n_totals=2)


def _forward_block(refs, block, how):
    base = FORMS[how.form]
    z, _ = block_logits(refs, block, how)

    def start():
        sinks = [_sink(refs, block)] if 'sink' in refs else []
        return add_terms(base, empty_sum((block.blocks.size, 1)), sinks)

    def write(total):
        refs['p'][...] = probabilities(base, z, total).astype(refs['p'].dtype)
        for name, values in zip(SUMS, total, strict=True):
            if name in refs:
                block.write_rows(refs[name], values)

    block.reduce_row(refs, start, lambda total: add_terms(base, total, [z], axis=-1), write)


def _sink(refs, block):
    sink = block.read_rows(refs['sink']).astype(jnp.float32)
    return jnp.broadcast_to(sink, (block.blocks.size, 1))


def block_logits(refs, block, how):
    """Returns `logits_of` a block."""
    x, seen = refs['x'][...].astype(jnp.float32), [block.column_mask()]
    if 'mask' in refs:
        seen.append(jnp.broadcast_to(refs['mask'][...].astype(jnp.int32), block.shape) != 0)
    return capped_logits(x, seen, how.softcap, lambda x, softcap: jnp.tanh(x / softcap))


def backward_rows(x_or_p, g, sums, mask, sink, *, how):
    shape, mask = _kernel_shape(g, mask, sink), mask if how.softcap else None
    moved = itemsize(x_or_p, g, x_or_p) + (mask is not None)
    blocks = _make_tiling(shape, moved, how)
    arrays = {'x' if how.softcap else 'p': x_or_p, 'g': g}
    given = {name: blocks.matrix_operand(array.reshape(shape)) for name, array in arrays.items()}
    given |= _side_operands(blocks, mask, sink)
    given |= {name: blocks.row_operand(sums[name].reshape(shape[:-1])) for name in sums}
    made = {'dx': blocks.matrix_operand(jax.ShapeDtypeStruct(shape, x_or_p.dtype), is_output=True)}
    if sink is not None:
        made['dsink'] = blocks.row_operand(_row_number_shape(shape))
    body = functools.partial(_backward_block, how=how)
    return call_in_blocks(body, blocks, given, made, 'softmax_backward', n_totals=1)


def _backward_block(refs, block, how):
    """Computes dx = p (g - sum p g) dz/dx; dsink = - p_sink sum p g."""
    base, slope = FORMS[how.form], None
    g = refs['g'][...].astype(jnp.float32)
    total = tuple(block.read_rows(refs[name]) for name in SUMS if name in refs)
    if how.softcap:
        z, slope = block_logits(refs, block, how)
        p = probabilities(base, z, total)
    else:
        p = refs['p'][...].astype(jnp.float32)

    def start():
        return (jnp.zeros((block.blocks.size, 1), jnp.float32),)

    def add(mean):
        terms = p * g if block.column_mask() is None else jnp.where(block.column_mask(), p * g, 0.0)
        return (mean[0] + jnp.sum(terms, -1, keepdims=True),)

    def write(mean):
        dx = p * (g - mean[0])
        refs['dx'][...] = (dx if slope is None else dx * slope).astype(refs['dx'].dtype)
        if 'dsink' in refs:
            taken = probabilities(base, _sink(refs, block), total)
            block.write_rows(refs['dsink'], -taken * mean[0])

    block.reduce_row(refs, start, add, write)
