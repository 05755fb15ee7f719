"""Gathers and scatters sharded arrays through process 0, if only its disk is used.

The arrays of a state are moved one after another. Besides their own parts, devices hold at most
MAX_BYTES of an array at a time, or all of an array with a sharded first axis.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from lm.launch.distributed import is_first

MAX_BYTES = 2**28


def gather_to_first(tree: Any) -> Any:
    """Returns the tree with NumPy arrays on process 0, None on the others; called by all."""
    return jax.tree.map(_gather_array, tree)


def scatter_from_first(tree: Any, shapes: Any) -> Any:
    """Returns arrays sharded like `shapes`, with the values of `tree` on process 0; all call it."""
    leaves, structure = jax.tree.flatten(shapes)
    host_leaves = jax.tree.leaves(tree) if is_first() else [None] * len(leaves)
    pairs = zip(host_leaves, leaves, strict=True)
    return structure.unflatten([_scatter_array(array, like) for array, like in pairs])


def _gather_array(array: jax.Array) -> np.ndarray | None:
    if array.is_fully_replicated:  # needs no communication
        return np.asarray(array.addressable_data(0)) if is_first() else None
    whole = np.empty(array.shape, array.dtype) if is_first() else None
    sharding = cast(NamedSharding, array.sharding)  # states have no other kind
    spec = sharding.spec
    is_sharded = bool(spec) and spec[0] is not None
    for start, stop in _row_ranges(array, whole=is_sharded):
        part = _make_gather(stop - start, sharding.mesh)(array, start)
        if whole is not None:
            whole[start:stop] = np.asarray(part.addressable_data(0))
        # Otherwise this part would stay on the devices while the next part is gathered.
        part.delete()
    return whole


@functools.cache
def _make_gather(size: int, mesh: jax.sharding.Mesh) -> Any:
    """Returns a program that gathers `size` rows of an array on every device."""

    def slice_rows(array, start):
        return jax.lax.dynamic_slice_in_dim(array, start, size)

    return jax.jit(slice_rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _scatter_array(array: np.ndarray | None, like: jax.ShapeDtypeStruct) -> jax.Array:
    whole = np.empty(like.shape, like.dtype)
    if is_first():
        whole[...] = array
    # Broadcast as integers: it adds to zeros, which would turn -0.0 into 0.0.
    rows = whole.reshape(like.shape or (1,)).view(f'u{whole.itemsize}')
    for start, stop in _row_ranges(rows):
        rows[start:stop] = multihost_utils.broadcast_one_to_all(rows[start:stop])
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])


def _row_ranges(array: Any, whole: bool = False) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) ranges of the first axis, of at most MAX_BYTES each.

    whole: yield one range for all rows.
    """
    length = array.shape[0]
    row_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
    size = length if whole else max(1, MAX_BYTES // max(1, row_bytes))
    for start in range(0, length, size):
        yield start, min(length, start + size)
