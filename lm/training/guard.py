"""Steps that change nothing: after a divergence (train.on_divergence), or a spike (train.on_spike).

The decision is made on the devices, from the metrics of the step and from those of the steps before
it that the state keeps.
"""

import jax
import jax.numpy as jnp

from lm.config.fields import TrainConfig
from lm.training.state import SKIP_SPIKE, WATCHED, State
from modules.recent import find_limit, push

MUST_BE_FINITE = ('loss', 'grad_norm', 'update_norm')  # otherwise the step has diverged
SKIP_DIVERGED = 'skip_step'

Metrics = dict[str, jax.Array]


def guard_step(
    train: TrainConfig, before: State, after: State, metrics: Metrics
) -> tuple[State, Metrics]:
    """Returns the state after a step, and its metrics, with `skipped` = 1 if it changed nothing.

    A skipped step still counts: otherwise the schedule would stand still, while the text moves on
    to the next batch. All else keeps every bit: weights, moments, averages, the state of layers and
    of the stages of an update. Only the window has the loss and the gradient norm of a spike: a
    second one like it then is none, and a loss that stays high is accepted after some steps.

    Args:
      train: the section with on_divergence, on_spike and the limits of a spike.
      before: the state before the step.
      after: the state after it.
      metrics: of the step.
    """
    is_kept = None
    if train.on_divergence == SKIP_DIVERGED:
        is_kept = jnp.all(jnp.isfinite(jnp.stack([metrics[name] for name in MUST_BE_FINITE])))
    if train.on_spike == SKIP_SPIKE:
        watched = jnp.stack([metrics[name] for name in WATCHED])
        limits = find_limit(before.watched, train.spike_sigmas, train.spike_from)
        # inf and NaN are a divergence, and no spike.
        is_spike = jnp.any(watched > limits) & jnp.all(jnp.isfinite(watched))
        metrics = metrics | {'spiked': is_spike.astype(jnp.float32)}
        is_kept = ~is_spike if is_kept is None else is_kept & ~is_spike
        watched_window = push(before.watched, watched)
    else:
        watched_window = before.watched
    if is_kept is None:
        return after, metrics
    # Each array is selected, as the condition is traced: 0 times an infinite update would be NaN.
    guarded = jax.tree.map(
        lambda changed, unchanged: jnp.where(is_kept, changed, unchanged), after, before
    )
    guarded = guarded.replace(step=after.step, watched=watched_window)
    return guarded, metrics | {'skipped': 1.0 - is_kept}
