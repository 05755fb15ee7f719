"""Averages of the weights, which evaluation uses in place of the trained weights.

A row maps its numbers, which may be tracers, to an Average, which works with any optimizer. It
averages the stored parameters (`modules.reparam`): with weight_norm, directions and gains
separately.
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
# notes(recipe, part): lines on allowed combinations that differ from the published ones.
average_row = row_decorator(moves_weights=False, notes=lambda recipe, part: (), check=accept_any)


class Average(NamedTuple):
    """Functions of an average.

    `adjust_updates` maps the update of the optimizer and its weight decay to the update that is
    added; fraction: learning rate over its peak. `update_average` sees the weights after the update
    and any map behind it.
    """

    init: Callable[[Any], AverageState]  #: (params) -> state, a dict
    #: (params, state) -> the weights for evaluation
    evaluation_weights: Callable[[Any, AverageState], Any]
    #: (updates, params, state, fraction) -> (updates, state)
    adjust_updates: Callable[[Any, Any, AverageState, Any], tuple[Any, AverageState]] = (
        lambda u, params, state, _: (u, state)
    )
    #: (params, state) -> state
    update_average: Callable[[Any, AverageState], AverageState] = lambda params, state: state


@average_row()
def none() -> Average:
    """No average: `x_t = w_t`."""
    return Average(lambda params: {}, lambda params, state: params)


@average_row()
def ema(
    *, average_decay: Annotated[float, below_1('share of the average kept at each step')] = 0.999
) -> Average:
    """Exponential moving average (arXiv:1412.6980): `x_t = ((1 - d) / (1 - d^t)) sum_(i=1)^t d^(t -
    i) w_i`.

    `d` is `average_decay`. The bias of the start is corrected, so that the initial weights have no
    part in the average: each update moves `x` by `(1 - d) / (1 - d^t)` of the way to `w`. Training
    does not depend on the average. If a reparametrisation maps stored parameters after each update,
    as normalize_and_project does, evaluation maps the average too. Source: section 7.2, also for
    the default of 0.999.
    """

    def init(params):
        return {'updates': jnp.int32(0), 'average': jax.tree.map(jnp.copy, params)}

    def update_average(params, state):
        updates = state['updates'] + 1
        complement = 1 - jnp.asarray(average_decay)
        # (1 - d) / (1 - d^t), without the cancellation of 1 - d^t for d near 1.
        share = complement / -jnp.expm1(updates * jnp.log1p(-complement))
        average = jax.tree.map(lambda x, w: x + share * (w - x), state['average'], params)
        return {'updates': updates, 'average': average}

    return Average(init, lambda params, state: state['average'], update_average=update_average)


def mask_untrained(average: Average, trained: Any) -> Average:
    """Returns an average without state for weights that are not trained.

    Args:
      average: an average of the trained parameters.
      trained: a bool for each parameter.

    Returns:
      An average of all parameters; evaluation uses untrained parameters unchanged.
    """

    def select_trained(tree):
        return jax.tree.map(lambda t, x: x if t else optax.MaskedNode(), trained, tree)

    def merge_untrained(trained_tree, tree):
        return jax.tree.map(
            lambda t, averaged, x: averaged if t else x, trained, trained_tree, tree
        )

    def adjust_updates(updates, params, state, fraction):
        moves, state = average.adjust_updates(
            select_trained(updates), select_trained(params), state, fraction
        )
        return merge_untrained(moves, updates), state

    return Average(
        init=lambda params: average.init(select_trained(params)),
        evaluation_weights=lambda params, state: merge_untrained(
            average.evaluation_weights(select_trained(params), state), params
        ),
        adjust_updates=adjust_updates,
        update_average=lambda params, state: average.update_average(select_trained(params), state),
    )


def schedule_free_notes(recipe: Any, part: Any) -> Iterator[str]:
    """Yields notes on deviations from published Schedule-Free: rate decay and momentum."""
    schedule = recipe.schedule
    if schedule.row.decays:
        yield (
            f'{part} replaces a learning-rate decay, but {schedule} decays as well. The published '
            'method uses a constant learning rate.'
        )
    for optimizer in recipe.optimizers.values():
        for name in ('b1', 'momentum'):
            if value := optimizer.options.get(name):
                yield (
                    f'{part} replaces momentum, but {optimizer} also has momentum, '
                    f'optim.{name}={value}. The published method sets it to 0.'
                )


@average_row(moves_weights=True, notes=schedule_free_notes)
def schedule_free(
    *,
    schedule_free_beta: Annotated[
        float, below_1('weight of x in the point where gradients are computed', minimum=0.01)
    ] = 0.9,
    schedule_free_power: Annotated[
        float, Option('exponent of the step number in its averaging weight', 0, 6, traced=True)
    ] = 0.0,
    schedule_free_lr_power: Annotated[
        float, Option('exponent of the learning rate in the averaging weight', 0, 6, traced=True)
    ] = 2.0,
) -> Average:
    """Schedule-Free (arXiv:2405.15682): gradients between the iterate and its average.

    `y = (1 - b) z + b x`
    `z <- z + u`
    `x <- (1 - c) x + c z`
    `c = k_t / (sum_(i=1)^t k_i) with k_t = t^r (max_(i <= t) eta_i)^q`

    Gradients are taken at `y`, which are the parameters, and evaluation uses the average `x`. `u`
    is the step of the optimizer, with weight decay of `y`. `eta_i` is the learning rate of step `i`
    as a share of its peak, which divides out. `b`, `q` and `r` are `schedule_free_beta`,
    `schedule_free_lr_power` and `schedule_free_power`. `z` is stored, and
    `x = y + (1 - 1 / b) (z - y)`.

    This replaces momentum: the authors' AdamW is `optim.b1=0`, their SGD `optim.momentum=0`, and
    their schedule a warm-up, then constant. A map of stored parameters after updates would separate
    `y` from `x` and `z`, and is refused. Source: the paper and
    https://github.com/facebookresearch/schedule_free, version 1.4.1.
    """

    def init(params):
        z = jax.tree.map(jnp.copy, params)
        zero = jnp.float32(0)
        return {'updates': jnp.int32(0), 'largest': zero, 'total': zero, 'z': z}

    def adjust_updates(updates, params, state, fraction):
        b, count = schedule_free_beta, state['updates'] + 1
        largest = jnp.maximum(state['largest'], fraction)
        weight = count**schedule_free_power * largest**schedule_free_lr_power
        total = state['total'] + weight
        c = divide_or_zero(weight, total)
        moves = jax.tree.map(
            lambda u, y, z: c * (z - y) + (1 - b * (1 - c)) * u, updates, params, state['z']
        )
        z = jax.tree.map(jnp.add, state['z'], updates)
        return moves, {'updates': count, 'largest': largest, 'total': total, 'z': z}

    def evaluation_weights(params, state):
        extrapolation = 1 - 1 / schedule_free_beta
        return jax.tree.map(lambda y, z: y + extrapolation * (z - y), params, state['z'])

    return Average(init, evaluation_weights, adjust_updates=adjust_updates)


AVERAGES = {'none': none, 'ema': ema, 'schedule_free': schedule_free}
