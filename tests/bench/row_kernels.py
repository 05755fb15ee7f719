"""Kernels over rows, and what other libraries have in their place: how far from right, how fast.

Bytes are the least there are to move (each array once), so that a share of 1 of what a copy reaches
on the same device is a kernel at the limit. `tests.bench.accelerator` measures; what programs read
and write is in the table of `tests.bench.kernels`, which needs no chip.
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
MOST_BYTES = 8e9  # of the device's memory
ROUNDS = 7
CLOSE = {'bfloat16': 1e-2, 'float32': 1e-4}


class Case(NamedTuple):
    """moved: arrays of the size of x that are read and written at least. of: the function of a
    platform's kernel, (x, g, scale or labels) -> results.
    """

    name: str
    moved: int
    of: Callable[[Callable], Callable]
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
    Case('rms_norm forward', 2, norm, RMS_NORM_KERNELS),
    Case('rms_norm both', 5, norm_both, RMS_NORM_KERNELS),
]
ROW_CASES = [
    Case('softmax forward', 2, softmax, SOFTMAX_KERNELS),
    Case('softmax both', 5, softmax_both, SOFTMAX_KERNELS),
    Case('cross_entropy forward', 1, loss, CROSS_ENTROPY_KERNELS),
    Case('cross_entropy both', 3, loss_both, CROSS_ENTROPY_KERNELS),
]


def cases() -> Iterator[tuple[Case, tuple[int, int], str]]:
    for some, shapes in ((NORM_CASES, NORMS), (ROW_CASES, ROWS)):
        for shape in shapes:
            for dtype in TYPES:
                for case in some:
                    yield case, shape, dtype


def drawn(seed: int, shape: tuple[int, int], dtype: str, case: Case) -> tuple[jax.Array, ...]:
    """x, g and what else the case is given."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x, g = (jax.random.normal(key, shape, dtype) for key in keys[:2])
    if case.kernels is RMS_NORM_KERNELS:
        return x, g, 1 + 0.1 * jax.random.normal(keys[2], shape[1:])
    return x, g, jax.random.randint(keys[2], shape[:1], 0, shape[1])


def seconds_of(run: Callable[[], Any], calls: int) -> float:
    """Of one of so many calls that `run` makes; the median of ROUNDS."""
    found = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:]) / calls


def time_of(function: Callable[..., Any], sets: list[tuple[jax.Array, ...]]) -> float:
    """Seconds of a call, as all sets are gone through in one program, one after the other."""

    @jax.jit
    def all_of(sets):
        results = []
        for one in sets:
            if results:
                one, results[-1] = jax.lax.optimization_barrier((one, results[-1]))
            results.append(function(*one))
        return results

    return seconds_of(lambda: all_of(sets), len(sets))


@functools.cache
def copy_rate() -> float:
    """Bytes a second of a copy of COPIED bytes, read and written."""
    array = jnp.zeros(COPIED // 4, jnp.float32)
    seconds = time_of(lambda x: x + 1, [(array,)] * 4)
    return 2 * array.nbytes / seconds


def error_of(case: Case, implementation: str, shape: tuple[int, int], dtype: str, on: str) -> float:
    """The largest |ours - right| / |right| of the results, in norms: right is float64 on a CPU."""
    arrays = drawn(1, shape, dtype, case)
    ours = jax.jit(case.of(case.kernels[implementation].for_platform(on)))(*arrays)
    with jax.enable_x64(True), jax.default_device(jax.devices('cpu')[0]):
        exact = [
            jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)
            for x in map(np.asarray, arrays)
        ]
        right = jax.jit(case.of(case.kernels['reference'].for_platform('cpu')))(*exact)
    return max(map(distance, jax.tree.leaves(ours), jax.tree.leaves(right)))


def distance(ours: jax.Array, right: jax.Array) -> float:
    """|ours - right| / |right|, in norms."""
    ours, right = (np.asarray(x).astype(np.float64) for x in (ours, right))
    return float(np.linalg.norm(ours - right) / np.linalg.norm(right))


def share_of_copy(case: Case, shape: tuple[int, int], dtype: str, time_case: Callable) -> dict:
    """Bytes a second, and their share of a copy's. time_case(sets): seconds of a call in so many
    sets of arrays.
    """
    least = case.moved * shape[0] * shape[1] * jnp.dtype(dtype).itemsize
    held = 5 * shape[0] * shape[1] * jnp.dtype(dtype).itemsize
    rate = least / time_case(max(1, min(round(BEYOND_CACHE / least), int(MOST_BYTES / held))))
    return {'GB/s': rate / 1e9, 'share of a copy': rate / copy_rate()}


def time_kernel(case: Case, implementation: str, shape, dtype: str, on: str, count: int) -> float:
    """Seconds of a call of one of our kernels."""
    sets = [drawn(seed, shape, dtype, case) for seed in range(count)]
    return time_of(case.of(case.kernels[implementation].for_platform(on)), sets)


def peer(name: str) -> Callable[[str, tuple[int, int], str, int], float]:
    """Seconds of a call (case, shape, type, sets) by another library. Raises ImportError where it
    is not installed, and NotImplementedError for a case that it does not have.
    """
    if name == 'tokamax':
        return _seconds_of_tokamax
    from tests.bench import torch_rows

    return functools.partial(torch_rows.seconds, name)


def _seconds_of_tokamax(name, shape, dtype, count):
    import tokamax

    case = next((one for one in NORM_CASES if one.name == name), None)
    if case is None:
        raise NotImplementedError(f'tokamax has no {name}')

    def compute(x, scale, eps):
        return tokamax.layer_norm(x, scale, None, epsilon=eps, subtract_mean=False)

    sets = [drawn(seed, shape, dtype, case) for seed in range(count)]
    return time_of(case.of(compute), sets)
