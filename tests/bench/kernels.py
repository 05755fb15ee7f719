"""What kernels over rows move through a TPU's memory, beside the same left to XLA.

    uv run --extra tpu python -m tests.bench.kernels

Nothing runs: libtpu's compiler makes each program for chips that need not be here, and what its
instructions read and write is added up (`tests.tpu_programs.moves`), arrays in the chip's fast
memory left out. That over the memory's rate is the least time the program takes, and what it takes
where nothing else holds it up. `in a block` is a norm among its neighbours: a sum before it,
products before and behind it, forward and backward, since a kernel is a barrier to XLA's fusion.
"""

import os
import sys

import jax
import jax.numpy as jnp

from modules.kernels.rms_norm import RMS_NORM_KERNELS
from tests.tpu_programs import CHIPS, ENVIRONMENT, compiled, moves

SHAPES = ((65_536, 4096), (65_536, 1000))
EPS = 1e-6


def forward(norm):
    return lambda x, scale: norm(x, scale, EPS)


def backward(norm):
    return lambda x, scale, g: jax.vjp(forward(norm), x, scale)[1](g)


def in_a_block(norm):
    def block(x, into, out, scale):
        total = x + jnp.dot(x, out)
        return total + jnp.dot(jax.nn.silu(jnp.dot(norm(total, scale, EPS), into)), out)

    def both(x, into, out, scale, g):
        y, pull = jax.vjp(block, x, into, out, scale)
        return y, pull(g)

    return both


CASES = {
    'forward': (forward, ('ND', 'D')),
    'backward': (backward, ('ND', 'D', 'ND')),
    'in a block': (in_a_block, ('ND', 'DD', 'DD', 'D', 'ND')),
}


def gigabytes(name, case, sizes, chip):
    make, letters = CASES[case]
    shapes = [
        (tuple(sizes[axis] for axis in one), 'float32' if one == 'D' else 'bfloat16')
        for one in letters
    ]
    program = compiled(make(RMS_NORM_KERNELS[name].compute), shapes, chip)
    return sum(move.bytes for move in moves(program)) / 1e9


def main():
    if not os.environ.items() >= ENVIRONMENT.items():  # libtpu reads it as it is loaded
        os.execve(
            sys.executable,
            [sys.executable, '-m', 'tests.bench.kernels'],
            os.environ | ENVIRONMENT,
        )
    print('| rms_norm, bfloat16 | chip | GB by XLA | by the kernel | ms by XLA | by the kernel | |')
    print('|---|---|---|---|---|---|---|')
    for rows, width in SHAPES:
        for case in CASES:
            for chip, facts in CHIPS.items():
                sizes = {'N': rows, 'D': width}
                left, kernel = (gigabytes(n, case, sizes, chip) for n in ('reference', 'pallas'))
                times = (f'{1e3 * size / facts.gb_per_second:.2f}' for size in (left, kernel))
                print(
                    f'| {rows:,} x {width:,}, {case} | {chip} | {left:.2f} | {kernel:.2f} | '
                    f'{" | ".join(times)} | {kernel / left:.2f} |',
                    flush=True,
                )


if __name__ == '__main__':
    main()
