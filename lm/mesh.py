"""Which device holds what."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.sections import MeshConfig
from modules.params import ParamSpec

# Logical axis of a parameter -> mesh axis; None: every device holds all of it.
RULES = {
    'basis': None,
    'embed': None,
    'expert': None,
    'group': None,
    'head_dim': None,
    'heads': None,
    'kv_heads': None,
    'layer': None,
    'long_side': None,
    'mlp': None,
    'position': None,
    'qk_features': None,
    'rank': None,
    'router': None,
    'short_side': None,
    'vocab': None,
}


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None, runs: int = 1) -> Mesh:
    """A mesh with the axes `run`, over which runs of one program lie, and `data`.

    `run` is as long as there are runs to train side by side and config.run allows, and divides the
    devices that `data` leaves. ValueError where the devices do not fill the mesh.
    """
    devices = jax.devices() if devices is None else devices
    n = len(devices)
    for name, size in (('data', config.data), ('run', config.run)):
        if size != -1 and not 1 <= size <= n:
            raise ValueError(
                f'mesh.{name} must be between 1 and the {n} devices there are, or -1 for all; '
                f'got {size}'
            )
    most = min(runs, n if config.run == -1 else config.run)
    if config.data == -1:
        run = max(size for size in range(1, most + 1) if n % size == 0)
        data = n // run
    else:
        run, data = min(most, n // config.data), config.data
    return Mesh(np.array(devices[: run * data]).reshape(run, data), ('run', 'data'))


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


def traced_on(mesh: Mesh, function: Callable) -> Callable:
    """`function`, to be jitted with shardings of `mesh`: what it calls finds the mesh in
    `jax.sharding.get_abstract_mesh()`. Kernels that XLA cannot partition cut their rows by it.
    """

    @functools.wraps(function)
    def on_mesh(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    return on_mesh


def over_runs(sharding: NamedSharding) -> NamedSharding:
    """The sharding of an array of one run, for many stacked along a leading axis."""
    return NamedSharding(sharding.mesh, PartitionSpec('run', *sharding.spec))


def put_batch(
    mesh: Mesh, batch: dict[str, np.ndarray], sharding: NamedSharding | None = None
) -> dict[str, Any]:
    """This process's rows, as global arrays, cut over `data` or as `sharding` says."""
    sharding = sharding or batch_sharding(mesh)
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}
