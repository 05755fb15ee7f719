"""Rules that say over which axes of the mesh each axis of a parameter or activation is cut.

Programs are traced under their mesh (`jax.sharding.use_abstract_mesh`). XLA's partitioner cuts them
by the shardings of their inputs; `shard_activation` constrains the arrays in between.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

# Slow links first: `tensor` is on neighbouring devices, `data` reaches over slices of a pod.
AXES = ('run', 'data', 'fsdp', 'expert', 'context', 'tensor')
PARAMETER_AXES = ('fsdp', 'tensor', 'expert')  # what parameters are cut over
BATCH = ('data', 'fsdp', 'expert')  # what rows of a batch are cut over

# Logical axis of a parameter -> the mesh axes it is cut over; (): every device holds all of it.
# `fsdp` cuts the first side of a matrix: XLA for TPUs then sums its gradient by a reduce-scatter,
# and with the last side by an all-reduce of the whole.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    'basis': ('fsdp',),
    'embed': ('fsdp',),
    'expert': ('expert',),
    'factor': (),
    'group': (),
    'head_dim': (),
    'heads': ('tensor', 'fsdp'),
    'kv_heads': ('tensor', 'fsdp'),
    'layer': (),
    'long_side': ('fsdp',),
    'matrix': PARAMETER_AXES,  # each index a matrix, whole on one device
    'mlp': ('tensor', 'fsdp'),
    'position': (),
    'qk_features': (),
    'rank': (),
    'router': (),
    'short_side': ('fsdp',),
    'vocab': ('tensor', 'fsdp'),
}

# Letter of an activation's shape -> the same. M is B and T flattened, G rows whose tokens are with
# their experts; other letters are whole.
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
    """Returns how an array of this shape with named axes is cut.

    Each axis in turn is cut over its mesh axes that no axis before it has taken, from the first on,
    as far as its length divides.
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


def part_axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that one axis of an array is cut over."""
    return (part,) if isinstance(part, str) else part or ()


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes that an array is cut over."""
    return tuple(axis for part in spec for axis in part_axes(part))


def count_shards(letters: str, shape: Sequence[int]) -> int:
    """Returns into how many parts `shard_activation` cuts an array of this shape, on the traced mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in spec_axes(partition(mesh, ACTIVATIONS, letters, shape)))


def count_axis_shards(letter: str) -> int:
    """Returns into how many parts an axis of activations is cut, on the traced mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    over = [axis for axis in ACTIVATIONS[letter] if axis not in mesh.manual_axes]
    return math.prod(mesh.shape.get(axis, 1) for axis in over)


def shard_activation(x: jax.Array, letters: str) -> jax.Array:
    """Cuts x over the devices by the letters of its shape, such as 'BTD'.

    x stays as it is on a mesh that cuts rows alone, which XLA finds by itself, and where the code
    runs on each device by itself (`modules.parallel.loss_sums`): x is then cut over `tensor` as its
    weights are, and a `vmap` over runs would name `run` once more.
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
    """Maps `compute` over the axes of the traced mesh that no caller has taken, but for one, `but`,
    if it cuts something.

    What varies over which axes is not checked: Pallas calls do not say it of their results, and
    under a `vmap` over runs the check refuses a `cond` whose branches vary.
    """
    mesh = jax.sharding.get_abstract_mesh()
    left = {except_axis} if mesh.shape.get(except_axis, 1) > 1 else set()
    axis_names = {*mesh.axis_names} - {*mesh.manual_axes} - left
    how = {'in_specs': in_specs, 'out_specs': out_specs, 'axis_names': axis_names}
    return jax.shard_map(compute, **how, check_vma=False)


def shards_parameters() -> bool:
    """Whether the traced mesh cuts parameters."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape.get(axis, 1) > 1 for axis in PARAMETER_AXES)


def shard_parameter(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Cuts x over the devices as a parameter with these axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, partition(mesh, PARAMETERS, axes, x.shape))


def gather_weights(
    product: Callable[..., jax.Array], groups: Sequence[Sequence[str]]
) -> Callable[..., jax.Array]:
    """Makes product(x, w, ...) gather w over `fsdp`, once forward and once backward.

    groups: names of a parameter's axes, by the axes of w that they are flattened to. The backward
    pass of a layer that is computed again has two products with each weight. Left to XLA, each may
    gather it in an order of axes of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get('fsdp', 1) == 1 or set(mesh.manual_axes) - {'run'}:
        return product

    def multiply_whole(x, w, *rows):
        over = partition(mesh, PARAMETERS, [group[0] for group in groups], w.shape)
        kept = (tuple(axis for axis in part_axes(part) if axis != 'fsdp') or None for part in over)
        return product(x, _constrain_weight(w, PartitionSpec(*kept)), *rows)

    # A whole weight is not kept for the backward pass.
    return jax.checkpoint(
        multiply_whole, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _constrain_weight(w, over):
    return jax.lax.with_sharding_constraint(w, over)


_constrain_weight.defvjp(
    lambda w, over: (_constrain_weight(w, over), None), lambda over, _, grad: (grad,)
)


def shard_matrices(x: jax.Array, n_batch: int) -> jax.Array:
    """Cuts x by whole matrices, one for each index of its first `n_batch` axes; every device has
    all of them where their number does not divide.
    """
    return jax.lax.with_sharding_constraint(x, _matrix_spec(x.shape[:n_batch]))


def _matrix_spec(lengths: Sequence[int]) -> PartitionSpec:
    mesh = jax.sharding.get_abstract_mesh()
    return partition(mesh, PARAMETERS, ('matrix',) * len(lengths), lengths)


def shards_matrices(lengths: Sequence[int]) -> bool:
    """Whether `shard_matrices` cuts axes of these lengths."""
    return any(over is not None for over in _matrix_spec(lengths))


def shard_map_matrices(
    compute: Callable[..., Any], lengths: Sequence[int], stacked: Any, shared: Sequence[Any]
) -> Any:
    """Computes compute(stacked, *shared), on each device for its matrices by `shard_matrices`.

    The arrays of the tree `stacked`, and those of the result, begin with axes of these lengths;
    each device has all of `shared`. XLA's partitioner for TPUs would gather the arguments of `eigh`
    and `qr`. Traced values, such as the count of updates or a number of the optimizer, must be in
    `shared`: a `vmap` over runs does not see what `compute` closes over.
    """
    apart = _matrix_spec(lengths)
    in_specs = (apart, *[PartitionSpec()] * len(shared))
    return map_devices(compute, in_specs, apart)(stacked, *shared)
