"""Removal of norms from a trained model, one after the other (arXiv:2507.02559).

A model that is fine-tuned with the statistics of a norm held at a constant learns to do without it.
An affine map is left of the norm, which `modules.norms.fold` takes into the matrix after it.
"""

from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.norms.base import EmaDecay, Eps, HasBias, HasScale, Norm, apply_affine
from modules.options import Option
from modules.statistics import STATS, at_least_float32, is_training, token_mean


def removal_update(start: int, gap: int, order: jax.Array | int) -> jax.Array | int:
    """Returns after how many updates the norm in place `order`, from 0, is removed."""
    return start + gap * order


class _Removal(Norm):
    """y = c(x) / d * scale (+ bias), d = sqrt(mean(c(x)^2) + eps) until the norm is removed.

    c(x) is x - mean(x) where the norm is `centred`, else x. From update removal_start +
    removal_gap * order on, d is the running mean over tokens of its earlier values, which each
    update before has moved by 1 - ema_decay of the way. `order` is the norm's place: the norms of
    the MLPs from the first layer on, then those of attention, then the final one, as published. A
    microbatch is an update. The parameters are those of the norm that it removes, so that training
    goes on from a checkpoint of that norm (train.init_from).

    The running mean is frozen as in the code beside the paper (with EXP_RECOMPUTE_STD_ON_REAL).
    Ours is simpler: it has one constant for all positions, where the code keeps one of their own
    for the first position and end-of-text until the end; it removes the norms of queries, keys and
    values at once, where the code does values later; and it has no auxiliary loss that evens out
    the last stream.
    """

    eps: Eps = 1e-6
    scale: HasScale = True
    bias: HasBias = True
    ema_decay: EmaDecay = 0.9
    removal_start: Annotated[
        int, Option('updates before the first norm is removed', 1, time_unit='updates')
    ] = 20
    removal_gap: Annotated[
        int, Option('updates from one removal to the next', 0, time_unit='updates')
    ] = 2
    order: jax.Array | int = 0
    valid: jax.Array | None = None

    centred: ClassVar[bool] = False

    @staticmethod
    def lasts(blocks: int, removal_start: int, removal_gap: int) -> int:
        """Returns after how many updates the last norm of a model of `blocks` is removed."""
        return removal_update(removal_start, removal_gap, 2 * blocks)

    @nn.compact
    def __call__(self, x):
        constant = self.variable(STATS, 'deviation', jnp.ones, ())
        updates = self.variable(STATS, 'updates', jnp.zeros, (), jnp.int32)
        x32 = at_least_float32(x)
        if self.centred:
            x32 = x32 - jnp.mean(x32, -1, keepdims=True)
        deviation = jnp.sqrt(jnp.mean(x32**2, -1, keepdims=True) + self.eps)
        removed = updates.value >= removal_update(self.removal_start, self.removal_gap, self.order)
        if is_training(self):
            seen = jax.lax.stop_gradient(token_mean(deviation, self.valid)[0])
            kept = self.ema_decay * constant.value + (1 - self.ema_decay) * seen
            kept = jnp.where(updates.value == 0, seen, kept)
            constant.value, before = jnp.where(removed, constant.value, kept), constant.value
            updates.value = updates.value + 1
        else:
            before = constant.value
        y = x32 / jnp.where(removed, before, deviation)
        return apply_affine(self, y, self.scale, self.bias).astype(x.dtype)


class LayerNormRemoval(_Removal):
    """LayerNorm whose deviation becomes a constant, one norm after another (arXiv:2507.02559).

    Taking off the mean is linear and stays.
    """

    centred = True


class RMSNormRemoval(_Removal):
    """RMSNorm whose rms becomes a constant, one norm after another (arXiv:2507.02559)."""

    bias: HasBias = False
