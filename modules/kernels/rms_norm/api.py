"""RMSNorm as Pallas kernels, one forward and one backward per platform, and the table of kernels.

Least bytes for N rows of D entries of b bytes: 2NDb forward and 3NDb backward. The backward pass
recomputes the inverse root, as it reads the row anyway.
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from modules.kernels.common.rows import PALLAS, Kernel, check_types, flatten_rows
from modules.kernels.rms_norm.base import NAME, reference
from modules.parallel.kernel_calls import PARTS, map_shards, row_letters


def kernels_on(platform: str) -> ModuleType:
    """Imports `forward_rows` and `backward_rows` of a platform, for rows on a single device."""
    if platform == 'tpu':
        from modules.kernels.rms_norm import tpu as kernels
    else:
        from modules.kernels.rms_norm import gpu as kernels
    return kernels


def rms_norm(
    x: jax.Array,
    scale_D: jax.Array | None,
    eps: float,
    out_dtype: jnp.dtype | None = None,
    *,
    platform: str,
) -> jax.Array:
    """RMSNorm by Pallas kernels, with one pass over memory forward and one backward.

    Computes the same as `reference`.

    Args:
      x: [..., D].
      scale_D: the gain; None: 1.
      eps: added under the root.
      out_dtype: the type of the result; None: the type of x.
      platform: 'tpu' or 'gpu'.

    Raises:
      ValueError: for types other than bfloat16 and float32, and for rows that exceed a TPU core's
        vector memory or the registers of a GPU's warpgroup.
    """
    check_types(NAME, x, scale_D)
    return _rms_norm(x, scale_D, eps, jnp.dtype(out_dtype or x.dtype), platform)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rms_norm(x, scale_D, eps, out_dtype, platform):
    def on_device(x, scale_D):
        y_ND = kernels_on(platform).forward_rows(flatten_rows(x), scale_D, eps, out_dtype)
        return y_ND.reshape(x.shape)

    rows = row_letters(x)
    return map_shards(on_device, (x, scale_D), (rows, None), rows)


def _forward(x, scale_D, eps, out_dtype, platform):
    return _rms_norm(x, scale_D, eps, out_dtype, platform), (x, scale_D)


def _backward(eps, out_dtype, platform, residuals, g):
    del out_dtype
    x, scale_D = residuals

    def on_device(x, g, scale_D):
        dx_ND, dscale_PD = kernels_on(platform).backward_rows(
            flatten_rows(x), flatten_rows(g), scale_D, eps
        )
        return dx_ND.reshape(x.shape), dscale_PD

    rows = row_letters(x)
    dx, dscale_PD = map_shards(on_device, (x, g, scale_D), (rows, rows, None), (rows, PARTS))
    return dx, None if scale_D is None else jnp.sum(dscale_PD, 0).astype(scale_D.dtype)


_rms_norm.defvjp(_forward, _backward)


# (x [..., D], scale [D] or None, eps, out_dtype or None) -> [..., D], of x's type for None.
RMS_NORM_KERNELS = {
    'reference': Kernel(reference),
    'pallas': Kernel(rms_norm, PALLAS, is_forward_mode=False),
}
