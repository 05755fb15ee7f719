"""RMSNorm on GPUs: one kernel forward, one backward, each of which reads every row once.

A program has the whole of a row in its registers, or, of long ones, reads it again before anything
else takes its place in the processor's cache. Its rows' part of the gradient of the scale stays in
registers until its last row.
"""

import jax
import jax.numpy as jnp

from modules.kernels.gpu_rows import KEPT, Row, call_on_gpu, programs_of, total, wide
from modules.kernels.rows import refuse_width

NAME = 'kernels.rms_norm=pallas'
LONGEST = 16_384  # of rows whose part of the scale's gradient registers hold


def forward_rows(
    x_ND: jax.Array,
    residual_ND: jax.Array | None,
    scale_D: jax.Array | None,
    eps: float,
    out_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array | None]:
    """(y, x + residual) of rows on one device, as `fused.rms_norm` has them."""
    rows, width = x_ND.shape
    refuse_width(NAME, 'registers', width, LONGEST)
    x_ND, residual_ND, scale_D = (wide(a) for a in (x_ND, residual_ND, scale_D))
    made = {'y': jax.ShapeDtypeStruct(x_ND.shape, out_dtype)}
    if residual_ND is not None:
        made['total'] = jax.ShapeDtypeStruct(x_ND.shape, x_ND.dtype)
    row = Row.of(x_ND.shape[1], x_ND, residual_ND, made['y'])
    parts, keeps = row.slices(), row.width <= KEPT

    def body(refs, n, _):
        def read(part):
            x = row.read(refs['x'], n, part)
            if 'residual' not in refs:
                return x
            x = x + row.read(refs['residual'], n, part)
            return x.astype(x_ND.dtype).astype(jnp.float32)  # as whoever reads it next has it

        xs = [read(part) for part in parts]
        inverse = _inverse_rms(row, parts, xs, width, eps)
        for some in row.at_once(zip(parts, xs, strict=True)):
            some = [(part, x if keeps else read(part)) for part, x in some]
            ys = [_scaled(row, refs, part, x * inverse) for part, x in some]
            for (part, x), y in zip(some, ys, strict=True):
                if 'total' in refs:
                    row.write(refs['total'], n, part, x)
                row.write(refs['y'], n, part, y)

    found = call_on_gpu(
        body,
        {'x': x_ND, 'residual': residual_ND, 'scale': scale_D},
        made,
        rows=rows,
        programs=programs_of(row.width, 1 + (residual_ND is not None)),
        name='rms_norm',
    )
    total_ND = found.get('total')
    return found['y'][:, :width], None if total_ND is None else total_ND[:, :width]


def _inverse_rms(row, parts, xs, width, eps):
    squares = [row.counted(part, x * x) for part, x in zip(parts, xs, strict=True)]
    return jax.lax.rsqrt(total(squares) / width + eps)


def _scaled(row, refs, part, x):
    return x * row.read(refs['scale'], None, part) if 'scale' in refs else x


def backward_rows(
    x_ND: jax.Array,
    g_ND: jax.Array,
    g_total_ND: jax.Array | None,
    scale_D: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array | None]:
    """(dx, dscale of each program's rows [P, D]) of rows on one device.

    dx = r (g' - n mean(g' n)) with g' = g scale and n = x r; dscale = sum over rows of g n.
    """
    rows, width = x_ND.shape
    refuse_width(NAME, 'registers', width, LONGEST)
    x_ND, g_ND, g_total_ND, scale_D = (wide(a) for a in (x_ND, g_ND, g_total_ND, scale_D))
    row = Row.of(x_ND.shape[1], x_ND, g_ND, g_total_ND)
    parts, keeps = row.slices(), row.width <= KEPT
    programs = min(rows, programs_of(row.width, 3))
    made = {'dx': jax.ShapeDtypeStruct(x_ND.shape, x_ND.dtype)}
    if scale_D is not None:
        made['dscale'] = jax.ShapeDtypeStruct((programs, row.width), jnp.float32)

    def body(refs, n, dscales):
        xs = [row.read(refs['x'], n, part) for part in parts]
        gs = [row.read(refs['g'], n, part) for part in parts]
        inverse = _inverse_rms(row, parts, xs, width, eps)
        products = [
            row.counted(part, _scaled(row, refs, part, g) * x)
            for part, x, g in zip(parts, xs, gs, strict=True)
        ]
        mean = total(products) * inverse / width
        new = []
        for some in row.at_once(zip(parts, xs, gs, dscales, strict=True)):
            dxs = []
            for part, x, g, dscale in some:
                if not keeps:
                    x, g = (row.read(refs[name], n, part) for name in ('x', 'g'))
                normal = x * inverse
                dx = inverse * (_scaled(row, refs, part, g) - normal * mean)
                if 'g_total' in refs:
                    dx = dx + row.read(refs['g_total'], n, part)
                dxs.append(dx)
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

    found = call_on_gpu(
        body,
        {'x': x_ND, 'g': g_ND, 'g_total': g_total_ND, 'scale': scale_D},
        made,
        rows=rows,
        programs=programs,
        name='rms_norm_backward',
        start=start,
        finish=finish,
    )
    dscale_PD = found.get('dscale')
    return found['dx'][:, :width], None if dscale_PD is None else dscale_PD[:, :width]
