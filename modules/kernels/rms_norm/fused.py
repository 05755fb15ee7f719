"""RMSNorm with one kernel forward and one backward, those of a platform.

Least bytes for N rows of D entries, of b bytes each: 2NDb forward and 3NDb backward, and 4NDb each
where a residual is added. The inverse root is computed again in the backward pass, where the row is
at hand anyway.
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from modules.kernels.devices import PARTS, letters_of, over_devices
from modules.kernels.rows import flat, refuse_types

NAME = 'kernels.rms_norm=pallas'


def kernels_on(platform: str) -> ModuleType:
    """`forward_rows` and `backward_rows` of a platform, for rows on one device."""
    if platform == 'tpu':
        from modules.kernels.rms_norm import tpu as kernels
    else:
        from modules.kernels.rms_norm import gpu as kernels
    return kernels


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def rms_norm(
    x: jax.Array,
    residual: jax.Array | None,
    scale_D: jax.Array | None,
    eps: float,
    out_dtype: jnp.dtype,
    platform: str,
) -> tuple[jax.Array, jax.Array | None]:
    """(y, x + residual) with y = rms_norm(x + residual) * scale; (y, None) without a residual."""
    refuse_types(NAME, x, residual, scale_D)
    return _forward(x, residual, scale_D, eps, out_dtype, platform)


def _forward(x, residual, scale_D, eps, out_dtype, platform):
    kernels = kernels_on(platform)

    def on_device(x, residual, scale_D):
        x_ND, residual_ND = (flat(a) for a in (x, residual))
        y_ND, sum_ND = kernels.forward_rows(x_ND, residual_ND, scale_D, eps, out_dtype)
        return y_ND.reshape(x.shape), None if sum_ND is None else sum_ND.reshape(x.shape)

    rows = letters_of(x)
    arrays, letters = (x, residual, scale_D), (rows, rows, None)
    return over_devices(on_device, arrays, letters, (rows, rows))


def _saved(x, residual, scale_D, eps, out_dtype, platform):
    y, total = _forward(x, residual, scale_D, eps, out_dtype, platform)
    return (y, total), (x if total is None else total, scale_D, residual is not None)


def _backward(eps, out_dtype, platform, saved, cotangents):
    del out_dtype
    kernels = kernels_on(platform)
    (x, scale_D, has_residual), (g, g_total) = saved, cotangents

    def on_device(x, g, g_total, scale_D):
        x_ND, g_ND, total_ND = (flat(a) for a in (x, g, g_total))
        dx_ND, dscale_PD = kernels.backward_rows(x_ND, g_ND, total_ND, scale_D, eps)
        return dx_ND.reshape(x.shape), dscale_PD

    rows = letters_of(x)
    arrays, letters = (x, g, g_total, scale_D), (rows, rows, rows, None)
    dx, dscale_PD = over_devices(on_device, arrays, letters, (rows, PARTS))
    dscale_D = None if scale_D is None else jnp.sum(dscale_PD, 0).astype(scale_D.dtype)
    return dx, dx if has_residual else None, dscale_D


rms_norm.defvjp(_saved, _backward)
