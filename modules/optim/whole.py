"""Matrices that lie whole on the device that works on them, where the mesh cuts parameters.

A product of matrices that are cut sends parts of them; an iteration, or a decomposition, sends
them again and again. Here the layers of a parameter go to a device each, and what is found comes
back: one exchange in and one out.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from modules.devices import (
    are_apart,
    as_parameter,
    cuts_parameters,
    matrices_apart,
    of_own_matrices,
)
from modules.optim.base import Kept
from modules.params import Described, ParamSpec, as_matrices, from_matrices, matrix_axes

MOMENTS = ('momentum', 'second')  # what is kept under these names is shaped like the parameter


def whole_matrices(spec: ParamSpec, x: jax.Array) -> jax.Array:
    """`as_matrices`, of which each lies whole on a device where parameters are cut: one exchange
    here and one of the result, instead of some in each product of an iteration. x itself is held
    where it is, or what it is made of would be exchanged instead.
    """
    if not cuts_parameters():
        return as_matrices(spec, x)
    n_batch = len(matrix_axes(spec)[0])
    return as_matrices(spec, matrices_apart(as_parameter(x, spec.axes), n_batch))


def as_it_lies(spec: ParamSpec, matrices: jax.Array, grad: jax.Array) -> jax.Array:
    """`from_matrices`, of the shape and type of a gradient, and where the parameter lies."""
    direction = from_matrices(spec, matrices, grad.shape).astype(grad.dtype)
    if not cuts_parameters():
        return direction
    return as_parameter(matrices_apart(direction, len(matrix_axes(spec)[0])), spec.axes)


def kept_whole(spec: ParamSpec, kept: Kept) -> Kept:
    """What is kept of a parameter, its moments and arrays [batch axes, ...] in their boxes, in
    boxes that lay it where its matrices lie whole. Where their number does not divide, each array
    is cut as it was.
    """

    def whole(one):
        box = one if isinstance(one, Described) else Described(one, spec)
        n_batch = len(matrix_axes(spec)[0])
        axes = ('matrix',) * n_batch + box.spec.axes[n_batch:]
        return box.replace(spec=dataclasses.replace(box.spec, axes=axes))

    return {name: whole(one) for name, one in kept.items()}


def updated_whole(
    spec: ParamSpec,
    update: Callable[..., tuple[jax.Array, Kept]],
    grad: jax.Array,
    kept: Kept,
    shared: Sequence[Any],
) -> tuple[jax.Array, Kept]:
    """(the direction, what is kept next) of update((grads, kept), *shared), in which gradients,
    `MOMENTS` and directions are matrices [..., I, O]. `update` must treat each matrix alone, and
    take what is traced from `shared`: it runs on each device for the matrices that are there.
    """
    lengths = [grad.shape[i] for i in matrix_axes(spec)[0]]
    of_matrices = {
        name: as_matrices(spec, one) if name in MOMENTS else one for name, one in kept.items()
    }
    if are_apart(lengths):
        given = whole_matrices(spec, grad), of_matrices
        direction, later = of_own_matrices(update, lengths, given, shared)
        direction = as_it_lies(spec, direction, grad)
    else:
        direction, later = update((as_matrices(spec, grad), of_matrices), *shared)
        direction = from_matrices(spec, direction, grad.shape)
    return direction, {
        name: from_matrices(spec, one, grad.shape) if name in MOMENTS else one
        for name, one in later.items()
    }
