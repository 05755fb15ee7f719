"""RMSNorm over the last axis. A new kernel is a row in `RMS_NORM_KERNELS`.

Each is (x [..., D], scale [D] or None, eps, out_dtype) -> [..., D] of `out_dtype`; None: x's type.
`reference` is the specification; the others equal it to rounding
(tests/modules/test_rms_norm_kernels.py).
"""

import jax
import jax.numpy as jnp

from modules.kernels.platforms import PALLAS, Kernel
from modules.kernels.rms_norm.reference import add_reference, inverse_rms, reference

__all__ = ['ADD_RMS_NORM_KERNELS', 'RMS_NORM_KERNELS', 'inverse_rms', 'reference']


def pallas(
    x: jax.Array,
    scale_D: jax.Array | None,
    eps: float,
    out_dtype: jnp.dtype | None = None,
    *,
    platform: str,
) -> jax.Array:
    """`reference` in one pass over memory forward and one backward; on TPUs and GPUs.

    ValueError for numbers of another type than bfloat16 and float32, and for rows that do not fit
    a TPU core's vector memory, or the registers of a GPU's warpgroup.
    """
    from modules.kernels.rms_norm.fused import rms_norm  # here, as Pallas takes time to import

    return rms_norm(x, None, scale_D, eps, jnp.dtype(out_dtype or x.dtype), platform)[0]


def add_pallas(
    x: jax.Array, residual: jax.Array, scale_D: jax.Array | None, eps: float, *, platform: str
) -> tuple[jax.Array, jax.Array]:
    """`add_reference`, which reads and writes each array once."""
    from modules.kernels.rms_norm.fused import rms_norm

    return rms_norm(x, residual, scale_D, eps, x.dtype, platform)


RMS_NORM_KERNELS = {
    'reference': Kernel(reference),
    'pallas': Kernel(pallas, PALLAS, is_forward_mode=False),
}
# The same kernels with a sum before them: (x, residual, scale, eps) -> (norm of the sum, the sum).
ADD_RMS_NORM_KERNELS = {
    'reference': Kernel(add_reference),
    'pallas': Kernel(add_pallas, PALLAS, is_forward_mode=False),
}
