"""Learning-rate schedules: the fraction of the peak at each step.

Steps count from 0, and step t of a warm-up of w has (t + 1) / w, so that the first step is not
wasted. Everything in `hyper` may be a tracer: lengths are data, and pieces are joined by `where`.
"""

from typing import Any

import jax
import jax.numpy as jnp


def _warmup(step, hyper):
    return jnp.minimum(1.0, (step + 1) / jnp.maximum(hyper.warmup_steps, 1.0))


def _progress(step, start, stop):
    """0 up to `start`, 1 from `stop` on; the last step of the run is stop - 1."""
    return jnp.clip((step + 1 - start) / jnp.maximum(stop - start, 1.0), 0.0, 1.0)


def constant(step: jax.Array, hyper: Any) -> jax.Array:
    """Linear warm-up, then 1."""
    return _warmup(step, hyper)


def warmup_cosine(step: jax.Array, hyper: Any) -> jax.Array:
    """Linear warm-up, then r + (1 - r) (1 + cos(pi p)) / 2, reaching r = final_lr_fraction at the
    last step (arXiv:1608.03983, one cycle).
    """
    progress = _progress(step, hyper.warmup_steps, hyper.steps)
    final = hyper.final_lr_fraction
    return _warmup(step, hyper) * (final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))


def warmup_stable_decay(step: jax.Array, hyper: Any) -> jax.Array:
    """Linear warm-up, 1, then linearly to final_lr_fraction over the last decay_fraction of the
    steps (WSD, arXiv:2404.06395).
    """
    start = hyper.steps * (1 - hyper.decay_fraction)
    progress = _progress(step, start, hyper.steps)
    return _warmup(step, hyper) * (1 - (1 - hyper.final_lr_fraction) * progress)
