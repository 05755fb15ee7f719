"""From a gradient to the next state: the optimizer's direction, its size, the decay."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm.config import part_at
from lm.state import (
    Hyper,
    Learner,
    State,
    numbers,
    optimizer,
    optimizer_of,
    peaks_of,
    schedule_fraction,
)
from modules.params import ParamSpec, root_mean_square
from modules.scaling import Decay
from modules.scaling.decay import in_gradient


class OptimizerStep(NamedTuple):
    """state: the next one; updates: what was added to each stored weight, before any map after it
    (`modules.reparam`); lr: the learning rate now.
    """

    state: State
    updates: Any
    lr: jax.Array


def optimizer_step(
    learner: Learner,
    state: State,
    hyper: Hyper,
    grads: Any,
    value: jax.Array,
    value_fn: Callable[[Any], jax.Array],
) -> OptimizerStep:
    """From the gradient of the stored weights to the next state, whose `stats` are those of `state`
    as its `reparam` is, but for a map after the update.

    value: the objective; value_fn(params): the same at other weights, for optimizers that ask.
    """
    config, described = learner.config, learner.described
    grads = shrunk(described.specs, grads, hyper)
    if in_gradient(part_at(config, 'optim.decay_rule').row):
        fraction = schedule_fraction(config, state.step, hyper)
        shares = decay_shares(learner, hyper, fraction)
        grads = jax.tree.map(lambda g, share, w: g + share * w, grads, shares, state.params)
    direction, opt_state = optimizer(config, described, hyper).update(
        grads, state.opt_state, state.params, value=value, grad=grads, value_fn=value_fn
    )
    lr, updates = _updates(learner, direction, state, hyper)
    params = optax.apply_updates(state.params, updates)
    mapped, reparam = described.reparam.after_update(params, state.reparam)
    params = jax.tree.map(
        lambda new, old, trained: new if trained else old, mapped, params, described.trainable
    )
    new = State(state.step + 1, params, reparam, state.stats, opt_state)
    return OptimizerStep(new, updates, lr)


def _updates(learner: Learner, direction: Any, state: State, hyper: Hyper) -> tuple[jax.Array, Any]:
    """(learning rate now, what is added to each weight): the direction and the decay, scaled."""
    config, described, peaks = learner.config, learner.described, peaks_of(hyper)
    decoupled = not in_gradient(part_at(config, 'optim.decay_rule').row)
    fraction = schedule_fraction(config, state.step, hyper)

    def update(direction, weight, spec, scaling, share, trained):
        if not trained:
            return jnp.zeros_like(weight)
        direction = of_rms(spec, direction, hyper)
        change = -peaks[optimizer_of(spec)] * fraction * scaling.lr_factor * direction
        return change - share * weight if decoupled and scaling.decay_factor else change

    updates = jax.tree.map(
        update,
        direction,
        state.params,
        described.specs,
        described.scalings,
        decay_shares(learner, hyper, fraction),
        described.trainable,
    )
    return peaks['optim.name'] * fraction, updates


def decay_shares(learner: Learner, hyper: Mapping[str, Any], fraction: Any) -> Any:
    """For each weight the number that `optim.decay_rule` multiplies it by in one step, to be taken
    off it, or added to its gradient; `fraction` is what the schedule makes of learning rates.
    """
    config, described = learner.config, learner.described
    rule, peaks = part_at(config, 'optim.decay_rule'), peaks_of(hyper)
    options = numbers(config, rule, hyper)

    def share(spec, scaling, growth, trained):
        if not (trained and scaling.decay_factor):
            return 0.0
        decay = Decay(
            weight_decay=hyper['optim.weight_decay'],
            lr=peaks[optimizer_of(spec)] * scaling.lr_factor,
            fraction=fraction,
            steps=hyper['train.steps'],
            growth=growth,
            factor=scaling.decay_factor,
            hidden=spec.role == 'hidden',
        )
        return rule.row(decay, **options)

    return jax.tree.map(
        share, described.specs, described.scalings, described.growths, described.trainable
    )


def shrunk(specs: Any, grads: Any, hyper: Hyper) -> Any:
    """The gradients, that of the word embedding times `optim.embedding_gradient_shrink` where it is
    given: before clipping, so that Adam, whose direction has no size of its own, sees it through
    the clipped norm and epsilon alone. Source: arXiv:2210.02414, section 3.2.
    """
    factor = hyper.get('optim.embedding_gradient_shrink')
    if factor is None:
        return grads
    return jax.tree.map(
        lambda spec, g: factor * g if spec.role == 'embedding' and 'vocab' in spec.axes else g,
        specs,
        grads,
    )


def of_rms(spec: ParamSpec, direction: jax.Array, hyper: Hyper) -> jax.Array:
    """The direction scaled to the root mean square `optim.match_rms`, of hidden matrices, and to
    `optim.update_clip` at most, each where it is given; of each matrix or vector of a parameter
    that has several.

    Sources: 0.2, at which updates are as large as Adam's, arXiv:2502.16982, section 2.2; clipping
    arXiv:1804.04235, section 6.
    """
    most = hyper.get('optim.update_clip')
    wanted = hyper.get('optim.match_rms') if spec.role == 'hidden' else None
    if wanted is None and most is None:
        return direction
    rms = root_mean_square(spec, direction)
    factor = jnp.ones_like(rms)
    if wanted is not None:
        factor = jnp.where(rms > 0, wanted / jnp.where(rms > 0, rms, 1.0), 0.0)
    if most is not None:
        factor = factor / jnp.maximum(1.0, factor * rms / most)
    return jnp.broadcast_to(factor, direction.shape) * direction
