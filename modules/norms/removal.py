"""Removal of norms from a trained model, one after the other (arXiv:2507.02559).

A model that is fine-tuned with a norm's statistics held constant learns to do without them. The
norm is then an affine map, which `modules.norms.fold` folds into the matrix after it.
"""

from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.norms.base import EmaDecay, Eps, HasBias, HasScale, Norm, apply_affine
from modules.options import Option
from modules.statistics import STATS, at_least_float32, is_training, token_mean


def removal_update(start: int, gap: int, order: jax.Array | int) -> jax.Array | int:
    """Returns the number of updates before a norm is removed.

    Args:
      start: updates before the first removal.
      gap: updates from one removal to the next.
      order: the norm's place, from 0.
    """
    return start + gap * order


class _Removal(Norm):
    """Divides by a deviation that is frozen during training (arXiv:2507.02559):
    `y = g c(x) / d + b`.

    `c(x)` is `x - mean(x)` if the norm is `centred`, else `x`, and `d = sqrt(mean(c(x)^2) + eps)`
    until the norm is removed. From update `removal_start + removal_gap order` on, `d` is the
    running mean over tokens of its earlier values, which each update before moved by
    `1 - ema_decay` of the way. `order` is the norm's place, from 0: the norms of MLPs from the
    first layer on, then those of attention, then the final norm, as published. A microbatch counts
    as an update. The parameters are those of the removed norm, so that training continues from its
    checkpoint (`train.init_from`).

    The running mean is frozen as in the paper's code (with EXP_RECOMPUTE_STD_ON_REAL). Ours is
    simpler in three ways. It has one constant for all positions, while the code keeps separate
    constants for the first position and end-of-text until the end. It removes the norms of queries,
    keys and values together; the code removes the norms of values later. It has no auxiliary loss
    that evens out the last stream.
    """

    eps: Eps = 1e-6
    scale: HasScale = True
    bias: HasBias = True
    ema_decay: EmaDecay = 0.9
    removal_start: Annotated[
        int, Option('updates before the first norm is removed', 1, time_unit='updates')
    ] = 20
    removal_gap: Annotated[int, Option('updates between removals', 0, time_unit='updates')] = 2
    order: jax.Array | int = 0
    valid: jax.Array | None = None

    centred: ClassVar[bool] = False

    @staticmethod
    def lasts(  # ty: ignore[incompatible-attribute-override]  # callers pass its options by name
        blocks: int, removal_start: int, removal_gap: int
    ) -> int:
        """Returns the number of updates before the last norm of the model is removed.

        Args:
          blocks: blocks of the model.
          removal_start: updates before the first removal.
          removal_gap: updates from one removal to the next.
        """
        return int(removal_update(removal_start, removal_gap, 2 * blocks))

    @nn.compact
    def __call__(self, x):
        constant = self.variable(STATS, 'deviation', jnp.ones, ())
        updates = self.variable(STATS, 'updates', jnp.zeros, (), jnp.int32)
        x32 = at_least_float32(x)
        if self.centred:
            x32 = x32 - jnp.mean(x32, -1, keepdims=True)
        deviation = jnp.sqrt(jnp.mean(x32**2, -1, keepdims=True) + self.eps)
        is_removed = updates.value >= removal_update(
            self.removal_start, self.removal_gap, self.order
        )
        if is_training(self):
            batch_deviation = jax.lax.stop_gradient(token_mean(deviation, self.valid)[0])
            running = self.ema_decay * constant.value + (1 - self.ema_decay) * batch_deviation
            running = jnp.where(updates.value == 0, batch_deviation, running)  # not from the 1.0
            constant.value, used_constant = (
                jnp.where(is_removed, constant.value, running),
                constant.value,
            )
            updates.value = updates.value + 1
        else:
            used_constant = constant.value
        y = x32 / jnp.where(is_removed, used_constant, deviation)
        return apply_affine(self, y, self.scale, self.bias).astype(x.dtype)


class LayerNormRemoval(_Removal):
    """LayerNorm whose standard deviation is frozen (arXiv:2507.02559):
    `y = g (x - mean(x)) / d + b`.

    `d = sqrt(var(x) + eps)`, as in LayerNorm, until this norm is removed; later `d` is a constant,
    the running mean of its earlier values. Norms are removed one after another: norm `k` at update
    `removal_start + removal_gap k`, with the norms of MLPs first, then those of attention, then the
    final norm. The subtraction of the mean is linear and stays.
    """

    centred = True


class RMSNormRemoval(_Removal):
    """RMSNorm whose root mean square is frozen (arXiv:2507.02559): `y = g x / d`.

    `d = sqrt(mean(x^2) + eps)`, as in RMSNorm, until this norm is removed; later `d` is a constant,
    the running mean of its earlier values. Norms are removed in the order of `layernorm_removal`.
    """

    bias: HasBias = False
