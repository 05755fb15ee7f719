"""Which device holds what."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.config import MeshConfig
from modules.params import ParamSpec

# Logical axis of a parameter -> mesh axis; None: every device holds all of it.
RULES = {
    'embed': None,
    'head_dim': None,
    'heads': None,
    'kv_heads': None,
    'layer': None,
    'mlp': None,
    'position': None,
    'vocab': None,
}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with the axis `data`; ValueError where the devices do not fill it."""
    devices = jax.devices() if devices is None else devices
    size = len(devices) if config.data == -1 else config.data
    if not 1 <= size <= len(devices):
        raise ValueError(
            f'mesh.data must be between 1 and the {len(devices)} devices there are, or -1 for all; '
            f'got {config.data}'
        )
    return Mesh(np.array(devices[:size]), ('data',))


def param_sharding(mesh: Mesh, spec: ParamSpec) -> NamedSharding:
    """By the logical names of the axes; ValueError for one that `RULES` does not list."""
    unknown = [axis for axis in spec.axes if axis not in RULES]
    if unknown:
        raise ValueError(
            f'no sharding rule for axes {unknown} of {spec}; add them to lm.mesh.RULES'
        )
    return NamedSharding(mesh, PartitionSpec(*(RULES[axis] for axis in spec.axes)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of the batch over `data`."""
    return NamedSharding(mesh, PartitionSpec('data'))


def put_batch(mesh: Mesh, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """This process's rows, as global arrays."""
    sharding = batch_sharding(mesh)
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}
