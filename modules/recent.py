"""The last values of a quantity, with which a step compares its own.

A window of 128 values that is read from half of them on, and 6 standard deviations for a spike, are
those of OLMo (github.com/allenai/OLMo-core, optim/skip_step_optimizer.py) and Levanter
(github.com/marin-community/levanter, optim/skipstep.py and clip_update_norm.py).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from modules.statistics import at_least_float32

# The smallest standard deviation, as in Levanter. Values that are all equal have none, and rounding
# would otherwise lie any number of them above the mean.
MIN_DEVIATION = 1e-6


class Recent(NamedTuple):
    """The last W values of each quantity, in a ring."""

    values: jax.Array  #: [..., W] float32
    count: jax.Array  #: number of values so far, int32


def init_recent(window: int, *shape: int) -> Recent:
    """Returns a window without values.

    Args:
      window: W, how many values it keeps.
      *shape: of the quantities.
    """
    return Recent(jnp.zeros((*shape, window), jnp.float32), jnp.int32(0))


def push(recent: Recent, value: jax.Array) -> Recent:
    """Returns the window with a value, in place of the oldest if it is full. Values that are not
    finite are left out, all together.

    Args:
      recent: the window.
      value: of each quantity.
    """
    place = recent.count % recent.values.shape[-1]
    values = recent.values.at[..., place].set(value.astype(recent.values.dtype))
    is_finite = jnp.all(jnp.isfinite(value))
    return jax.tree.map(
        lambda after, before: jnp.where(is_finite, after, before),
        Recent(values, recent.count + 1),
        recent,
    )


def find_limit(recent: Recent, sigmas: jax.Array | float, min_values: int) -> jax.Array:
    """Returns `mean + k sigma` of each quantity over the window; inf before it has enough values.

    Args:
      recent: the window.
      sigmas: k; it may be a tracer.
      min_values: how many values are enough.
    """
    window = recent.values.shape[-1]
    n = jnp.clip(recent.count, 1, window)
    is_set = jnp.arange(window) < recent.count
    values = at_least_float32(recent.values)
    mean = jnp.sum(values, -1, where=is_set) / n
    squares = jnp.sum((values - mean[..., None]) ** 2, -1, where=is_set) / n
    deviation = jnp.maximum(jnp.sqrt(squares), MIN_DEVIATION)
    return jnp.where(recent.count >= min_values, mean + sigmas * deviation, jnp.inf)
