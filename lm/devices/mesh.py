"""The mesh of a config, and the shardings of arrays on it."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lm.config.fields import MeshConfig
from modules.choices import nearest_divisor
from modules.parallel.axes import AXES, BATCH, partition
from modules.parallel.axes import PARAMETERS as RULES
from modules.params import LAYER, ParamSpec


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None, runs: int = 1) -> Mesh:
    """Returns a mesh with the axes `AXES`, of the sizes in the config.

    One size may be -1, for all devices that the other axes leave. `run`, along which the runs of a
    program lie, is at most `runs` and config.run, and divides the devices that the others leave.
    `data` crosses the slices of a pod.

    Args:
      config: the sizes of the axes.
      devices: the devices; all by default.
      runs: the number of runs that share the program.

    Raises:
      ValueError: if the devices do not fill the mesh.
    """
    devices = jax.devices() if devices is None else devices
    n = len(devices)
    sizes = {
        'run': config.run,
        'data': config.data,
        'fsdp': config.fsdp,
        'expert': config.expert,
        'context': config.context,
        'tensor': config.tensor,
    }
    _check_sizes(sizes, n)
    max_runs = min(runs, n if sizes['run'] == -1 else sizes['run'])
    open_axes = [axis for axis, size in sizes.items() if size == -1 and axis != 'run']
    fixed = math.prod(size for axis, size in sizes.items() if axis not in ('run', *open_axes))
    if open_axes:
        # Runs side by side need no communication: `run` is as large as the devices allow.
        remaining = n // fixed
        sizes['run'] = max(size for size in range(1, max_runs + 1) if remaining % size == 0)
        sizes[open_axes[0]] = remaining // sizes['run']
    else:
        sizes['run'] = min(max_runs, n // fixed)
    shape = [sizes[axis] for axis in AXES]
    return Mesh(
        _arrange_devices(devices[: math.prod(shape)], shape), AXES, (AxisType.Auto,) * len(AXES)
    )


def _check_sizes(sizes: dict[str, int], n: int) -> None:
    for axis, size in sizes.items():
        if size != -1 and not 1 <= size <= n:
            raise ValueError(
                f'mesh.{axis} must be between 1 and {n}, the number of devices, or -1 for all '
                f'remaining devices; got {size}'
            )
    open_axes = [axis for axis, size in sizes.items() if size == -1 and axis != 'run']
    if len(open_axes) > 1:
        raise ValueError(
            'only one axis of the mesh may be -1, which stands for all remaining devices; got '
            f'{", ".join(f"mesh.{axis}=-1" for axis in open_axes)}. Set all others to numbers'
            + (' (mesh.data is -1 by default).' if 'data' in open_axes else '.')
        )
    explicit = _explicit_sizes(sizes)
    product = math.prod(explicit.values())
    if product > n or (open_axes and n % product):
        largest = max(explicit, key=explicit.__getitem__)
        other_sizes = product // explicit[largest]
        nearest = (
            nearest_divisor(n // other_sizes, explicit[largest]) if n % other_sizes == 0 else None
        )
        advice = f' Nearest that works: mesh.{largest}={nearest}.' if nearest else ''
        raise ValueError(
            f'{_format_sizes(explicit)} needs {product} devices, and this must divide the number '
            f'of devices, {n}.{advice}'
        )


def min_devices(config: MeshConfig) -> int:
    """Returns the number of devices that the axes with an explicit size need."""
    return math.prod(_explicit_sizes({axis: getattr(config, axis) for axis in AXES}).values())


def _explicit_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if size > 1 and axis != 'run'}


def _format_sizes(sizes: Mapping[str, int]) -> str:
    return ' x '.join(f'mesh.{axis}={size}' for axis, size in sizes.items() if size > 1)


def check_idle_devices(config: MeshConfig, mesh: Mesh, n_devices: int) -> None:
    """Raises ValueError if a single run on several devices leaves others idle.

    Args:
      config: the configured sizes of the axes.
      mesh: the mesh.
      n_devices: the number of available devices.
    """
    if 1 < mesh.size < n_devices:
        free_axis = next((axis for axis in BATCH if getattr(config, axis) != 1), 'data')
        size = mesh.shape[free_axis] * (n_devices // mesh.size)
        raise ValueError(
            f'{_format_sizes(mesh.shape)} uses {mesh.size} of {n_devices} devices and leaves '
            f'{n_devices - mesh.size} idle. Set mesh.{free_axis}=-1 to use all of them (here '
            f'{size}), or let the program see fewer (CUDA_VISIBLE_DEVICES).'
        )


def _arrange_devices(devices: list[jax.Device], shape: list[int]) -> np.ndarray:
    """Returns the devices in mesh order: on TPUs by their links, with `data` across slices.

    Other devices keep the given order.
    """
    slices = {getattr(device, 'slice_index', 0) for device in devices}
    data = AXES.index('data')
    if len(slices) > 1:
        if shape[data] % len(slices):
            raise ValueError(
                f'mesh.data must be a multiple of the number of slices, {len(slices)}, because '
                f'only this axis spans slices; got {shape[data]}.'
            )
        across = [len(slices) if i == data else 1 for i in range(len(shape))]
        within = [size // n_slices for size, n_slices in zip(shape, across, strict=True)]
        return mesh_utils.create_hybrid_device_mesh(within, across, devices)
    if devices[0].platform == 'tpu' and math.prod(shape) > 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices).reshape(shape)


def torus_shape(devices: Iterable[jax.Device]) -> list[int]:
    """Returns the lengths above 1 of the torus that TPUs form; [] for other devices."""
    coordinates = {tuple(device.coords) for device in devices if device.platform == 'tpu'}
    lengths = [len(set(positions)) for positions in zip(*coordinates, strict=True)]
    return [length for length in lengths if length > 1]


def format_mesh(mesh: Mesh) -> str:
    """Returns a text such as 'data=4 tensor=2', or 'of one device'."""
    return ' '.join(f'{a}={n}' for a, n in mesh.shape.items() if n > 1) or 'of one device'


def param_sharding(mesh: Mesh, spec: ParamSpec, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of a parameter, by the logical names of its axes.

    Vectors are small, and are replicated.

    Args:
      mesh: the mesh.
      spec: role and axes of the parameter.
      shape: its shape.

    Raises:
      ValueError: for an axis that `RULES` does not list.
    """
    unknown = [axis for axis in spec.axes if axis not in RULES]
    if unknown:
        raise ValueError(
            f'no sharding rule for axes {unknown} of {spec}; add them to '
            'modules.parallel.axes.PARAMETERS'
        )
    if spec.role == 'vector' and sum(axis != LAYER for axis in spec.axes) < 2:
        return replicated_sharding(mesh)
    return NamedSharding(mesh, partition(mesh, RULES, spec.axes, shape))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: its rows are cut over the axes `BATCH` of the mesh."""
    return NamedSharding(mesh, PartitionSpec(tuple(a for a in BATCH if a in mesh.axis_names)))


def batch_parts(mesh: Mesh) -> int:
    """Returns the number of parts into which the rows of a batch are cut."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH)


def process_share(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """Returns (i, n): the devices of a process hold the i-th of n equal parts of each batch's rows.

    Processes that differ only in other axes hold the same part. The default is this process. Raises
    ValueError if the parts of a process are not adjacent.
    """
    process = jax.process_index() if process is None else process
    by_part = np.moveaxis(mesh.devices, AXES.index('run'), -1)
    by_part = by_part.reshape(batch_parts(mesh), -1)
    parts = [i for i, row in enumerate(by_part) if any(d.process_index == process for d in row)]
    is_aligned = (
        parts
        and parts == list(range(parts[0], parts[0] + len(parts)))
        and parts[0] % len(parts) == 0
    )
    if not is_aligned or len(by_part) % len(parts):
        raise ValueError(
            f'host {process} holds parts {parts} of the {len(by_part)} parts of a batch, which '
            'must be adjacent. Choose sizes of the mesh that divide the devices of a host, or are '
            'multiples of them.'
        )
    return parts[0] // len(parts), len(by_part) // len(parts)


def trace_on_mesh(mesh: Mesh, function: Callable) -> Callable:
    """Returns `function` with `mesh` as the abstract mesh while it is traced.

    Kernels that XLA cannot partition cut their rows by it, and layers shard activations by it. Jit
    the returned function with shardings of `mesh`.
    """

    @functools.wraps(function)
    def on_mesh(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    return on_mesh


def stacked_sharding(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of runs stacked along a leading axis, from the sharding of one run."""
    return NamedSharding(sharding.mesh, PartitionSpec('run', *sharding.spec))


def put_batch(
    mesh: Mesh, batch: dict[str, np.ndarray], sharding: NamedSharding | None = None
) -> dict[str, Any]:
    """Makes global arrays from this process's rows.

    Args:
      mesh: the mesh.
      batch: this process's rows, by field.
      sharding: sharding of the arrays; by default rows are cut over `BATCH`.

    Returns:
      The arrays by field.
    """
    sharding = sharding or batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
    }
