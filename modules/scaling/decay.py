"""Weight-decay rules: the share of a weight that is taken off in one step.

Those with `in_gradient` take nothing off: what they return is added to the gradient, times the
weight.
"""

import sys
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from modules.facts import demands_nothing, marks
from modules.options import Option
from modules.scaling.growth import Growth

# in_gradient: what it returns belongs into the gradient.
decay_row = marks(in_gradient=False, check=demands_nothing)


class Decay(NamedTuple):
    """What a rule knows of a parameter; numbers may be tracers.

    weight_decay: as configured; lr: the parameter's own at the peak; fraction: what the schedule
    makes of it now; steps: how long the run is; growth: against the base model; factor: what the
    parametrisation asks for, never 0 here; hidden: whether it is a hidden matrix.
    """

    weight_decay: Any
    lr: Any
    fraction: Any
    steps: Any
    growth: Growth = Growth()
    factor: float = 1.0
    hidden: bool = True


@decay_row()
def decoupled(decay: Decay) -> jax.Array:
    """lr * fraction * weight_decay * factor, as PyTorch and optax have AdamW where the factor is 1.

    The factor is that of the parametrisation, against its factor of the learning rate.

    AdamW's paper (arXiv:1711.05101) has no learning rate in its decay: that is `independent`.
    """
    return decay.lr * decay.fraction * decay.weight_decay * decay.factor


@decay_row()
def independent(decay: Decay) -> jax.Array:
    """fraction * weight_decay: with the schedule, whatever the learning rate.

    Algorithm 2 of arXiv:1711.05101, w -= eta_t (alpha m / (sqrt(v) + eps) + lambda w), with the
    schedule's multiplier eta_t = fraction and alpha = lr; named as in arXiv:2309.14322, 3.2.2.
    """
    return decay.fraction * decay.weight_decay


@decay_row()
def constant(decay: Decay) -> jax.Array:
    """lr * fraction * weight_decay, whatever the parametrisation asks.

    lr is the parameter's own: under muP the share falls with width (arXiv:2510.15262 compares it).
    """
    return decay.lr * decay.fraction * decay.weight_decay


@decay_row()
def sqrt_width(decay: Decay) -> jax.Array:
    """`constant`, of hidden matrices times sqrt(m), m the growth of fan_in (arXiv:2510.15262).

    With learning rates of 1 / m, as muP has them for hidden matrices, their largest singular value
    then does not change with width; vectors do not decay. Embeddings and readout, whose rates do
    not fall, are as in `constant`.
    """
    return constant(decay) * (decay.growth.fan_in**0.5 if decay.hidden else 1.0)


@decay_row()
def linear_width(decay: Decay) -> jax.Array:
    """`constant`, of hidden matrices times m, the growth of fan_in (compared in arXiv:2510.15262).

    With rates of 1 / m the share of a weight does not change with width.
    """
    return constant(decay) * (decay.growth.fan_in if decay.hidden else 1.0)


@decay_row()
def timescale(
    decay: Decay,
    *,
    decay_timescale: Annotated[
        float, Option('that weights are averages over, in runs', 1e-6, sys.float_info.max)
    ] = 1.0,
) -> jax.Array:
    """fraction / (decay_timescale * steps): weights are averages of updates over that many steps.

    The learning rate and weight_decay do not matter, but that with a weight_decay of 0 there is
    none. arXiv:2405.13698 finds that the time in epochs is what stays the same as model and data
    grow; a run of one pass is an epoch. The default is this module's.
    """
    share = decay.fraction / (decay_timescale * decay.steps)
    return jnp.where(jnp.asarray(decay.weight_decay) > 0, share, 0.0)


@decay_row()
def adamc(decay: Decay) -> jax.Array:
    """lr * fraction^2 * weight_decay of hidden matrices, `decoupled` of the others.

    With the schedule's fraction once more the ratio of gradient to weight stays the same to the end
    of the schedule, for matrices that a norm follows (AdamC, arXiv:2506.02285).
    """
    share = decoupled(decay)
    return share * decay.fraction if decay.hidden else share


@decay_row(in_gradient=True)
def l2(decay: Decay) -> jax.Array:
    """weight_decay, in the gradient: Adam divides it as it divides the gradient.

    The penalty weight_decay / 2 |w|^2; what AdamW is decoupled from (arXiv:1711.05101).
    """
    return jnp.asarray(decay.weight_decay)


DECAY_RULES = {
    'decoupled': decoupled,
    'adamc': adamc,
    'constant': constant,
    'independent': independent,
    'l2': l2,
    'linear_width': linear_width,
    'sqrt_width': sqrt_width,
    'timescale': timescale,
}
