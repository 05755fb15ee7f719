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
    """LayerNorm (arXiv:1607.06450): `y = g (x - mean(x)) / sqrt(var(x) + eps) + b`.

    Mean and biased variance are over the features of a token. The gain `g` and bias `b` [D] can be
    left out (`scale`, `bias`).
    """

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
    """L1 norm (arXiv:2411.10948): `y = g (x - mean(x)) / (mean(|x - mean(x)|) + eps) + b`.

    This is our reading of the paper, of which we could see only the abstract: the mean absolute
    deviation replaces the standard deviation, which is `sqrt(pi / 2)` times as large for a
    Gaussian. With `rescale`, the quotient is multiplied by `sqrt(2 / pi)`, so that a Gaussian input
    gets unit variance. We do not know whether the paper does so. Computed in float32.
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
    """Dynamic tanh, DyT (arXiv:2503.10622): `y = g tanh(a x) + b`.

    The slope `a` is one learned number per layer. It starts at ``alpha``, or at `alpha_attention`
    before attention if that is set. The bias `b` is left out unless `bias` is set. With this norm,
    the model also multiplies its embeddings by a learned number that starts at `sqrt(D)`, as the
    authors' LLaMA does.

    The authors' LLaMA has no bias and these starts; smaller models are best with larger values:

        size             alpha_attention   alpha
        7B, width 4096   0.8               0.2
        13B              0.6               0.15
        34B and 70B      0.2               0.05

    Source: equation 1, and its code.
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
