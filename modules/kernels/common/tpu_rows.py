"""Calls and blocks of TPU kernels over the rows of a matrix, and numbers per row along lanes.

A block is the part of an array that a kernel holds in vector memory. Its rows are whole, so that a
reduction over a row reads it once. Beyond the end of an array a block holds arbitrary numbers:
results per row need no mask, as they are not written there; sums over rows do.

In memory, numbers per row lie along lanes, which needs no padding. In computations they are columns
beside the rows of a block. Both conversions sum over a mask with one nonzero entry per row.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from modules.kernels.common.rows import check_width

LANES = 128  # columns of a vector register
SUBLANES = 16  # blocks have a multiple of it: registers have 16 rows of 16 bits, 8 of float32
DEFAULT_BYTES = 12 * 2**20  # vector memory of a block: kernels have 16 MiB by default
MAX_BYTES = 56 * 2**20  # for wide rows, of the 64 MiB of a core
MAX_ROWS = 1024  # of a block


def row_bytes(width: int, bytes_per_entry: float) -> float:
    """Returns the bytes of a row, padded to whole registers."""
    return math.ceil(width / LANES) * LANES * bytes_per_entry


def max_columns(rows: int, bytes_per_entry: float) -> int:
    """Returns the longest rows such that `rows` of them fit into vector memory."""
    return int(MAX_BYTES / rows / bytes_per_entry) // LANES * LANES


def block_columns(rows: int, bytes_per_entry: float) -> int:
    """Returns how many columns of `rows` rows fit into DEFAULT_BYTES, a multiple of LANES."""
    return int(DEFAULT_BYTES / bytes_per_entry / rows) // LANES * LANES


def block_rows(rows: int, width: int, bytes_per_entry: float, name: str) -> int:
    """Returns how many whole rows a block has: a multiple of SUBLANES within DEFAULT_BYTES.

    A block has SUBLANES rows even if they take more bytes.

    Args:
      rows: rows of the matrix.
      width: entries of a row.
      bytes_per_entry: of all buffers together; a buffer that is transferred while the previous
        block is computed counts twice.
      name: the kernel, for the error.

    Raises:
      ValueError: if SUBLANES rows do not fit into MAX_BYTES.
    """
    if SUBLANES * row_bytes(width, bytes_per_entry) > MAX_BYTES:
        check_width(name, 'vector memory', width, max_columns(SUBLANES, bytes_per_entry))
    fitting = int(DEFAULT_BYTES / row_bytes(width, bytes_per_entry)) // SUBLANES * SUBLANES
    return max(SUBLANES, min(fitting, MAX_ROWS, math.ceil(rows / SUBLANES) * SUBLANES))


def memory_limit(rows: int, width: int, bytes_per_entry: float) -> int | None:
    """Returns the vector memory to request for a block; None if the default suffices.

    Args:
      rows: rows of the block.
      width: columns of the block.
      bytes_per_entry: of all buffers together.
    """
    n_bytes = rows * row_bytes(width, bytes_per_entry)
    # With a margin of an eighth.
    return None if n_bytes <= DEFAULT_BYTES else int(1.125 * n_bytes)


def _diagonals(size: int, lanes: int, first: Any) -> Iterator[tuple[int, jax.Array]]:
    """Yields (offset, mask [rows, lanes] of the lane of each row), one register of lanes at a time.

    The first of `size` rows has the lane `first`, which is 0 if there are several registers.
    """
    for offset in range(0, size, LANES):
        shape = (min(LANES, size - offset), min(LANES, lanes - offset))
        row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        yield offset, lane == row + first


def lanes_to_column(numbers_1L: jax.Array, first: Any, size: int) -> jax.Array:
    """Returns the lanes from `first` on as a column [size, 1].

    Args:
      numbers_1L: numbers along lanes.
      first: the lane of the first row.
      size: rows of the column.
    """
    parts = [
        jnp.sum(
            jnp.where(mask, numbers_1L[:, offset : offset + mask.shape[1]], 0.0), 1, keepdims=True
        )
        for offset, mask in _diagonals(size, numbers_1L.shape[1], first)
    ]
    return jnp.concatenate(parts)


def column_to_lanes(column_R1: jax.Array, first: Any, lanes: int) -> tuple[jax.Array, jax.Array]:
    """Returns (a column as [1, lanes] from the lane `first` on, mask of the lanes that it fills).

    Args:
      column_R1: a number per row.
      first: the lane of the first row.
      lanes: lanes of the result.
    """
    size = len(column_R1)
    parts = [
        jnp.sum(jnp.where(mask, column_R1[offset : offset + mask.shape[0]], 0.0), 0, keepdims=True)
        for offset, mask in _diagonals(size, lanes, first)
    ]
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
    return jnp.concatenate(parts, 1), (lane >= first) & (lane < first + size)


def call_on_tpu(
    body: Callable[[dict[str, Any]], None],
    operands: Mapping[str, tuple[jax.Array | None, pl.BlockSpec]],
    out_shapes: Mapping[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    *,
    grid: tuple[int, ...],
    semantics: tuple[Any, ...],
    limit: int | None,
    cost: tuple[int, int, int],
    name: str,
    aliases: dict[str, str] | None = None,
    scratch: dict[str, Any] | None = None,
) -> dict[str, jax.Array]:
    """Calls a TPU kernel.

    Args:
      body: the computation of a block; gets {name: ref} of operands, results and scratch.
      operands: (array, blocks) by name; the kernel has no ref for None.
      out_shapes: (shape and type, blocks) of the results by name.
      grid: the lengths of the grid's axes.
      semantics: for each axis of the grid, 'parallel' if its blocks are independent, or
        'arbitrary'.
      limit: bytes of vector memory; None: the default.
      cost: (FLOPs, transcendentals, bytes moved), for the compiler's schedule.
      name: the kernel's name in traces.
      aliases: {operand: result} that share memory.
      scratch: {name: memory} that keeps its content from block to block.

    Returns:
      The results by name.
    """
    operands = {name: pair for name, pair in operands.items() if pair[0] is not None}
    names = [*operands, *out_shapes, *(scratch or {})]
    flops, transcendentals, moved = cost
    arrays = pl.pallas_call(
        lambda *refs: body(dict(zip(names, refs, strict=True))),
        grid=grid,
        in_specs=[spec for _, spec in operands.values()],
        out_specs=[spec for _, spec in out_shapes.values()],
        out_shape=[shape for shape, _ in out_shapes.values()],
        scratch_shapes=list((scratch or {}).values()),
        input_output_aliases={
            list(operands).index(operand): list(out_shapes).index(aliased)
            for operand, aliased in (aliases or {}).items()
        },
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=transcendentals, bytes_accessed=moved
        ),
        name=name,
    )(*(array for array, _ in operands.values()))
    return dict(zip(out_shapes, arrays, strict=True))
