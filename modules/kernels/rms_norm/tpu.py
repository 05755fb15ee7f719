"""RMSNorm on TPUs: one kernel forward and one backward, each reading every row once."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from modules.kernels.common.rows import itemsize
from modules.kernels.common.tpu_rows import block_rows, call_on_tpu, memory_limit
from modules.kernels.rms_norm.base import NAME

PARTS = 2  # of the rows, each with its own sum of gradients: at most as many as cores of a chip
PARTIAL_ROWS = 8  # a part has a sum for every eighth row, so that whole registers are added


def forward_rows(
    x_ND: jax.Array, scale_D: jax.Array | None, eps: float, out_dtype: Any
) -> jax.Array:
    """Returns `api.rms_norm` of rows on a single device.

    Args:
      x_ND: rows.
      scale_D: the gain; None: 1.
      eps: added under the root.
      out_dtype: the type of the result.
    """
    rows, width = x_ND.shape
    moved = itemsize(x_ND) + jnp.dtype(out_dtype).itemsize
    size = block_rows(rows, width, 2 * moved + 8, NAME)
    block = pl.BlockSpec((size, width), lambda i: (i, 0))
    whole = pl.BlockSpec((1, width), lambda i: (0, 0))
    scale_1D = None if scale_D is None else scale_D.reshape(1, -1)
    arrays = call_on_tpu(
        functools.partial(_forward_block, eps=eps),
        {'x': (x_ND, block), 'scale': (scale_1D, whole)},
        {'y': (jax.ShapeDtypeStruct(x_ND.shape, out_dtype), block)},
        grid=(math.ceil(rows / size),),
        semantics=('parallel',),
        limit=memory_limit(size, width, 2 * moved + 8),
        cost=(4 * rows * width, rows, moved * rows * width + 4 * width),
        name='rms_norm',
    )
    return arrays['y']


def _forward_block(refs, eps):
    x = refs['x'][...].astype(jnp.float32)
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    if 'scale' in refs:
        y = y * refs['scale'][...]
    refs['y'][...] = y.astype(refs['y'].dtype)


def backward_rows(
    x_ND: jax.Array, g_ND: jax.Array, scale_D: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (dx [N, D], partial sums of dscale [PARTS * PARTIAL_ROWS, D]) on a single device.

    Args:
      x_ND: rows.
      g_ND: the gradient of the output.
      scale_D: the gain; None: 1, without dscale.
      eps: added under the root.
    """
    rows, width = x_ND.shape
    moved = itemsize(x_ND, g_ND, x_ND)
    size = block_rows(rows, width, 2 * moved + 12, NAME)
    blocks = math.ceil(rows / size)
    parts = min(PARTS, blocks)
    blocks_per_part = math.ceil(blocks / parts)
    # The last part may have fewer blocks than the others. It then repeats the last block: dx is
    # written again with the same values, and dscale is unchanged, as the rows count as beyond the
    # end.
    block = pl.BlockSpec(
        (size, width), lambda p, i: (jnp.minimum(p * blocks_per_part + i, blocks - 1), 0)
    )
    whole = pl.BlockSpec((1, width), lambda p, i: (0, 0))
    operands = {'x': (x_ND, block), 'g': (g_ND, block)}
    out_shapes = {'dx': (jax.ShapeDtypeStruct(x_ND.shape, x_ND.dtype), block)}
    if scale_D is not None:
        operands['scale'] = (scale_D.reshape(1, -1), whole)
        sums = jax.ShapeDtypeStruct((parts * PARTIAL_ROWS, width), jnp.float32)
        out_shapes['dscale'] = (sums, pl.BlockSpec((PARTIAL_ROWS, width), lambda p, i: (p, 0)))
    bytes_moved = moved * rows * width + 4 * (1 + parts * PARTIAL_ROWS) * width
    arrays = call_on_tpu(
        functools.partial(_backward_block, eps=eps, rows=rows, blocks_per_part=blocks_per_part),
        operands,
        out_shapes,
        grid=(parts, blocks_per_part),
        # The blocks of a part add to the same sum, one after the other.
        semantics=('parallel', 'arbitrary'),
        limit=memory_limit(size, width, 2 * moved + 12),
        cost=(11 * rows * width, rows, bytes_moved),
        name='rms_norm_backward',
    )
    return arrays['dx'], arrays.get('dscale')


def _backward_block(refs, eps, rows, blocks_per_part):
    """Computes dx = r (g' - n mean(g' n)) and dscale = sum over rows of g n.

    Here g' = g scale and n = x r.
    """
    x, g = (refs[name][...].astype(jnp.float32) for name in ('x', 'g'))
    inverse = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    normal = x * inverse
    if 'scale' in refs:
        part, step = pl.program_id(0), pl.program_id(1)
        first = (part * blocks_per_part + step) * len(x)
        row = first + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        terms = jnp.where(row < rows, g * normal, 0.0)  # the last block may exceed the rows

        @pl.when(step == 0)
        def _():
            refs['dscale'][...] = jnp.zeros_like(refs['dscale'])

        refs['dscale'][...] += jnp.sum(terms.reshape(-1, PARTIAL_ROWS, x.shape[1]), 0)
        g = g * refs['scale'][...]
    dx = inverse * (g - normal * jnp.mean(g * normal, -1, keepdims=True))
    refs['dx'][...] = dx.astype(refs['dx'].dtype)
