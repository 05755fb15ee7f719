"""Compiles the products of a recipe of few bits for a chip and prints their cost as JSON.

python -m tests.tpu.compile_few_bits CHIP RECIPE
"""

import json
import sys

import jax
import jax.numpy as jnp

from modules.kernels.matmul import MATMUL_KERNELS
from tests.programs import compile_for_chip
from tpu.chips import CHIPS
from tpu.cost import estimate_cost
from tpu.hlo import Module

SHAPES = (4096, 2048), (2048, 1024), (4096, 1024)  # of x, w and the gradient of y


def main(chip: str, name: str) -> None:
    """Prints flops and their least time of y, dx and dw, simulated and real."""
    costs = {}
    for is_real in (False, True):
        kernel = MATMUL_KERNELS[name](outlier_size=0.0, real_products=is_real)

        def products(x, w, g, kernel=kernel):
            y, pull = jax.vjp(kernel, x, w)
            return y, *pull(g)

        compiled = compile_for_chip(products, [(shape, jnp.bfloat16) for shape in SHAPES], chip)
        # So much bandwidth that only products take time.
        published = CHIPS[chip]
        module = Module(compiled.as_text())
        cost = estimate_cost(module, published.peak, 1e30, kind=published.kind)
        costs['real' if is_real else 'simulated'] = cost.flops, cost.bound * published.peak
    print(json.dumps(costs))


if __name__ == '__main__':
    main(*sys.argv[1:])
