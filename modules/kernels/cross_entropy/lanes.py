"""Numbers of rows in kernels: along lanes in memory, where nothing pads them, and in columns beside
the rows of a block while they are computed with. And the blocks of rows that this asks for.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from modules.kernels.tpu_rows import LANES, SUBLANES, USUAL_BYTES, rows_at_once


class Blocks(NamedTuple):
    """How a kernel goes over a matrix, by blocks of rows and columns; columns are the last axis.

    Numbers of a row, [numbers, rows], are there for LANES rows at least. Where a block has fewer
    rows, the second axis of the grid is over the blocks that share them.
    """

    grid: tuple[int, int, int]
    shape: tuple[int, int]
    sharing: int
    there_are: int  # blocks of rows

    @property
    def matrix(self) -> pl.BlockSpec:
        def index(i, j, k):
            return jnp.minimum(i * self.sharing + j, self.there_are - 1), k

        return pl.BlockSpec(self.shape, index)

    def beside(self, numbers: int) -> pl.BlockSpec:
        """Of `numbers` a row."""
        return pl.BlockSpec((numbers, max(self.shape[0], LANES)), lambda i, j, k: (0, i))


def blocks_of(
    rows: int, width: int, bytes_an_entry: float, *, whole_rows: bool, name: str
) -> Blocks:
    """Blocks of LANES rows and as many columns as fit; of more rows where those are all columns.

    bytes_an_entry: as in `rows_at_once`. whole_rows: of all columns, and as many rows as fit.
    ValueError where not even the fewest do.
    """
    columns = width
    if not whole_rows:
        fewest = min(LANES, math.ceil(rows / SUBLANES) * SUBLANES)
        fitting = int(USUAL_BYTES / bytes_an_entry / fewest) // LANES * LANES
        columns = min(width, fitting)
    size = rows_at_once(rows, columns, bytes_an_entry, name)
    size = size // LANES * LANES if size >= LANES else 2 ** int(math.log2(size))
    there_are, together = math.ceil(rows / size), max(size, LANES)
    sharing = min(together // size, there_are)
    grid = (math.ceil(rows / together), sharing, math.ceil(width / columns))
    return Blocks(grid, (size, columns), sharing, there_are)


def along_lanes(*numbers_M: jax.Array) -> jax.Array:
    """[numbers, M] in float32, of whole registers: labels below 2^24 are exact."""
    numbers_XM = jnp.stack([number_M.astype(jnp.float32) for number_M in numbers_M])
    return jnp.pad(numbers_XM, ((0, 0), (0, -numbers_XM.shape[1] % LANES)))


def _diagonal(size, first):
    """[size, LANES]: whether a lane is that of a row, of which the first one has the lane `first`;
    what a column and lanes are made of each other by.
    """
    shape = (size, LANES)
    lane, row = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 0))
    return lane == first + row


def as_column(numbers_1L: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """[size, 1] of the lanes from `first` on, which is 0 where there are several registers."""
    own = _diagonal(min(size, LANES), first)
    parts = [numbers_1L[:, at : at + LANES] for at in range(0, numbers_1L.shape[1], LANES)]
    parts = [jnp.sum(jnp.where(own, part, 0.0), 1, keepdims=True) for part in parts]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def as_lanes(column: jax.Array, first: jax.Array) -> jax.Array:
    """[1, lanes] of a column, from the lane `first` on."""
    size = min(len(column), LANES)
    own = _diagonal(size, first)
    parts = [column[at : at + size] for at in range(0, len(column), size)]
    parts = [jnp.sum(jnp.where(own, part, 0.0), 0, keepdims=True) for part in parts]
    return jnp.concatenate(parts, 1) if len(parts) > 1 else parts[0]
