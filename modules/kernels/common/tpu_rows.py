"""Calls and blocks of TPU kernels over the rows of a matrix, and numbers of rows along lanes.

A block is what a kernel has in a chip's vector memory at a time. Its rows are whole, so that a
reduction over a row reads it once. Beyond an array's end a block holds arbitrary numbers: results
of single rows need no mask, since they are not written there; sums over rows do.

Numbers of rows lie along lanes in memory, where nothing pads them, and are columns beside the rows
of a block in computations. Columns and lanes are made of each other by sums of one number each.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from modules.kernels.common.rows import check_width

LANES = 128  # columns of a vector register
SUBLANES = 16  # rows of a block are a multiple: a register of 16-bit numbers has 16, of float32 8
DEFAULT_BYTES = 12 * 2**20  # of vector memory for a block, of the 16 MiB available by default
MAX_BYTES = 56 * 2**20  # of the 64 MiB of a core, for rows that need them
MAX_ROWS = 1024


def row_bytes(width: int, bytes_an_entry: float) -> float:
    return math.ceil(width / LANES) * LANES * bytes_an_entry


def max_columns(rows: int, bytes_an_entry: float) -> int:
    """Returns the longest rows of which so many fit into vector memory."""
    return int(MAX_BYTES / rows / bytes_an_entry) // LANES * LANES


def block_columns(rows: int, bytes_an_entry: float) -> int:
    """Returns how many columns of so many rows USUAL_BYTES hold, a multiple of LANES."""
    return int(DEFAULT_BYTES / bytes_an_entry / rows) // LANES * LANES


def block_rows(rows: int, width: int, bytes_an_entry: float, name: str) -> int:
    """Returns how many rows a block has: a multiple of SUBLANES within USUAL_BYTES, or SUBLANES
    where these take more.

    bytes_an_entry: of all buffers together; a buffer that is moved while the block before it is
    computed counts twice. Raises ValueError where SUBLANES rows do not fit.
    """
    if SUBLANES * row_bytes(width, bytes_an_entry) > MAX_BYTES:
        check_width(name, 'vector memory', width, max_columns(SUBLANES, bytes_an_entry))
    fitting = int(DEFAULT_BYTES / row_bytes(width, bytes_an_entry)) // SUBLANES * SUBLANES
    return max(SUBLANES, min(fitting, MAX_ROWS, math.ceil(rows / SUBLANES) * SUBLANES))


def memory_limit(rows: int, width: int, bytes_an_entry: float) -> int | None:
    """Returns the limit in bytes to ask for, for such a block; None where the default is enough."""
    needed = rows * row_bytes(width, bytes_an_entry)
    return None if needed <= DEFAULT_BYTES else int(1.125 * needed)


def _diagonals(size: int, lanes: int, first: Any) -> Iterator[tuple[int, jax.Array]]:
    """Yields (place, whether a lane is that of a row, [rows, lanes]), a register's lanes at a time.

    The first of `size` rows has the lane `first`, which is 0 where there are several registers.
    """
    for at in range(0, size, LANES):
        shape = (min(LANES, size - at), min(LANES, lanes - at))
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        yield at, lane == row + first


def lanes_to_column(numbers_1L: jax.Array, first: Any, size: int) -> jax.Array:
    """Returns the lanes from `first` on as [size, 1]."""
    parts = [
        jnp.sum(jnp.where(own, numbers_1L[:, at : at + own.shape[1]], 0.0), 1, keepdims=True)
        for at, own in _diagonals(size, numbers_1L.shape[1], first)
    ]
    return jnp.concatenate(parts)


def column_to_lanes(column_R1: jax.Array, first: Any, lanes: int) -> tuple[jax.Array, jax.Array]:
    """Returns (a column as [1, lanes] from the lane `first` on, which lanes it has)."""
    size = len(column_R1)
    parts = [
        jnp.sum(jnp.where(own, column_R1[at : at + own.shape[0]], 0.0), 0, keepdims=True)
        for at, own in _diagonals(size, lanes, first)
    ]
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
    return jnp.concatenate(parts, 1), (lane >= first) & (lane < first + size)


def call_on_tpu(
    body: Callable[[dict[str, Any]], None],
    operands: dict[str, tuple[jax.Array | None, pl.BlockSpec]],
    out_shapes: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
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
    operands = {name: pair for name, pair in operands.items() if pair[0] is not None}
    names = [*operands, *out_shapes, *(scratch or {})]
    flops, transcendentals, moved = cost
    results = pl.pallas_call(
        lambda *refs: body(dict(zip(names, refs, strict=True))),
        grid=grid,
        in_specs=[spec for _, spec in operands.values()],
        out_specs=[spec for _, spec in out_shapes.values()],
        out_shape=[shape for shape, _ in out_shapes.values()],
        scratch_shapes=list((scratch or {}).values()),
        input_output_aliases={
            list(operands).index(one): list(out_shapes).index(other)
            for one, other in (aliases or {}).items()
        },
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=transcendentals, bytes_accessed=moved
        ),
        name=name,
    )(*(array for array, _ in operands.values()))
    return dict(zip(out_shapes, results, strict=True))
