"""Learning-rate schedules: the fraction of the peak at each step.

Steps count from 0, and step t of a warm-up of w has (t + 1) / w, so that the first step is not
wasted. A decay reaches its end, final_lr_fraction, at the last step, t = steps - 1: with 0 the last
step changes no weight, and n - 1 of n steps train. In optax and nanoGPT a decay ends a step after
the last, and optax's warm-up begins with a step at 0 instead. All numbers may be tracers: lengths
are data, and pieces are joined by `where`.

Below, p is the progress of the decay, from 0 to 1, and r is final_lr_fraction.
"""

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.facts import accept_any, longest_horizon, row_decorator
from modules.optim.base import up_to_1
from modules.options import Option

Warmup = Annotated[
    int, Option('steps of linear warm-up', 0, math.inf, time_unit='steps', traced=True)
]
Cycles = Annotated[
    int, Option('number of equal cycles, each decaying from the peak', 1, traced=True)
]
End = Annotated[float, up_to_1('learning rate at the last step, as a share of the peak')]

# decays: whether the rate falls before the end. lasts: see `modules.facts.longest`.
schedule_row = row_decorator(decays=True, lasts=longest_horizon, check=accept_any)


def _warmup(step, warmup_steps):
    return jnp.minimum(1.0, (step + 1) / jnp.maximum(warmup_steps, 1.0))


def _progress(step, start, stop):
    """Returns 0 up to `start` and 1 in the last step, stop - 1, even if stop is near start."""
    return jnp.clip((step + 1 - start) / jnp.clip(stop - start, 1e-6, None), 0.0, 1.0)


def _cosine(progress, final):
    return final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


@schedule_row(decays=False)
def constant(step: jax.Array, steps: Any, *, warmup_steps: Warmup = 0) -> jax.Array:
    """Constant: `f = 1`."""
    return _warmup(step, warmup_steps)


def check_cycles(recipe: Any, part: Any) -> None:
    """Raises ValueError if a cycle would have fewer than two steps."""
    cycles, steps = part.options['cycles'], recipe.train.steps - part.options['warmup_steps']
    if 2 * cycles > max(steps, 2):
        raise ValueError(
            f'optim.cycles must leave at least two steps per cycle; got {cycles} cycles for the '
            f'{steps} steps after the warm-up. Largest that works: {max(steps // 2, 1)}.'
        )


@schedule_row(check=check_cycles)
def cyclic(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: Warmup = 0,
    final_lr_fraction: End = 0.0,
    cycles: Cycles = 4,
) -> jax.Array:
    """SGDR, several cosine decays (arXiv:1608.03983): `f = r + (1 - r) (1 + cos(pi p)) / 2`.

    `p` is the progress of a cycle, of `cycles` cycles of equal length. A cycle of a whole number of
    steps ends at `r`, and so does the run. A step shared by two cycles belongs to the cycle that
    contains its middle.
    """
    length = jnp.maximum(steps - warmup_steps, 1.0) / cycles
    n_decayed = step + 1 - warmup_steps
    cycle = jnp.clip(jnp.floor((n_decayed - 0.5) / length), 0.0, cycles - 1.0)
    progress = jnp.clip(n_decayed / length - cycle, 0.0, 1.0)
    return _warmup(step, warmup_steps) * _cosine(progress, final_lr_fraction)


def check_final_lr(recipe: Any, part: Any) -> None:
    """Raises ValueError for an end of 0, which no factor reaches."""
    if part.options['final_lr_fraction'] == 0:
        raise ValueError(
            f'{part} multiplies the learning rate by a constant factor per step and never reaches '
            '0, so optim.final_lr_fraction must be above 0; got 0. Leave it out, set it to a '
            'value such as 0.01, or choose optim.schedule=linear, which reaches 0.'
        )


@schedule_row(check=check_final_lr)
def exponential(
    step: jax.Array, steps: Any, *, warmup_steps: Warmup = 0, final_lr_fraction: End = 0.1
) -> jax.Array:
    """Exponential decay (arXiv:1512.00567): `f = r^p`.

    Each step multiplies the rate by the same factor, so `r` must be above 0. The paper has a factor
    of 0.94 every two epochs; the default end, a tenth of the peak, is our choice.
    """
    progress = _progress(step, warmup_steps, steps)
    return _warmup(step, warmup_steps) * jnp.power(final_lr_fraction, progress)


@schedule_row()
def inverse_sqrt(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: Warmup = 0,
    inverse_sqrt_steps: Annotated[
        int,
        Option('steps before the decay begins', 1, math.inf, time_unit='steps', traced=True),
    ] = 10_000,
) -> jax.Array:
    """Inverse square root, as in T5 (arXiv:1910.10683): `f = sqrt(k / max(t, k))`.

    `t` is the number of the step, from 1, and `k` is `inverse_sqrt_steps`, or `warmup_steps` if
    that is larger. T5 has no warm-up: its rate is `1 / sqrt(max(t, k))`, with a peak of
    `1 / sqrt(k)`. If `k` equals the warm-up, this is the schedule of arXiv:1706.03762. The schedule
    has no end, so that a run can be continued.
    """
    flat_steps = jnp.maximum(inverse_sqrt_steps, warmup_steps)
    return _warmup(step, warmup_steps) * jnp.sqrt(flat_steps / jnp.maximum(step + 1, flat_steps))


@schedule_row()
def linear(
    step: jax.Array, steps: Any, *, warmup_steps: Warmup = 0, final_lr_fraction: End = 0.0
) -> jax.Array:
    """Linear decay (arXiv:2502.15938): `f = 1 - (1 - r) p`.

    The paper finds it best to decay to 0, the default.
    """
    progress = _progress(step, warmup_steps, steps)
    return _warmup(step, warmup_steps) * (1 - (1 - final_lr_fraction) * progress)


@schedule_row()
def power(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: Warmup = 0,
    final_lr_fraction: End = 0.0,
    decay_power: Annotated[float, Option('k in (1 - p)^k', 1e-3, 1e3, traced=True)] = 0.9,
) -> jax.Array:
    """Polynomial decay, "poly" (arXiv:1606.00915): `f = r + (1 - r) (1 - p)^k`.

    `k` is `decay_power`.
    """
    remaining = 1 - _progress(step, warmup_steps, steps)
    decaying = (1 - final_lr_fraction) * jnp.power(remaining, decay_power)
    return _warmup(step, warmup_steps) * (final_lr_fraction + decaying)


@schedule_row()
def warmup_cosine(
    step: jax.Array, steps: Any, *, warmup_steps: Warmup = 0, final_lr_fraction: End = 0.0
) -> jax.Array:
    """Cosine decay (arXiv:1608.03983): `f = r + (1 - r) (1 + cos(pi p)) / 2`.

    This is one cycle of the paper's schedule.
    """
    progress = _progress(step, warmup_steps, steps)
    return _warmup(step, warmup_steps) * _cosine(progress, final_lr_fraction)


DECAY_SHAPES = {'linear': lambda progress: progress, 'sqrt': jnp.sqrt}  # of the way to the end


@schedule_row()
def warmup_stable_decay(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: Warmup = 0,
    final_lr_fraction: End = 0.0,
    decay_fraction: Annotated[float, up_to_1('share of the run that decays, at its end')] = 0.2,
    decay_shape: Annotated[
        str, Option('decay by 1 - p, or by 1 - sqrt(p)', choices=tuple(DECAY_SHAPES))
    ] = 'linear',
) -> jax.Array:
    """WSD, warm-up, stable, decay (arXiv:2404.06395): the peak, then a decay in the last part of
    the run.

    - `decay_shape=linear`: `f = 1 - (1 - r) p`.
    - `decay_shape=sqrt` (arXiv:2405.18392): `f = 1 - (1 - r) sqrt(p)`.

    The decay takes the share `decay_fraction` of the steps.
    """
    progress = _progress(step, steps * (1 - decay_fraction), steps)
    decay = DECAY_SHAPES[decay_shape](progress)
    return _warmup(step, warmup_steps) * (1 - (1 - final_lr_fraction) * decay)


SCHEDULES = {
    'constant': constant,
    'cyclic': cyclic,
    'exponential': exponential,
    'inverse_sqrt': inverse_sqrt,
    'linear': linear,
    'power': power,
    'warmup_cosine': warmup_cosine,
    'warmup_stable_decay': warmup_stable_decay,
}
