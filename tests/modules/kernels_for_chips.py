"""Compiles kernels for the chips named as arguments, which need not be present.

Prints a JSON line for each: how often the program passes over its rows, by which instructions, and
how many registers of a GPU the kernels use. It runs in a process of its own.
"""

import json
import sys

import jax
import jax.numpy as jnp

from modules.kernels.cross_entropy import CROSS_ENTROPY_KERNELS
from modules.kernels.rms_norm import RMS_NORM_KERNELS
from modules.kernels.softmax import SOFTMAX_KERNELS
from tests.program_text import moves
from tests.programs import compile_for_chip, kernels_compiled
from tpu.chips import CHIPS

ROWS = 131_072  # more than fast memory holds of the narrow ones, too
TYPES = {'ND': 'bfloat16', 'D': 'float32', 'N': 'int32'}
# Divisible by registers, not divisible, and too wide for a GPU's registers.
WIDTHS = {'tpu': (4096, 1000), 'gpu': (4096, 1000, 8192)}


def cases(platform: str):
    """Yields name, function, its arguments by the letters of their axes, and which it may
    overwrite.
    """
    tables = RMS_NORM_KERNELS, SOFTMAX_KERNELS, CROSS_ENTROPY_KERNELS
    norm, softmax, cross_entropy = (table['pallas'].for_platform(platform) for table in tables)

    def forward(x, scale):
        return norm(x, scale, 1e-6)

    def backward(x, scale, g):
        return jax.vjp(forward, x, scale)[1](g)

    def softmax_both(x, g):
        p, pull = jax.vjp(softmax, x)
        return p, pull(g)

    def loss(logits, labels):
        return jnp.sum(cross_entropy(logits, labels, 1e-4, 0.1)['objective'])

    yield 'rms_norm', forward, ('ND', 'D'), ()
    yield 'rms_norm backward', backward, ('ND', 'D', 'ND'), ()
    yield 'softmax', softmax, ('ND',), ()
    yield 'softmax, both', softmax_both, ('ND', 'ND'), ()
    yield 'cross_entropy', loss, ('ND', 'N'), ()
    yield 'cross_entropy, both', jax.value_and_grad(loss), ('ND', 'N'), (0,)


def main(*chips: str) -> None:
    for chip in chips:
        platform = CHIPS[chip].platform
        for name, function, letters, donated in cases(platform):
            for width in WIDTHS[platform]:
                sizes = {'N': ROWS, 'D': width}
                shapes = [
                    (tuple(sizes[axis] for axis in argument), TYPES[argument])
                    for argument in letters
                ]
                program = compile_for_chip(function, shapes, chip, donated)
                passes = moves(program)
                line = {
                    'chip': chip,
                    'name': name,
                    'width': width,
                    'passes': sum(move.bytes for move in passes) / (ROWS * width * 2),
                    'operations': [move.operation for move in passes],
                    'instructions': [move.name for move in passes],
                    'compiled': [kernel._asdict() for kernel in kernels_compiled()],
                    'temporary': program.memory_analysis().temp_size_in_bytes,
                }
                print(json.dumps(line), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
