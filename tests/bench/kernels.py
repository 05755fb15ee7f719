"""Bytes that kernels over rows move through the memory of TPUs and GPUs, beside XLA's own programs.

    uv run --extra tpu --extra cuda-compiler python -m tests.bench.kernels [chip ...]

Nothing runs. Compilers build each program for chips that need not be present, and the bytes that
its instructions read and write are summed (`program_text.moves`), without arrays in a TPU's fast
memory. Divided by the memory's rate, this is the least time that the program takes, and its time if
nothing else limits it: computed, not timed. A second read inside a kernel does not count.

`in a block`, `of queries and keys`, `in attention` and `behind a readout` include the products
around them in a model, forward and backward: a kernel is a barrier to XLA's fusion. For GPUs the
lesser of two programs counts: with products by Triton, which fuse their surroundings, and by
cuBLAS, which do not. On a GPU, XLA chooses the faster.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from modules.kernels.attention.base import MASKED
from modules.kernels.cross_entropy import CROSS_ENTROPY_KERNELS
from modules.kernels.matmul import direct
from modules.kernels.rms_norm import RMS_NORM_KERNELS
from modules.kernels.softmax import SOFTMAX_KERNELS
from modules.losses import LOSSES, chunk_loss, logits_loss, select_chunk_size
from modules.products import Readout
from tests.program_text import moves
from tests.programs import ENVIRONMENT, compile_for_chip, printed_by
from tpu.chips import CHIPS, GPUS, TPUS

MODULE = 'tests.bench.kernels'
EPS = 1e-6
SIZES = {'N': 65_536, 'D': 4096, 'E': 1000, 'M': 4096, 'V': 50_257, 'W': 1024, 'B': 4, 'H': 16}
SIZES |= {'T': 2048, 'K': 128, 'R': 256, 'S': 256, 'J': 64, 'U': 50_257}
FLOAT32, INT32 = ('D', 'E', 'J', 'WU'), ('M', 'HW')  # types of arguments; the others are bfloat16
OPTIONS = {  # of the compiler, for each program that it may make
    'tpu': ({},),
    'gpu': tuple({'xla_gpu_enable_triton_gemm': by_triton} for by_triton in (True, False)),
}


def in_a_block(norm):
    def block(x, into, projection, scale):
        total = x + jnp.dot(x, projection)
        return total + jnp.dot(jax.nn.silu(jnp.dot(norm(total, scale, EPS), into)), projection)

    return both(block)


def before_queries_and_keys(norm):
    def scores(x, w_q, w_k, scale):
        q, k = (norm(jnp.einsum('bsw,whj->bshj', x, w), scale, EPS) for w in (w_q, w_k))
        return jnp.einsum('bqhj,bkhj->bhqk', q, k)

    return both(scores)


def in_attention(softmax):
    def attention(q, k, v):
        scores = jnp.einsum('bhtk,bhsk->bhts', q, k)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jnp.einsum('bhts,bhsk->bhtk', softmax(scores, mask), v)

    return both(attention)


def behind_a_readout(cross_entropy):
    def loss(x, weight, labels):
        return total_loss(cross_entropy)(jnp.dot(x, weight), labels)

    return jax.value_and_grad(loss, argnums=(0, 1))


def behind_a_readout_by_chunks(cross_entropy):
    """Computes the loss as a step does: some tokens at a time, with logits in float32."""

    def total(x, weight, labels):
        chunk = select_chunk_size(labels.size, weight.shape[-1])
        loss = chunk_loss(logits_loss(cross_entropy), chunk)
        readout = Readout(weight, None, 0.0, direct, x.dtype)
        sums = loss(x, readout, labels, jnp.ones(labels.shape), z_loss=1e-4, label_smoothing=0.0)
        return sums['objective']

    return jax.value_and_grad(total, argnums=(0, 1))


def total_loss(cross_entropy):
    def total(logits, labels):
        return jnp.sum(cross_entropy(logits, labels, z_loss=1e-4, label_smoothing=0.0)['objective'])

    return total


def loss_and_gradient(cross_entropy):
    return jax.value_and_grad(total_loss(cross_entropy))


def plain_softmax(x, mask=None):
    x = x if mask is None else jnp.where(mask, x, MASKED)
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


def both(function):
    """Forward and backward, from arguments and the output's gradient."""

    def run(*arrays):
        y, pull = jax.vjp(function, *arrays[:-1])
        return y, pull(arrays[-1])

    return run


def backward(function):
    return lambda *arrays: jax.vjp(function, *arrays[:-1])[1](arrays[-1])


class KernelCase(NamedTuple):
    """plain: the alternative without a kernel. make: builds a program from either. letters: the
    axes of each argument, by SIZES. donated: arguments that it may overwrite.
    """

    name: str
    plain: Callable[..., Any]
    kernel: Callable[..., Any] | None
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    letters: tuple[str, ...]
    donated: tuple[int, ...] = ()


def find_kernel(table, platform):
    """Returns the platform's kernel, or None."""
    row = table['pallas']
    return row.for_platform(platform) if platform in row.platforms else None


def norms(width, pair):
    rows, square = f'N{width}', width + width

    def forward(norm):
        return lambda x, scale: norm(x, scale, EPS)

    yield KernelCase('forward', *pair, forward, (rows, width))
    yield KernelCase('backward', *pair, lambda n: backward(forward(n)), (rows, width, rows))
    yield KernelCase('in a block', *pair, in_a_block, (rows, square, square, width, rows))


def cases(platform: str) -> Iterator[KernelCase]:
    pair = (
        RMS_NORM_KERNELS['reference'].for_platform(platform),
        find_kernel(RMS_NORM_KERNELS, platform),
    )
    for width in 'DE':
        for case in norms(width, pair):
            yield case._replace(name=f'rms_norm, 65,536 x {SIZES[width]:,}, {case.name}')
    letters = ('RSW', 'WHJ', 'WHJ', 'J', 'RHSS')
    heads_case = 'rms_norm, 256 x 256 x 16 x 64, of queries and keys'
    yield KernelCase(heads_case, *pair, before_queries_and_keys, letters)
    pair = plain_softmax, find_kernel(SOFTMAX_KERNELS, platform)
    yield KernelCase('softmax, 65,536 x 4,096, both', *pair, both, ('ND', 'ND'))
    heads = ('BHTK',) * 4
    yield KernelCase('softmax, 4 x 16 x 2,048 x 2,048, in attention', *pair, in_attention, heads)
    pair = LOSSES['cross_entropy'].__wrapped__, find_kernel(CROSS_ENTROPY_KERNELS, platform)
    loss_case = 'cross_entropy, 4,096 x 50,257'
    yield KernelCase(f'{loss_case}, both', *pair, loss_and_gradient, ('MV', 'M'), (0,))
    yield KernelCase(f'{loss_case}, behind a readout', *pair, behind_a_readout, ('MW', 'WV', 'M'))
    name = 'cross_entropy, 16,384 x 50,257, behind a readout by chunks'
    yield KernelCase(name, *pair, behind_a_readout_by_chunks, ('HWW', 'WU', 'HW'))


def gigabytes(case: KernelCase, function: Callable[..., Any], chip: str) -> float:
    def select_type(letters):
        return 'float32' if letters in FLOAT32 else 'int32' if letters in INT32 else 'bfloat16'

    shapes = [(tuple(SIZES[axis] for axis in axes), select_type(axes)) for axes in case.letters]

    def sum_moved(options):
        program = compile_for_chip(case.make(function), shapes, chip, case.donated, options)
        return sum(move.bytes for move in moves(program))

    return min(map(sum_moved, OPTIONS[CHIPS[chip].platform])) / 1e9


def print_gigabytes(chips: Sequence[str]) -> None:
    """A line of JSON for each case: chip, name, by XLA, by the kernel."""
    for chip in chips:
        for case in cases(CHIPS[chip].platform):
            functions = (case.plain, case.kernel)
            pair = [function and gigabytes(case, function, chip) for function in functions]
            print(json.dumps([chip, case.name, *pair]), flush=True)


def cell(chip: str, xla: float, kernel: float | None) -> str:
    def ms(size):
        return f'{1e3 * size / CHIPS[chip].gb_per_second:.2f}'

    if kernel is None:
        return f'{xla:.2f}, -; {ms(xla)}, -'
    return f'{xla:.2f}, {kernel:.2f} ({kernel / xla:.2f}); {ms(xla)}, {ms(kernel)}'


def print_table(chips: Sequence[str]) -> None:
    lines = [line for chip in chips for line in printed_by(MODULE, chip, seconds=3600)]
    pairs = {(chip, name): pair for chip, name, *pair in lines}
    print(f'| bfloat16: GB by XLA, by the kernel; ms | {" | ".join(chips)} |')
    print('|---|' + '---|' * len(chips))
    for name in dict.fromkeys(name for _, name in pairs):
        cells = [cell(chip, *pairs[chip, name]) for chip in chips]
        print(f'| {name} | {" | ".join(cells)} |', flush=True)


def main(*names: str) -> None:
    if os.environ.items() >= ENVIRONMENT.items():  # a process of its own, by `print_table`
        print_gigabytes(names)
        return
    for chips in (TPUS, GPUS):
        if chosen := [chip for chip in chips if chip in names or not names]:
            print_table(chosen)
            print()


if __name__ == '__main__':
    main(*sys.argv[1:])
