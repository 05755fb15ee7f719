"""What TPU kernels over the rows of a matrix have in common: blocks of rows, and their memory.

A block is what a kernel has in a chip's fast memory at a time. Its rows are whole, so that a
reduction over a row reads it once. Out of an array's end a block holds whatever was there: what is
row by row needs no mask, since it is not written, and what is summed over rows does.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from modules.kernels.rows import refuse_width

LANES = 128  # of a vector register: columns fill them up, whatever they are
SUBLANES = 16  # rows of a block come in as many: a register of a 16-bit type has 16, of float32 8
USUAL_BYTES = 12 * 2**20  # of vector memory a block takes, of the 16 MiB there are by default
MOST_BYTES = 56 * 2**20  # of the 64 MiB a core has, where rows ask for them
MOST_ROWS = 1024


def rows_at_once(rows: int, width: int, bytes_an_entry: float, name: str) -> int:
    """How many rows of `width` entries a block has: a multiple of SUBLANES with USUAL_BYTES at
    most, the fewest where these are more already.

    bytes_an_entry: of all buffers together, twice each of those that are moved while the block
    before is computed. ValueError where not even the fewest rows fit.
    """
    row_bytes = math.ceil(width / LANES) * LANES * bytes_an_entry
    if SUBLANES * row_bytes > MOST_BYTES:
        most = int(MOST_BYTES / SUBLANES / bytes_an_entry) // LANES * LANES
        refuse_width(name, 'vector memory', width, most)
    fitting = int(USUAL_BYTES / row_bytes) // SUBLANES * SUBLANES
    there_are = math.ceil(rows / SUBLANES) * SUBLANES
    return max(SUBLANES, min(fitting, MOST_ROWS, there_are))


def memory_limit(rows: int, width: int, bytes_an_entry: float) -> int | None:
    """The limit in bytes to ask for, for such a block; None where the default does."""
    needed = rows * math.ceil(width / LANES) * LANES * bytes_an_entry
    return None if needed <= USUAL_BYTES else int(1.125 * needed)


def call_on_tpu(
    body: Callable[[dict[str, Any]], None],
    given: dict[str, tuple[jax.Array | None, pl.BlockSpec]],
    made: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    *,
    grid: tuple[int, ...],
    semantics: tuple[str, ...],
    limit: int | None,
    cost: pl.CostEstimate,
    name: str,
    aliases: dict[str, str] | None = None,
    scratch: dict[str, Any] | None = None,
) -> dict[str, jax.Array]:
    """{name: array} of what a TPU kernel makes of the arrays that are `given`, each with its block.

    body gets {name: ref} of both; arrays that are None are left out. semantics: of each axis of the
    grid, 'parallel' where no block depends on another one's. aliases: {given: made} that share
    memory. scratch: {name: memory} that the body gets too, kept from block to block.
    """
    given = {name: pair for name, pair in given.items() if pair[0] is not None}
    names = [*given, *made, *(scratch or {})]
    results = pl.pallas_call(
        lambda *refs: body(dict(zip(names, refs, strict=True))),
        grid=grid,
        in_specs=[spec for _, spec in given.values()],
        out_specs=[spec for _, spec in made.values()],
        out_shape=[shape for shape, _ in made.values()],
        scratch_shapes=list((scratch or {}).values()),
        input_output_aliases={
            list(given).index(one): list(made).index(other)
            for one, other in (aliases or {}).items()
        },
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit),
        cost_estimate=cost,
        name=name,
    )(*(array for array, _ in given.values()))
    return dict(zip(made, results, strict=True))
