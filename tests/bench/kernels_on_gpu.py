"""Kernels over rows on a GPU, timed: bytes a second as a share of what a copy reaches there.

    uv run --extra cuda python -m tests.bench.kernels_on_gpu [--least-rows]

Bytes are the least there are to move (each array once), so that a share of 1 is a kernel at the
limit. Beside each kernel the same left to XLA, and PyTorch (compiled), Liger and tokamax where they
are installed. First each kernel's results are held against float32 of the reference. What programs
read and write is in the table of `tests.bench.kernels`, which needs no GPU.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.launch.before_jax import has_accelerator
from modules.kernels.cross_entropy import CROSS_ENTROPY_KERNELS
from modules.kernels.rms_norm import RMS_NORM_KERNELS
from modules.kernels.softmax import SOFTMAX_KERNELS

EPS = 1e-6
TYPES = ('bfloat16', 'float32')
NORMS = [(8192, width) for width in (1024, 4096, 8192)]
ROWS = [(rows, width) for rows in (4096, 16_384) for width in (32_768, 50_257, 131_072)]
BEYOND_CACHE = 400e6  # bytes of the arrays that a measurement goes around in
MOST_BYTES = 60e9  # of the device's memory
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


def copy_rate() -> float:
    """Bytes a second of a copy of 2 GB, read and written."""
    array = jnp.zeros(2**29, jnp.float32)
    seconds = time_of(lambda x: x + 1, [(array,)] * 4)
    return 2 * array.nbytes / seconds


def error_of(case: Case, shape: tuple[int, int], dtype: str) -> float:
    """The largest |ours - right| / |right| of the results, in norms, on a few rows."""
    arrays = drawn(1, (min(shape[0], 64), shape[1]), dtype, case)
    x, g, other = arrays
    ours = jax.jit(case.of(case.kernels['pallas'].on('gpu')))(*arrays)
    reference = jax.jit(case.of(case.kernels['reference'].on('gpu')))
    right = reference(x.astype(jnp.float32), g.astype(jnp.float32), other)
    distances = jax.tree.map(
        lambda a, b: jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b), ours, right
    )
    return max(map(float, jax.tree.leaves(distances)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--least-rows', action='store_true', help='the smallest of each case alone')
    flags = parser.parse_args()
    if jax.default_backend() != 'gpu':
        print('GPU: not measured, as there is none.')
        return
    rate = copy_rate()
    print(f'{jax.devices()[0].device_kind}: a copy moves {rate / 1e9:,.0f} GB/s', flush=True)
    peers = {'kernel': None, 'XLA': None} | found_peers()
    print(f'| rows x width, type | case | error | {" | ".join(peers)} |')
    print('|---|---|---|' + '---|' * len(peers))
    done = set()
    for case, shape, dtype in cases():
        if flags.least_rows and (case.name, dtype) in done:
            continue
        done.add((case.name, dtype))
        least = case.moved * shape[0] * shape[1] * jnp.dtype(dtype).itemsize
        held = 5 * shape[0] * shape[1] * jnp.dtype(dtype).itemsize
        count = max(1, min(round(BEYOND_CACHE / least), int(MOST_BYTES / held)))
        error = error_of(case, shape, dtype)
        assert error < CLOSE[dtype], (case.name, shape, dtype, error)
        sets = [drawn(seed, shape, dtype, case) for seed in range(count)]
        cells = []
        for name, time_peer in peers.items():
            try:
                if time_peer is None:
                    kernel = case.kernels['pallas' if name == 'kernel' else 'reference']
                    seconds = time_of(case.of(kernel.on('gpu')), sets)
                else:
                    seconds = time_peer(case.name, shape, dtype, count)
            except NotImplementedError:
                cells.append('')
                continue
            share = least / seconds / rate
            cells.append(f'{least / seconds / 1e9:,.0f} ({share:.2f})')
        size = f'{shape[0]:,} x {shape[1]:,}, {dtype}'
        print(f'| {size} | {case.name} | {error:.0e} | {" | ".join(cells)} |', flush=True)


def found_peers() -> dict[str, Callable[[str, tuple[int, int], str, int], float]]:
    """{name: seconds of a call (case, shape, type, sets)} of those that are installed. They raise
    NotImplementedError for a case that they do not have.
    """
    peers = {}
    try:
        from tests.bench import torch_rows
    except ImportError as error:
        print(f'PyTorch: not measured ({error})')
    else:
        peers |= {name: functools.partial(torch_rows.seconds, name) for name in torch_rows.names()}
    try:
        import tokamax
    except ImportError as error:
        print(f'tokamax: not measured ({error})')
    else:
        peers['tokamax'] = functools.partial(_seconds_of_tokamax, tokamax)
    return peers


def _seconds_of_tokamax(tokamax, name, shape, dtype, count):
    case = next((one for one in NORM_CASES if one.name == name), None)
    if case is None:
        raise NotImplementedError

    def compute(x, scale, eps):
        return tokamax.layer_norm(x, scale, None, epsilon=eps, subtract_mean=False)

    sets = [drawn(seed, shape, dtype, case) for seed in range(count)]
    return time_of(case.of(compute), sets)


if __name__ == '__main__':
    if not has_accelerator():
        jax.config.update('jax_platforms', 'cpu')
    main()
