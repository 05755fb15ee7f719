"""Parts of an update: optimizer, decay and limits on its size, with the numbers of a run."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.config.recipe import Recipe
from lm.model.parameters import Description, optimizer_of
from modules.losses import chunks_of, cut
from modules.optim import Average, by_role, of_trained
from modules.optim.base import along
from modules.params import ParamSpec, root_mean_square
from modules.scaling import Decay

Numbers = Mapping[str, Any]


def numbered_rows(recipe: Recipe, hyper: Numbers) -> dict[str, Callable[..., Any]]:
    """Returns the rows that an update applies, with their numbers, by the field that names each."""
    parts = (recipe.schedule, *recipe.optimizers.values(), recipe.decay, recipe.average)
    return {part.path: functools.partial(part.row, **part.numbers(hyper)) for part in parts}


def peaks_of(rates: Numbers) -> dict[str, Any]:
    """Returns the peak learning rate of each optimizer, by the field that names it.

    rates: a Hyper or a flattened config; optim.others_lr may be missing or None.
    """
    others = rates.get('optim.others_lr')
    lr = rates['optim.lr']
    return {'optim.name': lr, 'optim.others': lr if others is None else others}


def optimizer(
    recipe: Recipe, described: Description, hyper: Numbers
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizers of all parameters as one, from clipped gradients to a direction.

    A gradient is divided by the epsilon factor f of its parameter. Where epsilon is compared with
    the gradient, that gives the direction of an epsilon f times as large.
    """
    rows = numbered_rows(recipe, hyper)
    own, others, trained = rows['optim.name'], rows['optim.others'], described.trainable
    roles = {} if recipe.optim.name == recipe.optim.others else {'hidden': own}
    if not all(jax.tree.leaves(trained)):
        chosen = by_role(described.specs, others, trained, **roles)
    elif roles:
        chosen = by_role(described.specs, others, **roles)
    else:
        chosen = own(described.specs)
    factors = jax.tree.map(lambda scaling: scaling.eps_factor, described.scalings)
    stages = [optax.clip_by_global_norm(hyper['optim.clip_norm'])]
    if any(factor != 1.0 for factor in jax.tree.leaves(factors)):
        stages.append(optax.stateless(lambda g, _: jax.tree.map(lambda a, f: a / f, g, factors)))
    return optax.with_extra_args_support(optax.chain(*stages, chosen))


def average_of(recipe: Recipe, described: Description, hyper: Numbers) -> Average:
    """Returns the average of stored weights that are trained (optim.average) with its numbers."""
    average, trained = numbered_rows(recipe, hyper)['optim.average'](), described.trainable
    return average if all(jax.tree.leaves(trained)) else of_trained(average, trained)


def shrunk(specs: Any, grads: Any, hyper: Numbers) -> Any:
    """Multiplies the gradient of the word embedding by `optim.embedding_gradient_shrink`, if given.

    This comes before clipping: Adam, whose direction has no size of its own, sees it through the
    clipped norm and epsilon alone. Source: arXiv:2210.02414, section 3.2.
    """
    factor = hyper.get('optim.embedding_gradient_shrink')
    if factor is None:
        return grads

    def shrink(spec, grad):
        return factor * grad if spec.role == 'embedding' and 'vocab' in spec.axes else grad

    return jax.tree.map(shrink, specs, grads)


def decay_shares(
    described: Description, rule: Callable, hyper: Numbers, fraction: Any, peaks: Numbers
) -> Any:
    """Returns for each weight the share that the decay rule takes off it, or adds to its gradient,
    in one step. rule: of `numbered_rows`; fraction: what the schedule makes of `peaks_of`.
    """

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
        return rule(decay)

    return jax.tree.map(
        share, described.specs, described.scalings, described.growths, described.trainable
    )


def of_rms(spec: ParamSpec, direction: jax.Array, hyper: Numbers) -> jax.Array:
    """Scales a direction to the root mean square `optim.match_rms`, for hidden matrices, and to
    `optim.update_clip` at most, where they are given. Each matrix or vector is scaled on its own.

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


def ghost_radius(asked: Any, params: Any, change: Any) -> jax.Array:
    """Returns r = max over target tokens of (max_v a_v - min_v a_v), over pi.

    a [V] is the derivative of a token's logits along the full change of the parameters, learning
    rate and decay included, by one forward-mode pass of the batch. r is linear in the change;
    beyond 1 the cross-entropy's series along it no longer converges. The logits are those of the
    training pass, where the authors take the evaluation's. asked: an `lm.training.step.Asked`.
    Raises ValueError where the model has no forward-mode derivative. Source: arXiv:2603.13552, and
    https://github.com/piyush314/ghosts-of-softmax.
    """

    def of_rows(part):
        rows, weights_BT = part
        (x_BTD, readout), (moved_BTD, moved) = along(
            lambda params: asked.activations_fn(params, rows), params, change
        )

        def of_chunk(part):
            x_BTD, moved_BTD, weights_BT = part
            _, a_BTV = jax.jvp(lambda x, r: r(x), (x_BTD, readout), (moved_BTD, moved))
            spread_BT = jnp.max(a_BTV, -1) - jnp.min(a_BTV, -1)
            return jnp.max(jnp.where(weights_BT > 0, spread_BT, 0.0))

        count = chunks_of(weights_BT.shape, 1, asked.tokens_at_a_time)
        parts = jax.tree.map(lambda x: cut(x, 1, count), (x_BTD, moved_BTD, weights_BT))
        return jnp.max(jax.lax.map(of_chunk, parts))

    return jnp.max(jax.lax.map(of_rows, (asked.rows, asked.weights))) / math.pi
