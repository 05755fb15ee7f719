"""Weight-decay rules: the share of a weight that is taken off in one step."""

from typing import Any, NamedTuple

import jax

from modules.scaling.parametrization import Growth


class Decay(NamedTuple):
    """What a rule knows of a parameter; numbers may be tracers.

    weight_decay, lr: as configured; fraction: what the schedule makes of the learning rate now;
    steps: how long the run is; growth: against the base model.
    """

    weight_decay: Any
    lr: Any
    fraction: Any
    steps: Any
    growth: Growth = Growth()


def decoupled(decay: Decay) -> jax.Array:
    """lr * fraction * weight_decay, as PyTorch and optax have AdamW.

    AdamW's paper (arXiv:1711.05101) has no learning rate in its decay: that is `independent`.
    """
    return decay.lr * decay.fraction * decay.weight_decay


def independent(decay: Decay) -> jax.Array:
    """fraction * weight_decay: with the schedule, whatever its peak.

    Algorithm 2 of arXiv:1711.05101, w -= eta_t (alpha m / (sqrt(v) + eps) + lambda w), with the
    schedule's multiplier eta_t = fraction and alpha = lr; named as in arXiv:2309.14322, 3.2.2.
    """
    return decay.fraction * decay.weight_decay
