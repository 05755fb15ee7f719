"""Kernels over rows, beside those of other libraries: error and speed.

Bytes are the least possible (each array once), so a kernel at the limit reaches the full rate of a
copy on the same device. `tests.bench.accelerator` measures; the table of `tests.bench.kernels`,
which needs no chip, has the bytes that programs read and write.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from modules.kernels.cross_entropy import CROSS_ENTROPY_KERNELS
from modules.kernels.rms_norm import RMS_NORM_KERNELS
from modules.kernels.softmax import SOFTMAX_KERNELS

EPS = 1e-6
TYPES = ('bfloat16', 'float32')
NORMS = [(8192, width) for width in (1024, 4096, 8192)]
ROWS = [(rows, width) for rows in (4096, 16_384) for width in (32_768, 50_257, 131_072)]
BEYOND_CACHE = 400e6  # bytes of the arrays that a measurement goes around in
COPIED = 2**31
MAX_BYTES = 8e9  # of the device's memory
ROUNDS = 7
TOLERANCES = {'bfloat16': 1e-2, 'float32': 1e-4}


class RowKernelCase(NamedTuple):
    """moved: the least number of arrays of the size of x that are read and written. make: from a
    platform's kernel, makes the function (x, g, scale or labels) -> results.
    """

    name: str
    moved: int
    make: Callable[[Callable], Callable]
    kernels: dict[str, Any]


def norm(compute):
    return lambda x, g, scale: compute(x, scale, EPS)


def norm_both(compute):
    def both(x, g, scale):
        y, pull = jax.vjp(lambda x, scale: compute(x, scale, EPS), x, scale)
        return y, *pull(g)

    return both


def softmax(compute):
    return lambda x, g, _: compute(x)


def softmax_both(compute):
    def both(x, g, _):
        p, pull = jax.vjp(compute, x)
        return p, *pull(g)

    return both


def total_loss(compute, x, labels):
    return jnp.sum(compute(x, labels, 1e-4, 0.0)['objective'])


def loss(compute):
    return lambda x, g, labels: total_loss(compute, x, labels)


def loss_both(compute):
    return lambda x, g, labels: jax.value_and_grad(functools.partial(total_loss, compute))(
        x, labels
    )


NORM_CASES = [
    RowKernelCase('rms_norm forward', 2, norm, RMS_NORM_KERNELS),
    RowKernelCase('rms_norm both', 5, norm_both, RMS_NORM_KERNELS),
]
ROW_CASES = [
    RowKernelCase('softmax forward', 2, softmax, SOFTMAX_KERNELS),
    RowKernelCase('softmax both', 5, softmax_both, SOFTMAX_KERNELS),
    RowKernelCase('cross_entropy forward', 1, loss, CROSS_ENTROPY_KERNELS),
    RowKernelCase('cross_entropy both', 3, loss_both, CROSS_ENTROPY_KERNELS),
]


def cases() -> Iterator[tuple[RowKernelCase, tuple[int, int], str]]:
    for group, shapes in ((NORM_CASES, NORMS), (ROW_CASES, ROWS)):
        for shape in shapes:
            for dtype in TYPES:
                for case in group:
                    yield case, shape, dtype


def draw(
    seed: int, shape: tuple[int, int], dtype: str, case: RowKernelCase
) -> tuple[jax.Array, ...]:
    """Draws x, g and the third argument of the case."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x, g = (jax.random.normal(key, shape, dtype) for key in keys[:2])
    if case.kernels is RMS_NORM_KERNELS:
        return x, g, 1 + 0.1 * jax.random.normal(keys[2], shape[1:])
    return x, g, jax.random.randint(keys[2], shape[:1], 0, shape[1])


def median_seconds(run: Callable[[], Any], calls: int) -> float:
    """Returns the seconds of one of the calls that `run` makes; the median of ROUNDS."""
    seconds = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:]) / calls


def time_calls(function: Callable[..., Any], sets: list[tuple[jax.Array, ...]]) -> float:
    """Returns the seconds of a call, as one program loops over all sets."""

    @jax.jit
    def call_all(sets):
        outputs = []
        for arrays in sets:
            if outputs:
                arrays, outputs[-1] = jax.lax.optimization_barrier((arrays, outputs[-1]))
            outputs.append(function(*arrays))
        return outputs

    return median_seconds(lambda: call_all(sets), len(sets))


@functools.cache
def copy_rate() -> float:
    """Returns bytes per second of a copy of COPIED bytes, read and written."""
    array = jnp.zeros(COPIED // 4, jnp.float32)
    seconds = time_calls(lambda x: x + 1, [(array,)] * 4)
    return 2 * array.nbytes / seconds


def compute_error(
    case: RowKernelCase, implementation: str, shape: tuple[int, int], dtype: str, on: str
) -> float:
    """Returns the largest |actual - expected| / |expected| of the results; float64 on a CPU is
    expected.
    """
    arrays = draw(1, shape, dtype, case)
    actual = jax.jit(case.make(case.kernels[implementation].for_platform(on)))(*arrays)
    with jax.enable_x64(True), jax.default_device(jax.devices('cpu')[0]):
        exact = [
            jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
            for x in map(np.asarray, arrays)
        ]
        expected = jax.jit(case.make(case.kernels['reference'].for_platform('cpu')))(*exact)
    return max(map(distance, jax.tree.leaves(actual), jax.tree.leaves(expected)))


def distance(actual: jax.Array, expected: jax.Array) -> float:
    """Returns |actual - expected| / |expected|, in norms."""
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def copy_share(
    case: RowKernelCase, shape: tuple[int, int], dtype: str, time_case: Callable
) -> dict:
    """Returns bytes per second, and their share of a copy's.

    time_case(sets): seconds of a call, over this number of sets of arrays.
    """
    min_bytes = case.moved * shape[0] * shape[1] * jnp.dtype(dtype).itemsize
    held_bytes = 5 * shape[0] * shape[1] * jnp.dtype(dtype).itemsize
    rate = min_bytes / time_case(
        max(1, min(round(BEYOND_CACHE / min_bytes), int(MAX_BYTES / held_bytes)))
    )
    return {'GB/s': rate / 1e9, 'share of a copy': rate / copy_rate()}


def time_kernel(
    case: RowKernelCase, implementation: str, shape, dtype: str, on: str, count: int
) -> float:
    """Returns the seconds of a call of one of our kernels."""
    sets = [draw(seed, shape, dtype, case) for seed in range(count)]
    return time_calls(case.make(case.kernels[implementation].for_platform(on)), sets)


def peer(name: str) -> Callable[[str, tuple[int, int], str, int], float]:
    """Returns a function (case, shape, type, sets) -> seconds of a call by another library.

    Raises ImportError if it is not installed, and NotImplementedError for a case that it lacks.
    """
    if name == 'tokamax':
        return _time_tokamax
    from tests.bench import torch_rows

    return functools.partial(torch_rows.seconds, name)


def _time_tokamax(name, shape, dtype, count):
    import tokamax

    case = next((row for row in NORM_CASES if row.name == name), None)
    if case is None:
        raise NotImplementedError(f'tokamax has no {name}')

    def compute(x, scale, eps):
        return tokamax.layer_norm(x, scale, None, epsilon=eps, subtract_mean=False)

    sets = [draw(seed, shape, dtype, case) for seed in range(count)]
    return time_calls(case.make(compute), sets)
