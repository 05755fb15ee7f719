"""Softmax on one TPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from modules.kernels.common.exponentials import add_terms, empty_sum, probabilities
from modules.kernels.common.rows import itemsize
from modules.kernels.common.tpu_rows import max_columns
from modules.kernels.softmax.base import FORMS, SUMS, SoftmaxOptions, capped_logits
from modules.kernels.softmax.tpu_blocks import (
    COLUMNS,
    MIN_ROWS,
    CurrentBlock,
    Tiling,
    call_in_blocks,
    merge_axes,
)


def _make_tiling(shape, moved, options):
    """Returns the blocks of an array; `moved`: bytes per entry of operands and results."""
    # Transferred buffers count twice; the rest is for the compiler's temporaries.
    bytes_per_entry = (
        2 * moved + (18 if options.form == 'two_pass' else 8) + (4 if options.softcap else 0)
    )
    is_whole = shape[-1] <= max_columns(MIN_ROWS, bytes_per_entry)
    return Tiling.for_shape(shape, shape[-1] if is_whole else COLUMNS, bytes_per_entry)


def _kernel_shape(x, mask, sink):
    """Returns x's shape in kernels; a mask or sink needs a separate axis of queries."""
    return merge_axes(x.shape) if mask is None and sink is None else x.shape


def _side_operands(tiling: Tiling, mask, sink):
    """Returns mask and sink by name, if there are any, with their blocks."""
    operands = {} if mask is None else {'mask': tiling.matrix_operand(mask)}
    return operands if sink is None else {**operands, 'sink': tiling.row_operand(sink)}


def _row_number_shape(shape):
    return jax.ShapeDtypeStruct(shape[:-1], jnp.float32)


def forward_rows(
    x: jax.Array,
    mask: jax.Array | None,
    sink: jax.Array | None,
    *,
    options: SoftmaxOptions,
    saves: bool,
) -> dict[str, jax.Array]:
    """Returns p and, if they are saved, SUMS, by name.

    Args:
      x: [..., S].
      mask: like x, with axes of length 1 where it is broadcast; None: there is none.
      sink: like x without its last axis; None: there is none.
      options: of the softmax.
      saves: whether to return SUMS.
    """
    shape, moved = _kernel_shape(x, mask, sink), 2 * itemsize(x) + (mask is not None)
    tiling = _make_tiling(shape, moved, options)
    operands = {'x': tiling.matrix_operand(x.reshape(shape)), **_side_operands(tiling, mask, sink)}
    out_shapes = {'p': tiling.matrix_operand(jax.ShapeDtypeStruct(shape, x.dtype), is_output=True)}
    if saves:
        out_shapes |= dict.fromkeys(SUMS, tiling.row_operand(_row_number_shape(shape)))
    body = functools.partial(_forward_block, options=options)
    return call_in_blocks(body, tiling, operands, out_shapes, 'softmax', n_totals=2)


def _forward_block(refs, block: CurrentBlock, options: SoftmaxOptions):
    base = FORMS[options.form]
    z, _ = block_logits(refs, block, options)

    def start():
        sinks = [_sink(refs, block)] if 'sink' in refs else []
        return add_terms(base, empty_sum((block.tiling.size, 1)), sinks)

    def write(total):
        refs['p'][...] = probabilities(base, z, total).astype(refs['p'].dtype)
        for name, values in zip(SUMS, total, strict=True):
            if name in refs:
                block.write_rows(refs[name], values)

    block.reduce_row(refs, start, lambda total: add_terms(base, total, [z], axis=-1), write)


def _sink(refs, block: CurrentBlock):
    sink = block.read_rows(refs['sink']).astype(jnp.float32)
    return jnp.broadcast_to(sink, (block.tiling.size, 1))


def block_logits(
    refs: dict[str, Any], block: CurrentBlock, options: SoftmaxOptions
) -> tuple[jax.Array, jax.Array | None]:
    """Returns `capped_logits` of a block.

    Args:
      refs: the kernel's refs by name.
      block: the block.
      options: of the softmax.
    """
    x, masks = refs['x'][...].astype(jnp.float32), [block.column_mask()]
    if 'mask' in refs:
        masks.append(jnp.broadcast_to(refs['mask'][...].astype(jnp.int32), block.shape) != 0)
    return capped_logits(x, masks, options.softcap, lambda x, softcap: jnp.tanh(x / softcap))


def backward_rows(
    x_or_p: jax.Array,
    g: jax.Array,
    sums: dict[str, jax.Array],
    mask: jax.Array | None,
    sink: jax.Array | None,
    *,
    options: SoftmaxOptions,
) -> dict[str, jax.Array]:
    """Returns dx and, with a sink, dsink, by name.

    Args:
      x_or_p: x with a softcap, otherwise the output p.
      g: the gradient of the output.
      sums: SUMS of the rows by name, if the forward pass saved them.
      mask: as in `forward_rows`.
      sink: as in `forward_rows`.
      options: of the softmax.
    """
    # Without a softcap dx follows from p alone, which is 0 at hidden entries: no mask is read.
    shape, mask = _kernel_shape(g, mask, sink), mask if options.softcap else None
    moved = itemsize(x_or_p, g, x_or_p) + (mask is not None)
    tiling = _make_tiling(shape, moved, options)
    arrays = {'x' if options.softcap else 'p': x_or_p, 'g': g}
    operands = {name: tiling.matrix_operand(array.reshape(shape)) for name, array in arrays.items()}
    operands |= _side_operands(tiling, mask, sink)
    operands |= {name: tiling.row_operand(sums[name].reshape(shape[:-1])) for name in sums}
    out_shapes = {
        'dx': tiling.matrix_operand(jax.ShapeDtypeStruct(shape, x_or_p.dtype), is_output=True)
    }
    if sink is not None:
        out_shapes['dsink'] = tiling.row_operand(_row_number_shape(shape))
    body = functools.partial(_backward_block, options=options)
    return call_in_blocks(body, tiling, operands, out_shapes, 'softmax_backward', n_totals=1)


def _backward_block(refs, block: CurrentBlock, options: SoftmaxOptions):
    """Computes dx = p (g - sum p g) dz/dx; dsink = - p_sink sum p g."""
    base, slope = FORMS[options.form], None
    g = refs['g'][...].astype(jnp.float32)
    total: Any = tuple(block.read_rows(refs[name]) for name in SUMS if name in refs)
    if options.softcap:
        z, slope = block_logits(refs, block, options)
        p = probabilities(base, z, total)
    else:
        p = refs['p'][...].astype(jnp.float32)

    def start():
        return (jnp.zeros((block.tiling.size, 1), jnp.float32),)

    def add(mean):
        in_row = block.column_mask()
        terms = p * g if in_row is None else jnp.where(in_row, p * g, 0.0)
        return (mean[0] + jnp.sum(terms, -1, keepdims=True),)

    def write(mean):
        dx = p * (g - mean[0])
        refs['dx'][...] = (dx if slope is None else dx * slope).astype(refs['dx'].dtype)
        if 'dsink' in refs:
            sink_probs = probabilities(base, _sink(refs, block), total)
            block.write_rows(refs['dsink'], -sink_probs * mean[0])

    block.reduce_row(refs, start, add, write)
