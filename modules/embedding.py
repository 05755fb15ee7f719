"""Lookup of rows of a table, with a gradient for tables that are sharded over devices."""

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


def look_up_rows(
    table_VD: jax.Array, tokens_BT: jax.Array, axes: tuple[str, str] = AXES
) -> jax.Array:
    """Returns table[tokens], [B, T, D].

    If the table is sharded over `fsdp`, a reduce-scatter sums the gradient of each device's rows on
    that device. Left to XLA, every device would first get the sum of the whole table.

    Args:
      table_VD: the table.
      tokens_BT: the rows to look up.
      axes: the logical axes of the table (`modules.params`).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get('fsdp', 1) == 1 or 'fsdp' in mesh.manual_axes:
        return table_VD[tokens_BT]
    return _look_up_rows(table_VD.shape, axes, table_VD, tokens_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up_rows(shape, axes, table_VD, tokens_BT):
    return table_VD[tokens_BT]


def _forward(shape, axes, table_VD, tokens_BT):
    return _look_up_rows(shape, axes, table_VD, tokens_BT), tokens_BT


def _backward(shape, axes, tokens_BT, grad_BTD):
    mesh = jax.sharding.get_abstract_mesh()
    table_spec = partition(mesh, PARAMETERS, axes, shape)
    token_spec = partition(mesh, ACTIVATIONS, 'BT', tokens_BT.shape)
    summed = spec_axes(token_spec)
    fsdp_dim = next((i for i, part in enumerate(table_spec) if 'fsdp' in part_axes(part)), None)
    if fsdp_dim is None or 'fsdp' not in summed:  # an odd table, or one row to make parameters
        return jnp.zeros(shape, grad_BTD.dtype).at[tokens_BT].add(grad_BTD), None
    vocab_axes = [axis for axis in part_axes(table_spec[0]) if axis != 'fsdp']
    rows = shape[0] // math.prod(mesh.shape[axis] for axis in vocab_axes)

    def local_gradient(tokens_BT, grad_BTD):
        """Returns the gradient of this device's rows, or of all rows if it has them all."""
        first_row = jax.lax.axis_index(tuple(vocab_axes)) * rows if vocab_axes else 0
        row_BT = tokens_BT - first_row
        # Rows of other devices get an index out of bounds, which the scatter drops.
        row_BT = jnp.where((row_BT >= 0) & (row_BT < rows), row_BT, rows)
        grad_VD = jnp.zeros((rows, grad_BTD.shape[-1]), grad_BTD.dtype)
        grad_VD = grad_VD.at[row_BT].add(grad_BTD, mode='drop')
        grad_VD = jax.lax.psum_scatter(grad_VD, 'fsdp', scatter_dimension=fsdp_dim, tiled=True)
        return jax.lax.psum(grad_VD, tuple(axis for axis in summed if axis != 'fsdp'))

    in_specs = (token_spec, PartitionSpec(*token_spec, None))
    return map_devices(local_gradient, in_specs, table_spec)(tokens_BT, grad_BTD), None


_look_up_rows.defvjp(_forward, _backward)
