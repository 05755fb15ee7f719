"""What kernels over rows move through a TPU's memory, beside the same left to XLA.

    uv run --extra tpu python -m tests.bench.kernels

Nothing runs: libtpu's compiler makes each program for chips that need not be here, and what its
instructions read and write is added up (`tests.tpu_programs.moves`), arrays in the chip's fast
memory left out. That over the memory's rate is the least time the program takes, and what it takes
where nothing else holds it up. `in a block`, `in attention` and `behind a readout` have the
products around them that a model has, forward and backward: a kernel is a barrier to XLA's fusion.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from modules.kernels.attention.scores import MASKED
from modules.kernels.cross_entropy import CROSS_ENTROPY_KERNELS
from modules.kernels.rms_norm import RMS_NORM_KERNELS
from modules.kernels.softmax import SOFTMAX_KERNELS
from modules.losses import LOSSES
from tests.tpu_programs import CHIPS, ENVIRONMENT, compiled, moves

EPS = 1e-6
SIZES = {'N': 65_536, 'D': 4096, 'E': 1000, 'M': 4096, 'V': 50_257, 'W': 1024, 'B': 4, 'H': 16}
SIZES |= {'T': 2048, 'K': 128}


def in_a_block(norm):
    def block(x, into, out, scale):
        total = x + jnp.dot(x, out)
        return total + jnp.dot(jax.nn.silu(jnp.dot(norm(total, scale, EPS), into)), out)

    return both(block)


def in_attention(softmax):
    def attention(q, k, v):
        scores = jnp.einsum('bhtk,bhsk->bhts', q, k)
        return jnp.einsum('bhts,bhsk->bhtk', softmax(scores, causal=True), v)

    return both(attention)


def behind_a_readout(cross_entropy):
    def loss(x, weight, labels):
        return total_of(cross_entropy)(jnp.dot(x, weight), labels)

    return jax.value_and_grad(loss, argnums=(0, 1))


def total_of(cross_entropy):
    def total(logits, labels):
        return jnp.sum(cross_entropy(logits, labels, 1e-4, 0.0)['objective'])

    return total


def gradient_of(cross_entropy):
    return jax.value_and_grad(total_of(cross_entropy))


def plain_softmax(x, causal=False):
    if causal:
        x = jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, MASKED)
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


def plain_cross_entropy(logits, labels, z_loss, label_smoothing):
    per_token = LOSSES['cross_entropy'].__wrapped__
    return per_token(logits, labels, z_loss=z_loss, label_smoothing=label_smoothing)


def both(function):
    """Forward and backward, of arguments and the result's gradient."""

    def run(*given):
        y, pull = jax.vjp(function, *given[:-1])
        return y, pull(given[-1])

    return run


def backward(function):
    return lambda *given: jax.vjp(function, *given[:-1])[1](given[-1])


class Case(NamedTuple):
    """plain: what models have otherwise. make: a program of either. letters: of the axes of its
    arguments, by SIZES. donated: of which it may write to.
    """

    name: str
    plain: Callable[..., Any]
    kernel: Callable[..., Any]
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    letters: tuple[str, ...]
    donated: tuple[int, ...] = ()


def norms(width):
    rows = f'N{width}'

    def forward(norm):
        return lambda x, scale: norm(x, scale, EPS)

    pair = [RMS_NORM_KERNELS[name].compute for name in ('reference', 'pallas')]
    yield Case('forward', *pair, forward, (rows, width))
    yield Case('backward', *pair, lambda n: backward(forward(n)), (rows, width, rows))
    square = width + width
    given = (rows, square, square, width, rows)
    yield Case('in a block', *pair, in_a_block, given)


def cases():
    for width in 'DE':
        for case in norms(width):
            yield case._replace(name=f'rms_norm, 65,536 x {SIZES[width]:,}, {case.name}')
    pair = plain_softmax, SOFTMAX_KERNELS['pallas'].compute
    yield Case('softmax, 65,536 x 4,096, both', *pair, both, ('ND', 'ND'))
    heads = ('BHTK',) * 4
    yield Case('softmax, 4 x 16 x 2,048 x 2,048, in attention', *pair, in_attention, heads)
    pair = plain_cross_entropy, CROSS_ENTROPY_KERNELS['pallas'].compute
    of_loss = 'cross_entropy, 4,096 x 50,257'
    yield Case(f'{of_loss}, both', *pair, gradient_of, ('MV', 'M'), (0,))
    yield Case(f'{of_loss}, behind a readout', *pair, behind_a_readout, ('MW', 'WV', 'M'))


def type_of(letters):
    return 'int32' if letters == 'M' else 'float32' if letters in ('D', 'E') else 'bfloat16'


def gigabytes(case, function, chip):
    shapes = [(tuple(SIZES[a] for a in one), type_of(one)) for one in case.letters]
    program = compiled(case.make(function), shapes, chip, case.donated)
    return sum(move.bytes for move in moves(program)) / 1e9


def main():
    if not os.environ.items() >= ENVIRONMENT.items():  # libtpu reads it as it is loaded
        command = [sys.executable, '-m', 'tests.bench.kernels']
        os.execve(sys.executable, command, os.environ | ENVIRONMENT)
    print(f'| bfloat16: GB by XLA, by the kernel; ms | {" | ".join(CHIPS)} |')
    print('|---|' + '---|' * len(CHIPS))
    for case in cases():
        cells = []
        for chip, facts in CHIPS.items():
            sizes = [gigabytes(case, one, chip) for one in (case.plain, case.kernel)]
            xla, kernel = sizes
            times = [1e3 * size / facts.gb_per_second for size in sizes]
            cells.append(
                f'{xla:.2f}, {kernel:.2f} ({kernel / xla:.2f}); {times[0]:.2f}, {times[1]:.2f}'
            )
        print(f'| {case.name} | {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
    main()
