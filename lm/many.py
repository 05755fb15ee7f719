"""One program for many runs: a function of one run, mapped over a leading `run` axis.

The axis lies on the mesh axis `run`; the runs that share a device are mapped there by a row of
`RUN_AXES`. Rows give equal results, to rounding: `loop` computes each run with the very operations
it has alone, `vmap` with batched ones.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec


def vmap(function: Callable, shared: tuple[Any, ...], active_R: jax.Array, *mapped: Any) -> Any:
    """All runs at once, in batched operations; a run that is not active costs as much as one that
    is.
    """
    del active_R
    return jax.vmap(lambda *one: function(*shared, *one))(*mapped)


def loop(function: Callable, shared: tuple[Any, ...], active_R: jax.Array, *mapped: Any) -> Any:
    """One run after the other; one that is not active costs nothing, and zeros stand for it.

    For XLA:CPU, whose batched products are slow: the figures are in tests/bench/RESULTS.md.
    """

    def one(arguments):
        active, own = arguments

        def work():
            return function(*shared, *own)

        def rest():
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))

        return jax.lax.cond(active, work, rest)

    return jax.lax.map(one, (active_R, mapped))


RUN_AXES = {'loop': loop, 'vmap': vmap}


def run_axis(name: str, platform: str) -> str:
    """`auto` is what suits the platform; any other name is itself."""
    if name != 'auto':
        return name
    return 'loop' if platform == 'cpu' else 'vmap'


def over_mesh(how: str, mesh: Mesh, function: Callable, n_shared: int = 0) -> Callable:
    """`many(*shared, active_R, *mapped)` for `function(*shared, *mapped of one run)`.

    Arguments and results are stacked along a leading axis R, a multiple of the mesh axis `run`,
    but for the first `n_shared` arguments.
    """

    def many(*arguments):
        shared, (active_R, *mapped) = arguments[:n_shared], arguments[n_shared:]
        return RUN_AXES[how](function, shared, active_R, *mapped)

    if mesh.shape['run'] == 1:
        return many

    def sharded(*arguments):
        cut = PartitionSpec('run')
        specs = (PartitionSpec(),) * n_shared + (cut,) * (len(arguments) - n_shared)
        return jax.shard_map(
            many, mesh=mesh, in_specs=specs, out_specs=cut, axis_names={'run'}, check_vma=False
        )(*arguments)

    return sharded
