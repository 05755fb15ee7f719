"""Digests of the content of a checkpoint, which reveal damage when it is read.

Digests of arrays are computed on the devices, before the arrays are written: no copy is made, and
the devices of a mesh add up their parts, so that the digest does not depend on the mesh. Small
arrays are copied and added up by NumPy, since a program takes 0.1 s to compile for each shape.
"""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Multipliers of two mixing functions: Wellons' lowbias32, and murmur3's finalizer.
MIX_MULTIPLIERS = ((0x7FEB352D, 0x846CA68B), (0x85EBCA6B, 0xC2B2AE35))


SMALL_BYTES = 1 << 20  # the host computes digests up to this size, in a few milliseconds
MAX_SLICES = 256  # processed one after another; more of them would be slow on an accelerator


class DamagedCheckpoint(ValueError):
    """The content of a checkpoint differs from the content that was written."""


def hash_record(record: Any) -> str:
    """Returns the SHA-256 of a JSON record; the order of its keys does not matter."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def hash_arrays(tree: Any) -> list[str]:
    """Returns sixteen hexadecimal digits for each leaf of a tree, in the order of its leaves.

    For the 32-bit words w_i of an array, they are the two sums over i of h_k(w_i xor h_1(i)) mod
    2^32, where h_1 and h_2 are mixing bijections. A single changed word always shows; other changes
    are missed with a probability of about 2^-64. Integer sums do not depend on their order, hence
    not on the mesh.
    """
    # One leaf at a time: on a CPU the sums need several times the memory of the leaf.
    sums = [_compute_sums(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree)]
    return [''.join(f'{int(total):08x}' for total in totals) for totals in sums]


def check_arrays(stored: list[str], tree: Any, name: str) -> None:
    """Raises DamagedCheckpoint for the first leaf with another digest than the stored one.

    Args:
      stored: the digests in the checkpoint, one for each leaf.
      tree: the arrays that were read.
      name: name of the item, for the error.
    """
    digests = hash_arrays(tree)
    if len(digests) != len(stored):
        raise DamagedCheckpoint(f'{name} has {len(digests)} arrays, but {len(stored)} digests')
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for path, digest, expected in zip(paths, digests, stored, strict=True):
        if digest != expected:
            raise DamagedCheckpoint(
                f'{path} of {name} has digest {digest}, but was written with {expected}'
            )


def _compute_sums(x: jax.Array) -> Any:
    """Returns both sums of an array, on the host."""
    if x.nbytes <= SMALL_BYTES and x.is_fully_addressable:
        return _sums_on_host(np.asarray(x))
    return jax.device_get((_sums_by_rows if _has_rows(x) else _sums)(x))


def _sums_on_host(x: np.ndarray) -> list[np.uint32]:
    """Computes `_sums` with NumPy, without compiling a program."""
    flat = np.ascontiguousarray(x).reshape(-1)
    unsigned = flat.view(f'u{min(x.dtype.itemsize, 4)}')  # 8-byte elements are two words
    words = unsigned.astype(np.uint32)
    keyed = words ^ _mix(np.arange(words.size, dtype=np.uint32), *MIX_MULTIPLIERS[0])
    return [np.sum(_mix(keyed, *mix), dtype=np.uint32) for mix in MIX_MULTIPLIERS]


@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _sums_from(_words(x), jnp.uint32(0))


def _sums_from(words: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both sums of the words of a slice that begins at row `start`."""
    # Indices along each axis: a flat order would gather a sharded array.
    index = jnp.broadcast_to(start, words.shape)
    for axis, size in enumerate(words.shape):
        position = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = (index * jnp.uint32(size) if axis else index) + position
    keyed = words ^ _mix(index, *MIX_MULTIPLIERS[0])
    start, second = (jnp.sum(_mix(keyed, *mix), dtype=jnp.uint32) for mix in MIX_MULTIPLIERS)
    return start, second


def _has_rows(x: jax.Array) -> bool:
    """Returns whether an array is on one device and can be processed a few rows at a time."""
    return x.ndim > 1 and x.size > 0 and len(x.devices()) == 1


@jax.jit
def _sums_by_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes `_sums` over slices of the first axis, which needs less memory."""
    n_rows = -(-x.shape[0] // MAX_SLICES)
    n_slices, n_left = divmod(x.shape[0], n_rows)

    def accumulate(sums, rows, start):
        slice_sums = _sums_from(_words(rows), start)
        return tuple(total + slice_sum for total, slice_sum in zip(sums, slice_sums, strict=True))

    def add_slice(i, sums):
        start = i * n_rows
        rows = jax.lax.dynamic_slice_in_dim(x, start, n_rows)
        return accumulate(sums, rows, start.astype(jnp.uint32))

    # Slices of equal shape in a loop, then the remaining rows, which have another shape.
    sums = jax.lax.fori_loop(0, n_slices, add_slice, (jnp.uint32(0), jnp.uint32(0)))
    if n_left:
        sums = accumulate(sums, x[-n_left:], jnp.uint32(x.shape[0] - n_left))
    return sums


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of each element as one word, or as two words along a new last axis."""
    if x.dtype == jnp.bool:
        return x.astype(jnp.uint32)
    size = x.dtype.itemsize
    unsigned = jnp.uint32 if size >= 4 else {1: jnp.uint8, 2: jnp.uint16}[size]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mix[Words: (jax.Array, np.ndarray)](index: Words, first: int, second: int) -> Words:
    """Applies a bijection of 32-bit words; every output bit depends on every bit of `index`."""
    # ty widens the result of an operator to `Array | Unknown`.
    index = (index ^ (index >> 16)) * np.uint32(first)  # ty: ignore[invalid-assignment]
    index = (index ^ (index >> 15)) * np.uint32(second)  # ty: ignore[invalid-assignment]
    return index ^ (index >> 16)  # ty: ignore[invalid-explicit-return]
