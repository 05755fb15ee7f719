"""Digests of what a checkpoint holds, to notice damage when it is read.

Those of arrays are computed where the arrays are, before they are written: no copy is made, and the
devices of a mesh add up what each holds, so that the digest does not depend on the mesh.
"""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp

# Of two mixing functions: lowbias32 of Wellons' hash prospector, and murmur3's finalizer.
MIXES = ((0x7FEB352D, 0x846CA68B), (0x85EBCA6B, 0xC2B2AE35))


class Damaged(ValueError):
    """What was read is not what was written."""


def of_record(record: Any) -> str:
    """SHA-256 of a JSON record, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def of_arrays(tree: Any) -> list[str]:
    """Sixteen hexadecimal digits for each leaf of a tree, in the order of its leaves.

    For the 32-bit words w_i of an array, the two sums over i of h_k(w_i xor h_1(i)) mod 2^32, where
    h_1 and h_2 are mixing bijections. One changed word always shows; other changes are missed with
    a probability of about 2^-64. Integer sums do not depend on their order, hence not on the mesh.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    sums = jax.device_get([_sums(leaf) for leaf in leaves])
    return [''.join(f'{int(one):08x}' for one in pair) for pair in sums]


def check_arrays(stored: list[str], tree: Any, where: str) -> None:
    """Raises Damaged, naming the first leaf of `tree` whose digest is not the stored one."""
    found = of_arrays(tree)
    if len(found) != len(stored):
        raise Damaged(f'{where} has digests of {len(stored)} arrays, and holds {len(found)}')
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for path, one, wanted in zip(paths, found, stored, strict=True):
        if one != wanted:
            raise Damaged(f'{path} of {where} has the digest {one}, and was written with {wanted}')


@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    words = _words(x)
    # Numbers along each axis instead of a flat order, which would gather an array that is cut.
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = index * jnp.uint32(size) + along
    keyed = words ^ _mixed(index, *MIXES[0])
    first, second = (jnp.sum(_mixed(keyed, *mix), dtype=jnp.uint32) for mix in MIXES)
    return first, second


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element as one word, or as two along a last axis."""
    if x.dtype == jnp.bool:
        return x.astype(jnp.uint32)
    size = x.dtype.itemsize
    unsigned = jnp.uint32 if size >= 4 else {1: jnp.uint8, 2: jnp.uint16}[size]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _mixed(index: jax.Array, first: int, second: int) -> jax.Array:
    """A bijection of 32-bit words whose every bit depends on every bit of `index`."""
    index = (index ^ (index >> 16)) * jnp.uint32(first)
    index = (index ^ (index >> 15)) * jnp.uint32(second)
    return index ^ (index >> 16)
