"""Types in which the state of an optimizer is stored."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.base import PerParameter
from modules.statistics import at_least_float32

MOMENTUM = 'momentum'  # the name of first moments in `PerParameter`


def narrow_momentum(optimizer: Any, dtype: Any, name: str) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with its first moments stored in `dtype`, rounded to nearest.

    A step computes in the type of the gradients: it reads the rounded average, and its direction
    has the new average before rounding. An average `m <- b m + (1 - b) g` moves by about a share
    `1 - b` of `m`, and bfloat16 has steps of 2^-8: with `b` up to 0.95 the rounding is noise, while
    second moments and averages with `b` near 1 would stand still, so only first moments are stored
    so. optax.scale_by_adam has the same with its `mu_dtype`.

    Args:
      optimizer: an optax transformation.
      dtype: such as jnp.bfloat16.
      name: the optimizer as flags spell it, for the error.

    Raises:
      ValueError: from its `init`, if the optimizer stores no first moment.
    """

    optimizer = optax.with_extra_args_support(optimizer)

    def init(params):
        state, count = _map_momentum(optimizer.init(params), lambda m: m.astype(dtype))
        if not count:
            raise ValueError(
                f'optim.momentum_dtype={jnp.dtype(dtype).name} has no effect: {name} stores no '
                'momentum. Leave it out, or choose another optimizer.'
            )
        return state

    def update(updates, state, params=None, **extra):
        wide, _ = _map_momentum(state, at_least_float32)
        updates, state = optimizer.update(updates, wide, params, **extra)
        narrow, _ = _map_momentum(state, lambda m: m.astype(dtype))
        return updates, narrow

    return optax.GradientTransformationExtraArgs(init, update)


def _map_momentum(state: Any, cast: Callable[[jax.Array], jax.Array]) -> tuple[Any, int]:
    """Returns (the state with cast first moments, the number of arrays that were cast)."""
    count = 0

    def is_known(x):
        return isinstance(x, (PerParameter, optax.ScaleByAdamState))

    def cast_tree(tree):
        nonlocal count
        count += len(jax.tree.leaves(tree))
        return jax.tree.map(cast, tree)

    def visit(node):
        if isinstance(node, PerParameter) and MOMENTUM in node.of:
            return node._replace(of={**node.of, MOMENTUM: cast_tree(node.of[MOMENTUM])})
        if isinstance(node, optax.ScaleByAdamState):
            return node._replace(mu=cast_tree(node.mu))
        return node

    return jax.tree.map(visit, state, is_leaf=is_known), count
