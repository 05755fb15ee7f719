"""Chips that programs are compiled for where there is none of them, and what is known of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies


class Chip(NamedTuple):
    """gb_per_second: of one device's memory, 1e9 bytes. described: what the compiler of `platform`
    is told of it.
    """

    platform: str
    gb_per_second: float
    described: dict[str, Any]

    def devices(self, gpus: int = 1) -> Sequence[jax.Device]:
        """Those of one host, to compile for and not to run on: all of its TPUs, or so many GPUs."""
        if self.platform == 'tpu':
            return topologies.get_topology_desc(platform='tpu', **self.described).devices
        topology = f'1x1x{gpus}'
        found = topologies.get_topology_desc(platform='cuda', topology=topology, **self.described)
        return found.devices


def _tpu(topology: str, gb_per_second: float) -> Chip:
    return Chip('tpu', gb_per_second, {'topology_name': topology})


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


def _gpu(gb_per_second: float, **facts: Any) -> Chip:
    facts['features'] = 'ACCELERATED_FEATURES' if facts['capability'] >= 9 else 'NONE'
    facts['shared_by_a_block'] = facts['shared'] - 1024  # what CUDA keeps of it for itself
    target = TARGET.format(bandwidth=int(1e9 * gb_per_second), **facts)
    return Chip('gpu', gb_per_second, {'target_config': target})


TPUS = {  # rates as published a chip
    'v5e': _tpu('v5e:2x2', 819),
    'v5p': _tpu('v5p:2x2x1', 2765),
    'v6e': _tpu('v6e:2x2', 1638),
    'tpu7x': _tpu('tpu7x:2x2x1', 3700),  # half a chip's: it has two devices
}
HOPPER = {
    'capability': 9,
    'multiprocessors': 132,
    'units': 128,
    'ghz': 1.98,
    'l2': 50 * 2**20,
    'shared': 228 * 2**10,
}
# What the devices say of themselves, as XLA's source has it (openxla/xla,
# xla/backends/gpu/target_config/specs). NVIDIA publishes 2,039, 3,350, 4,800 and up to 8,000 GB/s.
GPUS = {
    'a100': _gpu(
        2039,
        name='A100-SXM4-80GB',
        capability=8,
        multiprocessors=108,
        units=64,
        ghz=1.41,
        l2=40 * 2**20,
        shared=164 * 2**10,
        memory=85_100_068_864,
    ),
    'h100': _gpu(3352, name='H100 80GB HBM3', memory=84_942_979_072, **HOPPER),
    'h200': _gpu(4800, name='H200', memory=151_397_597_184, **HOPPER),
    'b200': _gpu(
        7672,
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
