"""RMSNorm on GPUs: one kernel forward, one backward, each of which reads every row once.

A program holds a row in its registers, or reads a long one again while the processor's cache still
has it. Its rows' part of the gradient of the scale stays in registers until its last row.
"""

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

MAX_WIDTH = 16_384  # of rows whose part of the scale's gradient registers hold


def forward_rows(x_ND, scale_D, eps, out_dtype):
    """Returns `api.rms_norm` of rows on one device."""
    rows, width = x_ND.shape
    check_width(NAME, 'registers', width, MAX_WIDTH)
    given = {'x': pad_columns(x_ND), 'scale': pad_columns(scale_D)}
    made = {'y': jax.ShapeDtypeStruct(given['x'].shape, out_dtype)}
    row = RowSlices.for_arrays(made['y'].shape[1], x_ND, made['y'])
    parts, keeps = row.slices(), row.width <= MAX_REGISTER_ROW

    def body(refs, n, _):
        xs = [row.read(refs['x'], n, part) for part in parts]
        inverse = _inverse_rms(row, parts, xs, width, eps)
        for some in row.batch_slices(zip(parts, xs, strict=True)):
            some = [(part, x if keeps else row.read(refs['x'], n, part)) for part, x in some]
            ys = [_apply_scale(row, refs, part, x * inverse) for part, x in some]
            for (part, _), y in zip(some, ys, strict=True):
                row.write(refs['y'], n, part, y)

    programs = count_programs(row.width, 1)
    found = call_on_gpu(body, given, made, rows=rows, programs=programs, name='rms_norm')
    return found['y'][:, :width]


def _inverse_rms(row, parts, xs, width, eps):
    squares = [row.mask_repeated(part, x * x) for part, x in zip(parts, xs, strict=True)]
    return jax.lax.rsqrt(sum_slices(squares) / width + eps)


def _apply_scale(row, refs, part, x):
    return x * row.read(refs['scale'], None, part) if 'scale' in refs else x


def backward_rows(x_ND, g_ND, scale_D, eps):
    """Returns (dx, dscale of each program's rows [P, D]) of rows on one device.

    dx = r (g' - n mean(g' n)) with g' = g scale and n = x r; dscale = sum over rows of g n.
    """
    rows, width = x_ND.shape
    check_width(NAME, 'registers', width, MAX_WIDTH)
    given = {'x': pad_columns(x_ND), 'g': pad_columns(g_ND), 'scale': pad_columns(scale_D)}
    row = RowSlices.for_arrays(given['x'].shape[1], x_ND, g_ND)
    parts, keeps = row.slices(), row.width <= MAX_REGISTER_ROW
    programs = min(rows, count_programs(row.width, 3))
    made = {'dx': jax.ShapeDtypeStruct(given['x'].shape, x_ND.dtype)}
    if scale_D is not None:
        made['dscale'] = jax.ShapeDtypeStruct((programs, row.width), jnp.float32)

    def body(refs, n, dscales):
        xs = [row.read(refs['x'], n, part) for part in parts]
        gs = [row.read(refs['g'], n, part) for part in parts]
        inverse = _inverse_rms(row, parts, xs, width, eps)
        products = [
            row.mask_repeated(part, _apply_scale(row, refs, part, g) * x)
            for part, x, g in zip(parts, xs, gs, strict=True)
        ]
        mean = sum_slices(products) * inverse / width
        new = []
        for some in row.batch_slices(zip(parts, xs, gs, dscales, strict=True)):
            dxs = []
            for part, x, g, dscale in some:
                if not keeps:
                    x, g = (row.read(refs[name], n, part) for name in ('x', 'g'))
                normal = x * inverse
                dxs.append(inverse * (_apply_scale(row, refs, part, g) - normal * mean))
                new.append(None if dscale is None else dscale + g * normal)
            for (part, *_), dx in zip(some, dxs, strict=True):
                row.write(refs['dx'], n, part, dx)
        return new

    def start(refs):
        return [row.full(0.0) if 'dscale' in refs else None for _ in parts]

    def finish(refs, program, dscales):
        for part, dscale in zip(parts, dscales, strict=True):
            if dscale is not None:
                row.write(refs['dscale'], program, part, dscale)

    how = {'name': 'rms_norm_backward', 'start': start, 'finish': finish}
    found = call_on_gpu(body, given, made, rows=rows, programs=programs, **how)
    return found['dx'][:, :width], found['dscale'][:, :width] if 'dscale' in found else None
