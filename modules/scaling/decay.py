"""Weight-decay rules: the share of each weight taken off in one step.

All arguments may be tracers; `lr` is the peak and `lr_now` what the schedule makes of it.
"""

import jax


def decoupled(weight_decay: jax.Array, lr_now: jax.Array, lr: jax.Array) -> jax.Array:
    """lr_now * weight_decay, as PyTorch and optax define AdamW (arXiv:1711.05101, algorithm 2)."""
    del lr
    return lr_now * weight_decay


def independent(weight_decay: jax.Array, lr_now: jax.Array, lr: jax.Array) -> jax.Array:
    """(lr_now / lr) * weight_decay: follows the schedule but not its peak (arXiv:2309.14322,
    3.2.2).
    """
    return lr_now / lr * weight_decay
