"""Layer normalization (arXiv:1607.06450)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.params import declare


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias over the last axis.

    x [..., D], scale and bias [D]; the variance is the biased one, of the centred values (E[x^2] -
    E[x]^2 loses its digits where the mean is large). Reduced in float32, returned in the type of x.
    Source: arXiv:1607.06450, equation 4.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, -1, keepdims=True)
    inv_std = jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + eps)
    scale, bias = jnp.broadcast_to(scale, x.shape), jnp.broadcast_to(bias, x.shape)
    return (centred * inv_std * scale + bias).astype(x.dtype)


class LayerNorm(nn.Module):
    """`layer_norm` with a learned gain, 1 at the start, and bias, 0 at the start."""

    eps: float
    axis: str = 'embed'

    @nn.compact
    def __call__(self, x):
        ones = declare(nn.initializers.ones, role='vector', axes=(self.axis,))
        zeros = declare(nn.initializers.zeros, role='vector', axes=(self.axis,))
        scale = self.param('scale', ones, x.shape[-1:])
        bias = self.param('bias', zeros, x.shape[-1:])
        return layer_norm(x, scale, bias, self.eps)
