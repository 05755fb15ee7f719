"""Sums over tokens that are cut over devices, each of which goes through its own."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from modules.devices import ACTIVATIONS, PARAMETERS, names, partition
from modules.embedding import AXES

LETTERS = {1: 'M', 2: 'BT'}  # of labels, by their rank
SUMS, OF_TOKENS, OF_READOUT = 'sums', 'of_tokens', 'of_readout'  # what a device makes


def own_tokens(shape: Sequence[int], whole_rows: bool) -> PartitionSpec | None:
    """How labels of this shape lie over the devices, where each can go through its own.

    None where the mesh does not cut tokens; where they do not divide, as a single row of a batch;
    where the caller is on each device by itself already; and where rows have to be whole and are
    cut. The sums are then left to XLA.
    """
    mesh, letters = jax.sharding.get_abstract_mesh(), LETTERS[len(shape)]
    wanted = {a for letter in letters for a in ACTIVATIONS[letter] if mesh.shape.get(a, 1) > 1}
    over = partition(mesh, ACTIVATIONS, letters, shape)
    if not wanted or wanted != {*_axes(over)} or (whole_rows and 'context' in wanted):
        return None
    return over


def pieces_of(over: PartitionSpec | None) -> int:
    """Over how many devices tokens lie; None: not cut."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if over is None else math.prod(mesh.shape[axis] for axis in _axes(over))


def on_own_tokens(
    compute: Callable[..., Any],
    over: PartitionSpec,
    made: Sequence[str],
    x: jax.Array,
    readout: Any,
    labels: jax.Array,
    weights: jax.Array,
    *others: Any,
) -> tuple[Any, ...]:
    """compute(x, readout, labels, weights, *others), on each device for its own tokens.

    over: how labels lie (`own_tokens`). Each device has the whole readout, its weight in the type
    of products, and all of `others`. made: what each of the results is. SUMS are added up over the
    devices; OF_TOKENS is shaped as x and lies as it does; OF_READOUT, the readout's gradient, is
    added up, and each device keeps the part of the weight's that it has of the weight.

    However many rounds `compute` makes, the weight is gathered once and its gradient scattered
    once; left to XLA, both are done in each round. The axis `tensor`, which cuts the vocabulary, is
    left to XLA inside, but not in these two, for which it would gather the vocabulary.
    """
    axes, whole, of_weight = _axes(over), PartitionSpec(), _lies(readout)
    narrow = readout.weight_DV.astype(readout.dtype)
    readout = readout.replace(weight_DV=_gathered(narrow, of_weight))
    specs = {SUMS: whole, OF_TOKENS: over, OF_READOUT: PartitionSpec(axes)}
    ends = {
        SUMS: lambda own: jax.lax.psum(own, axes),
        OF_TOKENS: lambda own: own,
        OF_READOUT: lambda own: own[None],
    }

    def on_device(*arrays):
        found = zip(made, compute(*arrays), strict=True)
        return tuple(jax.tree.map(ends[kind], one) for kind, one in found)

    found = jax.shard_map(
        on_device,
        in_specs=(over, whole, over, over, *[whole] * len(others)),
        out_specs=tuple(specs[kind] for kind in made),
        axis_names=_free(but='tensor'),
        check_vma=False,  # Pallas calls do not say over which axes their results vary
    )(x, readout, labels, weights, *others)
    of_readout = jax.tree.map(lambda _: whole, readout).replace(weight_DV=of_weight)
    summed = functools.partial(_summed, axes)
    return tuple(
        jax.tree.map(summed, one, of_readout) if kind == OF_READOUT else one
        for kind, one in zip(made, found, strict=True)
    )


def _lies(readout: Any) -> PartitionSpec:
    """How its weight [D, V] does, as the parameter that it is."""
    mesh, shape = jax.sharding.get_abstract_mesh(), readout.weight_DV.shape
    if not readout.is_table:
        return partition(mesh, PARAMETERS, ('embed', 'vocab'), shape)
    of_vocab, of_embed = partition(mesh, PARAMETERS, AXES, shape[::-1])
    return PartitionSpec(of_embed, of_vocab)


def _gathered(weight_DV: jax.Array, over: PartitionSpec) -> jax.Array:
    """All that is cut over `fsdp`, on each of its devices."""
    cut, kept = _without_fsdp(over)
    if cut is None:
        return weight_DV
    return jax.shard_map(
        lambda own: jax.lax.all_gather(own, 'fsdp', axis=cut, tiled=True),
        in_specs=over,
        out_specs=kept,
        axis_names=_free(),
        check_vma=False,
    )(weight_DV)


def _summed(axes: tuple[str, ...], parts: jax.Array, over: PartitionSpec) -> jax.Array:
    """The sum over the first axis, which lies over the mesh axes `axes`, laid as `over` says."""
    cut, kept = _without_fsdp(over)
    rest = tuple(axis for axis in axes if cut is None or axis != 'fsdp')

    def on_device(own):
        own = own[0]
        if cut is not None:
            own = jax.lax.psum_scatter(own, 'fsdp', scatter_dimension=cut, tiled=True)
        return jax.lax.psum(own, rest)

    return jax.shard_map(
        on_device,
        in_specs=PartitionSpec(axes, *kept),
        out_specs=over,
        axis_names=_free(),
        check_vma=False,
    )(parts)


def _without_fsdp(over: PartitionSpec) -> tuple[int | None, PartitionSpec]:
    """(which axis of an array is cut over it, how the array lies where none is)."""
    cut = [i for i, part in enumerate(over) if 'fsdp' in names(part)]
    kept = (tuple(axis for axis in names(part) if axis != 'fsdp') for part in over)
    return (cut[0] if cut else None), PartitionSpec(*(part or None for part in kept))


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    return tuple(axis for part in spec for axis in names(part))


def _free(but: str = '') -> set[str]:
    """Mesh axes that no caller has taken, but for one where it cuts something."""
    mesh = jax.sharding.get_abstract_mesh()
    left = {but} if mesh.shape.get(but, 1) > 1 else set()
    return {*mesh.axis_names} - {*mesh.manual_axes} - left
