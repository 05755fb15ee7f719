"""Norms with batch statistics, each channel's mean and variance over tokens, and EvoNorms.

In training, a token sees statistics of later tokens and of other sequences, so the training loss is
not a causal model's. Evaluation uses running averages and is causal. EvoNorm-S0, which has no such
statistics, is here beside EvoNorm-B0, because the same search found both.
"""

from typing import Annotated, Any

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
    apply_affine,
    broadcast_like,
    reshape_groups,
)
from modules.norms.layernorm import standardize
from modules.options import Option
from modules.statistics import STATS, at_least_float32, is_training, token_mean


def moments(x: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns (mean, biased variance), [D] each, over the valid tokens."""
    mean = token_mean(x, valid)
    return mean, token_mean((x - broadcast_like(mean, x)) ** 2, valid)


def normalize(x: jax.Array, mean: jax.Array, variance: jax.Array, eps: float) -> jax.Array:
    """Returns (x - mean) / sqrt(variance + eps).

    Args:
      x: [..., D].
      mean: [D].
      variance: [D].
      eps: added under the root.
    """
    return (x - broadcast_like(mean, x)) * jax.lax.rsqrt(broadcast_like(variance, x) + eps)


def unbiased_variance(variance: jax.Array, x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Returns variance * n / (n - 1) with n the number of valid tokens.

    Args:
      variance: the biased variance, [D].
      x: the tokens, [..., D].
      valid: 0 for padding; None: no padding.
    """
    tokens = jnp.ones((*x.shape[:-1], 1), x.dtype)
    n = jnp.sum(tokens if valid is None else tokens * valid)
    return variance * n / jnp.maximum(n - 1, 1.0)


class BatchStatisticsNorm(Norm):
    """A norm with running averages of mean and unbiased variance.

    An update moves them by `momentum` of the way to the batch's.
    """

    eps: Eps = 1e-5
    momentum: Momentum = 0.1
    valid: jax.Array | None = None

    leaks = 'statistics over all tokens of the batch'

    def running_moments(self, x: jax.Array) -> tuple[Any, Any]:
        """Returns the variables mean [D] and variance [D], which start at 0 and 1."""
        mean = self.variable(STATS, 'mean', jnp.zeros, x.shape[-1:])
        return mean, self.variable(STATS, 'variance', jnp.ones, x.shape[-1:])

    def update_average(self, running: Any, batch_average: jax.Array) -> None:
        """Moves a running average towards the batch's."""
        running.value = running.value + self.momentum * (batch_average - running.value)


class BatchNorm(BatchStatisticsNorm):
    """y = (x - mean) / sqrt(variance + eps) * scale + bias, over the tokens of a batch.

    Evaluation uses the running averages. Source: arXiv:1502.03167, algorithm 1.
    """

    scale: HasScale = True
    bias: HasBias = True

    @nn.compact
    def __call__(self, x):
        x32 = at_least_float32(x)
        mean, variance = self.running_moments(x)
        if is_training(self):
            y, means, variances = self.normalize_batch(x32)
            for batch_mean, batch_variance in zip(means, variances, strict=True):
                self.update_average(mean, batch_mean)
                self.update_average(variance, batch_variance)
        else:
            y = normalize(x32, mean.value, variance.value, self.eps)
        return apply_affine(self, y, self.scale, self.bias).astype(x.dtype)

    def normalize_batch(self, x: jax.Array) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        """Returns (normalized x, means, variances): one update of the running averages for each."""
        mean, variance = moments(x, self.valid)
        y = normalize(x, mean, variance, self.eps)
        return y, [mean], [unbiased_variance(variance, x, self.valid)]


class GhostBatchNorm(BatchNorm):
    """BatchNorm over each of `ghost_batches` parts of the batch separately, in whole sequences.

    The running averages are updated once for each part, in order. `ghost_batches` must divide the
    sequences of a microbatch. Source: arXiv:1705.08741, algorithm 1.
    """

    ghost_batches: Annotated[
        int, Option('parts of the batch that are normalized separately', 1)
    ] = 4

    divide_sequences = ('ghost_batches',)
    leaks = 'statistics over all tokens of its ghost batch'

    def normalize_batch(self, x: jax.Array) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        def split_batch(tokens):
            tokens = jnp.broadcast_to(tokens, (*x.shape[:-1], tokens.shape[-1]))
            return tokens.reshape(self.ghost_batches, -1, tokens.shape[-1])

        valid = jnp.ones((1,) * x.ndim, x.dtype) if self.valid is None else self.valid
        parts, valid = split_batch(x), split_batch(valid)
        means, variances = jax.vmap(moments)(parts, valid)
        y = jax.vmap(lambda x, m, v: normalize(x, m, v, self.eps))(parts, means, variances)
        return (
            y.reshape(x.shape),
            list(means),
            list(jax.vmap(unbiased_variance)(variances, parts, valid)),
        )


class BatchChannelNorm(BatchStatisticsNorm):
    """standardize(BatchNorm(x)) in `groups` groups of channels, then a gain and bias per group.

    With `estimated` the first norm is the paper's for small batches: it normalizes by the running
    averages in training too, after this batch has moved them. No gradient flows through them, and
    their variance moves towards the batch's variance about the running mean before the update. The
    paper changes `momentum` with time; here it is constant. The affine map of the first norm is per
    channel, the second norm's per group. Source: arXiv:1911.09738 and its code (BCNorm, EstBN);
    here the groups are of a token's features.
    """

    groups: Groups = None
    estimated: Annotated[bool, Option('whether training also normalizes by running averages')] = (
        False
    )

    @nn.compact
    def __call__(self, x):
        x32 = at_least_float32(x)
        mean, variance = self.running_moments(x)
        if is_training(self) and not self.estimated:
            mean_and_variance = moments(x32, self.valid)
            batch_variance = unbiased_variance(mean_and_variance[1], x32, self.valid)
            self.update_average(mean, mean_and_variance[0])
            self.update_average(variance, batch_variance)
        else:
            if is_training(self):
                x_constant = jax.lax.stop_gradient(x32)
                variance_about_running = token_mean(
                    (x_constant - broadcast_like(mean.value, x_constant)) ** 2, self.valid
                )
                self.update_average(mean, token_mean(x_constant, self.valid))
                self.update_average(variance, variance_about_running)
            mean_and_variance = mean.value, variance.value
        y = apply_affine(self, normalize(x32, *mean_and_variance, self.eps))
        y = standardize(reshape_groups(y, self.groups), self.eps)
        gain, shift = (
            self.vector(name, y.shape[-2], initial, axis='group')[:, None]
            for name, initial in (('group_scale', 1.0), ('group_bias', 0.0))
        )
        return (
            (y * broadcast_like(gain, y) + broadcast_like(shift, y))
            .reshape(x.shape)
            .astype(x.dtype)
        )


class EvoNormS0(Norm):
    """y = x sigmoid(v x) / sqrt(var_group(x) + eps) * scale + bias, with a learned v per channel.

    The variance is centred and biased, within each of `groups` groups of a token's features; the
    published variance, for images, is over space too. v = 1 at the start; no decay. It changes sign
    and shape of its input, as an activation does. Source: arXiv:2004.02967.
    """

    eps: Eps = 1e-5
    groups: Groups = None

    @nn.compact
    def __call__(self, x):
        x32 = at_least_float32(x)
        v = broadcast_like(self.vector('v', x.shape[-1], 1.0), x)
        grouped = reshape_groups(x32, self.groups)
        inv_std = jax.lax.rsqrt(jnp.var(grouped, -1, keepdims=True) + self.eps)
        y = x32 * nn.sigmoid(v * x32) * broadcast_like(inv_std, grouped).reshape(x.shape)
        return apply_affine(self, y).astype(x.dtype)


class EvoNormB0(BatchStatisticsNorm):
    """y = x / max(sqrt(var_batch + eps), v x + sqrt(var_token + eps)) * scale + bias.

    var_batch [D] is over the tokens of the batch, in evaluation its running average. var_token is
    over the features of a token, instead of the published variance over space, which would read
    later tokens. Source: arXiv:2004.02967.
    """

    eps: Eps = 1e-3

    @nn.compact
    def __call__(self, x):
        x32 = at_least_float32(x)
        v = broadcast_like(self.vector('v', x.shape[-1], 1.0), x)
        variance = self.variable(STATS, 'variance', jnp.ones, x.shape[-1:])
        over_batch = variance.value
        if is_training(self):
            _, over_batch = moments(x32, self.valid)
            self.update_average(variance, unbiased_variance(over_batch, x32, self.valid))
        over_token = broadcast_like(jnp.sqrt(jnp.var(x32, -1, keepdims=True) + self.eps), x)
        over_batch = broadcast_like(jnp.sqrt(over_batch + self.eps), x)
        y = x32 / jnp.maximum(over_batch, v * x32 + over_token)
        return apply_affine(self, y).astype(x.dtype)
