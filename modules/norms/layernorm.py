"""Layer normalization (arXiv:1607.06450), its L1 form, and dynamic tanh in its place."""

import math
import sys
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.norms.base import Eps, HasBias, HasScale, Norm, apply_affine
from modules.options import Option
from modules.statistics import at_least_float32

FINITE = sys.float_info.max


def standardize(x: jax.Array, eps: float) -> jax.Array:
    """Returns (x - mean(x)) / sqrt(var(x) + eps) over the last axis, in float32 at least.

    The variance is the biased variance of the centred values, since E[x^2] - E[x]^2 loses digits if
    the mean is large. Source: arXiv:1607.06450, equation 4.
    """
    x = at_least_float32(x)
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + eps)


class LayerNorm(Norm):
    """y = standardize(x) * scale + bias, each optional (arXiv:1607.06450)."""

    eps: Eps = 1e-6
    scale: HasScale = True
    bias: HasBias = True

    @nn.compact
    def __call__(self, x):
        return apply_affine(self, self.center_and_scale(x), self.scale, self.bias).astype(x.dtype)

    def center_and_scale(self, x: jax.Array) -> jax.Array:
        """Returns x with mean 0 and deviation 1 over the last axis."""
        return standardize(x, self.eps)


class L1Norm(LayerNorm):
    """y = (x - mean(x)) / (mean|x - mean(x)| + eps) * scale + bias, computed in float32.

    OUR READING of arXiv:2411.10948, of which only the abstract was available: the mean absolute
    deviation replaces the standard deviation, which is sqrt(pi / 2) times as large for a Gaussian.
    `rescale` multiplies by sqrt(2 / pi), so that such an x gets unit variance; whether the paper
    does so is unknown.
    """

    eps: Eps = 1e-5
    rescale: Annotated[bool, Option('whether to scale to unit variance for Gaussian inputs')] = (
        False
    )

    def center_and_scale(self, x: jax.Array) -> jax.Array:
        x = at_least_float32(x)
        centred = x - jnp.mean(x, -1, keepdims=True)
        y = centred / (jnp.mean(jnp.abs(centred), -1, keepdims=True) + self.eps)
        return y * math.sqrt(2 / math.pi) if self.rescale else y


class DyT(Norm):
    """y = tanh(a x) * scale (+ bias), with a learned scalar a in each layer.

    a starts at `alpha`, before attention at `alpha_attention` (None: at `alpha`). The authors'
    LLaMA has no bias, and alpha_attention | alpha of 0.8 | 0.2 at 7B (width 4096), 0.6 | 0.15 at
    13B, 0.2 | 0.05 at 34B and 70B; small models are best with larger values. It also multiplies the
    embeddings by a learned scalar that starts at sqrt(D), and so does a model with this norm.
    Source: arXiv:2503.10622, equation 1, and its code.
    """

    alpha: Annotated[float, Option('initial value of the learned slope', -FINITE, FINITE)] = 0.5
    alpha_attention: Annotated[
        float | None, Option('initial slope before attention; None: alpha', -FINITE, FINITE)
    ] = None
    bias: HasBias = False
    site: str = 'mlp'

    scales_embedding = True

    @nn.compact
    def __call__(self, x):
        at_attention = self.site == 'attention' and self.alpha_attention is not None
        alpha = self.vector('alpha', 0, self.alpha_attention if at_attention else self.alpha)
        y = jnp.tanh(alpha * at_least_float32(x))
        return apply_affine(self, y, bias=self.bias).astype(x.dtype)
