"""The peak rate of a device: published, or measured in the type that a step computes in."""

import functools
import math
import re
import time

import jax
import jax.numpy as jnp

T = 1e12
# Published dense bf16 FLOP/s of a device with accumulation in float32, by words of its
# `device_kind`. All words must be there; the first row that matches counts. The numbers are from
# the makers' data sheets, which often print twice as much for sparse matrices.
PEAK_FLOPS = {
    'tpu v6': 918 * T,
    'tpu7x': 1153.5 * T,  # half of a chip's 2,307: a chip is two devices
    'tpu v5p': 459 * T,
    'tpu v5 lite': 197 * T,
    'tpu v5e': 197 * T,
    'tpu v5': 459 * T,
    'tpu v4': 275 * T,
    'gb300': 2500 * T,
    'gb200': 2500 * T,
    'b300': 2250 * T,
    'b200': 2250 * T,
    'gh200': 989 * T,
    'h200 nvl': 835.5 * T,
    'h200': 989 * T,
    'h100 pcie': 756.5 * T,
    'h100 nvl': 835.5 * T,
    'h100': 989 * T,
    'h20': 148 * T,
    'a100': 312 * T,
    'a800': 312 * T,
    'a40': 149.7 * T,
    'a30': 165 * T,
    'a10': 125 * T,
    'l40s': 362 * T,
    'l40': 181 * T,
    'l4': 121 * T,
    'rtx 6000 ada': 364.2 * T,
    'rtx a6000': 154.8 * T,
    'rtx 5090': 209.5 * T,
    'rtx 5080': 112.6 * T,
    'rtx 4090': 165.2 * T,
    'rtx 4080 super': 104.4 * T,
    'rtx 4080': 97.5 * T,
    'rtx 3090 ti': 80 * T,
    'rtx 3090': 71 * T,
    'mi355x': 2500 * T,
    'mi325x': 1307.4 * T,
    'mi300x': 1307.4 * T,
    'mi300a': 980.6 * T,
    'mi250x': 191.5 * T,  # half of a card's 383: a card is two devices
    'mi250': 181 * T,
}
# Other chips, or a part of one, under the same name.
OTHER_CHIPS = {'laptop', 'mobile', 'mig', 'd', 'q'}  # RTX 4090 D, Max-Q
GEMM_SIZES = {'cpu': 2048}
ENOUGH_SEC = 0.15  # of products at the start of a run: two of size 2048 on two cores
GEMM_SIZE = 8192  # of others: fast devices spend most of a smaller product on its start


def published_peak(device_kind: str) -> float | None:
    """Returns the peak in `PEAK_FLOPS`, or None for a kind that it lacks."""
    words = set(re.findall(r'[a-z0-9]+', device_kind.lower()))
    if words & OTHER_CHIPS:
        return None
    matching = (flops for name, flops in PEAK_FLOPS.items() if {*name.split()} <= words)
    return next(matching, None)


def measure_gemm_flops(size: int, dtype: str, repeats: int = 5, max_sec: float = math.inf) -> float:
    """Measures the FLOP/s of a product of two square matrices.

    Args:
      size: rows of a matrix.
      dtype: their type.
      repeats: products; the fastest counts.
      max_sec: seconds after which no further product begins, once there are two.
    """
    a = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul).lower(a, a).compile()
    # Warm-up, not timed.
    product(a, a).block_until_ready()
    seconds: list[float] = []
    while len(seconds) < repeats and (len(seconds) < 2 or sum(seconds) < max_sec):
        start = time.perf_counter()
        product(a, a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)  # the best, as other processes may share the machine


@functools.cache
def cached_gemm_flops(size: int, dtype: str) -> float:
    """Returns `measure_gemm_flops`, measured once per process.

    A measurement takes 0.3 s of all cores, which every program of a sweep would otherwise pay. A
    peak that is measured on a busy machine is measured again as soon as a step exceeds it.
    """
    return measure_gemm_flops(size, dtype, max_sec=ENOUGH_SEC)


def peak_flops(n_devices: int, dtype: str, remeasure: bool = False) -> tuple[float, str]:
    """Returns (FLOP/s of `n_devices` together, source of the number).

    The number is published for bfloat16; TPUs multiply float32 in it too. For other types and
    devices it is measured: once per process unless `remeasure`. The devices of a CPU share the
    machine.

    Args:
      n_devices: the number of devices.
      dtype: the type of the step's products, model.dtype.
      remeasure: whether to measure again.
    """
    device = jax.devices()[0]
    published = published_peak(device.device_kind)
    if published and (dtype == 'bfloat16' or device.platform == 'tpu'):
        return published * n_devices, f'{n_devices} x published bf16 peak'
    if remeasure:
        cached_gemm_flops.cache_clear()
    size = GEMM_SIZES.get(device.platform, GEMM_SIZE)
    measured, source = cached_gemm_flops(size, dtype), f'measured {dtype} {size}^3 matmul'
    if device.platform == 'cpu':
        return measured, source
    return measured * n_devices, f'{n_devices} x {source}'
