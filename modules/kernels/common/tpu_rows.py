"""Calls and blocks of TPU kernels over the rows of a matrix.

A block is what a kernel has in a chip's vector memory at a time. Its rows are whole, so that a
reduction over a row reads it once. Beyond an array's end a block holds arbitrary numbers: results
of single rows need no mask, since they are not written there; sums over rows do.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from modules.kernels.common.rows import refuse_width

LANES = 128  # columns of a vector register
SUBLANES = 16  # rows of a block are a multiple: a register of 16-bit numbers has 16, of float32 8
USUAL_BYTES = 12 * 2**20  # of vector memory for a block, of the 16 MiB available by default
MOST_BYTES = 56 * 2**20  # of the 64 MiB of a core, for rows that need them
MOST_ROWS = 1024


def row_bytes(width: int, bytes_an_entry: float) -> float:
    return math.ceil(width / LANES) * LANES * bytes_an_entry


def most_columns(rows: int, bytes_an_entry: float) -> int:
    """Returns the longest rows of which so many fit into vector memory."""
    return int(MOST_BYTES / rows / bytes_an_entry) // LANES * LANES


def columns_at_once(rows: int, bytes_an_entry: float) -> int:
    """Returns how many columns of so many rows USUAL_BYTES hold, a multiple of LANES."""
    return int(USUAL_BYTES / bytes_an_entry / rows) // LANES * LANES


def rows_at_once(rows: int, width: int, bytes_an_entry: float, name: str) -> int:
    """Returns how many rows a block has: a multiple of SUBLANES within USUAL_BYTES, or SUBLANES
    where these take more.

    bytes_an_entry: of all buffers together; a buffer that is moved while the block before it is
    computed counts twice. Raises ValueError where SUBLANES rows do not fit.
    """
    if SUBLANES * row_bytes(width, bytes_an_entry) > MOST_BYTES:
        refuse_width(name, 'vector memory', width, most_columns(SUBLANES, bytes_an_entry))
    fitting = int(USUAL_BYTES / row_bytes(width, bytes_an_entry)) // SUBLANES * SUBLANES
    return max(SUBLANES, min(fitting, MOST_ROWS, math.ceil(rows / SUBLANES) * SUBLANES))


def memory_limit(rows: int, width: int, bytes_an_entry: float) -> int | None:
    """Returns the limit in bytes to ask for, for such a block; None where the default is enough."""
    needed = rows * row_bytes(width, bytes_an_entry)
    return None if needed <= USUAL_BYTES else int(1.125 * needed)


def call_on_tpu(
    body: Callable[[dict[str, Any]], None],
    given: dict[str, tuple[jax.Array | None, pl.BlockSpec]],
    made: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    *,
    grid: tuple[int, ...],
    semantics: tuple[str, ...],
    limit: int | None,
    cost: tuple[int, int, int],
    name: str,
    aliases: dict[str, str] | None = None,
    scratch: dict[str, Any] | None = None,
) -> dict[str, jax.Array]:
    """Calls a TPU kernel on the arrays in `given` and returns those in `made`, by name.

    body: gets {name: ref} of both; arrays that are None are left out. semantics: for each axis of
    the grid, 'parallel' where no block depends on another one's. cost: (flops, transcendentals,
    bytes moved). aliases: {given: made} that share memory. scratch: {name: memory} that the body
    gets too, kept from block to block.
    """
    given = {name: pair for name, pair in given.items() if pair[0] is not None}
    names = [*given, *made, *(scratch or {})]
    flops, transcendentals, moved = cost
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
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=transcendentals, bytes_accessed=moved
        ),
        name=name,
    )(*(array for array, _ in given.values()))
    return dict(zip(made, results, strict=True))
