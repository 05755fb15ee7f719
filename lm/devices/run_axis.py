"""The run axis: layouts of the runs of one program in its arrays, `SingleRun` or `StackedRuns`.

`StackedRuns` adds a leading axis R, on the mesh axis `run`, and a row of `RUN_AXES` maps a function
of one run over it. The rows agree up to rounding: `loop` computes each run with the operations of a
single run, `vmap` with batched ones. `SingleRun` has one run and no axis; its program is the
function itself.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from lm.devices.mesh import batch_sharding, replicated_sharding, stacked_sharding


def vmap(mesh: Mesh, function: Callable, n_shared: int = 0) -> Callable:
    """Computes all runs at once, in batched operations. Inactive runs cost as much as active ones.

    The partitioner cuts the runs over the mesh. Under shard_map it would gather activations over
    `data`: 96 all-gathers in a step of the default model on v5e:2x4 with run=4, data=2; here none.

    Args:
      mesh: the mesh.
      function: function(*shared, *arguments) of one run.
      n_shared: number of arguments that all runs share.

    Returns:
      function(*shared, active_R, *arguments_R) of all runs.
    """
    del mesh

    def many(*arguments):
        shared, (_, *mapped) = arguments[:n_shared], arguments[n_shared:]
        return jax.vmap(
            lambda *run_arguments: function(*shared, *run_arguments), spmd_axis_name='run'
        )(*mapped)

    return many


def loop(mesh: Mesh, function: Callable, n_shared: int = 0) -> Callable:
    """Computes one run after another. Inactive runs cost nothing, and their results are zeros.

    XLA:CPU needs it, as its batched products are slow. Results go into separate buffers, since XLA
    would copy the results of all runs in each round if they were written over the arguments. There
    are as many rounds as active runs, since a condition copies its operands: with 16 runs of width
    128 on two cores a run takes 63 ms per step, and 72 ms with either alternative. The barriers
    keep XLA from fusing the copies with the step, which would then round differently from a single
    run.

    Args:
      mesh: the mesh.
      function: function(*shared, *arguments) of one run.
      n_shared: number of arguments that all runs share.

    Returns:
      function(*shared, active_R, *arguments_R) of all runs.
    """

    def many(*arguments):
        shared, (active_R, *mapped) = arguments[:n_shared], arguments[n_shared:]
        # Active runs first, so that the loop can end after their number.
        active_first_R = jnp.argsort(~active_R)

        def compute_run(run):
            run_arguments = jax.lax.optimization_barrier(take(mapped, run))
            return jax.lax.optimization_barrier(function(*shared, *run_arguments))

        def compute_next(n_done, results_R):
            run = active_first_R[n_done]
            return put(results_R, compute_run(run), run)

        zeros_R = jax.tree.map(
            lambda s: jnp.zeros((*active_R.shape, *s.shape), s.dtype),
            jax.eval_shape(compute_run, 0),
        )
        return jax.lax.fori_loop(0, jnp.sum(active_R), compute_next, zeros_R)

    if mesh.shape['run'] == 1:
        return many

    def by_device(*arguments):
        over_runs = PartitionSpec('run')
        specs = (PartitionSpec(),) * n_shared + (over_runs,) * (len(arguments) - n_shared)
        return jax.shard_map(
            many,
            mesh=mesh,
            in_specs=specs,
            out_specs=over_runs,
            axis_names={'run'},
            check_vma=False,
        )(*arguments)

    return by_device


# A row maps `function(*shared, *mapped)` of one run to `many(*shared, active_R, *mapped_R)`: all
# but the first n_shared arguments, and the results, are stacked along a leading axis R, a multiple
# of the mesh axis `run`. Jit the mapped function with shardings that cut R over that axis.
RUN_AXES = {'loop': loop, 'vmap': vmap}
SINGLE = 'single'


def select_run_axis(name: str, platform: str) -> str:
    """Returns the row of RUN_AXES that suits the platform for `auto`, and any other name itself."""
    if name != 'auto':
        return name
    return 'loop' if platform == 'cpu' else 'vmap'


def put(all_R: Any, tree: Any, run: jax.Array) -> Any:
    """Returns the stacked tree `all_R` with a run's tree at an index of its leading axis.

    Args:
      all_R: the stacked tree.
      tree: the tree of one run.
      run: the index.
    """
    update = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda leaf_R, leaf: update(leaf_R, leaf, run, 0), all_R, tree)


def take(all_R: Any, run: jax.Array) -> Any:
    """Returns the tree at index `run` of the leading axis."""
    pick = jax.lax.dynamic_index_in_dim
    return jax.tree.map(lambda leaf_R: pick(leaf_R, run, 0, keepdims=False), all_R)


class SingleRun:
    """The layout of one run. Arrays are passed through without a copy.

    It has the methods of `StackedRuns`, for a program that serves both, and a single slot.

    states_sharding, scalars_sharding, batch_sharding: the shardings of a state, of small arrays and
    of a batch.
    """

    skips_inactive = True

    def __init__(self, mesh: Mesh, state_shardings: Any):
        self.states_sharding = state_shardings
        self.scalars_sharding, self.batch_sharding = replicated_sharding(mesh), batch_sharding(mesh)

    def map_runs(self, function: Callable, n_shared: int = 0) -> Callable[..., Any]:
        """Adds the argument `active`. Nothing reads it, so jit drops it."""

        @functools.wraps(function)
        def apply_one(*arguments):
            return function(*arguments[:n_shared], *arguments[n_shared + 1 :])

        return apply_one

    def shapes(self, run_shapes: Any, slots: int) -> Any:
        return run_shapes

    def make_buffer(self, run_shapes: Any, slots: int) -> None:
        """Returns None: one run needs no stacked buffer."""

    def put(self, states: Any, state: Any, slot: int) -> Any:
        """Returns the state of the run.

        Args:
          states: unused; there is no stacked buffer.
          state: the state.
          slot: unused; there is one slot.
        """
        return state

    def take(self, states: Any, slot: int) -> Any:
        return states

    def stack(self, trees: Sequence[Any]) -> Any:
        (tree,) = trees
        return tree

    def stack_scalars(self, trees: Sequence[Any]) -> Any:
        return self.stack(trees)

    def pick(self, fetched: Any, slot: int) -> Any:
        return fetched


class StackedRuns:
    """The layout of several runs along a leading axis R, with a slot for each run.

    states_sharding, scalars_sharding, batch_sharding: the shardings of stacked states, small arrays
    and batches.

    Args:
      axis_name: a row of RUN_AXES.
      mesh: the mesh.
      state_shardings: the shardings of one run's state.
    """

    def __init__(self, axis_name: str, mesh: Mesh, state_shardings: Any):
        self._axis_name, self._mesh = axis_name, mesh
        self.skips_inactive = axis_name == 'loop'
        self.states_sharding = jax.tree.map(stacked_sharding, state_shardings)
        self.scalars_sharding, self.batch_sharding = (
            stacked_sharding(replicated_sharding(mesh)),
            stacked_sharding(batch_sharding(mesh)),
        )
        self._put = jax.jit(put, out_shardings=self.states_sharding, donate_argnums=0)
        self._take = jax.jit(take, out_shardings=state_shardings)

    def map_runs(self, function: Callable, n_shared: int = 0) -> Callable[..., Any]:
        """Maps a function of one run over the slots, by the row of RUN_AXES."""
        return RUN_AXES[self._axis_name](self._mesh, function, n_shared)

    def shapes(self, run_shapes: Any, slots: int) -> Any:
        """Returns shapes and types of a tree stacked for `slots` runs."""
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((slots, *s.shape), s.dtype), run_shapes)

    def make_buffer(self, run_shapes: Any, slots: int) -> Any:
        """Returns zeros for the states of `slots` runs, each with shapes `run_shapes`."""
        shapes_R = self.shapes(run_shapes, slots)

        def zeros():
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes_R)

        return jax.jit(zeros, out_shardings=self.states_sharding)()

    def put(self, states: Any, state: Any, slot: int) -> Any:
        """Returns `states`, which are donated, with a run's state in a slot.

        Args:
          states: the stacked states.
          state: the state of one run.
          slot: the index of the run.
        """
        return self._put(states, state, slot)

    def take(self, states: Any, slot: int) -> Any:
        """Returns a copy of the state in a slot."""
        return self._take(states, slot)

    def stack(self, trees: Sequence[Any]) -> Any:
        """Stacks the host arrays of all slots."""
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def stack_scalars(self, trees: Sequence[Any]) -> Any:
        """Stacks the small arrays of all slots on the devices."""
        stacked_R = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
        return jax.device_put(stacked_R, self.scalars_sharding)

    def pick(self, fetched: Any, slot: int) -> Any:
        """Returns a slot's part of fetched host arrays."""
        return jax.tree.map(lambda leaf_R: leaf_R[slot], fetched)


def make_layout(axis_name: str, mesh: Mesh, state_shardings: Any) -> SingleRun | StackedRuns:
    """Returns the layout of a program's runs.

    Args:
      axis_name: SINGLE, or a row of RUN_AXES for any number of runs.
      mesh: the mesh.
      state_shardings: the shardings of one run's state.
    """
    if axis_name == SINGLE:
        return SingleRun(mesh, state_shardings)
    return StackedRuns(axis_name, mesh, state_shardings)
