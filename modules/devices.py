"""Which axis of a parameter or of an activation lies over which axes of the mesh.

Programs are traced under the mesh they are for (`jax.sharding.use_abstract_mesh`). XLA's
partitioner cuts them from the shardings of what goes in; `sharded` says where what is made on the
way lies.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

# Slow links first: `tensor` lies on neighbouring devices, `data` reaches over slices of a pod.
AXES = ('run', 'data', 'fsdp', 'expert', 'context', 'tensor')
OF_PARAMETERS = ('fsdp', 'tensor', 'expert')  # what parameters are cut over
BATCH = ('data', 'fsdp', 'expert')  # a row of the batch is on one place of these

# Logical axis of a parameter -> the mesh axes it lies over; (): every device holds all of it. The
# first side of a matrix is cut over `fsdp`: XLA for TPUs makes a reduce-scatter of the sum of its
# gradient, and of one that is cut along its last side an all-reduce of the whole.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    'basis': ('fsdp',),
    'embed': ('fsdp',),
    'expert': ('expert',),
    'group': (),
    'head_dim': (),
    'heads': ('tensor', 'fsdp'),
    'kv_heads': ('tensor', 'fsdp'),
    'layer': (),
    'long_side': ('fsdp',),
    'matrix': OF_PARAMETERS,  # each index a matrix, whole on the device that works on it
    'mlp': ('tensor', 'fsdp'),
    'position': (),
    'qk_features': (),
    'rank': (),
    'router': (),
    'short_side': ('fsdp',),
    'vocab': ('tensor', 'fsdp'),
}

# Letter of an activation's shape -> the same. M is B and T together, G rows whose tokens are with
# their experts; letters that are not here are whole.
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
    """How an array of this shape is cut, whose axes are named.

    Each axis in turn lies over those of its mesh axes that no axis before it has taken, and over
    as many of them, from the first on, as its length is a multiple of.
    """
    free = set(mesh.axis_names) - set(getattr(mesh, 'manual_axes', ()))
    parts = []
    for name, length in zip(names, shape, strict=True):
        over, n = [], 1
        for axis in rules.get(name, ()):
            size = mesh.shape.get(axis, 1)
            if size > 1 and axis in free and length % (n * size) == 0:
                over.append(axis)
                n *= size
        free -= set(over)
        parts.append(over[0] if len(over) == 1 else tuple(over) or None)
    return PartitionSpec(*parts)


def names(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one axis of an array lies over."""
    return (part,) if isinstance(part, str) else part or ()


def pieces(letters: str, shape: Sequence[int]) -> int:
    """Into how many parts `sharded` cuts an array of this shape, on the mesh that is traced for."""
    mesh = jax.sharding.get_abstract_mesh()
    over = partition(mesh, ACTIVATIONS, letters, shape)
    return math.prod(mesh.shape[axis] for part in over for axis in names(part))


def parts_of(letter: str) -> int:
    """Into how many parts activations are cut along an axis, on the mesh that is traced for."""
    mesh = jax.sharding.get_abstract_mesh()
    over = [axis for axis in ACTIVATIONS[letter] if axis not in mesh.manual_axes]
    return math.prod(mesh.shape.get(axis, 1) for axis in over)


def sharded(x: jax.Array, letters: str) -> jax.Array:
    """x, laid over the devices by the letters of its shape, such as 'BTD'.

    Where devices differ in their rows alone nothing is said: XLA finds that by itself. Nor is it
    where each is on its own among those of `ACTIVATIONS` (`modules.losses.devices`): what it has is
    cut over `tensor` as its weights are, and a `vmap` over runs would name `run` once more.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if all(mesh.shape[axis] == 1 for axis in mesh.axis_names if axis not in ('run', 'data')):
        return x
    if set(mesh.manual_axes) - {'run'}:
        return x
    return jax.lax.with_sharding_constraint(x, partition(mesh, ACTIVATIONS, letters, x.shape))


def cuts_parameters() -> bool:
    """Whether the mesh that is traced for cuts parameters."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape.get(axis, 1) > 1 for axis in OF_PARAMETERS)


def as_parameter(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """x, laid over the devices as a parameter with these axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, partition(mesh, PARAMETERS, axes, x.shape))


def matrices_apart(x: jax.Array, n_batch: int) -> jax.Array:
    """x, of whose first `n_batch` axes each index is a matrix, laid over the devices by whole ones;
    all of them are on each where their number does not divide.
    """
    return jax.lax.with_sharding_constraint(x, _apart(x.shape[:n_batch]))


def _apart(lengths: Sequence[int]) -> PartitionSpec:
    """How axes of these lengths are cut, each index of which is a matrix."""
    mesh = jax.sharding.get_abstract_mesh()
    return partition(mesh, PARAMETERS, ('matrix',) * len(lengths), lengths)


def are_apart(lengths: Sequence[int]) -> bool:
    """Whether matrices, as many as the product of these lengths, are on several devices."""
    return any(over is not None for over in _apart(lengths))


def of_own_matrices(
    compute: Callable[..., Any], lengths: Sequence[int], stacked: Any, shared: Sequence[Any]
) -> Any:
    """compute(stacked, *shared), on each device for the matrices that `matrices_apart` lays there.

    The arrays of the tree `stacked`, and those of the result, begin with axes of these lengths;
    each device has all of those in `shared`. For TPUs XLA's partitioner would gather what `eigh`
    and `qr` take. What is traced, the count of updates or a number of the optimizer, has to be in
    `shared`: a `vmap` over runs does not see what `compute` has from elsewhere.
    """
    mesh, apart = jax.sharding.get_abstract_mesh(), _apart(lengths)
    return jax.shard_map(
        compute,
        in_specs=(apart, *[PartitionSpec()] * len(shared)),
        out_specs=apart,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,  # of runs that are mapped over it refuses a `cond` whose branches vary
    )(stacked, *shared)
