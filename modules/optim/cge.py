"""Coordinate-wise gradient estimation: descent without a backward pass."""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from modules.optim.base import of_family
from modules.options import Option


class CGEState(NamedTuple):
    """count: updates done."""

    count: jax.Array


@of_family('sgd', most_parameters=100_000, gradient=False, own_loss=True)
def cge(
    specs: Any,
    *,
    cge_step: Annotated[
        float, Option('by which a coordinate is moved to see the loss', 1e-7, 1, traced=True)
    ] = 5e-3,
    cge_coordinates: Annotated[
        int, Option('coordinates looked at in an update, drawn at random; 0: all', 0)
    ] = 0,
    cge_at_a_time: Annotated[int, Option('coordinates looked at side by side', 1)] = 16,
) -> optax.GradientTransformationExtraArgs:
    """(L(w + mu e_i) - L(w)) / mu for each coordinate i, mu = cge_step: the gradient, estimated.

    That takes one forward pass a coordinate, and one more, of the same batch.
    With `cge_coordinates`, others are drawn in each update, and the rest have 0. The gradient is
    not read, so that XLA removes its computation (`Needs`), and clipping it does nothing. In
    float32 differences of the loss are good to about 1e-7 of it, over mu; keep model.dtype float32.
    The authors move by the learning rate itself where no mu is given; theirs of pruning is taken,
    without the pruning. Source: arXiv:2310.02025, and https://github.com/OPTML-Group/DeepZero.
    ValueError where the extra argument value_fn is missing.
    """
    del specs

    def init(params):
        del params
        return CGEState(jnp.int32(0))

    def update(grads, state, params=None, *, value_fn=None, **more):
        del grads, more
        if params is None or value_fn is None:
            raise ValueError(
                'cge looks at the loss beside the parameters; give `update` these and '
                'value_fn(params), the loss of the batch'
            )
        key = jax.random.fold_in(jax.random.key(0), state.count)
        estimate = differences(value_fn, params, cge_step, cge_at_a_time, cge_coordinates, key)
        return estimate, CGEState(state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def differences(
    value_fn: Callable[[Any], jax.Array],
    params: Any,
    step: jax.Array,
    at_a_time: int,
    coordinates: int,
    key: jax.Array,
) -> Any:
    """A tree like the parameters. The loss where nothing is moved is computed among the others, so
    that it is rounded as they are.
    """
    flat_P, unravel = ravel_pytree(params)
    size, chosen = flat_P.size, jnp.arange(flat_P.size)
    if 0 < coordinates < size:
        chosen = jax.random.choice(key, size, (coordinates,), replace=False)
    n = chosen.size
    count = at_a_time * math.ceil((n + 1) / at_a_time)
    moved = jnp.concatenate([chosen, jnp.full(count - n, size)])  # one beyond the last moves none

    def value(i):
        return value_fn(unravel(flat_P.at[i].add(step, mode='drop')))

    values = jax.lax.map(value, moved, batch_size=at_a_time)
    estimate = (values[:n] - values[n]) / step
    return unravel(jnp.zeros_like(flat_P).at[chosen].set(estimate.astype(flat_P.dtype)))
