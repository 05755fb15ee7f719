"""Norms by a running mean square over tokens, with a running estimate in the backward pass too.

The exact gradient would need means of the gradients over the same tokens. Their running estimates
are BACKWARD_STATS: the backward pass returns their next values. In training a token sees the mean
square of later tokens; evaluation uses a running mean square and is causal.
"""

import functools
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.norms.base import (
    EmaDecay,
    Eps,
    Groups,
    Norm,
    WarmupUpdates,
    apply_affine,
    broadcast_like,
    reshape_groups,
)
from modules.norms.batchnorm import BatchStatisticsNorm
from modules.norms.rmsnorm import rms_normalize
from modules.options import Option
from modules.statistics import BACKWARD_STATS, STATS, at_least_float32, is_training, token_mean


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def power_scale(
    eps: float, ema_decay: float, x, running_gz, mean_square, batch_mean_square
) -> jax.Array:
    """z = x / sqrt(mean_square + eps), with PowerNorm's backward pass instead of the exact one.

    Given g = dL/dz [..., D]: h = g - (1 - ema_decay) e z with e = running_gz [D]; dx = h /
    sqrt(batch_mean_square + eps); and the cotangent of running_gz is its next value e + mean(h z),
    the mean over tokens, padding too. The mean squares are constants here. The code divides dx by
    the batch's; arXiv:2003.07845, algorithm 2, by the running one. With ema_decay = 1, dx = g /
    sqrt(batch_mean_square + eps).

    Args:
      eps: added under the root.
      ema_decay: decay of running_gz.
      x: [..., D].
      running_gz: the running mean of h z, [D].
      mean_square: the mean square that divides x, [D].
      batch_mean_square: the mean square of this batch, [D].
    """
    return x * broadcast_like(jax.lax.rsqrt(mean_square + eps), x)


def _power_forward(eps, ema_decay, x, running_gz, mean_square, batch_mean_square):
    z = power_scale(eps, ema_decay, x, running_gz, mean_square, batch_mean_square)
    return z, (z, running_gz, batch_mean_square)


def _power_backward(eps, ema_decay, residuals, g):
    z, running_gz, batch_mean_square = residuals
    h = g - (1 - ema_decay) * broadcast_like(running_gz, g) * z
    next_gz = running_gz + token_mean(h * z, None)
    zero = jnp.zeros_like(batch_mean_square)
    return h * broadcast_like(jax.lax.rsqrt(batch_mean_square + eps), g), next_gz, zero, zero


power_scale.defvjp(_power_forward, _power_backward)


class PowerNorm(Norm):
    """PowerNorm (arXiv:2003.07845): `y = g s / sqrt(phi + eps) + b with s = x / rms(x)`.

    `rms(x)` is taken in each of `groups` groups of a token's features; the authors' translation
    models have as many groups as heads. `phi` [D] is the mean square of `s` over tokens: of the
    current batch in the first `warmup` updates, later and in evaluation its running average. An
    update moves the average by `1 - ema_decay` of the way to the batch's value; during warm-up it
    first replaces the average by the plain mean of all batches so far. The backward pass is not the
    exact derivative but that of `modules.norms.running.power_scale`. Source: the paper and its code
    (MaskPowerNorm).
    """

    eps: Eps = 1e-5
    groups: Groups = 1
    warmup: WarmupUpdates = 10_000
    ema_decay: EmaDecay = 0.9
    valid: jax.Array | None = None

    leaks = BatchStatisticsNorm.leaks
    forward_mode = False

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1:]
        phi = self.variable(STATS, 'mean_square', jnp.ones, features)
        count = self.variable(STATS, 'updates', jnp.zeros, (), jnp.int32)
        running_gz = self.variable(BACKWARD_STATS, 'running_gz', jnp.zeros, features)
        s = rms_normalize(reshape_groups(x, self.groups), self.eps).reshape(x.shape)
        if is_training(self):
            update = count.value + 1
            batch_mean_square = jax.lax.stop_gradient(token_mean(s**2, self.valid))
            mean_square = jnp.where(update <= self.warmup, batch_mean_square, phi.value)
            z = power_scale(
                self.eps, self.ema_decay, s, running_gz.value, mean_square, batch_mean_square
            )
            # During warm-up phi first becomes the plain mean of all batches, this one included.
            plain = phi.value + (batch_mean_square - phi.value) / update
            average = jnp.where(update < self.warmup, plain, phi.value)
            phi.value = self.ema_decay * average + (1 - self.ema_decay) * batch_mean_square
            count.value = update
        else:
            z = s * broadcast_like(jax.lax.rsqrt(phi.value + self.eps), s)
        return apply_affine(self, z).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def unified_scale(
    eps: float, ema_decay: float, warmup: int, x, scale, statistics, constants
) -> jax.Array:
    """z scale with z = x / sqrt(m + eps), with Unified Normalization's backward pass.

    Given dy: g = dy scale r with r = compensation; G = mean(g z) over tokens, padding too, enters
    slot update mod W of a window [W, D] (if skip, the running value does). Its mean G' over the
    window (G itself if update <= W or update < warmup or skip) moves the running value e by (1 -
    ema_decay) of the way; dx = (g - e' z) / sqrt(m + eps), with G' instead of e' if skip. dscale =
    sum(dy r z).

    Args:
      eps: added under the root.
      ema_decay: decay of the running value.
      warmup: updates without the window.
      x: [..., D].
      scale: the gain, [D].
      statistics: (window, e); their cotangents are their next values.
      constants: (m [D], compensation [D], update, skip), which have no gradient.
    """
    return x * broadcast_like(jax.lax.rsqrt(constants[0] + eps) * scale, x)


def _unified_forward(eps, ema_decay, warmup, x, scale, statistics, constants):
    z = x * broadcast_like(jax.lax.rsqrt(constants[0] + eps), x)
    return z * broadcast_like(scale, x), (z, scale, statistics, constants)


def _unified_backward(eps, ema_decay, warmup, residuals, dy):
    z, scale, (window, running), constants = residuals
    mean_square, compensation, update, skip = constants
    length = window.shape[0]
    g = dy * broadcast_like(scale * compensation, dy)
    batch_gz = token_mean(g * z, None)
    slot = jnp.mod(update, length).astype(jnp.int32)
    window = jnp.asarray(window).at[slot].set(jnp.where(skip > 0, running, batch_gz))
    ignores_window = (update <= length) | (update < warmup) | (skip > 0)
    mean = jnp.where(ignores_window, batch_gz, jnp.mean(window, 0))
    running = ema_decay * running + (1 - ema_decay) * mean
    correction = broadcast_like(jnp.where(skip > 0, mean, running), z)
    dx = (g - correction * z) * broadcast_like(jax.lax.rsqrt(mean_square + eps), z)
    axes = tuple(range(dy.ndim - 1))
    dscale = jnp.sum(dy * z, axes) * compensation
    return dx, dscale, (window, running), jax.tree.map(jnp.zeros_like, constants)


unified_scale.defvjp(_unified_forward, _unified_backward)


class UnifiedNorm(Norm):
    """Unified normalization (arXiv:2208.01313): `y = g x / sqrt(m + eps) + b`.

    `m` [D] is the geometric mean, over the last `window` batches, of the mean square over tokens.
    In three cases it is the mean square of the current batch instead: while there are fewer
    batches, in the first `warmup` updates, and for outliers if `filter_outliers` is set. Evaluation
    uses the running mean `M`, which each update moves by `1 - ema_decay` of the way to `m`. The
    layer is then an affine map per channel, and folds into the next matrix (`modules.norms.fold`).

    The backward pass is that of `modules.norms.running.unified_scale`. After update
    `max(1000, warmup)` it multiplies gradients by `sqrt(m + eps) / sqrt(M + eps)`, limited to the
    range from 1/5 to 5.

    A batch is an outlier if, with its mean square in the window, the arithmetic mean of any channel
    exceeds the geometric mean by more than `window * V`. `V` is the unbiased variance of the square
    roots of all entries in the window before this batch. The running mean then replaces the outlier
    in the window. The authors filter for vision and advise against it for language. Source: the
    paper and its code (UN1d).
    """

    eps: Eps = 1e-5
    window: Annotated[int, Option('batches in the geometric mean', 1)] = 4
    warmup: WarmupUpdates = 4000
    ema_decay: EmaDecay = 0.9
    filter_outliers: Annotated[bool, Option('whether to ignore outlier batches')] = False
    valid: jax.Array | None = None

    leaks = BatchStatisticsNorm.leaks
    forward_mode = False

    @nn.compact
    def __call__(self, x):
        x32, features = at_least_float32(x), x.shape[-1]
        running = self.variable(STATS, 'mean_square', jnp.ones, (features,))
        squares = self.variable(STATS, 'window', jnp.zeros, (self.window, features))
        count = self.variable(STATS, 'updates', jnp.zeros, (), jnp.int32)
        skipped = self.variable(STATS, 'skipped', jnp.zeros, (), jnp.int32)
        window_gz = self.variable(BACKWARD_STATS, 'window_gz', jnp.zeros, (self.window, features))
        running_gz = self.variable(BACKWARD_STATS, 'running_gz', jnp.zeros, (features,))
        scale = self.vector('scale', features, 1.0)
        if is_training(self):
            update = count.value + 1
            mean_square, squares.value, skip = self.mean_square(
                x32, squares.value, running.value, update
            )
            compensation = jnp.sqrt((mean_square + self.eps) / (running.value + self.eps))
            uncompensated = (update <= max(1000, self.warmup)) | skip
            compensation = jnp.where(uncompensated, 1.0, jnp.clip(compensation, 1 / 5, 5.0))
            running.value = self.ema_decay * running.value + (1 - self.ema_decay) * mean_square
            count.value = update
            # A window of 1 always skips, and has no outliers to count.
            skipped.value = skipped.value + (skip & (self.window > 1))
            flags = update.astype(jnp.float32), skip.astype(jnp.float32)
            constants = mean_square, compensation, *flags
            statistics = window_gz.value, running_gz.value
            options = self.eps, self.ema_decay, self.warmup
            y = unified_scale(*options, x32, scale, statistics, constants)
        else:
            y = x32 * broadcast_like(jax.lax.rsqrt(running.value + self.eps) * scale, x)
        return (y + broadcast_like(self.vector('bias', features, 0.0), y)).astype(x.dtype)

    def mean_square(
        self, x: jax.Array, window: jax.Array, running: jax.Array, update: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (m [D], the next window, whether to skip the batch's statistics).

        Args:
          x: [..., D].
          window: mean squares of the last batches, [window, D].
          running: the running mean square, [D].
          update: the number of this update, from 1.
        """
        batch_mean_square = jax.lax.stop_gradient(token_mean(x**2, self.valid))
        slot = jnp.mod(update, self.window)
        spread = jnp.var(jnp.sqrt(window), ddof=1)
        window = jnp.asarray(window).at[slot].set(batch_mean_square)
        geometric = jnp.exp(jnp.mean(jnp.log(window), 0))
        skip = jnp.bool_(self.window == 1)
        if self.filter_outliers:
            exceeds_spread = jnp.any(jnp.mean(window, 0) - geometric > spread * self.window)
            is_outlier = (update >= self.warmup) & exceeds_spread
            window = jnp.where(is_outlier, window.at[slot].set(running), window)
            skip = skip | is_outlier
        ignores_window = (update <= self.window) | (update < self.warmup) | skip
        return jnp.where(ignores_window, batch_mean_square, geometric), window, skip
