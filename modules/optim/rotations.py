"""Matrices [..., I, O] seen in other bases: what the methods that rotate gradients share.

A basis holds its vectors in columns. Every product is of full precision: a basis that is turned by
products of bfloat16, the default of some devices, is no longer orthogonal.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

SIDES = {'left': -2, 'right': -1}  # the axes of rows, the summed side, and of columns
_TURN = {'left': '...ij,...io->...jo', 'right': '...io,...op->...ip'}
_TURN_BACK = {'left': '...ji,...io->...jo', 'right': '...io,...po->...ip'}
_SQUARE = {'left': '...io,...jo->...ij', 'right': '...io,...ip->...op'}


Bases = Mapping[str, jax.Array]  # of some sides, each [..., n, n]; the others are left as they are


def product(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, precision=jax.lax.Precision.HIGHEST)


def turned(matrices: jax.Array, bases: Bases) -> jax.Array:
    """left^T M right: coordinates in the bases."""
    for side, basis in bases.items():
        operands = (basis, matrices) if side == 'left' else (matrices, basis)
        matrices = product(_TURN[side], *operands)
    return matrices


def turned_back(matrices: jax.Array, bases: Bases) -> jax.Array:
    """left M right^T, the inverse of `turned`."""
    for side, basis in bases.items():
        operands = (basis, matrices) if side == 'left' else (matrices, basis)
        matrices = product(_TURN_BACK[side], *operands)
    return matrices


def outer(matrices: jax.Array, side: str) -> jax.Array:
    """M M^T [..., I, I] for the left side, M^T M [..., O, O] for the right one."""
    return product(_SQUARE[side], matrices, matrices)


def smaller_side(matrices: jax.Array) -> str:
    """The left one of a square."""
    rows, columns = matrices.shape[-2:]
    return 'left' if rows <= columns else 'right'


def of_side(matrices: jax.Array, side: str, diagonal: float) -> jax.Array:
    """The multiple of the identity [..., n, n] that belongs to a side of the matrices."""
    size, batch = matrices.shape[SIDES[side]], matrices.shape[:-2]
    return jnp.broadcast_to(diagonal * jnp.eye(size, dtype=matrices.dtype), (*batch, size, size))
