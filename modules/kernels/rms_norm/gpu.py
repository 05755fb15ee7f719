"""RMSNorm on GPUs: one kernel forward and one backward, each reading every row once.

A program holds a row in registers, or rereads a long row while it is still in the processor's
cache. Its share of the scale's gradient stays in registers until its last row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from modules.kernels.common.gpu_rows import (
    MAX_REGISTER_ROW,
    RowSlices,
    call_on_gpu,
    count_programs,
    pad_columns,
    sum_slices,
)
from modules.kernels.common.rows import check_width
from modules.kernels.rms_norm.base import NAME

MAX_WIDTH = 16_384  # of a row: its share of the scale's gradient must fit into registers


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
    check_width(NAME, 'registers', width, MAX_WIDTH)
    padded_x_ND = pad_columns(x_ND)
    operands = {'x': padded_x_ND, 'scale': pad_columns(scale_D)}
    out_shapes = {'y': jax.ShapeDtypeStruct(padded_x_ND.shape, out_dtype)}
    row = RowSlices.for_arrays(padded_x_ND.shape[1], x_ND, out_shapes['y'])
    parts, keeps = row.slices(), row.width <= MAX_REGISTER_ROW

    def body(refs, n, _):
        xs = [row.read(refs['x'], n, part) for part in parts]
        inverse = _inverse_rms(row, parts, xs, width, eps)
        for batch in row.batch_slices(zip(parts, xs, strict=True)):
            pairs = [(part, x if keeps else row.read(refs['x'], n, part)) for part, x in batch]
            ys = [_apply_scale(row, refs, part, x * inverse) for part, x in pairs]
            for (part, _), y in zip(pairs, ys, strict=True):
                row.write(refs['y'], n, part, y)

    programs = count_programs(row.width, 1)
    arrays = call_on_gpu(body, operands, out_shapes, rows=rows, programs=programs, name='rms_norm')
    return arrays['y'][:, :width]


def _inverse_rms(row: RowSlices, parts, xs, width, eps) -> jax.Array:
    squares = [row.mask_repeated(part, x * x) for part, x in zip(parts, xs, strict=True)]
    return jax.lax.rsqrt(sum_slices(squares) / width + eps)


def _apply_scale(row: RowSlices, refs, part, x) -> jax.Array:
    return x * row.read(refs['scale'], None, part) if 'scale' in refs else x


def backward_rows(
    x_ND: jax.Array, g_ND: jax.Array, scale_D: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (dx [N, D], dscale of each program's rows [P, D]) of rows on a single device.

    dx = r (g' - n mean(g' n)) with g' = g scale and n = x r; dscale = sum over rows of g n.

    Args:
      x_ND: rows.
      g_ND: the gradient of the output.
      scale_D: the gain; None: 1, without dscale.
      eps: added under the root.
    """
    rows, width = x_ND.shape
    check_width(NAME, 'registers', width, MAX_WIDTH)
    padded_x_ND = pad_columns(x_ND)
    operands = {'x': padded_x_ND, 'g': pad_columns(g_ND), 'scale': pad_columns(scale_D)}
    row = RowSlices.for_arrays(padded_x_ND.shape[1], x_ND, g_ND)
    parts, keeps = row.slices(), row.width <= MAX_REGISTER_ROW
    # Three arrays in registers: x, g and the sum for the scale. At most `rows`, as in
    # `call_on_gpu`, since dscale has a row for each program.
    programs = min(rows, count_programs(row.width, 3))
    out_shapes = {'dx': jax.ShapeDtypeStruct(padded_x_ND.shape, x_ND.dtype)}
    if scale_D is not None:
        out_shapes['dscale'] = jax.ShapeDtypeStruct((programs, row.width), jnp.float32)

    def body(refs, n, dscales):
        xs = [row.read(refs['x'], n, part) for part in parts]
        gs = [row.read(refs['g'], n, part) for part in parts]
        inverse = _inverse_rms(row, parts, xs, width, eps)
        products = [
            row.mask_repeated(part, _apply_scale(row, refs, part, g) * x)
            for part, x, g in zip(parts, xs, gs, strict=True)
        ]
        mean = sum_slices(products) * inverse / width
        sums = []
        for batch in row.batch_slices(zip(parts, xs, gs, dscales, strict=True)):
            dxs = []
            for part, x, g, dscale in batch:
                if not keeps:  # reread, so that registers need not hold the row until here
                    x, g = (row.read(refs[name], n, part) for name in ('x', 'g'))
                normal = x * inverse
                dxs.append(inverse * (_apply_scale(row, refs, part, g) - normal * mean))
                sums.append(None if dscale is None else dscale + g * normal)
            for (part, *_), dx in zip(batch, dxs, strict=True):
                row.write(refs['dx'], n, part, dx)
        return sums

    def start(refs):
        return [row.full(0.0) if 'dscale' in refs else None for _ in parts]

    def finish(refs, program, dscales):
        for part, dscale in zip(parts, dscales, strict=True):
            if dscale is not None:
                row.write(refs['dscale'], program, part, dscale)

    arrays = call_on_gpu(
        body,
        operands,
        out_shapes,
        rows=rows,
        programs=programs,
        name='rms_norm_backward',
        start=start,
        finish=finish,
    )
    return arrays['dx'][:, :width], arrays['dscale'][:, :width] if 'dscale' in arrays else None
