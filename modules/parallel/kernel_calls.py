"""Kernels on several devices: XLA cannot shard a Pallas call."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from modules.parallel.axes import ACTIVATIONS, map_devices

PARTS = 'A'  # the letter of an axis with an index for each device that has different rows
LEADING = {2: 'M', 3: 'BT', 4: 'BNT'}  # letters of the rows of activations, by their rank


def row_letters(x: jax.Array) -> str:
    """Returns the letters of all axes but the last: rows are [M], [B, T] or [B, N, T]."""
    return LEADING.get(x.ndim, '')


def map_shards(
    compute: Callable[..., Any],
    arrays: Sequence[Any],
    letters: Sequence[str | None],
    out_letters: Any,
) -> Any:
    """Computes compute(*arrays), on each device of the traced mesh for its shard.

    A letter is sharded only if its length divides in all arrays, and if no letter that must stay
    whole uses the same mesh axes. An axis of length 1 is whole, and broadcasts against a sharded
    axis.

    Args:
      compute: the function of one device.
      arrays: its arguments, trees of arrays or None.
      letters: for each argument the letters of its first axes
        (`modules.parallel.axes.ACTIVATIONS`);
        axes without a letter are whole on each device.
      out_letters: the same for the results, in the structure of the result.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {name for name in mesh.axis_names if name not in mesh.manual_axes}
    if all(mesh.shape[name] == 1 for name in free):
        return compute(*arrays)
    lengths: dict[str, set[int]] = {}
    for array, array_letters in zip(arrays, letters, strict=True):
        for leaf in jax.tree.leaves(array):
            for letter, length in zip(array_letters or '', leaf.shape, strict=False):
                # An axis of length 1 broadcasts, so it does not restrict its letter.
                lengths.setdefault(letter, set()).update({length} - {1})
    mesh_axes = _assign_axes(lengths, {name: mesh.shape[name] for name in free})

    def leaf_spec(leaf, leaf_letters):
        pairs = zip(leaf_letters, leaf.shape, strict=False)
        return PartitionSpec(
            *(mesh_axes[letter] if length > 1 else None for letter, length in pairs)
        )

    in_specs = tuple(
        jax.tree.map(lambda leaf, names=names: leaf_spec(leaf, names or ''), array)
        for array, names in zip(arrays, letters, strict=True)
    )
    used = tuple(axis for axes in mesh_axes.values() if axes for axis in axes)
    mesh_axes = mesh_axes | {PARTS: tuple(dict.fromkeys(used))}
    out_specs = jax.tree.map(
        lambda names: PartitionSpec(*(mesh_axes.get(letter) for letter in names)), out_letters
    )
    on_devices = map_devices(compute, in_specs, out_specs)
    if set(mesh.manual_axes) - {'run'}:
        on_devices = _map_unnamed(on_devices)
    return on_devices(*arrays)


def gather_tokens(x_BKT_: jax.Array, axis_name: str) -> jax.Array:
    """Gathers the tokens of all devices along a mesh axis, [B, K, T, ...].

    The axis of devices is gathered as the first axis, so that the gradient is scattered along it:
    there XLA for TPUs has a reduce-scatter, while along T it sums whole arrays.
    """
    gathered = jnp.moveaxis(jax.lax.all_gather(x_BKT_, axis_name), 0, 2)
    return gathered.reshape(*x_BKT_.shape[:2], -1, *x_BKT_.shape[3:])


def _map_unnamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps without a mesh axis, where each device already has its own runs.

    A `vmap` that names `run` would shard them again. The result has no reverse-mode derivative.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return function(*arrays)

    @call.def_vmap
    def batch_rule(runs, mapped, *arrays):
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(mapped))
        stacked = jax.vmap(function, axes, axis_size=runs)(*arrays)
        return stacked, jax.tree.map(lambda _: True, stacked)

    return call


def _assign_axes(
    lengths: Mapping[str, set[int]], sizes: Mapping[str, int]
) -> dict[str, tuple[str, ...] | None]:
    """Returns the mesh axes that shard each letter; None: the letter is whole.

    lengths: the lengths other than 1 of each letter's axes. sizes: the mesh axes.
    """
    mesh_axes, whole = {}, set()
    for letter, axis_lengths in lengths.items():
        axes = tuple(axis for axis in ACTIVATIONS[letter] if sizes.get(axis, 1) > 1)
        n = math.prod(sizes[axis] for axis in axes)
        mesh_axes[letter] = axes or None
        if not axis_lengths or any(length % n for length in axis_lengths):
            mesh_axes[letter] = None
            whole |= set(axes) if axis_lengths else set()
    return {
        letter: None if axes is None or whole & set(axes) else axes
        for letter, axes in mesh_axes.items()
    }
