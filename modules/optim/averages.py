"""Averages of the weights, which evaluation uses in place of the trained weights.

A row maps the specs of the parameters, the length of the run and its numbers, which may be tracers,
to an Average, which works with any optimizer. It averages the stored parameters
(`modules.reparam`): with weight_norm, directions and gains separately.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from modules.facts import accept_any, longest_horizon, row_decorator
from modules.optim.base import (
    ABOVE_0,
    below_1,
    compute_if,
    divide_or_zero,
    from_0,
    up_to_1,
)
from modules.options import Option

AverageState = dict[str, Any]  # by name: a tree like the parameters, or a scalar


# moves_weights: it cannot be combined with a map of stored parameters after updates
#   (`modules.reparam`).
# notes(recipe, part): lines on allowed combinations that differ from the published ones.
# lasts: see `modules.facts.longest_horizon`.
average_row = row_decorator(
    moves_weights=False,
    notes=lambda recipe, part: (),
    lasts=longest_horizon,
    check=accept_any,
)


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
def none(specs: Any, steps: Any) -> Average:
    """No average: `x_t = w_t`."""
    return Average(lambda params: {}, lambda params, state: params)


@average_row()
def ema(
    specs: Any,
    steps: Any,
    *,
    average_decay: Annotated[float, below_1('share of the average kept at each step')] = 0.999,
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
    specs: Any,
    steps: Any,
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


@average_row()
def tail_ema(
    specs: Any,
    steps: Any,
    *,
    tail_ema_fraction: Annotated[
        float, up_to_1('share of the run that is averaged, its end')
    ] = 0.25,
    tail_ema_decay: Annotated[float, below_1('share of that average kept at each step')] = 1
    - 1 / 150,
    tail_ema_weight: Annotated[float, up_to_1('weight of the average in evaluation')] = 0.6,
) -> Average:
    """Average of the end of the run, mixed with the last weights: `x_t = (1 - a) w_t + a e_t`.

    `e <- d e + (1 - d) w`

    `e` starts as the weights at the start of the last part of the run (`tail_ema_fraction`), and
    before that part `x` is `w`. `a` is `tail_ema_weight`, and `d` is `tail_ema_decay`.
    Embeddings are evaluated as trained, and no average of them is stored. Training does not depend
    on the average. Source: the code of https://github.com/KellerJordan/modded-nanogpt, track 3,
    record 45, where the part is the last 720 of 2720 steps, in which the rate falls.
    """

    def init(params):
        average = jax.tree.map(
            lambda spec, w: optax.MaskedNode() if spec.role == 'embedding' else jnp.copy(w),
            specs,
            params,
        )
        return {'updates': jnp.int32(0), 'average': average}

    def update_average(params, state):
        updates = state['updates'] + 1
        is_before = updates <= jnp.round((1 - tail_ema_fraction) * steps)

        def move(spec, w, e):
            if spec.role == 'embedding':
                return e
            return jnp.where(is_before, w, e + (1 - tail_ema_decay) * (w - e))

        average = jax.tree.map(move, specs, params, state['average'])
        return {'updates': updates, 'average': average}

    def evaluation_weights(params, state):
        def mix(spec, w, e):
            return w if spec.role == 'embedding' else w + tail_ema_weight * (e - w)

        return jax.tree.map(mix, specs, params, state['average'])

    return Average(init, evaluation_weights, update_average=update_average)


def check_outer_steps(recipe: Any, part: Any) -> None:
    """Raises ValueError if the run would end between two outer steps."""
    period, steps = part.options['outer_every'], recipe.train.steps
    if steps % period:
        nearest = max(round(steps / period), 1) * period
        raise ValueError(
            f'{part} evaluates the weights after each outer step, so optim.outer_every must divide '
            f'train.steps; got {period} and {steps}. Nearest number of steps that works: {nearest}.'
        )


@average_row(moves_weights=True, check=check_outer_steps)
def outer_nesterov(
    specs: Any,
    steps: Any,
    *,
    outer_every: Annotated[
        int, Option('steps of the optimizer for each outer step', 1, time_unit='steps', traced=True)
    ] = 30,
    outer_lr: Annotated[float, Option('outer learning rate', ABOVE_0, 10, traced=True)] = 0.7,
    outer_momentum: Annotated[float, below_1('share of the outer momentum kept')] = 0.5,
) -> Average:
    """Outer Nesterov steps, DiLoCo with a single worker (arXiv:2311.08105): `x <- x - (mu m + eta
    d)`.

    `d = x - w`
    `m <- mu m + eta d`
    `w <- x`

    After every `outer_every` steps of the optimizer, the way `d` from the last outer step counts as
    a gradient, and training goes on at the new `x`. Evaluation uses `x`, so between two outer steps
    it does not change. `eta` is `outer_lr`, and `mu` is `outer_momentum`; with 1 and 0 there is no
    outer step. State of the optimizer is kept.

    arXiv:2505.23725 names it MuLoCo with Muon inside. The defaults are those of
    https://github.com/KellerJordan/modded-nanogpt, track 3, record 13.
    """

    def init(params):
        return {
            'updates': jnp.int32(0),
            'outer': jax.tree.map(jnp.copy, params),
            'momentum': jax.tree.map(jnp.zeros_like, params),
        }

    def is_due(updates):
        return updates % outer_every == 0

    def adjust_updates(updates, params, state, _):
        count = state['updates'] + 1

        def outer_step():
            moved = jax.tree.map(lambda x, w, u: x - (w + u), state['outer'], params, updates)
            momentum = jax.tree.map(
                lambda m, d: outer_momentum * m + outer_lr * d, state['momentum'], moved
            )
            moves = jax.tree.map(
                lambda x, w, m, d: x - w - (outer_momentum * m + outer_lr * d),
                state['outer'],
                params,
                momentum,
                moved,
            )
            return moves, momentum

        moves, momentum = compute_if(is_due(count), outer_step, (updates, state['momentum']))
        return moves, {**state, 'updates': count, 'momentum': momentum}

    def update_average(params, state):
        due = is_due(state['updates'])
        outer = jax.tree.map(lambda w, x: jnp.where(due, w, x), params, state['outer'])
        return {**state, 'outer': outer}

    return Average(
        init,
        lambda params, state: state['outer'],
        adjust_updates=adjust_updates,
        update_average=update_average,
    )


@average_row(moves_weights=True)
def ema_nesterov(
    specs: Any,
    steps: Any,
    *,
    ema_nesterov_beta: Annotated[
        float, from_0('length of the step ahead at the peak learning rate')
    ] = 0.6,
    ema_nesterov_decay: Annotated[
        float, below_1('share of the average displacement kept at each step')
    ] = 0.99,
    ema_nesterov_start: Annotated[
        float, up_to_1('share of the run before the first step ahead')
    ] = 0.16,
    ema_nesterov_stop: Annotated[
        float, up_to_1('share of the run after which no step goes ahead')
    ] = 0.76,
) -> Average:
    """EMA-Nesterov (arXiv:2605.25395): gradients ahead of the weights, `y = x + b f m`.

    `x_(t + 1) = y_t + u_t`
    `m <- g m + (1 - g) (x_(t + 1) - x_t)`

    Gradients are taken at `y`, which are the parameters, and evaluation uses `x`. `u` is the step
    of the optimizer, with weight decay of `y`. `b` and `g` are `ema_nesterov_beta` and
    `ema_nesterov_decay`. `f` is the learning rate over its peak, as it was in the step that led to
    `x`; the source has that of the step from `y`. Before the share `ema_nesterov_start` of the run,
    and after `ema_nesterov_stop`, `y = x`; with a stop of 1 there is no end.

    The average `m` is stored, and `x = y - b f m`. The defaults are those of
    https://github.com/KellerJordan/modded-nanogpt, track 3, record 39: steps 500 to 2400 of 3150.
    """

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {'updates': jnp.int32(0), 'ahead': jnp.float32(0), 'displacement': zeros}

    def adjust_updates(updates, params, state, fraction):
        count, g = state['updates'] + 1, ema_nesterov_decay
        displacement = jax.tree.map(
            lambda u, m: g * m + (1 - g) * (u + state['ahead'] * m), updates, state['displacement']
        )
        # With a stop of 1, a run that is continued is as if it had been longer from the start.
        has_no_stop = jnp.asarray(ema_nesterov_stop) >= 1
        is_before_stop = has_no_stop | (count < ema_nesterov_stop * steps)
        is_active = (count >= ema_nesterov_start * steps) & is_before_stop
        ahead = jnp.where(is_active, ema_nesterov_beta * fraction, 0.0).astype(jnp.float32)
        moves = jax.tree.map(lambda u, m: u + ahead * m, updates, displacement)
        return moves, {'updates': count, 'ahead': ahead, 'displacement': displacement}

    def evaluation_weights(params, state):
        return jax.tree.map(lambda y, m: y - state['ahead'] * m, params, state['displacement'])

    return Average(init, evaluation_weights, adjust_updates=adjust_updates)


AVERAGES = {
    'none': none,
    'ema': ema,
    'ema_nesterov': ema_nesterov,
    'outer_nesterov': outer_nesterov,
    'schedule_free': schedule_free,
    'tail_ema': tail_ema,
}
