"""Rules that map each axis of a parameter or activation to the mesh axes that shard it.

Programs are traced under their mesh (`jax.sharding.use_abstract_mesh`). XLA's partitioner shards
them according to the shardings of their inputs; `shard_activation` constrains the arrays in
between.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

# Slow links first: `tensor` is on neighbouring devices, `data` spans slices of a pod.
AXES = ('run', 'data', 'fsdp', 'expert', 'context', 'tensor')
PARAMETER_AXES = ('fsdp', 'tensor', 'expert')  # shard parameters
BATCH = ('data', 'fsdp', 'expert')  # shard the rows of a batch

# Logical axis of a parameter -> the mesh axes that shard it; (): every device holds all of it.
# `fsdp` shards the first side of a matrix: XLA for TPUs then sums its gradient by a reduce-scatter.
# With the last side it uses an all-reduce of the whole gradient.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    'basis': ('fsdp',),
    'coefficient': (),
    'embed': ('fsdp',),
    'expert': ('expert',),
    'factor': (),
    'gate_features': (),
    'group': (),
    'head_dim': (),
    'heads': ('tensor', 'fsdp'),
    'kv_features': (),
    'kv_heads': ('tensor', 'fsdp'),
    'layer': (),
    'long_side': ('fsdp',),
    'matrix': PARAMETER_AXES,  # each index a matrix, whole on a single device
    'mlp': ('tensor', 'fsdp'),
    'position': (),
    'qk_features': (),
    'rank': (),
    'recent': (),
    'router': (),
    'short_side': ('fsdp',),
    'tap': (),
    'source': (),
    'stream': (),
    'table': (),
    'token': ('tensor', 'fsdp'),
    'vocab': ('tensor', 'fsdp'),
}

# Letter of an activation's shape -> the mesh axes that shard it. M is B and T flattened; G are rows
# after their tokens were dispatched to experts. Other letters are not sharded.
ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    'B': BATCH,
    'M': BATCH,
    'T': ('context',),
    'E': ('expert',),
    'G': ('data', 'fsdp'),
    'F': ('tensor',),
    'K': ('tensor',),
    'N': ('tensor',),
    'V': ('tensor',),
}


def partition(
    mesh: Mesh | AbstractMesh,
    rules: Mapping[str, tuple[str, ...]],
    names: Sequence[str],
    shape: Sequence[int],
) -> PartitionSpec:
    """Returns the sharding of an array with named axes.

    Each axis in turn is sharded over its mesh axes that no earlier axis uses, from the first on, as
    far as its length divides.

    Args:
      mesh: the mesh; axes of an enclosing `shard_map` are not used.
      rules: `PARAMETERS` or `ACTIVATIONS`.
      names: the axes of the array.
      shape: their lengths.
    """
    free = set(mesh.axis_names) - set(getattr(mesh, 'manual_axes', ()))
    partitions = []
    for name, length in zip(names, shape, strict=True):
        mesh_axes, n = [], 1
        for axis in rules.get(name, ()):
            size = mesh.shape.get(axis, 1)
            if size > 1 and axis in free and length % (n * size) == 0:
                mesh_axes.append(axis)
                n *= size
        free -= set(mesh_axes)
        partitions.append(mesh_axes[0] if len(mesh_axes) == 1 else tuple(mesh_axes) or None)
    return PartitionSpec(*partitions)


def part_axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that shard an axis of an array, from its entry of a PartitionSpec."""
    return (part,) if isinstance(part, str) else part or ()


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes that shard an array."""
    return tuple(axis for part in spec for axis in part_axes(part))


def count_shards(letters: str, shape: Sequence[int]) -> int:
    """Counts the shards of an array under `shard_activation`, on the traced mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in spec_axes(partition(mesh, ACTIVATIONS, letters, shape)))


def count_axis_shards(letter: str) -> int:
    """Counts the shards of an axis of activations, on the traced mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    mesh_axes = [axis for axis in ACTIVATIONS[letter] if axis not in mesh.manual_axes]
    return math.prod(mesh.shape.get(axis, 1) for axis in mesh_axes)


def shard_activation(x: jax.Array, letters: str) -> jax.Array:
    """Shards x over the devices by the letters of its shape, such as 'BTD'.

    On a mesh that shards only rows x is left alone, as XLA finds that sharding unaided. It is also
    left alone in code that runs on each device separately (`modules.parallel.loss_sums`). There, x
    is sharded over `tensor` like its weights, and a `vmap` over runs would name `run` a second
    time.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if all(mesh.shape[axis] == 1 for axis in mesh.axis_names if axis not in ('run', 'data')):
        return x
    if set(mesh.manual_axes) - {'run'}:
        return x
    return jax.lax.with_sharding_constraint(x, partition(mesh, ACTIVATIONS, letters, x.shape))


def map_devices(
    compute: Callable[..., Any], in_specs: Any, out_specs: Any, except_axis: str = ''
) -> Callable[..., Any]:
    """Maps `compute` over all axes of the traced mesh that no enclosing `shard_map` uses.

    Varying axes are not checked: Pallas calls do not declare them for their results, and under a
    `vmap` over runs the check rejects a `cond` with varying branches.

    Args:
      compute: the function of one device.
      in_specs: the shardings of its arguments.
      out_specs: the shardings of its results.
      except_axis: an axis that is left to XLA if it shards anything.
    """
    mesh = jax.sharding.get_abstract_mesh()
    excluded = {except_axis} if mesh.shape.get(except_axis, 1) > 1 else set()
    axis_names = {*mesh.axis_names} - {*mesh.manual_axes} - excluded
    return jax.shard_map(
        compute,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=axis_names,
        check_vma=False,
    )


def shards_parameters() -> bool:
    """Returns whether the traced mesh shards parameters."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape.get(axis, 1) > 1 for axis in PARAMETER_AXES)


def shard_parameter(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Shards x over the devices like a parameter with these axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, partition(mesh, PARAMETERS, axes, x.shape))


def gather_weights(
    product: Callable[..., jax.Array], groups: Sequence[Sequence[str]]
) -> Callable[..., jax.Array]:
    """Makes product(x, w, ...) gather w over `fsdp`, once forward and once backward.

    The backward pass of a rematerialized layer has two products with each weight. XLA may otherwise
    gather it twice, with different orders of its axes.

    Args:
      product: the function; further arguments are passed on.
      groups: for each axis of w, the names of the parameter's axes that it flattens.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get('fsdp', 1) == 1 or set(mesh.manual_axes) - {'run'}:
        return product

    def multiply_whole(x, w, *rows):
        spec = partition(mesh, PARAMETERS, [group[0] for group in groups], w.shape)
        without_fsdp = (
            tuple(axis for axis in part_axes(part) if axis != 'fsdp') or None for part in spec
        )
        return product(x, _constrain_weight(w, PartitionSpec(*without_fsdp)), *rows)

    # The policy does not save the gathered weight, so the backward pass gathers it again.
    return jax.checkpoint(
        multiply_whole, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _constrain_weight(w, spec):
    return jax.lax.with_sharding_constraint(w, spec)


_constrain_weight.defvjp(
    lambda w, spec: (_constrain_weight(w, spec), None), lambda spec, _, grad: (grad,)
)


def shard_matrices(x: jax.Array, n_batch: int) -> jax.Array:
    """Shards x by whole matrices, one for each index of its first `n_batch` axes.

    If the devices do not divide the matrices evenly, every device has all matrices.
    """
    return jax.lax.with_sharding_constraint(x, _matrix_spec(x.shape[:n_batch]))


def _matrix_spec(lengths: Sequence[int]) -> PartitionSpec:
    mesh = jax.sharding.get_abstract_mesh()
    return partition(mesh, PARAMETERS, ('matrix',) * len(lengths), lengths)


def shards_matrices(lengths: Sequence[int]) -> bool:
    """Returns whether `shard_matrices` shards axes of these lengths."""
    return any(part is not None for part in _matrix_spec(lengths))


def shard_map_matrices(
    compute: Callable[..., Any], lengths: Sequence[int], stacked: Any, shared: Sequence[Any]
) -> Any:
    """Computes compute(stacked, *shared), on each device for its shard of the matrices.

    XLA's partitioner for TPUs would gather the arguments of `eigh` and `qr`.

    Args:
      compute: a function that maps over leading axes of `stacked`.
      lengths: those axes, which the arrays of `stacked` and of the result begin with.
      stacked: a tree of arrays, sharded by `shard_matrices`.
      shared: arguments that each device has in full. Traced values, such as the count of updates or
        a
        number of the optimizer, must be here: a `vmap` over runs does not see what `compute` closes
        over.
    """
    spec = _matrix_spec(lengths)
    in_specs = (spec, *[PartitionSpec()] * len(shared))
    return map_devices(compute, in_specs, spec)(stacked, *shared)
