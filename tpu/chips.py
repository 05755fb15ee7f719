"""Chips that programs are compiled for in their absence, their published rates, and topologies.

A topology is 'v5p:4x4x4', several such slices, 'h100:8', or 'here', the local devices. Rates are
per device, in units of 1e9 bytes per second; a chip of TPU v7x has two devices.
"""

import dataclasses
import importlib.util
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from lm.training.peaks import published_peak
from modules.choices import suggest_nearest
from modules.kernels.attention.cudnn import assume_capability
from tpu.environment import HERE

GIB = 2**30


class Chip(NamedTuple):
    """A kind of TPU or GPU.

    platform: 'tpu' or 'gpu'. kind: `jax.Device.device_kind`. memory: bytes that the compiler allows
    a program. gb_per_second: bandwidth of that memory. link: one-way rate of a link to a neighbour;
    for a GPU, of all its links. network: one-way share of the network between slices. description:
    arguments for `get_topology_desc`. cubes: whether slices have three dimensions. cores:
    TensorCores per chip, if Google's names of slices count them. largest: chips of the largest
    slice, or GPUs of a host. host: chips of a host along each dimension.
    """

    platform: str
    kind: str
    memory: int
    gb_per_second: float
    link: float
    network: float
    description: dict[str, Any]
    devices_per_chip: int = 1
    cubes: bool = False
    cores: int = 1
    largest: int = 1
    host: tuple[int, ...] = ()

    @property
    def peak(self) -> float:
        """Returns the published flop/s of bf16 products."""
        peak = published_peak(self.kind)
        assert peak is not None  # every chip here has a published peak
        return peak

    def make_host_devices(self, gpus: int = 1) -> Sequence[jax.Device]:
        """Returns the devices of one host, to compile for: all its TPUs, or `gpus` GPUs."""
        if self.platform == 'tpu':
            return self.make_slice_devices('x'.join(map(str, self.host)), 1)
        shape = {'topology': f'1x1x{gpus}'}
        return topologies.get_topology_desc(platform='cuda', **shape, **self.description).devices

    def make_slice_devices(self, shape: str, number: int) -> Sequence[jax.Device]:
        """Returns the devices of `number` TPU slices, each a torus of `shape`, such as '4x4x4'."""
        slice_options: dict[str, Any] = {'num_slices': number} if number > 1 else {}
        description = self.description | slice_options
        description |= {'topology_name': f'{self.description["topology_name"]}:{shape}'}
        return topologies.get_topology_desc(platform='tpu', **description).devices


def _tpu(name: str, kind: str, gib: float, *rates: Any, options: Any = (), **facts: Any) -> Chip:
    """Returns the Chip of a TPU; rates are gb_per_second, link and network."""
    description: Any = {'topology_name': name, **dict(options)}
    return Chip('tpu', kind, int(gib * GIB), *rates, description, **facts)


# GiB of memory, then the rates of memory, a link and the network. Memory: as available according to
# libtpu 0.0.51, in the error for a program that needs more. Rates of memory and of the network
# between slices, sizes of slices and hosts: Google Cloud's pages on TPU v4, v5e, v5p, v6e and
# TPU7x; a network given per host is divided by its chips. Links: "one-way ICI bandwidth per link"
# of jax-ml/scaling-book, tpus.md. For TPU7x a twelfth of the 1,200 GB/s that Google gives for all
# six links both ways; for the other chips Google's number is 1.1 times the book's.
# Network of v4: the book's 25 GB/s per host.
PLANE = {'largest': 256, 'host': (2, 2)}
CUBES = {'cubes': True, 'cores': 2, 'host': (2, 2, 1)}
# The two TensorCores of a v4 chip act as one device.
MEGACORE = {'chip_config_name': 'megacore'}
TPUS = {
    'v4': _tpu('v4', 'TPU v4', 30.75, 1200, 45, 6.25, options=MEGACORE, largest=4096, **CUBES),
    'v5e': _tpu('v5e', 'TPU v5 lite', 15.75, 819, 45, 3.125, **PLANE),
    'v5p': _tpu('v5p', 'TPU v5', 95.73, 2765, 90, 6.25, largest=6144, **CUBES),
    'v6e': _tpu('v6e', 'TPU v6 lite', 31.24, 1638, 90, 12.5, **PLANE),
    'tpu7x': _tpu(
        'tpu7x', 'TPU7x', 94.74, 3690, 50, 6.25, devices_per_chip=2, largest=9216, **CUBES
    ),
}

# The part of stream_executor.GpuTargetConfigProto that determines how XLA compiles a program. Sizes
# are in bytes. Literal numbers are the same for an A100, an H100 and a B200.
TARGET = """
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {capability} feature_extension: {features} }}
  core_count: {multiprocessors}
  fpus_per_core: {units}
  clock_rate_ghz: {ghz}
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  l2_cache_size: {l2}
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_by_a_block}
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_core_limit: 2048 threads_per_block_limit: 1024 threads_per_warp: 32
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
"""


def _gpu(name: str, memory: int, gb_per_second: float, link: float, **facts: Any) -> Chip:
    """Returns the Chip of a GPU; facts fill the fields of TARGET."""
    kind, bandwidth = f'NVIDIA {name}', int(1e9 * gb_per_second)
    facts['features'] = 'ACCELERATED_FEATURES' if facts['capability'] >= 9 else 'NONE'
    facts['shared_by_a_block'] = facts['shared'] - 1024  # CUDA keeps 1 KiB for itself
    target = TARGET.format(kind=kind, memory=memory, bandwidth=bandwidth, **facts)
    return Chip('gpu', kind, memory, gb_per_second, link, 50, {'target_config': target}, largest=8)


# Links: half of NVIDIA's sum of all NVLinks in both directions. Network: one 400 Gb/s card per GPU,
# as in a DGX. Other numbers are reported by the devices, according to XLA's source (openxla/xla,
# xla/backends/gpu/target_config/specs). NVIDIA publishes 2,039, 3,350, 4,800 and up to 8,000 GB/s.
AMPERE = {'capability': 8, 'multiprocessors': 108, 'units': 64, 'ghz': 1.41}
AMPERE |= {'l2': 40 * 2**20, 'shared': 164 * 2**10}
HOPPER = {'capability': 9, 'multiprocessors': 132, 'units': 128, 'ghz': 1.98}
HOPPER |= {'l2': 50 * 2**20, 'shared': 228 * 2**10}
BLACKWELL = {'capability': 10, 'multiprocessors': 148, 'units': 128, 'ghz': 1.965}
BLACKWELL |= {'l2': 132_644_864, 'shared': 228 * 2**10}
GPUS = {
    'a100': _gpu('A100-SXM4-80GB', 85_100_068_864, 2039, 300, **AMPERE),
    'h100': _gpu('H100 80GB HBM3', 84_942_979_072, 3352, 450, **HOPPER),
    'h200': _gpu('H200', 151_397_597_184, 4800, 450, **HOPPER),
    'b200': _gpu('B200', 191_514_411_008, 7672, 900, **BLACKWELL),
}
CHIPS = TPUS | GPUS

# Planar slices that Google offers (its pages on v5e and v6e).
FLAT_SHAPES = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
# Slices of three dimensions: within one cube of 4 x 4 x 4, or whole cubes.
SUBCUBE_SHAPES = ('2x2x1', '2x2x2', '2x2x4', '2x4x4')
CUBE, MAX_CUBE_SIDE = 4, 24
MAX_DIGITS = 6  # of a number in the name of a slice; the largest has 9216 chips
WRAPS_FLAT = 16  # a dimension with this many chips is a ring, a shorter dimension a line
EXTRAS = {'tpu': ('libtpu', 'tpu'), 'gpu': ('jax_cuda13_plugin', 'cuda-compiler')}
UNPLANNED = ('v2', 'v3')  # older TPUs, whose names count devices; no plan is made for them
# Names of these chips on machines and instance types.
ALIASES = {'v5litepod': 'v5e', 'v5lite': 'v5e', 'v5': 'v5p', 'v7x': 'tpu7x', 'tpu7': 'tpu7x'}


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices of a plan.

    name: as given by the user. chip: None for the local devices. shape: chips of a slice along each
    dimension; (n,) for GPUs.
    """

    name: str
    chip: Chip | None
    devices: Sequence[jax.Device]
    shape: tuple[int, ...] = ()
    slices: int = 1

    @property
    def chips(self) -> int:
        """Returns the number of chips; 1 for the local devices."""
        return math.prod(self.shape) * self.slices if self.chip else 1

    @property
    def label(self) -> str:
        """Returns the name with the number of slices, for messages."""
        return f'{self.slices} slices of {self.name}' if self.slices > 1 else self.name

    def is_ring(self, dimension: int) -> bool:
        """Whether the chips along a dimension form a ring."""
        # Whole cubes close into rings along each dimension, planar slices only at full length.
        length = self.shape[dimension]
        assert self.chip is not None  # the local devices have no shape
        return length % CUBE == 0 if self.chip.cubes else length == WRAPS_FLAT


def open_topology(name: str, slices: int = 1) -> Topology:
    """Returns the topology with its devices, to compile for.

    Raises ValueError for a topology that is not offered, with the nearest that is; for several
    slices of chips without slices; and for a missing compiler, with the extra that installs it.
    """
    given_name, name = name, canonical_slice(name)
    kind, _, shape = name.partition(':')
    if name != HERE and kind not in CHIPS:
        raise ValueError(
            f'--topology must name one of {", ".join(CHIPS)} and its shape, such as v5p:4x4x4 or '
            f'h100:8, or be {HERE}; got {name!r}.{_suggestion(kind)}'
        )
    chip = CHIPS.get(kind)
    if chip is not None and shape not in (offered := list_shapes(chip)):
        raise ValueError(
            f'--topology={given_name}: {kind} has no {shape or "empty shape"!r}.'
            f' Nearest that is offered: {kind}:{_nearest_shape(shape, offered)}.'
        )
    if slices < 1:
        raise ValueError(f'--slices must be 1 or more; got {slices}')
    if slices > 1 and (chip is None or chip.platform == 'gpu'):
        raise ValueError(f'--slices={slices} is for TPUs; --topology={name} has no slices')
    if chip is None:
        return Topology(name, None, jax.devices())
    compiler, extra = EXTRAS[chip.platform]
    if importlib.util.find_spec(compiler) is None:
        raise ValueError(
            f'--topology={name} is compiled by {compiler}, which is not installed: '
            f'uv sync --extra {extra}'
        )
    lengths = tuple(map(int, shape.split('x')))
    devices = (
        chip.make_host_devices(*lengths)
        if chip.platform == 'gpu'
        else chip.make_slice_devices(shape, slices)
    )
    if chip.platform == 'gpu':
        assume_capability(devices[0].compute_capability)
    return Topology(name, chip, devices, lengths, slices)


def count_slice_devices(name: str, flag: str) -> int:
    """Returns the number of devices of a slice.

    Names are v6e-16, v5p-32 or v5litepod-16, xpk's v6e-4x4, or v6e:4x4. Raises ValueError, with the
    nearest, for a slice that is not offered. flag: the flag that named it, for the error.
    """
    kind, _, number = name.partition('-')
    if kind in UNPLANNED and is_whole_number(number) and len(number) <= MAX_DIGITS:
        return int(number)
    if 'x' in number:
        name = f'{kind}:{number}'
    kind, _, shape = canonical_slice(name).partition(':')
    kind = ALIASES.get(kind, kind)
    if kind not in TPUS:
        prefix = kind.lower().partition('-')[0]
        alias = ALIASES.get(prefix, prefix)
        raise ValueError(
            f'{flag} must be a kind of TPU and its size, of {", ".join(TPUS)}, such as v6e-16 or '
            f'v5litepod-16; got {name!r}.{suggest_nearest(alias, TPUS)}'
        )
    if shape not in (offered := list_shapes(TPUS[kind])):
        chips = count_chips(closest := _nearest_shape(shape, offered))
        raise ValueError(
            f'{flag}={name}: there is no such slice of {kind}. Nearest that is offered: '
            f'{kind}-{chips * TPUS[kind].cores}, which has {chips} chips ({closest}).'
        )
    return count_chips(shape) * TPUS[kind].devices_per_chip


def canonical_slice(name: str) -> str:
    """Returns 'v5e:4x4' for v5e-16 or v5litepod-16, and 'v5p:2x2x4' for v5p-32.

    Google names slices by their chips, or by their TensorCores. Any other name is returned
    unchanged.
    """
    kind, _, number = name.partition('-')
    kind = ALIASES.get(kind, kind)
    if kind not in TPUS or not is_whole_number(number):
        return name
    if len(number) > MAX_DIGITS:
        return f'{kind}:{number}'  # refused later: no slice has so many chips
    chips, remainder = divmod(int(number), TPUS[kind].cores)
    # Several shapes have equally many chips; reversed, so that the shape listed first wins.
    shapes_by_chips = {count_chips(shape): shape for shape in reversed(list_shapes(TPUS[kind]))}
    return f'{kind}:{chips if remainder else shapes_by_chips.get(chips, chips)}'


def is_whole_number(text: str) -> bool:
    """Whether a text has the digits 0 to 9 alone; int() reads digits of other scripts too."""
    return text.isascii() and text.isdecimal()


def count_chips(shape: str) -> int:
    """Returns the number of chips of a shape such as '4x4'."""
    return math.prod(map(int, shape.split('x')))


def list_shapes(chip: Chip) -> list[str]:
    """Returns the offered slices, or numbers of GPUs of a host, smallest first."""
    if chip.platform == 'gpu':
        return [str(2**k) for k in range(chip.largest.bit_length())]
    if not chip.cubes:
        return list(FLAT_SHAPES)
    shapes = itertools.combinations_with_replacement(range(CUBE, MAX_CUBE_SIDE + 1, CUBE), 3)
    cubes = [shape for shape in shapes if math.prod(shape) <= chip.largest]
    cubes.sort(key=lambda shape: (math.prod(shape), max(shape)))
    return [*SUBCUBE_SHAPES, *('x'.join(map(str, shape)) for shape in cubes)]


def _nearest_shape(shape: str, offered: Sequence[str]) -> str:
    """Returns the offered shape with the nearest number of chips, then most lengths in common."""
    lengths = shape.lower().split('x')
    if not all(map(is_whole_number, lengths)):
        return offered[0]
    if len(shape) > 3 * MAX_DIGITS:
        return offered[-1]  # the largest; the product might be no float
    chips = max(math.prod(map(int, lengths)), 1)

    def distance(candidate):
        same = sum(part in candidate.split('x') for part in lengths)
        return abs(math.log(chips / count_chips(candidate))), -same

    return min(offered, key=distance)


def _suggestion(kind: str) -> str:
    """Returns ' Did you mean ...?' for an alias of a known chip, else the nearest name."""
    prefix = kind.lower().split('-')[0]
    guess = ALIASES.get(prefix, prefix)
    if guess not in CHIPS:
        return suggest_nearest(guess, CHIPS)
    example = '4x4x4' if CHIPS[guess].cubes else list_shapes(CHIPS[guess])[-1]
    return f' Did you mean {guess}:{example}?'
