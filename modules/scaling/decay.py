"""Weight-decay rules: the share of each weight taken off in one step.

All arguments may be tracers; `lr` is the peak, `fraction` what the schedule makes of it now.
"""

import jax


def decoupled(weight_decay: jax.Array, lr: jax.Array, fraction: jax.Array) -> jax.Array:
    """lr * fraction * weight_decay, as PyTorch and optax have AdamW (arXiv:1711.05101, alg. 2)."""
    return lr * fraction * weight_decay


def independent(weight_decay: jax.Array, lr: jax.Array, fraction: jax.Array) -> jax.Array:
    """fraction * weight_decay: with the schedule, whatever its peak (arXiv:2309.14322, 3.2.2)."""
    del lr
    return fraction * weight_decay
