"""Matrices [..., I, O] in other bases, and whole matrices on the device that works on them.

Bases: the columns of a basis are its vectors. Products have full precision: with bfloat16 products,
the default of some devices, a basis would not stay orthogonal.

Devices: a product of sharded matrices exchanges parts of them, and an iteration or a decomposition
exchanges them again and again. Instead, each matrix of a stack goes whole to one device, and the
result comes back: one exchange in and one out.
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

SIDES = {'left': -2, 'right': -1}  # the axes of rows (the summed side) and columns
MOMENTS = ('momentum', 'second')  # names of state shaped like the parameter

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
    """Returns diagonal * I [..., n, n], with n the size of a side of the matrices.

    Args:
      matrices: [..., I, O].
      side: 'left' or 'right'.
      diagonal: the factor.
    """
    size, batch = matrices.shape[SIDES[side]], matrices.shape[:-2]
    return jnp.broadcast_to(diagonal * jnp.eye(size, dtype=matrices.dtype), (*batch, size, size))


def float_matrices(spec: ParamSpec, x: jax.Array) -> jax.Array:
    """Returns the matrices of a parameter in at least float32."""
    return at_least_float32(as_matrices(spec, x))


def boxed_identity(
    spec: ParamSpec, matrices: jax.Array, side: str, diagonal: float = 1.0
) -> ParamBox:
    """Returns the `identity` of a side of a parameter's matrices, in its box.

    Args:
      spec: describes the parameter.
      matrices: [..., I, O].
      side: 'left' or 'right'.
      diagonal: the factor.
    """
    return box_state(spec, identity(matrices, side, diagonal), 'basis', 'basis')


def whole_matrices(spec: ParamSpec, x: jax.Array) -> jax.Array:
    """Returns `as_matrices`, with each matrix whole on one device if the mesh shards parameters.

    x itself keeps the layout of the parameter; otherwise the inputs of x would be exchanged.
    """
    if not shards_parameters():
        return as_matrices(spec, x)
    n_batch = len(matrix_axes(spec)[0])
    return as_matrices(spec, shard_matrices(shard_parameter(x, spec.axes), n_batch))


def from_whole_matrices(spec: ParamSpec, matrices: jax.Array, grad: jax.Array) -> jax.Array:
    """Inverts `whole_matrices`.

    Args:
      spec: describes the parameter.
      matrices: [..., I, O].
      grad: has the shape and type of the parameter's gradient.

    Returns:
      An array like `grad`, in the layout of the parameter.
    """
    direction = from_matrices(spec, matrices, grad.shape).astype(grad.dtype)
    if not shards_parameters():
        return direction
    return shard_parameter(shard_matrices(direction, len(matrix_axes(spec)[0])), spec.axes)


def lay_out_whole(spec: ParamSpec, state: ParamState) -> ParamState:
    """Returns state in boxes that lay it out like the whole matrices of the parameter.

    If the number of matrices does not divide over the devices, each array is sharded like its first
    box.

    Args:
      spec: describes the parameter.
      state: moments, and arrays [batch axes, ...] in their boxes.
    """
    n_batch = len(matrix_axes(spec)[0])

    def rebox(entry):
        box = entry if isinstance(entry, ParamBox) else ParamBox(entry, spec)
        axes = ('matrix',) * n_batch + box.spec.axes[n_batch:]
        return box.replace(spec=dataclasses.replace(box.spec, axes=axes))

    return {name: rebox(entry) for name, entry in state.items()}


def update_whole_matrices(
    spec: ParamSpec, update: Callable, grad: jax.Array, state: ParamState, shared: Sequence[Any]
) -> tuple[jax.Array, ParamState]:
    """Computes update((grads, state), *shared) for whole matrices.

    Args:
      spec: describes the parameter.
      update: maps gradients and state to (direction, next state). Gradients, `MOMENTS` and
        directions are matrices [..., I, O] in it. It runs on each device for the device's matrices,
        so it must treat each matrix alone and take all traced values from `shared`.
      grad: the gradient.
      state: from `lay_out_whole`.
      shared: the other arguments of `update`.

    Returns:
      (direction, next state), shaped like the parameter.
    """
    lengths = [grad.shape[i] for i in matrix_axes(spec)[0]]
    matrix_state = {
        name: as_matrices(spec, array) if name in MOMENTS else array
        for name, array in state.items()
    }
    if shards_matrices(lengths):
        inputs = whole_matrices(spec, grad), matrix_state
        direction, new_state = shard_map_matrices(update, lengths, inputs, shared)
        direction = from_whole_matrices(spec, direction, grad)
    else:
        direction, new_state = update((as_matrices(spec, grad), matrix_state), *shared)
        direction = from_matrices(spec, direction, grad.shape)
    return direction, {
        name: from_matrices(spec, array, grad.shape) if name in MOMENTS else array
        for name, array in new_state.items()
    }
