"""Dynamic tanh, a norm without statistics (arXiv:2503.10622)."""

import sys
from typing import Annotated

import jax.numpy as jnp
from flax import linen as nn

from modules.norms.base import HasBias, Norm, affine
from modules.options import Option
from modules.statistics import at_least_float32

FINITE = sys.float_info.max


class DyT(Norm):
    """y = tanh(a x) * scale (+ bias), with one learned number a in each layer.

    `alpha` is where a starts, `alpha_attention` where it does in front of attention (None: as
    elsewhere). The authors' LLaMA has no bias, and alpha_attention | alpha of 0.8 | 0.2 at 7B
    (width 4096), 0.6 | 0.15 at 13B, 0.2 | 0.05 at 34B and 70B; small models are best with larger
    ones. It also multiplies the embeddings by a learned number that starts at sqrt(D), and so does
    a model with this norm. Source: arXiv:2503.10622, equation 1, and the code beside it.
    """

    alpha: Annotated[float, Option('where the learned slope starts', -FINITE, FINITE)] = 0.5
    alpha_attention: Annotated[
        float | None, Option('the same in front of attention', -FINITE, FINITE)
    ] = None
    bias: HasBias = False
    site: str = 'mlp'

    scales_embedding = True

    @nn.compact
    def __call__(self, x):
        at_attention = self.site == 'attention' and self.alpha_attention is not None
        alpha = self.vector('alpha', 0, self.alpha_attention if at_attention else self.alpha)
        y = jnp.tanh(alpha * at_least_float32(x))
        return affine(self, y, True, self.bias).astype(x.dtype)
