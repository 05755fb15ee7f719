"""Root-mean-square normalization (arXiv:1910.07467)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.params import declare


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """y = x / sqrt(mean(x^2) + eps) * scale over the last axis.

    x [..., D], scale [D]; reduced and scaled in float32, returned in the type of x.
    Source: arXiv:1910.07467, equation 4.
    """
    x32 = x.astype(jnp.float32)
    inv_rms = jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + eps)
    return (x32 * inv_rms * jnp.broadcast_to(scale, x.shape)).astype(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned gain, 1 at the start."""

    eps: float
    axis: str = 'embed'

    @nn.compact
    def __call__(self, x):
        ones = declare(nn.initializers.ones, role='vector', axes=(self.axis,))
        return rms_norm(x, self.param('scale', ones, x.shape[-1:]), self.eps)
