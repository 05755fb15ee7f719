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
    """BatchNorm (arXiv:1502.03167): `y = g (x - m) / sqrt(v + eps) + b`.

    In training, `m` and `v` [D] are the mean and variance of each channel over the tokens of a
    batch. In evaluation they are running averages, which each update moves by `momentum` of the way
    to the batch's mean and unbiased variance. The gain `g` and bias `b` [D] can be left out
    (`scale`, `bias`). Source: algorithm 1.
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
    """Ghost batch normalization (arXiv:1705.08741): BatchNorm over each of several parts of a
    batch.

    The batch is split into `ghost_batches` parts of whole sequences, each with separate statistics.
    The running averages are updated once per part, in order. `ghost_batches` must divide the number
    of sequences in a microbatch. Source: algorithm 1.
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
    """Batch-channel normalization (arXiv:1911.09738): BatchNorm, then LayerNorm within groups of
    channels.

    `y = g_k (z - m_k) / sqrt(v_k + eps) + b_k with z = BatchNorm(x)`

    `m_k` and `v_k` are the mean and variance of `z` over group `k` of a token's features, and `g_k`
    and `b_k` are numbers per group. The BatchNorm has a gain and bias per channel. `groups` sets
    the number of groups.

    With `estimated`, the BatchNorm is the paper's variant for small batches: it uses the running
    averages in training too, after the current batch has updated them. No gradient flows through
    the averages. The running variance moves towards the variance of the batch about the previous
    running mean. The paper changes `momentum` over time; here it is constant. Source: the paper and
    its code (BCNorm, EstBN).
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
    """EvoNorm-S0 (arXiv:2004.02967): `y = g x sigmoid(v x) / sqrt(s_k + eps) + b`.

    `s_k` is the biased variance of the features of a token within group `k` of `groups`. The
    published variance, for images, is also over space. `v` [D] is learned, starts at 1 and does not
    decay. Like an activation, the norm changes sign and shape of its input.
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
    """EvoNorm-B0 (arXiv:2004.02967): `y = g x / max(sqrt(V_batch + eps), v x + sqrt(V_token + eps))
    + b`.

    `V_batch` [D] is the variance of each channel over the tokens of a batch; evaluation uses its
    running average. `V_token` is the variance over the features of a token. It replaces the
    published variance over space, which would read later tokens. `v` [D] is learned and starts at
    1.
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
