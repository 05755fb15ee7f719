"""Norms with statistics of the batch: a channel's mean and variance over tokens.

In training a token sees statistics of later tokens and of other sequences: the training loss is not
that of a causal model. Evaluation uses running statistics and is causal.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.norms.base import (
    Eps,
    Groups,
    HasBias,
    HasScale,
    Momentum,
    Norm,
    affine,
    along,
    in_groups,
)
from modules.norms.layernorm import standardize
from modules.options import Option
from modules.statistics import STATS, at_least_float32, is_training, token_mean

LEAKS = 'statistics over all tokens of the batch'


def moments(x: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(mean, biased variance), [D] each, of the tokens that count."""
    mean = token_mean(x, valid)
    return mean, token_mean((x - along(mean, x)) ** 2, valid)


def normalize(x: jax.Array, mean: jax.Array, variance: jax.Array, eps: float) -> jax.Array:
    return (x - along(mean, x)) * jax.lax.rsqrt(along(variance, x) + eps)


def unbiased(variance: jax.Array, x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """variance * n / (n - 1) with n the number of tokens."""
    tokens = jnp.ones((*x.shape[:-1], 1), x.dtype)
    n = jnp.sum(tokens if valid is None else tokens * valid)
    return variance * n / jnp.maximum(n - 1, 1.0)


class BatchNorm(Norm):
    """y = (x - mean) / sqrt(variance + eps) * scale + bias, over the tokens of a batch.

    Evaluation takes running averages, moved by `momentum` of the way each update, the variance
    unbiased in them. Source: arXiv:1502.03167, algorithm 1.
    """

    eps: Eps = 1e-5
    momentum: Momentum = 0.1
    scale: HasScale = True
    bias: HasBias = True
    valid: jax.Array | None = None

    leaks = LEAKS

    @nn.compact
    def __call__(self, x):
        x32 = at_least_float32(x)
        mean = self.variable(STATS, 'mean', jnp.zeros, x.shape[-1:])
        variance = self.variable(STATS, 'variance', jnp.ones, x.shape[-1:])
        if is_training(self):
            y, means, variances = self.batch(x32)
            for seen_mean, seen_variance in zip(means, variances, strict=True):
                mean.value = mean.value + self.momentum * (seen_mean - mean.value)
                variance.value = variance.value + self.momentum * (seen_variance - variance.value)
        else:
            y = normalize(x32, mean.value, variance.value, self.eps)
        return affine(self, y, self.scale, self.bias).astype(x.dtype)

    def batch(self, x):
        """(normalized x, means, variances): an update of the running averages for each."""
        mean, variance = moments(x, self.valid)
        return (
            normalize(x, mean, variance, self.eps),
            [mean],
            [unbiased(variance, x, self.valid)],
        )


class GhostBatchNorm(BatchNorm):
    """BatchNorm over each of `ghost_batches` parts of the batch on its own, whole sequences each.

    The running averages are updated once for each part, in order. `ghost_batches` must divide the
    sequences of a microbatch. Source: arXiv:1705.08741, algorithm 1.
    """

    ghost_batches: Annotated[int, Option('parts of the batch, normalized alone', 1)] = 4

    divide_sequences = ('ghost_batches',)

    leaks = 'statistics over all tokens of its ghost batch'

    def batch(self, x):
        def part(values):
            values = jnp.broadcast_to(values, (*x.shape[:-1], values.shape[-1]))
            return values.reshape(self.ghost_batches, -1, values.shape[-1])

        valid = jnp.ones((1,) * x.ndim, x.dtype) if self.valid is None else self.valid
        parts, valid = part(x), part(valid)
        means, variances = jax.vmap(moments)(parts, valid)
        y = jax.vmap(lambda x, m, v: normalize(x, m, v, self.eps))(parts, means, variances)
        return y.reshape(x.shape), list(means), list(jax.vmap(unbiased)(variances, parts, valid))


class BatchChannelNorm(Norm):
    """standardize(BatchNorm(x)) in `groups` groups of channels, then a gain and bias a group.

    `estimated` makes the first norm that of the paper for small batches: it normalizes by the
    running averages, also in training, once this batch has moved them; no gradient flows through
    them, and the variance that moves theirs is about the running mean before the move. The moving
    speed is `momentum`, constant here. The affine map of the first norm is per channel, that of the
    second per group. Source: arXiv:1911.09738 and the code beside it (BCNorm, EstBN); here the
    groups are of one token's features.
    """

    eps: Eps = 1e-5
    momentum: Momentum = 0.1
    groups: Groups = None

    divide_width = ('groups',)
    estimated: Annotated[
        bool, Option('whether training normalizes by the running averages too')
    ] = False
    valid: jax.Array | None = None

    leaks = LEAKS

    @nn.compact
    def __call__(self, x):
        x32, features = at_least_float32(x), x.shape[-1]
        mean = self.variable(STATS, 'mean', jnp.zeros, (features,))
        variance = self.variable(STATS, 'variance', jnp.ones, (features,))

        def move(seen_mean, seen_variance):
            mean.value = mean.value + self.momentum * (seen_mean - mean.value)
            variance.value = variance.value + self.momentum * (seen_variance - variance.value)

        if is_training(self) and not self.estimated:
            used = moments(x32, self.valid)
            move(used[0], unbiased(used[1], x32, self.valid))
        else:
            if is_training(self):
                seen = jax.lax.stop_gradient(x32)
                about_running = token_mean((seen - along(mean.value, seen)) ** 2, self.valid)
                move(token_mean(seen, self.valid), about_running)
            used = mean.value, variance.value
        y = affine(self, normalize(x32, *used, self.eps), True, True)
        groups = default_groups(features) if self.groups is None else self.groups
        y = standardize(in_groups(y, groups), self.eps)
        gain = self.vector('group_scale', groups, 1.0, axis='group')[:, None]
        shift = self.vector('group_bias', groups, 0.0, axis='group')[:, None]
        return (y * along(gain, y) + along(shift, y)).reshape(x.shape).astype(x.dtype)


def default_groups(features: int) -> int:
    """The published 32, or as many below as divide the width and leave each group 8 features."""
    return max(n for n in range(1, 33) if features % n == 0 and (n == 1 or features >= 8 * n))
