"""EvoNorms: normalization and activation found together by search (arXiv:2004.02967).

Found for the feature maps of convolutions; what stands for space there is ours: a token is a sample
without space. Both change the sign and shape of what they normalize, as an activation does.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.norms.base import Eps, Groups, Momentum, Norm, affine, along, in_groups
from modules.norms.batchnorm import LEAKS, default_groups, moments, unbiased
from modules.statistics import STATS, at_least_float32, is_training


class EvoNormS0(Norm):
    """y = x sigmoid(v x) / sqrt(var_group(x) + eps) * scale + bias, with a learned v a channel.

    The variance is the centred, biased one of each of `groups` groups of a token's features. v = 1
    at the start; no decay. Source: arXiv:2004.02967.
    """

    eps: Eps = 1e-5
    groups: Groups = None

    divide_width = ('groups',)

    @nn.compact
    def __call__(self, x):
        x32 = at_least_float32(x)
        v = along(self.vector('v', x.shape[-1], 1.0), x)
        groups = default_groups(x.shape[-1]) if self.groups is None else self.groups
        grouped = in_groups(x32, groups)
        inv_std = jax.lax.rsqrt(jnp.var(grouped, -1, keepdims=True) + self.eps)
        y = x32 * nn.sigmoid(v * x32) * along(inv_std, grouped).reshape(x.shape)
        return affine(self, y, True, True).astype(x.dtype)


class EvoNormB0(Norm):
    """y = x / max(sqrt(var_batch + eps), v x + sqrt(var_token + eps)) * scale + bias.

    var_batch [D] is over the tokens of the batch, in evaluation its running average (moved by
    `momentum`, unbiased); var_token is over the features of one token, in the place of the
    published variance over space, which would read later tokens. Source: arXiv:2004.02967.
    """

    eps: Eps = 1e-3
    momentum: Momentum = 0.1
    valid: jax.Array | None = None

    leaks = LEAKS

    @nn.compact
    def __call__(self, x):
        x32 = at_least_float32(x)
        v = along(self.vector('v', x.shape[-1], 1.0), x)
        variance = self.variable(STATS, 'variance', jnp.ones, x.shape[-1:])
        over_batch = variance.value
        if is_training(self):
            _, over_batch = moments(x32, self.valid)
            seen = unbiased(over_batch, x32, self.valid)
            variance.value = variance.value + self.momentum * (seen - variance.value)
        over_token = along(jnp.sqrt(jnp.var(x32, -1, keepdims=True) + self.eps), x)
        over_batch = along(jnp.sqrt(over_batch + self.eps), x)
        y = x32 / jnp.maximum(over_batch, v * x32 + over_token)
        return affine(self, y, True, True).astype(x.dtype)
