"""Matrices [..., I, O] in other bases, and whole on the device that works on them.

Bases: the columns of a basis are its vectors. Products have full precision: with bfloat16 products,
the default of some devices, a basis would not stay orthogonal.

Devices: a product of matrices that the mesh cuts sends parts of them, and an iteration or a
decomposition sends them again and again. Instead, each matrix of a stack goes whole to one device,
and the result comes back: one exchange in and one out.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from modules.optim.base import ParamState, box_state
from modules.parallel.axes import (
    shard_map_matrices,
    shard_matrices,
    shard_parameter,
    shards_matrices,
    shards_parameters,
)
from modules.params import ParamBox, ParamSpec, as_matrices, from_matrices, matrix_axes
from modules.spectrum import precise_einsum
from modules.statistics import at_least_float32

SIDES = {'left': -2, 'right': -1}  # the axes of rows, the summed side, and of columns
MOMENTS = ('momentum', 'second')  # the names of state that is shaped like the parameter

Bases = Mapping[str, jax.Array]  # {side: [..., n, n]}; a side without a basis is not rotated


def rotate(matrices: jax.Array, bases: Bases) -> jax.Array:
    """Returns left^T M right: coordinates in the bases."""
    for side, basis in bases.items():
        if side == 'left':
            matrices = precise_einsum('...ij,...io->...jo', basis, matrices)
        else:
            matrices = precise_einsum('...io,...op->...ip', matrices, basis)
    return matrices


def rotate_back(matrices: jax.Array, bases: Bases) -> jax.Array:
    """Returns left M right^T, the inverse of `rotate`."""
    for side, basis in bases.items():
        if side == 'left':
            matrices = precise_einsum('...ji,...io->...jo', basis, matrices)
        else:
            matrices = precise_einsum('...io,...po->...ip', matrices, basis)
    return matrices


def gram(matrices: jax.Array, side: str) -> jax.Array:
    """Returns M M^T [..., I, I] for the left side, M^T M [..., O, O] for the right one."""
    subscripts = {'left': '...io,...jo->...ij', 'right': '...io,...ip->...op'}
    return precise_einsum(subscripts[side], matrices, matrices)


def smaller_side(matrices: jax.Array) -> str:
    """Returns the side with fewer entries, 'left' for a square matrix."""
    rows, columns = matrices.shape[-2:]
    return 'left' if rows <= columns else 'right'


def identity(matrices: jax.Array, side: str, diagonal: float = 1.0) -> jax.Array:
    """Returns diagonal * I [..., n, n], with n the size of a side of the matrices."""
    size, batch = matrices.shape[SIDES[side]], matrices.shape[:-2]
    return jnp.broadcast_to(diagonal * jnp.eye(size, dtype=matrices.dtype), (*batch, size, size))


def float_matrices(spec: ParamSpec, x: jax.Array) -> jax.Array:
    """Returns the matrices of a parameter in at least float32."""
    return at_least_float32(as_matrices(spec, x))


def boxed_identity(spec: ParamSpec, matrices: jax.Array, side: str, diagonal=1.0) -> ParamBox:
    """Returns the `identity` that belongs to the matrices of a parameter, in its box."""
    return box_state(spec, identity(matrices, side, diagonal), 'basis', 'basis')


def whole_matrices(spec: ParamSpec, x: jax.Array) -> jax.Array:
    """Returns `as_matrices`, each matrix whole on one device where the mesh cuts parameters.

    x itself stays laid out as the parameter; otherwise what x is made of would be exchanged.
    """
    if not shards_parameters():
        return as_matrices(spec, x)
    n_batch = len(matrix_axes(spec)[0])
    return as_matrices(spec, shard_matrices(shard_parameter(x, spec.axes), n_batch))


def from_whole_matrices(spec: ParamSpec, matrices: jax.Array, grad: jax.Array) -> jax.Array:
    """Returns `from_matrices` with the shape and type of a gradient, laid out as the parameter."""
    direction = from_matrices(spec, matrices, grad.shape).astype(grad.dtype)
    if not shards_parameters():
        return direction
    return shard_parameter(shard_matrices(direction, len(matrix_axes(spec)[0])), spec.axes)


def lay_out_whole(spec: ParamSpec, state: ParamState) -> ParamState:
    """Returns state in boxes that lay it where the matrices of the parameter are whole.

    `kept` holds moments, and arrays [batch axes, ...] in their boxes. If the number of matrices
    does not divide over the devices, each array is cut as its first box says.
    """
    n_batch = len(matrix_axes(spec)[0])

    def whole(one):
        box = one if isinstance(one, ParamBox) else ParamBox(one, spec)
        axes = ('matrix',) * n_batch + box.spec.axes[n_batch:]
        return box.replace(spec=dataclasses.replace(box.spec, axes=axes))

    return {name: whole(one) for name, one in state.items()}


def update_whole_matrices(
    spec: ParamSpec, update: Callable, grad: jax.Array, state: ParamState, shared: Sequence[Any]
) -> tuple[jax.Array, ParamState]:
    """Returns (direction, what is stored next) of update((grads, kept), *shared).

    Gradients, `MOMENTS` and directions are matrices [..., I, O] there. `update` runs on each device
    for the matrices that are there, so it must treat each matrix alone and take all traced values
    from `shared`.
    """
    lengths = [grad.shape[i] for i in matrix_axes(spec)[0]]
    of_matrices = {
        name: as_matrices(spec, one) if name in MOMENTS else one for name, one in state.items()
    }
    if shards_matrices(lengths):
        given = whole_matrices(spec, grad), of_matrices
        direction, later = shard_map_matrices(update, lengths, given, shared)
        direction = from_whole_matrices(spec, direction, grad)
    else:
        direction, later = update((as_matrices(spec, grad), of_matrices), *shared)
        direction = from_matrices(spec, direction, grad.shape)
    return direction, {
        name: from_matrices(spec, one, grad.shape) if name in MOMENTS else one
        for name, one in later.items()
    }
