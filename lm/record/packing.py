"""Packed weights in checkpoints: parameters of few values, stored as integers of few bits."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from modules.params import named_leaves, path_name
from modules.precision.codes import PackedWeight, unpack_weight


def store_packed(params: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the arrays to store for parameters, and the record of those that are packed.

    params: arrays and `PackedWeight` leaves. In the first result, each of the latter is a dict of
    arrays; the second is {path: record}.
    """
    packed = {p: w for p, w in named_leaves(params).items() if isinstance(w, PackedWeight)}
    stored = jax.tree.map(lambda w: w.arrays if isinstance(w, PackedWeight) else w, params)
    records = {
        path: weight.record()
        | {'arrays': {name: [str(x.dtype), *x.shape] for name, x in weight.arrays.items()}}
        for path, weight in packed.items()
    }
    return stored, records


def stored_shapes(shapes: Any, records: Mapping[str, Any]) -> Any:
    """Replaces the shapes of packed parameters by those of their stored arrays.

    Args:
      shapes: parameters as shapes with shardings, or as NumPy arrays to restore to the host.
      records: of the packed weights, by path.
    """

    def replace(path, leaf):
        record = records.get(path_name(path))
        if record is None:
            return leaf
        return {
            name: _describe_array(leaf, shape, dtype)
            for name, (dtype, *shape) in record['arrays'].items()
        }

    return jax.tree_util.tree_map_with_path(replace, shapes)


def _describe_array(leaf, shape, dtype):
    """Describes a stored array, which all devices of a parameter read."""
    if isinstance(leaf, np.ndarray):
        return np.broadcast_to(np.zeros((), dtype), shape)
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def unpack_params(stored: Any, shapes: Any, records: Mapping[str, Any]) -> Any:
    """Returns the parameters, sharded like `shapes`.

    Args:
      stored: the arrays that were read.
      shapes: of the parameters.
      records: of the packed weights, by path.
    """

    def unpack(path, leaf, arrays):
        record = records.get(path_name(path))
        if record is None:
            return arrays
        values = unpack_weight(jax.device_get(arrays), record).values().astype(leaf.dtype)
        return values if isinstance(leaf, np.ndarray) else jax.device_put(values, leaf.sharding)

    return jax.tree_util.tree_map_with_path(unpack, shapes, stored)
