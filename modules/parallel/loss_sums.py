"""Sums over tokens that are cut over devices, each of which loops over its own."""

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
    """Returns how labels of this shape are cut, if each device can loop over its own.

    None leaves the sums to XLA: where the mesh does not cut tokens, where they do not divide, where
    the caller runs on each device already, and where rows that must be whole are cut.
    """
    mesh, letters = jax.sharding.get_abstract_mesh(), LETTERS[len(shape)]
    wanted = {a for letter in letters for a in ACTIVATIONS[letter] if mesh.shape.get(a, 1) > 1}
    over = partition(mesh, ACTIVATIONS, letters, shape)
    if not wanted or wanted != {*spec_axes(over)} or (whole_rows and 'context' in wanted):
        return None
    return over


def count_token_shards(over: PartitionSpec | None) -> int:
    """Returns how many devices tokens are cut over."""
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
    """Computes compute(x, readout, labels, weights, *others), on each device for its own tokens.

    over: how labels are cut (`token_spec`). Each device has the whole readout, its weight in the
    type of products, and all of `others`. made: the kind of each result. SUMS are added over the
    devices; OF_TOKENS is shaped and cut as x; OF_READOUT, the readout's gradient, is added, and
    each device keeps the part of the weight's gradient that it has of the weight.

    However many rounds `compute` makes, the weight is gathered once and its gradient scattered
    once; left to XLA, both happen in each round. XLA cuts the vocabulary over `tensor` inside, but
    not in these two, where it would gather the vocabulary.
    """
    axes, whole, of_weight = spec_axes(over), PartitionSpec(), _weight_spec(readout)
    narrow = readout.weight_DV.astype(readout.dtype)
    readout = readout.replace(weight_DV=_gather_weight(narrow, of_weight))
    specs = {SUMS: whole, PER_TOKEN: over, READOUT_GRADIENT: PartitionSpec(axes)}
    ends = {
        SUMS: lambda own: jax.lax.psum(own, axes),
        PER_TOKEN: lambda own: own,
        READOUT_GRADIENT: lambda own: own[None],
    }

    def on_device(*arrays):
        found = zip(kinds, compute(*arrays), strict=True)
        return tuple(jax.tree.map(ends[kind], one) for kind, one in found)

    in_specs = (over, whole, over, over, *[whole] * len(shared))
    run = map_devices(
        on_device, in_specs, tuple(specs[kind] for kind in kinds), except_axis='tensor'
    )
    found = run(x, readout, labels, weights, *shared)
    of_readout = jax.tree.map(lambda _: whole, readout).replace(weight_DV=of_weight)
    summed = functools.partial(_sum_shards, axes)
    return tuple(
        jax.tree.map(summed, one, of_readout) if kind == READOUT_GRADIENT else one
        for kind, one in zip(kinds, found, strict=True)
    )


def _weight_spec(readout: Any) -> PartitionSpec:
    """Returns how the readout's weight [D, V] is cut, as the parameter that it is."""
    mesh, shape = jax.sharding.get_abstract_mesh(), readout.weight_DV.shape
    if not readout.is_table:
        return partition(mesh, PARAMETERS, ('embed', 'vocab'), shape)
    of_vocab, of_embed = partition(mesh, PARAMETERS, AXES, shape[::-1])
    return PartitionSpec(of_embed, of_vocab)


def _gather_weight(weight_DV: jax.Array, over: PartitionSpec) -> jax.Array:
    """Gathers a weight over `fsdp`."""
    cut, kept = _without_fsdp(over)
    if cut is None:
        return weight_DV
    gather = functools.partial(jax.lax.all_gather, axis_name='fsdp', axis=cut, tiled=True)
    return map_devices(gather, over, kept)(weight_DV)


def _sum_shards(axes: tuple[str, ...], parts: jax.Array, over: PartitionSpec) -> jax.Array:
    """Sums over the first axis, cut over the mesh axes `axes`; the sum is cut by `over`."""
    cut, kept = _without_fsdp(over)
    rest = tuple(axis for axis in axes if cut is None or axis != 'fsdp')

    def on_device(gradient):
        gradient = gradient[0]
        if cut is not None:
            gradient = jax.lax.psum_scatter(gradient, 'fsdp', scatter_dimension=cut, tiled=True)
        return jax.lax.psum(gradient, rest)

    return map_devices(on_device, PartitionSpec(axes, *kept), over)(parts)


def _without_fsdp(over: PartitionSpec) -> tuple[int | None, PartitionSpec]:
    """Returns (which axis of an array is cut over `fsdp`, how the array is cut without it)."""
    cut = [i for i, part in enumerate(over) if 'fsdp' in part_axes(part)]
    kept = (tuple(axis for axis in part_axes(part) if axis != 'fsdp') for part in over)
    return (cut[0] if cut else None), PartitionSpec(*(part or None for part in kept))
