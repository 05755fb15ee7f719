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
    """Returns a mesh with the axes `AXES`, of the sizes in the config; one may be -1, for all
    devices that the others leave.

    `run`, along which runs of one program lie, is at most `runs` and config.run, and divides the
    devices that the others leave. `data` crosses the slices of a pod. Raises ValueError where the
    devices do not fill the mesh.
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
    most = min(runs, n if sizes['run'] == -1 else sizes['run'])
    rest = [axis for axis, size in sizes.items() if size == -1 and axis != 'run']
    fixed = math.prod(size for axis, size in sizes.items() if axis not in ('run', *rest))
    if rest:
        left = n // fixed
        sizes['run'] = max(size for size in range(1, most + 1) if left % size == 0)
        sizes[rest[0]] = left // sizes['run']
    else:
        sizes['run'] = min(most, n // fixed)
    shape = [sizes[axis] for axis in AXES]
    return Mesh(
        _arrange_devices(devices[: math.prod(shape)], shape), AXES, (AxisType.Auto,) * len(AXES)
    )


def _check_sizes(sizes: dict[str, int], n: int) -> None:
    for axis, size in sizes.items():
        if size != -1 and not 1 <= size <= n:
            raise ValueError(
                f'mesh.{axis} must be between 1 and the {n} devices there are, or -1 for all; '
                f'got {size}'
            )
    rest = [axis for axis, size in sizes.items() if size == -1 and axis != 'run']
    if len(rest) > 1:
        raise ValueError(
            f'one axis of the mesh may be -1, for all devices that the others leave; got '
            f'{", ".join(f"mesh.{axis}=-1" for axis in rest)}. Set all but one to numbers'
            + (' (mesh.data is -1 unless it is set).' if 'data' in rest else '.')
        )
    asked = _explicit_sizes(sizes)
    product = math.prod(asked.values())
    if product > n or (rest and n % product):
        largest = max(asked, key=asked.get)
        others = product // asked[largest]
        nearest = nearest_divisor(n // others, asked[largest]) if n % others == 0 else None
        works = f' Nearest that works: mesh.{largest}={nearest}.' if nearest else ''
        raise ValueError(
            f'{_format_sizes(asked)} is of {product} devices, and there are {n}: they do not divide '
            f'them.{works}'
        )


def min_devices(config: MeshConfig) -> int:
    """Returns the number of devices that the axes with a size need."""
    return math.prod(_explicit_sizes({axis: getattr(config, axis) for axis in AXES}).values())


def _explicit_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in sizes.items() if size > 1 and axis != 'run'}


def _format_sizes(sizes: Mapping[str, int]) -> str:
    return ' x '.join(f'mesh.{axis}={size}' for axis, size in sizes.items() if size > 1)


def check_idle_devices(config: MeshConfig, mesh: Mesh, n_devices: int) -> None:
    """Raises ValueError where a single run on several devices leaves others idle."""
    if 1 < mesh.size < n_devices:
        rest = next((axis for axis in BATCH if getattr(config, axis) != 1), 'data')
        fitting = mesh.shape[rest] * (n_devices // mesh.size)
        raise ValueError(
            f'{_format_sizes(mesh.shape)} is of {mesh.size} devices, and there are {n_devices}: '
            f'{n_devices - mesh.size} would be idle. Set mesh.{rest}=-1 for all of them, which is '
            f'{fitting} here, or let the program see fewer (CUDA_VISIBLE_DEVICES).'
        )


def _arrange_devices(devices: list[jax.Device], shape: list[int]) -> np.ndarray:
    """Returns the devices in mesh order: on TPUs by their links, with `data` across slices, and
    elsewhere in the given order.
    """
    slices = {getattr(device, 'slice_index', 0) for device in devices}
    data = AXES.index('data')
    if len(slices) > 1:
        if shape[data] % len(slices):
            raise ValueError(
                f'mesh.data must be a multiple of the {len(slices)} slices, which it alone '
                f'crosses; got {shape[data]}.'
            )
        across = [len(slices) if i == data else 1 for i in range(len(shape))]
        within = [size // over for size, over in zip(shape, across, strict=True)]
        return mesh_utils.create_hybrid_device_mesh(within, across, devices)
    if devices[0].platform == 'tpu' and math.prod(shape) > 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices).reshape(shape)


def torus_shape(devices: Iterable[jax.Device]) -> list[int]:
    """Returns the lengths above 1 of the torus that TPUs form; [] for other devices."""
    places = {tuple(device.coords) for device in devices if device.platform == 'tpu'}
    lengths = [len(set(along)) for along in zip(*places, strict=True)]
    return [length for length in lengths if length > 1]


def format_mesh(mesh: Mesh) -> str:
    """Returns 'data=4 tensor=2', or 'of one device'."""
    return ' '.join(f'{a}={n}' for a, n in mesh.shape.items() if n > 1) or 'of one device'


def param_sharding(mesh: Mesh, spec: ParamSpec, shape: tuple[int, ...]) -> NamedSharding:
    """Shards a parameter by the logical names of its axes. A vector is small, and replicated.

    Raises ValueError for a name that `RULES` does not list.
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
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Cuts the rows of a batch over the axes `BATCH` of the mesh."""
    return NamedSharding(mesh, PartitionSpec(tuple(a for a in BATCH if a in mesh.axis_names)))


def batch_parts(mesh: Mesh) -> int:
    """Returns the number of parts that the rows of a batch are cut into."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH)


def process_share(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """Returns (i, n): the devices of a process (default: this one) hold the i-th of n equal parts
    of each batch's rows. Processes that differ only in other axes hold the same part.

    Raises ValueError where the parts of a process do not lie side by side.
    """
    process = jax.process_index() if process is None else process
    by_part = np.moveaxis(mesh.devices, AXES.index('run'), -1)
    by_part = by_part.reshape(batch_parts(mesh), -1)
    own = [i for i, row in enumerate(by_part) if any(d.process_index == process for d in row)]
    aligned = own and own == list(range(own[0], own[0] + len(own))) and own[0] % len(own) == 0
    if not aligned or len(by_part) % len(own):
        raise ValueError(
            f'the devices of host {process} hold parts {own} of the {len(by_part)} parts that the '
            'batch is cut into; they must lie side by side. Give the axes of the mesh sizes that '
            'the devices of a host divide, or are divided by.'
        )
    return own[0] // len(own), len(by_part) // len(own)


def trace_on_mesh(mesh: Mesh, function: Callable) -> Callable:
    """Returns `function` with `mesh` as the abstract mesh while it is traced.

    Kernels that XLA cannot partition cut their rows by it, and layers shard activations by it. The
    result is to be jitted with shardings of `mesh`.
    """

    @functools.wraps(function)
    def on_mesh(*arguments):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    return on_mesh


def stacked_sharding(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of many runs' arrays, stacked along a leading axis, from one run's."""
    return NamedSharding(sharding.mesh, PartitionSpec('run', *sharding.spec))


def put_batch(
    mesh: Mesh, batch: dict[str, np.ndarray], sharding: NamedSharding | None = None
) -> dict[str, Any]:
    """Makes global arrays from this process's rows, cut over `BATCH` or as `sharding` says."""
    sharding = sharding or batch_sharding(mesh)
    return {k: jax.make_array_from_process_local_data(sharding, v) for k, v in batch.items()}
