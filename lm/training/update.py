"""From a gradient to the next state: the optimizer's direction, its size, the decay."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lm.model.parameters import optimizer_of
from lm.training.ghost_radius import ghost_radius
from lm.training.state import Hyper, Learner, State, StepNumbers, step_numbers
from modules.kernels import ATTENTION_KERNELS, OPERATIONS
from modules.optim import with_share
from modules.params import ParamSpec, named_leaves, root_mean_square
from modules.scaling import Decay


def refuse_unserved(learner: Learner) -> None:
    """ValueError where an optimizer has more parameters than it serves, or the step needs what the
    attention kernel of these devices does not have. Nothing is computed.
    """
    recipe, described = learner.recipe, learner.described
    sizes = {'optim.name': 0, 'optim.others': 0}
    for path, spec in named_leaves(described.specs).items():
        sizes[optimizer_of(spec)] += math.prod(named_leaves(described.shapes)[path].shape)
    if recipe.optim.name == recipe.optim.others:
        sizes = {'optim.name': sum(sizes.values())}
    for path, size in sizes.items():
        part = recipe.optimizers[path]
        most = part.row.needs.most_parameters
        if most is not None and size > most:
            raise ValueError(
                f'{part} is for at most {most:,} parameters; got {size:,}. Make the '
                'model smaller, give it to fewer (optim.name has the hidden matrices, optim.others '
                'the rest), or choose another optimizer.'
            )
    kernels = learner.model.kernels
    for asker, what in recipe.in_forward_mode.items():
        for operation in ('rms_norm', 'softmax', 'cross_entropy'):
            name = kernels.name_of(operation)
            if not OPERATIONS[operation][name].is_forward_mode:
                raise ValueError(
                    f'{asker} differentiates the {what} in forward mode, and kernels.{operation}='
                    f'{name} has no such derivative; choose kernels.{operation}=reference'
                )
    if not recipe.attention.row.has_scores:
        return
    kernel = kernels.attention_name
    for asker, what in recipe.in_forward_mode.items():
        able = [name for name, one in ATTENTION_KERNELS.items() if what in one.forward_mode]
        if kernel not in able:
            raise ValueError(
                f'{asker} differentiates the {what} in forward mode, and kernels.attention='
                f'{kernel} has no such derivative; choose kernels.attention={"|".join(able)}'
            )


class OptimizerStep(NamedTuple):
    """state: the next one; updates: what was added to each stored weight, before any map after it
    (`modules.reparam`); lr: the learning rate now; seen: what is recorded of the step, by name.
    """

    state: State
    updates: Any
    lr: jax.Array
    seen: dict[str, jax.Array]


class Asked(NamedTuple):
    """What can be asked of a batch beside its gradient, of the stored parameters; what is not asked
    for is not computed.

    rows: the batch in its microbatches [n, B / n, ...], and weights [n, B / n, T] those of its
    target tokens. value_fn(params): the objective; share_fn(params, rows): what some rows add to
    it; every microbatch with what layers carried at the step's start, which in the gradient's own
    pass goes from one to the next. activations_fn(params, rows): what logits are made of,
    (x [b, T, D], readout). of_logits(logits [b, T, V], rows): the share again, but for what layers
    add to the loss.
    tokens_at_a_time: of how many tokens logits shall be made at most; 0: all.
    """

    rows: Any
    weights: jax.Array
    value_fn: Callable[[Any], jax.Array]
    share_fn: Callable[[Any, Any], jax.Array]
    activations_fn: Callable[[Any, Any], tuple[jax.Array, Any]]
    of_logits: Callable[[jax.Array, Any], jax.Array]
    tokens_at_a_time: int

    def logits_fn(self, params: Any, rows: Any) -> jax.Array:
        x_BTD, readout = self.activations_fn(params, rows)
        return readout(x_BTD)


def optimizer_step(
    learner: Learner,
    state: State,
    hyper: Hyper,
    grads: Any,
    means: dict[str, jax.Array],
    asked: Asked,
) -> OptimizerStep:
    """From the gradient of the stored weights to the next state, whose `stats` are those of `state`
    as its `reparam` is, but for a map after the update.

    means: `objective` and the other terms of the loss, over the batch's target tokens.
    """
    recipe, described = learner.recipe, learner.described
    grads = shrunk(described.specs, grads, hyper)
    now = step_numbers(recipe, described, state.step, hyper)
    if recipe.decay.row.in_gradient:
        shares = decay_shares(learner, hyper, now.fraction, now.peaks)
        grads = jax.tree.map(lambda g, share, w: g + share * w, grads, shares, state.params)
    direction, opt_state = now.optimizer.update(
        grads,
        state.opt_state,
        state.params,
        value=means['objective'],
        grad=grads,
        means=means,
        rows=asked.rows,
        value_fn=asked.value_fn,
        share_fn=asked.share_fn,
        logits_fn=asked.logits_fn,
        of_logits=asked.of_logits,
    )
    updates = _updates(learner, direction, state, hyper, now)
    seen = {}
    if (most := hyper.get('optim.ghost_radius')) is not None:
        radius = ghost_radius(asked, state.params, updates, asked.tokens_at_a_time)
        updates = jax.tree.map(lambda u: most / jnp.maximum(radius, most) * u, updates)
        seen['ghost_radius'] = radius
    updates, kept = now.average.steer(updates, state.params, state.average, now.fraction)
    params = optax.apply_updates(state.params, updates)
    params, reparam = described.after_update(params, state.reparam)
    kept = now.average.follow(params, kept)
    new = State(state.step + 1, params, reparam, state.stats, opt_state, kept)
    return OptimizerStep(new, updates, now.peaks['optim.name'] * now.fraction, seen)


def _updates(learner: Learner, direction: Any, state: State, hyper: Hyper, now: StepNumbers) -> Any:
    """The step of each weight: the direction and the decay, scaled."""
    described, (fraction, peaks, *_) = learner.described, now
    taken_off = not learner.recipe.decay.row.in_gradient

    def update(spec, direction, weight, scaling, decay, trained):
        if not trained:
            return jnp.zeros_like(weight)
        direction, share = with_share(direction)
        direction = of_rms(spec, direction, hyper)
        change = -peaks[optimizer_of(spec)] * fraction * scaling.lr_factor * direction
        return change - decay * share * weight if taken_off and scaling.decay_factor else change

    return jax.tree.map(
        update,
        described.specs,
        direction,
        state.params,
        described.scalings,
        decay_shares(learner, hyper, fraction, peaks),
        described.trainable,
    )


def decay_shares(
    learner: Learner, hyper: Mapping[str, Any], fraction: Any, peaks: Mapping[str, Any]
) -> Any:
    """For each weight the number that `optim.decay_rule` multiplies it by in one step, to be taken
    off it, or added to its gradient; `fraction` is what the schedule makes of learning rates, whose
    peaks are `peaks` (`lm.training.state.peaks_of`).
    """
    recipe, described = learner.recipe, learner.described
    rule = recipe.decay
    options = rule.numbers(hyper)

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
