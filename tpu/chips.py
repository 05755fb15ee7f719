"""Chips that programs are compiled for where there is none of them, and what is published of them.

Rates are of one device, in units of 1e9 bytes a second; a chip of TPU v7x is two devices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from lm.flops import published_peak


class Chip(NamedTuple):
    """platform: 'tpu' or 'gpu'. kind: as a device of it says (`jax.Device.device_kind`).

    memory: bytes that the compiler lets a program have; None where it does not say.
    gb_per_second: of its memory. link: what one link to a neighbour, of a GPU all its links,
    carries one way. network: its share of the network between slices, one way. described: what the
    compiler is told of it. cubes: its slices have three dimensions. largest: chips of the largest
    slice, or GPUs of a host. host: the chips of a host, by dimension.
    """

    platform: str
    kind: str
    memory: int | None
    gb_per_second: float
    link: float
    network: float
    described: dict[str, Any]
    devices_a_chip: int = 1
    cubes: bool = False
    largest: int = 1
    host: tuple[int, ...] = ()

    @property
    def peak(self) -> float:
        """Flop/s of bf16 products."""
        return published_peak(self.kind)

    def devices(self, gpus: int = 1) -> Sequence[jax.Device]:
        """Those of one host, to compile for and not to run on: all of its TPUs, or so many GPUs."""
        if self.platform == 'tpu':
            host = 'x'.join(map(str, self.host))
            return self.slices(host, 1)
        found = topologies.get_topology_desc(
            platform='cuda', topology=f'1x1x{gpus}', **self.described
        )
        return found.devices

    def slices(self, shape: str, number: int) -> Sequence[jax.Device]:
        """The devices of so many slices of TPUs, each a torus of `shape`, such as '4x4x4'."""
        several = {'num_slices': number} if number > 1 else {}
        name = f'{self.described["topology_name"]}:{shape}'
        described = self.described | several | {'topology_name': name}
        return topologies.get_topology_desc(platform='tpu', **described).devices


GIB = 2**30


def _tpu(name: str, kind: str, **facts: Any) -> Chip:
    described = {'topology_name': name, **facts.pop('described', {})}
    return Chip('tpu', kind, described=described, **facts)


# Memory: what libtpu 0.0.51 says is available in the error of a program that needs more. Bandwidth
# of memory and of the network between slices, sizes of slices and hosts: Google Cloud's pages on
# TPU v4, v5e, v5p, v6e and TPU7x; a network that they give for a host is shared by its chips.
# Links: "one-way ICI bandwidth per link" of jax-ml/scaling-book, tpus.md, and of TPU7x a twelfth of
# the 1,200 GB/s that Google gives for all six links both ways, which for the others is 1.1 times as
# much as the book's. Network of v4: the book's 25 GB/s a host.
TPUS = {
    'v4': _tpu(
        'v4',
        'TPU v4',
        memory=int(30.75 * GIB),
        gb_per_second=1200,
        link=45,
        network=6.25,
        cubes=True,
        largest=4096,
        host=(2, 2, 1),
        described={'chip_config_name': 'megacore'},
    ),
    'v5e': _tpu(
        'v5e',
        'TPU v5 lite',
        memory=int(15.75 * GIB),
        gb_per_second=819,
        link=45,
        network=3.125,
        largest=256,
        host=(2, 2),
    ),
    'v5p': _tpu(
        'v5p',
        'TPU v5',
        memory=int(95.73 * GIB),
        gb_per_second=2765,
        link=90,
        network=6.25,
        cubes=True,
        largest=6144,
        host=(2, 2, 1),
    ),
    'v6e': _tpu(
        'v6e',
        'TPU v6 lite',
        memory=int(31.24 * GIB),
        gb_per_second=1638,
        link=90,
        network=12.5,
        largest=256,
        host=(2, 2),
    ),
    'tpu7x': _tpu(
        'tpu7x',
        'TPU7x',
        memory=int(94.74 * GIB),
        gb_per_second=3690,
        link=50,
        network=6.25,
        devices_a_chip=2,
        cubes=True,
        largest=9216,
        host=(2, 2, 1),
    ),
}

# The part of stream_executor.GpuTargetConfigProto that decides what XLA makes of a program. Sizes
# are in bytes. What is written out here, an A100, an H100 and a B200 have in common.
TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
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
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
"""


def _gpu(gb_per_second: float, link: float, **facts: Any) -> Chip:
    facts['features'] = 'ACCELERATED_FEATURES' if facts['capability'] >= 9 else 'NONE'
    facts['shared_by_a_block'] = facts['shared'] - 1024  # what CUDA keeps of it for itself
    target = TARGET.format(bandwidth=int(1e9 * gb_per_second), **facts)
    kind, memory = f'NVIDIA {facts["name"]}', facts['memory']
    return Chip('gpu', kind, memory, gb_per_second, link, 50, {'target_config': target}, largest=8)


HOPPER = {
    'capability': 9,
    'multiprocessors': 132,
    'units': 128,
    'ghz': 1.98,
    'l2': 50 * 2**20,
    'shared': 228 * 2**10,
}
# Links: half of what NVIDIA gives for all NVLinks, both ways. Network: one 400 Gb/s card a GPU, as
# a DGX has it. The rest is what the devices say of themselves, as XLA's source has it (openxla/xla,
# xla/backends/gpu/target_config/specs). NVIDIA publishes 2,039, 3,350, 4,800 and up to 8,000 GB/s.
GPUS = {
    'a100': _gpu(
        2039,
        300,
        name='A100-SXM4-80GB',
        capability=8,
        multiprocessors=108,
        units=64,
        ghz=1.41,
        l2=40 * 2**20,
        shared=164 * 2**10,
        memory=85_100_068_864,
    ),
    'h100': _gpu(3352, 450, name='H100 80GB HBM3', memory=84_942_979_072, **HOPPER),
    'h200': _gpu(4800, 450, name='H200', memory=151_397_597_184, **HOPPER),
    'b200': _gpu(
        7672,
        900,
        name='B200',
        capability=10,
        multiprocessors=148,
        units=128,
        ghz=1.965,
        l2=132_644_864,
        shared=228 * 2**10,
        memory=191_514_411_008,
    ),
}
CHIPS = TPUS | GPUS
