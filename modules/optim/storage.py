"""Types in which the state of an optimizer is stored."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.base import PerParameter
from modules.precision.formats import Format, round_to_format
from modules.statistics import at_least_float32

MOMENTUM, SECOND = 'momentum', 'second'  # names of first and second moments in `PerParameter`
#: The config field of the type of each.
FIELDS = {MOMENTUM: 'optim.momentum_dtype', SECOND: 'optim.second_moment_dtype'}
BFLOAT16 = Format(8, 7)
KEY_SEED, WEIGHT_KEY_SEED = 0, 1
NEAREST, STOCHASTIC = 'nearest', 'stochastic'  # roundings of weights
Cast = Callable[[jax.Array, jax.Array], jax.Array]  # (array, key) -> array


def narrow_moments(
    optimizer: Any, dtypes: Mapping[str, Any], name: str
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with its moments stored in other types.

    A step computes in the type of the gradients: it reads the rounded average, and its direction
    has the new average before rounding. An average `m <- b m + (1 - b) g` moves by about a share
    `1 - b` of `m`, and bfloat16 has steps of 2^-8. First moments, with `b` up to 0.95, are rounded
    to nearest (as by `mu_dtype` of optax.scale_by_adam): the rounding is noise. Second moments,
    with `b` near 1, would stand still; they are rounded stochastically, with a key of the step, and
    keep their expectation.

    Args:
      optimizer: an optax transformation.
      dtypes: MOMENTUM or SECOND, or both, with a type such as jnp.bfloat16.
      name: the optimizer as flags spell it, for the error.

    Raises:
      ValueError: from its `init`, if the optimizer stores no such moment.
    """

    optimizer = optax.with_extra_args_support(optimizer)
    nearest: dict[str, Cast] = {
        m: lambda x, key, dtype=dtype: x.astype(dtype) for m, dtype in dtypes.items()
    }
    rounded = dict(nearest)
    if SECOND in dtypes and jnp.dtype(dtypes[SECOND]) == jnp.bfloat16:
        rounded[SECOND] = round_stochastically
    widened = dict.fromkeys(dtypes, lambda x, key: at_least_float32(x))

    def init(params):
        state, counts = _map_moments(optimizer.init(params), nearest)
        for moment in dtypes:
            if not counts[moment]:
                words = 'momentum' if moment == MOMENTUM else 'second moment'
                raise ValueError(
                    f'{FIELDS[moment]}={jnp.dtype(dtypes[moment]).name} has no effect: {name} '
                    f'stores no {words}. Leave it out, or choose another optimizer.'
                )
        return state

    def update(updates, state, params=None, **extra):
        wide, _ = _map_moments(state, widened)
        updates, state = optimizer.update(updates, wide, params, **extra)
        narrow, _ = _map_moments(state, rounded)
        return updates, narrow

    return optax.GradientTransformationExtraArgs(init, update)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds to bfloat16, to either neighbour, with x as the expectation.

    Args:
      x: float32.
      key: the random key.
    """
    return round_to_format(x, BFLOAT16, 'stochastic', key).astype(jnp.bfloat16)


def round_weights(params: Any, rounding: str, step: jax.Array) -> Any:
    """Rounds weights to values that bfloat16 has, in their own type.

    An update is often smaller than half of the distance between two values, 2^-8 of the weight:
    rounding to nearest then loses it, stochastic rounding keeps its expectation.

    Args:
      params: float32 weights.
      rounding: NEAREST or STOCHASTIC.
      step: number of updates done, which draws the random numbers.
    """
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(WEIGHT_KEY_SEED), step), len(leaves))
    rounded = [
        round_to_format(x, BFLOAT16, rounding, key) for x, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, rounded)


def _map_moments(state: Any, casts: Mapping[str, Cast]) -> tuple[Any, dict[str, int]]:
    """Returns (the state with cast moments, the number of arrays that were cast of each)."""
    counts = dict.fromkeys(casts, 0)

    def is_known(x):
        return isinstance(x, (PerParameter, optax.ScaleByAdamState))

    def cast_tree(moment, tree, step):
        key = jax.random.fold_in(jax.random.key(KEY_SEED), step)

        def cast(x):
            counts[moment] += 1
            return casts[moment](x, jax.random.fold_in(key, counts[moment]))

        return jax.tree.map(cast, tree)

    def visit(node):
        if isinstance(node, PerParameter):
            moments = {m: cast_tree(m, node.of[m], node.count) for m in casts if m in node.of}
            return node._replace(of=node.of | moments)
        if isinstance(node, optax.ScaleByAdamState):
            fields = {MOMENTUM: 'mu', SECOND: 'nu'}
            moments = {
                fields[m]: cast_tree(m, node._asdict()[fields[m]], node.count) for m in casts
            }
            return node._replace(**moments)
        return node

    return jax.tree.map(visit, state, is_leaf=is_known), counts
