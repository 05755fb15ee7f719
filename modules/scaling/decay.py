"""Weight-decay rules: the share of a weight that a step removes.

A rule with `in_gradient` removes nothing: its value times the weight is added to the gradient.
`times_lr`: the share is proportional to learning rate times weight_decay. `reads_strength`: it
depends on the size of weight_decay, which otherwise only turns decay on.
"""

import sys
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from modules.facts import accept_any, row_decorator
from modules.options import Option
from modules.scaling.parametrization import Growth

decay_row = row_decorator(in_gradient=False, times_lr=True, reads_strength=True, check=accept_any)


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
    """Decoupled decay of AdamW in PyTorch and optax: `s = eta f lambda c`.

    `c` is the decay factor of the parametrisation, which compensates its factor of the learning
    rate. AdamW's paper (arXiv:1711.05101) has no learning rate in its decay: that is `independent`.
    """
    return decay.lr * decay.fraction * decay.weight_decay * decay.factor


@decay_row(times_lr=False)
def independent(decay: DecayInputs) -> jax.Array:
    """Decay independent of the learning rate (arXiv:1711.05101): `s = f lambda`.

    This is algorithm 2 of AdamW's paper, with the schedule's multiplier `eta_t = f` and
    `alpha = eta`:

    `w <- w - eta_t (alpha m / (sqrt(v) + epsilon) + lambda w)`

    The name is that of arXiv:2309.14322, section 3.2.2.
    """
    return decay.fraction * decay.weight_decay


@decay_row()
def constant(decay: DecayInputs) -> jax.Array:
    """The same decay for any parametrisation (arXiv:2510.15262): `s = eta f lambda`.

    `eta` is the learning rate of the parameter, so under muP the share falls with width. The paper
    compares this rule with others.
    """
    return decay.lr * decay.fraction * decay.weight_decay


@decay_row()
def sqrt_width(decay: DecayInputs) -> jax.Array:
    """Decay that grows with the root of the width (arXiv:2510.15262): `s = eta f lambda sqrt(m)`.

    This applies to hidden matrices, and `m` is the growth of their fan_in. With learning rates of
    `1 / m`, as muP has them, their largest singular value then does not change with width; vectors
    do not decay. For embeddings and readout, whose rates do not fall, the rule is `constant`.
    """
    return constant(decay) * (decay.growth.fan_in**0.5 if decay.hidden else 1.0)


@decay_row()
def linear_width(decay: DecayInputs) -> jax.Array:
    """Decay that grows with the width (arXiv:2510.15262): `s = eta f lambda m`.

    This applies to hidden matrices, and `m` is the growth of their fan_in; for other parameters the
    rule is `constant`. With learning rates of `1 / m`, the share of a weight does not change with
    width. The paper compares this rule with others.
    """
    return constant(decay) * (decay.growth.fan_in if decay.hidden else 1.0)


@decay_row(times_lr=False, reads_strength=False)
def timescale(
    decay: DecayInputs,
    *,
    decay_timescale: Annotated[
        float,
        Option('averaging time of the weights, as a multiple of the run', 1e-6, sys.float_info.max),
    ] = 1.0,
) -> jax.Array:
    """Weights as averages of the updates of a fixed time (arXiv:2405.13698): `s = f / (tau T)`.

    `T` is the number of steps of the run, and `tau` is `decay_timescale`: weights are averages of
    updates over `tau T` steps. The learning rate and `weight_decay` do not matter, except that
    `weight_decay=0` turns decay off. The paper finds that the time in epochs stays the same as
    model and data grow; a run of a single pass is an epoch. The default is our choice.
    """
    share = decay.fraction / (decay_timescale * decay.steps)
    # `where`, not `if`: weight_decay may be a tracer.
    return jnp.where(jnp.asarray(decay.weight_decay) > 0, share, 0.0)


@decay_row()
def adamc(decay: DecayInputs) -> jax.Array:
    """AdamC, for matrices that a norm follows (arXiv:2506.02285): `s = eta f^2 lambda c`.

    This applies to hidden matrices; for other parameters the rule is `decoupled`, and `c` is its
    factor. The second factor `f` keeps the ratio of gradient to weight the same to the end of the
    schedule.
    """
    share = decoupled(decay)
    return share * decay.fraction if decay.hidden else share


@decay_row(in_gradient=True, times_lr=False)
def l2(decay: DecayInputs) -> jax.Array:
    """Penalty of squared weights, in the gradient (arXiv:1711.05101): `g <- g + lambda w`.

    No share is removed: this is the gradient of the penalty `lambda |w|^2 / 2`. Adam divides it as
    it divides the gradient; AdamW is decoupled from it.
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
