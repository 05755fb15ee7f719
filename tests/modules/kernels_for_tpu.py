"""Compiles kernels for TPUs that are not here and prints, one line of JSON for each, how often the
program passes over its rows and what it copies. A process of its own.
"""

import json

import jax

from modules.kernels.rms_norm import ADD_RMS_NORM_KERNELS, RMS_NORM_KERNELS
from tests.tpu_programs import CHIPS, compiled, moves

ROWS = 32_768
WIDTHS = (4096, 1000)  # one that registers divide, and one that they do not


def cases():
    """name: (function, shapes by the letters of their axes)."""
    norm, add = RMS_NORM_KERNELS['pallas'].compute, ADD_RMS_NORM_KERNELS['pallas']

    def forward(x, scale):
        return norm(x, scale, 1e-6)

    def backward(x, scale, g):
        return jax.vjp(forward, x, scale)[1](g)

    def add_forward(x, residual, scale):
        return add(x, residual, scale, 1e-6)

    yield 'rms_norm', forward, ('ND', 'D')
    yield 'rms_norm backward', backward, ('ND', 'D', 'ND')
    yield 'add_rms_norm', add_forward, ('ND', 'ND', 'D')


def main():
    for chip in CHIPS:
        for name, function, letters in cases():
            for width in WIDTHS:
                sizes = {'N': ROWS, 'D': width}
                shapes = [
                    (tuple(sizes[axis] for axis in one), 'float32' if one == 'D' else 'bfloat16')
                    for one in letters
                ]
                program = compiled(function, shapes, chip)
                found = moves(program)
                print(
                    json.dumps(
                        {
                            'chip': chip,
                            'name': name,
                            'width': width,
                            'passes': sum(move.bytes for move in found) / (ROWS * width * 2),
                            'operations': [move.operation for move in found],
                            'temporary': program.memory_analysis().temp_size_in_bytes,
                        }
                    ),
                    flush=True,
                )


if __name__ == '__main__':
    main()
