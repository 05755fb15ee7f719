"""Averages of the weights, which evaluation uses in place of the trained weights.

A row maps its numbers, which may be tracers, to an Average, which works with any optimizer. It
averages the stored parameters (`modules.reparam`): with weight_norm, directions and gains apart.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from modules.facts import accept_any, row_decorator
from modules.optim.base import below_1, divide_or_zero
from modules.options import Option

AverageState = dict[str, Any]  # by name: a tree like the parameters, or a scalar


# moves_weights: it cannot be combined with a map of stored parameters after updates
#   (`modules.reparam`).
# notes(recipe, part): lines on what it is allowed with but not published with.
average_row = row_decorator(moves_weights=False, notes=lambda recipe, part: (), check=accept_any)


class Average(NamedTuple):
    """Functions of one average.

    `steer` maps what the optimizer and its weight decay would add to the weights to what is added;
    fraction: learning rate over its peak. `follow` sees the weights after the update and any map
    behind it.
    """

    init: Callable[[Any], AverageState]  #: (params) -> kept, its own state
    evaluation_weights: Callable[
        [Any, AverageState], Any
    ]  #: (params, kept) -> the weights that evaluation uses
    #: (updates, params, kept, fraction) -> (updates, kept)
    adjust_updates: Callable[[Any, Any, AverageState, Any], tuple[Any, AverageState]] = (
        lambda u, params, kept, _: (u, kept)
    )
    #: (params, kept) -> kept
    update_average: Callable[[Any, AverageState], AverageState] = lambda params, kept: kept


@average_row()
def none() -> Average:
    """Evaluation uses the weights that are trained."""
    return Average(lambda params: {}, lambda params, kept: params)


@average_row()
def ema(
    *, average_decay: Annotated[float, below_1('share of the average that is kept')] = 0.999
) -> Average:
    """Exponential moving average, x_t = (1 - d) sum_i d^(t - i) w_i / (1 - d^t), i from 1 to t.

    The bias of the start is corrected, so that the initial weights have no part in it: x moves by
    (1 - d) / (1 - d^t) of the way to w. Training does not depend on it. If a reparametrisation maps
    stored parameters after each update, as normalize_and_project does, evaluation maps the average
    too. Source, also of 0.999: arXiv:1412.6980, section 7.2.
    """

    def init(params):
        return {'updates': jnp.int32(0), 'average': jax.tree.map(jnp.copy, params)}

    def follow(params, kept):
        updates = kept['updates'] + 1
        left = 1 - jnp.asarray(average_decay)
        share = left / -jnp.expm1(updates * jnp.log1p(-left))
        average = jax.tree.map(lambda x, w: x + share * (w - x), kept['average'], params)
        return {'updates': updates, 'average': average}

    return Average(init, lambda params, kept: kept['average'], update_average=follow)


def mask_untrained(average: Average, trained: Any) -> Average:
    """Returns an average that keeps nothing of weights that training leaves as they are.

    Args:
      average: of all parameters that it is given.
      trained: a bool for each parameter.

    Returns:
      One of all parameters; evaluation uses the others as they are.
    """

    def only(tree):
        return jax.tree.map(lambda t, x: x if t else optax.MaskedNode(), trained, tree)

    def with_others(found, tree):
        return jax.tree.map(lambda t, new, x: new if t else x, trained, found, tree)

    def steer(updates, params, kept, fraction):
        moves, kept = average.adjust_updates(only(updates), only(params), kept, fraction)
        return with_others(moves, updates), kept

    return Average(
        init=lambda params: average.init(only(params)),
        evaluation_weights=lambda params, kept: with_others(
            average.evaluation_weights(only(params), kept), params
        ),
        adjust_updates=steer,
        update_average=lambda params, kept: average.update_average(only(params), kept),
    )


def schedule_free_notes(recipe: Any, part: Any) -> Iterator[str]:
    """Yields notes on what Schedule-Free is published without: rate decay and momentum."""
    schedule = recipe.schedule
    if schedule.row.decays:
        yield (
            f'{part} takes the place of a decay: {schedule} decays all the same; published with '
            'constant'
        )
    for optimizer in recipe.optimizers.values():
        for name in ('b1', 'momentum'):
            if value := optimizer.options.get(name):
                yield (
                    f'{part} takes the place of momentum, and {optimizer} has its own, '
                    f'optim.{name}={value}; published with 0'
                )


@average_row(moves_weights=True, notes=schedule_free_notes)
def schedule_free(
    *,
    schedule_free_beta: Annotated[
        float, below_1('share of the mean where gradients are taken', minimum=0.01)
    ] = 0.9,
    schedule_free_power: Annotated[
        float, Option('power of the step in its weight in the mean', 0, 6, traced=True)
    ] = 0.0,
    schedule_free_lr_power: Annotated[
        float, Option('power of the learning rate in that weight', 0, 6, traced=True)
    ] = 2.0,
) -> Average:
    """Schedule-Free: gradients at y = (1 - b) z + b x, steps of z, evaluation at their mean x.

        z <- z + u        x <- (1 - c) x + c z        c = weight_t / sum of weights up to t
        weight_t = t^r * (largest learning rate up to t)^p

    u is the step of the optimizer, with weight decay of y; b, p and r are schedule_free_beta,
    _lr_power and _power. Params are y, and z is kept: x = y + (1 - 1/b) (z - y). Learning rates
    count in c as shares of their peak, which divides out. It takes the place of momentum: the
    authors' AdamW is optim.b1=0, their SGD optim.momentum=0, and their schedule a warm-up, then
    constant. A map of stored parameters after updates would separate y from x and z, and is
    refused.
    Source: arXiv:2405.15682, https://github.com/facebookresearch/schedule_free, version 1.4.1.
    """

    def init(params):
        z = jax.tree.map(jnp.copy, params)
        zero = jnp.float32(0)
        return {'updates': jnp.int32(0), 'largest': zero, 'total': zero, 'z': z}

    def steer(updates, params, kept, fraction):
        b, count = schedule_free_beta, kept['updates'] + 1
        largest = jnp.maximum(kept['largest'], fraction)
        weight = count**schedule_free_power * largest**schedule_free_lr_power
        total = kept['total'] + weight
        c = divide_or_zero(weight, total)
        moves = jax.tree.map(
            lambda u, y, z: c * (z - y) + (1 - b * (1 - c)) * u, updates, params, kept['z']
        )
        z = jax.tree.map(jnp.add, kept['z'], updates)
        return moves, {'updates': count, 'largest': largest, 'total': total, 'z': z}

    def averaged(params, kept):
        beyond = 1 - 1 / schedule_free_beta
        return jax.tree.map(lambda y, z: y + beyond * (z - y), params, kept['z'])

    return Average(init, averaged, adjust_updates=steer)


AVERAGES = {'none': none, 'ema': ema, 'schedule_free': schedule_free}
