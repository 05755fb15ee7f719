"""Layer normalization (arXiv:1607.06450) and its L1 form (arXiv:2411.10948)."""

import math
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.norms.base import Eps, HasBias, HasScale, Norm, affine
from modules.options import Option
from modules.statistics import at_least_float32


def standardize(x: jax.Array, eps: float) -> jax.Array:
    """(x - mean(x)) / sqrt(var(x) + eps) over the last axis, in float32.

    The variance is the biased one, of the centred values (E[x^2] - E[x]^2 loses its digits where
    the mean is large). Source: arXiv:1607.06450, equation 4.
    """
    x = at_least_float32(x)
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + eps)


class LayerNorm(Norm):
    """y = standardize(x) * scale + bias, either of which can be left out (arXiv:1607.06450)."""

    eps: Eps = 1e-6
    scale: HasScale = True
    bias: HasBias = True

    @nn.compact
    def __call__(self, x):
        return affine(self, standardize(x, self.eps), self.scale, self.bias).astype(x.dtype)


def l1_standardize(x: jax.Array, eps: float) -> jax.Array:
    """(x - mean(x)) / (mean|x - mean(x)| + eps) over the last axis, in float32."""
    x = at_least_float32(x)
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / (jnp.mean(jnp.abs(centred), -1, keepdims=True) + eps)


class L1Norm(Norm):
    """y = l1_standardize(x) * scale + bias; `rescale` multiplies by sqrt(2 / pi) first.

    OUR READING of arXiv:2411.10948, of which we had the abstract alone: the mean
    absolute deviation in the place of the standard deviation. A Gaussian has sqrt(2 / pi) standard
    deviations of it, so that `rescale` gives such an x unit variance; whether the paper does so is
    not known.
    """

    eps: Eps = 1e-5
    scale: HasScale = True
    bias: HasBias = True
    rescale: Annotated[bool, Option('whether a Gaussian input gets unit variance')] = False

    @nn.compact
    def __call__(self, x):
        y = l1_standardize(x, self.eps)
        if self.rescale:
            y = y * math.sqrt(2 / math.pi)
        return affine(self, y, self.scale, self.bias).astype(x.dtype)
