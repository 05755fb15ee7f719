"""RMSNorm as Pallas kernels, one forward and one backward per platform, and the tables of kernels.

Least bytes for N rows of D entries of b bytes: 2NDb forward and 3NDb backward, and 4NDb each where
a residual is added. The backward pass computes the inverse root again, as it reads the row anyway.
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from modules.kernels.common.platforms import PALLAS, Kernel
from modules.kernels.common.rows import flat, refuse_types
from modules.kernels.rms_norm.base import NAME, add_reference, reference
from modules.parallel.kernel_calls import PARTS, letters_of, over_devices


def kernels_on(platform: str) -> ModuleType:
    """Imports `forward_rows` and `backward_rows` of a platform, for rows on one device."""
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
    """Returns (rms_norm(x + residual) * scale, x + residual); (y, None) without a residual.

    Raises ValueError for types other than bfloat16 and float32, and for rows that do not fit a TPU
    core's vector memory or the registers of a GPU's warpgroup.
    """
    refuse_types(NAME, x, residual, scale_D)
    return _forward(x, residual, scale_D, eps, out_dtype, platform)


def _forward(x, residual, scale_D, eps, out_dtype, platform):
    def on_device(x, residual, scale_D):
        forward_rows = kernels_on(platform).forward_rows
        y_ND, sum_ND = forward_rows(flat(x), flat(residual), scale_D, eps, out_dtype)
        return y_ND.reshape(x.shape), None if sum_ND is None else sum_ND.reshape(x.shape)

    rows = letters_of(x)
    return over_devices(on_device, (x, residual, scale_D), (rows, rows, None), (rows, rows))


def _saved(x, residual, scale_D, eps, out_dtype, platform):
    y, total = _forward(x, residual, scale_D, eps, out_dtype, platform)
    return (y, total), (x if total is None else total, scale_D, residual is not None)


def _backward(eps, out_dtype, platform, saved, cotangents):
    del out_dtype
    (x, scale_D, has_residual), (g, g_total) = saved, cotangents

    def on_device(x, g, g_total, scale_D):
        backward_rows = kernels_on(platform).backward_rows
        dx_ND, dscale_PD = backward_rows(flat(x), flat(g), flat(g_total), scale_D, eps)
        return dx_ND.reshape(x.shape), dscale_PD

    rows = letters_of(x)
    arrays, letters = (x, g, g_total, scale_D), (rows, rows, rows, None)
    dx, dscale_PD = over_devices(on_device, arrays, letters, (rows, PARTS))
    dscale_D = None if scale_D is None else jnp.sum(dscale_PD, 0).astype(scale_D.dtype)
    return dx, dx if has_residual else None, dscale_D


rms_norm.defvjp(_saved, _backward)


def pallas(
    x: jax.Array,
    scale_D: jax.Array | None,
    eps: float,
    out_dtype: jnp.dtype | None = None,
    *,
    platform: str,
) -> jax.Array:
    """Computes `reference` in one pass over memory forward and one backward."""
    return rms_norm(x, None, scale_D, eps, jnp.dtype(out_dtype or x.dtype), platform)[0]


def add_pallas(
    x: jax.Array, residual: jax.Array, scale_D: jax.Array | None, eps: float, *, platform: str
) -> tuple[jax.Array, jax.Array]:
    """Computes `add_reference`, reading and writing each array once."""
    return rms_norm(x, residual, scale_D, eps, x.dtype, platform)


# (x [..., D], scale [D] or None, eps, out_dtype or None) -> [..., D], of x's type for None.
RMS_NORM_KERNELS = {
    'reference': Kernel(reference),
    'pallas': Kernel(pallas, PALLAS, is_forward_mode=False),
}
# (x, residual, scale, eps) -> (norm of the sum, the sum)
ADD_RMS_NORM_KERNELS = {
    'reference': Kernel(add_reference),
    'pallas': Kernel(add_pallas, PALLAS, is_forward_mode=False),
}
