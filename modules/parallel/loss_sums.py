"""Sums over sharded tokens: each device loops over its own tokens."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from modules.embedding import AXES
from modules.parallel.axes import (
    ACTIVATIONS,
    PARAMETERS,
    map_devices,
    part_axes,
    partition,
    spec_axes,
)

LETTERS = {1: 'M', 2: 'BT'}  # of labels, by their rank
SUMS, PER_TOKEN, READOUT_GRADIENT = 'sums', 'of_tokens', 'of_readout'  # kinds of results


def token_spec(shape: Sequence[int], whole_rows: bool) -> PartitionSpec | None:
    """Returns the sharding of labels of this shape if each device can loop over its own; else None.

    None leaves the sums to XLA: if the mesh does not shard tokens, if they do not divide, if the
    caller already runs on each device, or if rows that must be whole are sharded.
    """
    mesh, letters = jax.sharding.get_abstract_mesh(), LETTERS[len(shape)]
    token_axes = {a for letter in letters for a in ACTIVATIONS[letter] if mesh.shape.get(a, 1) > 1}
    spec = partition(mesh, ACTIVATIONS, letters, shape)
    if (
        not token_axes
        or token_axes != {*spec_axes(spec)}
        or (whole_rows and 'context' in token_axes)
    ):
        return None
    return spec


def count_token_shards(over: PartitionSpec | None) -> int:
    """Counts the devices that tokens are sharded over."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if over is None else math.prod(mesh.shape[axis] for axis in spec_axes(over))


def map_token_shards(
    compute: Callable[..., Any],
    over: PartitionSpec,
    kinds: Sequence[str],
    x: jax.Array,
    readout: Any,
    labels: jax.Array,
    weights: jax.Array,
    *shared: Any,
) -> tuple[Any, ...]:
    """Computes compute(x, readout, labels, weights, *shared), on each device for its tokens.

    However often `compute` loops, the readout's weight is gathered once and its gradient scattered
    once; XLA alone would do both in each iteration. XLA shards the vocabulary over `tensor` inside
    `compute`, but not in these two operations, where it would gather the vocabulary.

    Args:
      compute: the function of one device.
      over: the sharding of labels (`token_spec`).
      kinds: the kind of each result. SUMS are added over the devices. PER_TOKEN is shaped and
        sharded
        like x. READOUT_GRADIENT is added, and sharded like the readout's weight.
      x: activations.
      readout: whole on each device, with its weight in the type of products.
      labels: a label for each token.
      weights: a weight for each token.
      *shared: whole on each device.

    Returns:
      The results of `compute`.
    """
    axes, whole, weight_spec = spec_axes(over), PartitionSpec(), _weight_spec(readout)
    cast_weight_DV = readout.weight_DV.astype(readout.dtype)
    readout = readout.replace(weight_DV=_gather_weight(cast_weight_DV, weight_spec))
    specs = {SUMS: whole, PER_TOKEN: over, READOUT_GRADIENT: PartitionSpec(axes)}
    finish = {
        SUMS: lambda local: jax.lax.psum(local, axes),
        PER_TOKEN: lambda local: local,
        READOUT_GRADIENT: lambda local: local[None],
    }

    def on_device(*arrays):
        arrays = zip(kinds, compute(*arrays), strict=True)
        return tuple(jax.tree.map(finish[kind], array) for kind, array in arrays)

    in_specs = (over, whole, over, over, *[whole] * len(shared))
    run = map_devices(
        on_device, in_specs, tuple(specs[kind] for kind in kinds), except_axis='tensor'
    )
    arrays = run(x, readout, labels, weights, *shared)
    readout_spec = jax.tree.map(lambda _: whole, readout).replace(weight_DV=weight_spec)
    sum_shards = functools.partial(_sum_shards, axes)
    return tuple(
        jax.tree.map(sum_shards, array, readout_spec) if kind == READOUT_GRADIENT else array
        for kind, array in zip(kinds, arrays, strict=True)
    )


def _weight_spec(readout: Any) -> PartitionSpec:
    """Returns the sharding of the readout's weight [D, V] as a parameter."""
    mesh, shape = jax.sharding.get_abstract_mesh(), readout.weight_DV.shape
    if not readout.is_table:
        return partition(mesh, PARAMETERS, ('embed', 'vocab'), shape)
    vocab_axes, embed_axes = partition(mesh, PARAMETERS, AXES, shape[::-1])
    return PartitionSpec(embed_axes, vocab_axes)


def _gather_weight(weight_DV: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Gathers a weight over `fsdp`."""
    axis, without_fsdp = _without_fsdp(spec)
    if axis is None:
        return weight_DV
    gather = functools.partial(jax.lax.all_gather, axis_name='fsdp', axis=axis, tiled=True)
    return map_devices(gather, spec, without_fsdp)(weight_DV)


def _sum_shards(axes: tuple[str, ...], partial_sums: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Sums over the first axis, which the mesh axes `axes` shard; `spec` shards the sum."""
    axis, without_fsdp = _without_fsdp(spec)
    mesh_axes = tuple(name for name in axes if axis is None or name != 'fsdp')

    def on_device(gradient):
        gradient = gradient[0]  # the axis that READOUT_GRADIENT added for the devices
        if axis is not None:
            gradient = jax.lax.psum_scatter(gradient, 'fsdp', scatter_dimension=axis, tiled=True)
        return jax.lax.psum(gradient, mesh_axes)

    return map_devices(on_device, PartitionSpec(axes, *without_fsdp), spec)(partial_sums)


def _without_fsdp(spec: PartitionSpec) -> tuple[int | None, PartitionSpec]:
    """Returns (the axis of an array that `fsdp` shards or None, the sharding without `fsdp`)."""
    fsdp_axes = [i for i, part in enumerate(spec) if 'fsdp' in part_axes(part)]
    without_fsdp = (tuple(axis for axis in part_axes(part) if axis != 'fsdp') for part in spec)
    return (fsdp_axes[0] if fsdp_axes else None), PartitionSpec(
        *(part or None for part in without_fsdp)
    )
