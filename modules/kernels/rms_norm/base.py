"""RMSNorm in plain operations: the reference that kernels are tested against."""

import jax
import jax.numpy as jnp

from modules.statistics import at_least_float32

NAME = 'kernels.rms_norm=pallas'


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """Returns 1 / sqrt(mean(x^2) + eps) over the last axis, [..., 1].

    Args:
      x: [..., D], in the type for the mean.
      eps: added under the root.
    """
    return jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + eps)


def reference(
    x: jax.Array, scale_D: jax.Array | None, eps: float, out_dtype: jnp.dtype | None = None
) -> jax.Array:
    """RMSNorm in plain operations, over the last axis: `y = g x / sqrt(mean(x^2) + eps)`.

    Args:
      x: [..., D]; reduced in float32 at least.
      scale_D: the gain; None: 1.
      eps: added under the root.
      out_dtype: the type of the result; None: the type of x.

    Returns:
      An array of the shape of x.
    """
    x32 = at_least_float32(x)
    y = x32 * inverse_rms(x32, eps)
    if scale_D is not None:
        y = y * jnp.broadcast_to(scale_D, y.shape)
    return y.astype(out_dtype or x.dtype)
