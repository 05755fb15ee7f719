"""Kernels on several devices: XLA cannot cut a Pallas call."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from modules.parallel.axes import ACTIVATIONS, map_devices

PARTS = 'A'  # the letter of an axis with one place for each device that has rows of its own
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
    """Computes compute(*arrays), on each device of the traced mesh for its own part.

    Arrays and results are cut along the axes that their letters name, from the first axis on
    (`modules.parallel.axes.ACTIVATIONS`); axes without a letter are whole on each device.
    out_letters has the structure of the result. A letter is cut only where its length divides in
    all arrays, and where no letter left whole lies over the same devices. An axis of length 1 is
    whole, and stands for all of an axis that is cut.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {name for name in mesh.axis_names if name not in mesh.manual_axes}
    if all(mesh.shape[name] == 1 for name in free):
        return compute(*arrays)
    lengths = {}
    for array, own in zip(arrays, letters, strict=True):
        for leaf in jax.tree.leaves(array):
            for letter, length in zip(own or '', leaf.shape, strict=False):
                lengths.setdefault(letter, set()).update({length} - {1})
    over = _assign_axes(lengths, {name: mesh.shape[name] for name in free})

    def leaf_spec(leaf, leaf_letters):
        pairs = zip(leaf_letters, leaf.shape, strict=False)
        return PartitionSpec(*(over[one] if length > 1 else None for one, length in pairs))

    in_specs = tuple(
        jax.tree.map(lambda leaf, own=own: leaf_spec(leaf, own or ''), array)
        for array, own in zip(arrays, letters, strict=True)
    )
    used = tuple(axis for axes in over.values() if axes for axis in axes)
    over = over | {PARTS: tuple(dict.fromkeys(used))}
    out_specs = jax.tree.map(
        lambda own: PartitionSpec(*(over.get(letter) for letter in own)), out_letters
    )
    on_own = map_devices(compute, in_specs, out_specs)
    if set(mesh.manual_axes) - {'run'}:
        on_own = _map_unnamed(on_own)
    return on_own(*arrays)


def gather_tokens(x_BKT_: jax.Array, axis_name: str) -> jax.Array:
    """Gathers the tokens of all devices along a mesh axis.

    The axis of devices is at first in front of all others, so that the gradient is scattered along
    the first axis, where XLA for TPUs has a reduce-scatter; along T it sums whole arrays.
    """
    of_devices = jnp.moveaxis(jax.lax.all_gather(x_BKT_, axis_name), 0, 2)
    return of_devices.reshape(*x_BKT_.shape[:2], -1, *x_BKT_.shape[3:])


def _map_unnamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps without a mesh axis, where each device has its own runs already.

    A `vmap` that names `run` would cut them once more. There is no reverse mode through it.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return function(*arrays)

    @call.def_vmap
    def batch_rule(runs, mapped, *arrays):
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(mapped))
        found = jax.vmap(function, axes, axis_size=runs)(*arrays)
        return found, jax.tree.map(lambda _: True, found)

    return call


def _assign_axes(
    lengths: Mapping[str, set[int]], sizes: Mapping[str, int]
) -> dict[str, tuple[str, ...] | None]:
    """Returns the mesh axes of these sizes that each letter is cut over; None for a whole one.

    lengths: those of each letter's axes but 1.
    """
    over, whole = {}, set()
    for letter, found in lengths.items():
        axes = tuple(axis for axis in ACTIVATIONS[letter] if sizes.get(axis, 1) > 1)
        n = math.prod(sizes[axis] for axis in axes)
        over[letter] = axes or None
        if not found or any(length % n for length in found):
            over[letter] = None
            whole |= set(axes) if found else set()
    return {
        letter: None if axes is None or whole & set(axes) else axes for letter, axes in over.items()
    }
