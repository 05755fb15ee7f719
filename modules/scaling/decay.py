"""Weight-decay rules: the share of a weight that a step removes.

A rule with `in_gradient` removes nothing: its value times the weight is added to the gradient.
`times_lr`: the share is proportional to learning rate times weight_decay.
"""

import sys
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from modules.facts import accept_any, row_decorator
from modules.options import Option
from modules.scaling.parametrization import Growth

decay_row = row_decorator(in_gradient=False, times_lr=True, check=accept_any)


class DecayInputs(NamedTuple):
    """Inputs of a decay rule for a parameter; numbers may be tracers."""

    weight_decay: Any  #: as configured
    lr: Any  #: of the parameter, at the peak
    fraction: Any  #: learning rate now, over its peak
    steps: Any  #: length of the run
    growth: Growth = Growth()  #: of the parameter
    factor: float = 1.0  #: from the parametrisation; never 0 here
    hidden: bool = True  #: whether the parameter is a hidden matrix


@decay_row()
def decoupled(decay: DecayInputs) -> jax.Array:
    """lr * fraction * weight_decay * factor, as AdamW in PyTorch and optax if the factor is 1.

    The factor is the parametrisation's, and compensates its factor of the learning rate. AdamW's
    paper (arXiv:1711.05101) has no learning rate in its decay: that is `independent`.
    """
    return decay.lr * decay.fraction * decay.weight_decay * decay.factor


@decay_row(times_lr=False)
def independent(decay: DecayInputs) -> jax.Array:
    """fraction * weight_decay: with the schedule, whatever the learning rate.

    Algorithm 2 of arXiv:1711.05101, w -= eta_t (alpha m / (sqrt(v) + eps) + lambda w), with the
    schedule's multiplier eta_t = fraction and alpha = lr; named as in arXiv:2309.14322, 3.2.2.
    """
    return decay.fraction * decay.weight_decay


@decay_row()
def constant(decay: DecayInputs) -> jax.Array:
    """lr * fraction * weight_decay, for any parametrisation.

    lr is the parameter's: under muP the share falls with width (arXiv:2510.15262 compares it).
    """
    return decay.lr * decay.fraction * decay.weight_decay


@decay_row()
def sqrt_width(decay: DecayInputs) -> jax.Array:
    """`constant`, of hidden matrices times sqrt(m), m the growth of fan_in (arXiv:2510.15262).

    With learning rates of 1 / m, as muP has them for hidden matrices, their largest singular value
    then does not change with width; vectors do not decay. For embeddings and readout, with rates
    that do not fall, it is `constant`.
    """
    return constant(decay) * (decay.growth.fan_in**0.5 if decay.hidden else 1.0)


@decay_row()
def linear_width(decay: DecayInputs) -> jax.Array:
    """`constant`, of hidden matrices times m, the growth of fan_in (compared in arXiv:2510.15262).

    With rates of 1 / m the share of a weight does not change with width.
    """
    return constant(decay) * (decay.growth.fan_in if decay.hidden else 1.0)


@decay_row(times_lr=False)
def timescale(
    decay: DecayInputs,
    *,
    decay_timescale: Annotated[
        float,
        Option('averaging time of the weights, as a multiple of the run', 1e-6, sys.float_info.max),
    ] = 1.0,
) -> jax.Array:
    """fraction / (decay_timescale * steps): weights are averages of updates over that many steps.

    The learning rate and weight_decay do not matter, except that a weight_decay of 0 turns decay
    off. arXiv:2405.13698 finds that the time in epochs stays the same as model and data grow; a run
    of a single pass is an epoch. The default is our choice.
    """
    share = decay.fraction / (decay_timescale * decay.steps)
    # `where`, not `if`: weight_decay may be a tracer.
    return jnp.where(jnp.asarray(decay.weight_decay) > 0, share, 0.0)


@decay_row()
def adamc(decay: DecayInputs) -> jax.Array:
    """lr * fraction^2 * weight_decay of hidden matrices, `decoupled` of the others.

    The second factor of the schedule's fraction keeps the ratio of gradient to weight the same to
    the end of the schedule, for matrices that a norm follows (AdamC, arXiv:2506.02285).
    """
    share = decoupled(decay)
    return share * decay.fraction if decay.hidden else share


@decay_row(in_gradient=True, times_lr=False)
def l2(decay: DecayInputs) -> jax.Array:
    """weight_decay, in the gradient: Adam divides it as it divides the gradient.

    This is the penalty weight_decay / 2 |w|^2, from which AdamW is decoupled (arXiv:1711.05101).
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
