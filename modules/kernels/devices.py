"""Kernels on several devices: XLA cannot cut a Pallas call."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from modules.devices import ACTIVATIONS

PARTS = 'A'  # the letter of an axis along which each device has made numbers of its own rows
LEADING = {2: 'M', 3: 'BT', 4: 'BNT'}  # the letters of the rows of activations, by their rank


def letters_of(x: jax.Array) -> str:
    """Of all axes but the last: rows are [M], [B, T] or [B, N, T]."""
    return LEADING.get(x.ndim, '')


def over_devices(
    compute: Callable[..., Any],
    arrays: Sequence[Any],
    letters: Sequence[str | None],
    out_letters: Any,
) -> Any:
    """compute(*arrays), on each device for its own part.

    XLA cannot cut a kernel. Under `jax.sharding.use_abstract_mesh` the arrays are cut along the
    axes that their letters name (`modules.devices.ACTIVATIONS`), from the first on, and so are the
    results, which are put together again; what has no letter is whole on each device. out_letters
    is shaped as the result. An axis that does not divide in one of the arrays is cut in none, nor
    is one that lies over the same devices; one of length 1 stands for all of an axis that is.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {name for name in mesh.axis_names if name not in mesh.manual_axes}
    if all(mesh.shape[name] == 1 for name in free):
        return compute(*arrays)
    lengths = _lengths(arrays, letters)
    over = _cut_axes(lengths, {name: mesh.shape[name] for name in free})

    def spec_of(leaf, own):
        pairs = zip(own, leaf.shape, strict=False)
        return PartitionSpec(*(over[one] if length > 1 else None for one, length in pairs))

    in_specs = tuple(
        jax.tree.map(lambda leaf, own=own: spec_of(leaf, own or ''), array)
        for array, own in zip(arrays, letters, strict=True)
    )
    used = tuple(axis for axes in over.values() if axes for axis in axes)
    over = over | {PARTS: tuple(dict.fromkeys(used))}
    out_specs = jax.tree.map(
        lambda own: PartitionSpec(*(over.get(letter) for letter in own)), out_letters
    )
    on_own = jax.shard_map(
        compute,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=free,
        check_vma=False,  # Pallas calls do not say over which axes their results vary
    )
    if set(mesh.manual_axes) - {'run'}:
        on_own = _unnamed(on_own)
    return on_own(*arrays)


def of_all_tokens(x_BKT_: jax.Array, axis_name: str) -> jax.Array:
    """x of all tokens of a row, of which each device along a mesh axis has some.

    Devices are put along an axis in front of all others at first: the gradient is then scattered
    along that one, where XLA for TPUs has a reduce-scatter; along T it sums whole arrays.
    """
    of_devices = jnp.moveaxis(jax.lax.all_gather(x_BKT_, axis_name), 0, 2)
    return of_devices.reshape(*x_BKT_.shape[:2], -1, *x_BKT_.shape[3:])


def _unnamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same; what is mapped over it has no mesh axis there, where the device has its own runs.

    A `vmap` that names `run` would cut them once more. There is no reverse mode through it.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return function(*arrays)

    @call.def_vmap
    def of_runs(runs, mapped, *arrays):
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(mapped))
        found = jax.vmap(function, axes, axis_size=runs)(*arrays)
        return found, jax.tree.map(lambda _: True, found)

    return call


def _lengths(arrays, letters) -> dict[str, set[int]]:
    """The lengths of each letter's axis, but 1."""
    found = {}
    for array, own in zip(arrays, letters, strict=True):
        for leaf in jax.tree.leaves(array):
            for letter, length in zip(own or '', leaf.shape, strict=False):
                found.setdefault(letter, set()).update({length} - {1})
    return found


def _cut_axes(
    lengths: Mapping[str, set[int]], sizes: Mapping[str, int]
) -> dict[str, tuple[str, ...] | None]:
    """The mesh axes that each letter is cut over, of those with these sizes; None: it is whole."""
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
