"""Learning-rate schedules: the fraction of the peak at each step.

Steps count from 0, and step t of a warm-up of w has (t + 1) / w, so that the first step is not
wasted. A decay ends at the last step, t = steps - 1, and there it is final_lr_fraction: with
0, the default, the last step changes no weight, and of n steps n - 1 train. optax and nanoGPT
would get there one step after the last, and optax's warm-up begins with a step at 0 instead. All
numbers may be tracers: lengths are data, and pieces are joined by `where`.
"""

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.options import Option

WarmupSteps = Annotated[
    int, Option('steps of linear warm-up', 0, math.inf, counted_in='steps', traced=True)
]
FinalFraction = Annotated[float, Option('of the peak, at the last step', 0, 1, traced=True)]


def _warmup(step, warmup_steps):
    return jnp.minimum(1.0, (step + 1) / jnp.maximum(warmup_steps, 1.0))


def _progress(step, start, stop):
    """0 up to `start`, 1 from `stop` on; the last step of the run is stop - 1."""
    return jnp.clip((step + 1 - start) / jnp.maximum(stop - start, 1.0), 0.0, 1.0)


def constant(step: jax.Array, steps: Any, *, warmup_steps: WarmupSteps = 0) -> jax.Array:
    """Linear warm-up, then 1."""
    del steps
    return _warmup(step, warmup_steps)


def warmup_cosine(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: WarmupSteps = 0,
    final_lr_fraction: FinalFraction = 0.0,
) -> jax.Array:
    """Linear warm-up, then r + (1 - r) (1 + cos(pi p)) / 2 (arXiv:1608.03983, one cycle).

    It reaches r = final_lr_fraction at the last step.
    """
    progress = _progress(step, warmup_steps, steps)
    rest = (1 - final_lr_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return _warmup(step, warmup_steps) * (final_lr_fraction + rest)


def warmup_stable_decay(
    step: jax.Array,
    steps: Any,
    *,
    warmup_steps: WarmupSteps = 0,
    final_lr_fraction: FinalFraction = 0.0,
    decay_fraction: Annotated[float, Option('of the steps, the last ones', 0, 1, traced=True)] = (
        0.2
    ),
) -> jax.Array:
    """Linear warm-up, 1, then linearly to final_lr_fraction (WSD, arXiv:2404.06395).

    The decay takes the last decay_fraction of the steps.
    """
    progress = _progress(step, steps * (1 - decay_fraction), steps)
    return _warmup(step, warmup_steps) * (1 - (1 - final_lr_fraction) * progress)
