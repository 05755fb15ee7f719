"""Lookup of rows of a table, with its gradient where the table is cut over devices."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from modules.parallel.axes import (
    ACTIVATIONS,
    PARAMETERS,
    map_devices,
    part_axes,
    partition,
    spec_axes,
)

AXES = ('vocab', 'embed')


def look_up_rows(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns table[tokens], [B, T, D].

    Where the table is cut over `fsdp`, a reduce-scatter sums the gradient of each device's rows
    where they are kept: left to XLA, every device gets the sum of the whole table first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get('fsdp', 1) == 1 or 'fsdp' in mesh.manual_axes:
        return table_VD[tokens_BT]
    return _look_up_rows(table_VD.shape, table_VD, tokens_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up_rows(shape, table_VD, tokens_BT):
    return table_VD[tokens_BT]


def _forward(shape, table_VD, tokens_BT):
    return _look_up_rows(shape, table_VD, tokens_BT), tokens_BT


def _backward(shape, tokens_BT, grad_BTD):
    mesh = jax.sharding.get_abstract_mesh()
    over = partition(mesh, PARAMETERS, AXES, shape)
    of_tokens = partition(mesh, ACTIVATIONS, 'BT', tokens_BT.shape)
    summed = spec_axes(of_tokens)
    scattered = next((i for i, part in enumerate(over) if 'fsdp' in part_axes(part)), None)
    if scattered is None or 'fsdp' not in summed:  # an odd table, or one row to make parameters
        return jnp.zeros(shape, grad_BTD.dtype).at[tokens_BT].add(grad_BTD), None
    vocab_axes = [axis for axis in part_axes(over[0]) if axis != 'fsdp']
    rows = shape[0] // math.prod(mesh.shape[axis] for axis in vocab_axes)

    def on_device(tokens_BT, grad_BTD):
        """Returns the gradient of this device's rows, or of all where it has them all."""
        first = jax.lax.axis_index(tuple(vocab_axes)) * rows if vocab_axes else 0
        at_BT = tokens_BT - first
        at_BT = jnp.where((at_BT >= 0) & (at_BT < rows), at_BT, rows)  # others are dropped
        grad_VD = jnp.zeros((rows, grad_BTD.shape[-1]), grad_BTD.dtype)
        grad_VD = grad_VD.at[at_BT].add(grad_BTD, mode='drop')
        grad_VD = jax.lax.psum_scatter(grad_VD, 'fsdp', scatter_dimension=scattered, tiled=True)
        return jax.lax.psum(grad_VD, tuple(axis for axis in summed if axis != 'fsdp'))

    in_specs = (of_tokens, PartitionSpec(*of_tokens, None))
    return map_devices(on_device, in_specs, over)(tokens_BT, grad_BTD), None


_look_up_rows.defvjp(_forward, _backward)
