"""One program for many runs: a function of one run, mapped over a leading `run` axis.

The axis lies on the mesh axis `run`; a row of `RUN_AXES` says how the runs that share a device are
mapped there. Rows give equal results, to rounding: `loop` computes each run with the very
operations it has alone, `vmap` with batched ones.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec


def vmap(mesh: Mesh, function: Callable, n_shared: int) -> Callable:
    """All runs at once, in batched operations; a run that is not active costs as much as one that
    is.

    Left to the partitioner: inside shard_map it gathers activations over `data` (96 all-gathers in
    a step of the default model on v5e:2x4 with run=4, data=2; here none).
    """
    del mesh

    def many(*arguments):
        shared, (_, *mapped) = arguments[:n_shared], arguments[n_shared:]
        return jax.vmap(lambda *one: function(*shared, *one), spmd_axis_name='run')(*mapped)

    return many


def loop(mesh: Mesh, function: Callable, n_shared: int) -> Callable:
    """One run after the other; one that is not active costs nothing, and zeros stand for it.

    For XLA:CPU, whose batched products are slow. Results go into buffers of their own, as XLA
    copies those of all runs in each round if they are written over the arguments, and there are as
    many rounds as active runs, as a condition copies what goes in and out: of 16 runs of width 128
    on two cores one then takes 72 ms a step either way, and 63 ms so. The barriers keep XLA from
    fusing that with the step, which would then round differently from a run alone.
    """

    def many(*arguments):
        shared, (active_R, *mapped) = arguments[:n_shared], arguments[n_shared:]
        active_first_R = jnp.argsort(~active_R)

        def of_run(run):
            own = jax.lax.optimization_barrier(take(mapped, run))
            return jax.lax.optimization_barrier(function(*shared, *own))

        def one_more(done, results):
            run = active_first_R[done]
            return put(results, of_run(run), run)

        nothing = jax.tree.map(
            lambda s: jnp.zeros((*active_R.shape, *s.shape), s.dtype), jax.eval_shape(of_run, 0)
        )
        return jax.lax.fori_loop(0, jnp.sum(active_R), one_more, nothing)

    if mesh.shape['run'] == 1:
        return many

    def by_device(*arguments):
        cut = PartitionSpec('run')
        specs = (PartitionSpec(),) * n_shared + (cut,) * (len(arguments) - n_shared)
        return jax.shard_map(
            many, mesh=mesh, in_specs=specs, out_specs=cut, axis_names={'run'}, check_vma=False
        )(*arguments)

    return by_device


RUN_AXES = {'loop': loop, 'vmap': vmap}


def run_axis(name: str, platform: str) -> str:
    """`auto` is what suits the platform; any other name is itself."""
    if name != 'auto':
        return name
    return 'loop' if platform == 'cpu' else 'vmap'


def over_mesh(how: str, mesh: Mesh, function: Callable, n_shared: int = 0) -> Callable[..., Any]:
    """`many(*shared, active_R, *mapped)` for `function(*shared, *mapped of one run)`.

    Arguments and results are stacked along a leading axis R, a multiple of the mesh axis `run`,
    but for the first `n_shared` arguments. To be jitted with shardings that cut R over `run`.
    """
    return RUN_AXES[how](mesh, function, n_shared)


def put(all_R: Any, one: Any, run: jax.Array) -> Any:
    """The tree `all_R` with `one` in place `run` of its leading axis."""
    update = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda leaf_R, leaf: update(leaf_R, leaf, run, 0), all_R, one)


def take(all_R: Any, run: jax.Array) -> Any:
    """What is in place `run` of the leading axis."""
    pick = jax.lax.dynamic_index_in_dim
    return jax.tree.map(lambda leaf_R: pick(leaf_R, run, 0, keepdims=False), all_R)
