"""Blocks of a TPU kernel over the rows of [..., T, S]: blocks of rows, and of columns in a row.

Arrays come as [1, L, T, S], with all leading axes merged in L: `vmap` puts its axis before the
first axis, where it costs nothing. Numbers per row come along lanes, as [1, L, 1, T].
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from modules.kernels.common.rows import broadcast_index, itemsize
from modules.kernels.common.tpu_rows import (
    DEFAULT_BYTES,
    LANES,
    MAX_ROWS,
    SUBLANES,
    call_on_tpu,
    column_to_lanes,
    lanes_to_column,
    memory_limit,
    row_bytes,
)

MIN_ROWS = 8  # of a block
COLUMNS = 2048  # of a block that has a part of a row: a multiple of LANES
TOTALS = ('first_total', 'second_total')  # over the blocks of a row, in vector memory


def merge_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Merges the axes before the last of [..., T, S] if that moves little data.

    It does if T is whole registers, or few rows.
    """
    is_free = shape[-2] % SUBLANES == 0 or shape[-2] < 4 * SUBLANES
    return (math.prod(shape[:-1]), shape[-1]) if is_free else shape


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Blocks of `size` rows and `columns` columns of an array [*lead, rows, width].

    bytes_per_entry: of all buffers together.
    """

    lead: tuple[int, ...]
    rows: int
    width: int
    size: int
    columns: int
    bytes_per_entry: float

    @classmethod
    def for_shape(cls, shape: tuple[int, ...], columns: int, bytes_per_entry: float) -> 'Tiling':
        """Selects as many rows as fit.

        Args:
          shape: [*lead, rows, width].
          columns: of a block, if there are as many.
          bytes_per_entry: of all buffers together.
        """
        *lead, rows, width = shape
        columns = width if width <= columns else columns
        fitting = int(DEFAULT_BYTES / row_bytes(columns, bytes_per_entry))
        # A power of two, so that it divides a register's lanes or they divide it.
        size = 2 ** int(math.log2(max(MIN_ROWS, min(fitting, MAX_ROWS))))
        return cls(tuple(lead), rows, width, min(size, rows), columns, bytes_per_entry)

    @property
    def chunks(self) -> int:
        """Blocks of columns."""
        return math.ceil(self.width / self.columns)

    @property
    def phases(self) -> int:
        """Reads of a row: two if it has several blocks, as the first read reduces it."""
        return 2 if self.chunks > 1 else 1

    @property
    def group(self) -> int:
        """Rows whose numbers share a block along lanes."""
        return max(self.size, LANES)

    @property
    def grid(self) -> tuple[int, ...]:
        """(leading index, group, block of rows in the group, phase, block of columns)."""
        groups = math.ceil(self.rows / self.group)
        blocks_per_group = math.ceil(min(self.group, self.rows) / self.size)
        return (math.prod(self.lead), groups, blocks_per_group, self.phases, self.chunks)

    @property
    def row_blocks(self) -> int:
        """Blocks of rows."""
        return math.ceil(self.rows / self.size)

    @property
    def has_all_blocks(self) -> bool:
        """Whether every index of the grid has a block."""
        return self.grid[1] * self.grid[2] == self.row_blocks

    def has_block(self, group: Any, i: Any) -> Any:
        """Returns whether block i of a group exists: the last group may have fewer."""
        return group * (self.group // self.size) + i < self.row_blocks

    def clamp_block(self, group: Any, i: Any, phase: Any, chunk: Any) -> tuple:
        """Returns (block of rows, phase, block of columns), clamped to existing blocks.

        An index that does not change moves no data, so indices of the grid without a block are
        free.

        Args:
          group: the index of the group.
          i: the block of rows in the group.
          phase: the read of the row.
          chunk: the block of columns.
        """
        row = jnp.minimum(group * (self.group // self.size) + i, self.row_blocks - 1)
        if self.has_all_blocks:
            return row, phase, chunk
        exists = self.has_block(group, i)
        phase = jnp.where(exists, phase, self.phases - 1)
        return row, phase, jnp.where(exists, chunk, self.chunks - 1)

    def matrix_operand(self, array: Any, is_output: bool = False) -> tuple[Any, pl.BlockSpec]:
        """Returns [..., T or 1, S or 1] in the kernel's shape, and its blocks.

        Args:
          array: an array or its description.
          is_output: whether it is written, which happens in the last phase only.
        """
        *leading, rows, columns = array.shape

        def index(group, i, phase, chunk):
            row, phase, chunk = self.clamp_block(group, i, phase, chunk)
            if is_output and self.phases == 2:
                chunk = chunk * phase  # stays at the first block in phase 0, so nothing is stored
            return row if rows > 1 else 0, chunk if columns > 1 else 0

        block = (self.size if rows > 1 else 1, self.columns if columns > 1 else 1)
        return self._make_operand(array, leading, (rows, columns), block, index)

    def row_operand(self, array: Any) -> tuple[Any, pl.BlockSpec]:
        """Returns [..., T or 1] along lanes, and its blocks."""
        *leading, rows = array.shape

        def index(group, i, phase, chunk):
            return 0, group if rows > 1 else 0

        return self._make_operand(array, leading, (1, rows), (1, min(self.group, rows)), index)

    def _make_operand(self, array, leading: Sequence[int], shape, block, index):
        """Returns an array, or its description, as [1, L, *shape], and its blocks.

        leading: its leading axes, each as in `lead` or 1.
        """
        shape = (1, math.prod(leading), *shape)
        leading = (1,) * (len(self.lead) - len(leading)) + tuple(leading)

        def index_map(lead, *indices):
            lead = lead if leading == self.lead else broadcast_index(lead, self.lead, leading)
            return 0, lead, *index(*indices)

        if isinstance(array, jax.ShapeDtypeStruct):
            array = jax.ShapeDtypeStruct(shape, array.dtype)
        else:
            array = array.reshape(shape)
        return array, pl.BlockSpec((None, None, *block), index_map)


@dataclasses.dataclass(frozen=True)
class CurrentBlock:
    """The block that a kernel instance computes.

    offset: the first row of the block among the rows of its group.
    """

    tiling: Tiling
    offset: Any
    phase: Any
    chunk: Any

    @classmethod
    def from_grid(cls, tiling: Tiling) -> 'CurrentBlock':
        """Returns the block at the current index of the grid."""
        group, i, phase, chunk = (pl.program_id(axis) for axis in range(1, 5))
        row = tiling.clamp_block(group, i, phase, chunk)[0] * tiling.size
        return cls(tiling, row - group * tiling.group, phase, chunk)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the block."""
        return self.tiling.size, self.tiling.columns

    def columns(self) -> jax.Array:
        """Returns the index in S of each entry."""
        first = self.chunk * self.tiling.columns
        return first + jax.lax.broadcasted_iota(jnp.int32, self.shape, 1)

    def column_mask(self) -> jax.Array | None:
        """Returns which entries are in the array's columns; None: all."""
        if self.tiling.width % self.tiling.columns == 0:
            return None
        return self.columns() < self.tiling.width

    def read_rows(self, ref: Any) -> jax.Array:
        """Returns a block along lanes as [size or 1, 1]."""
        if ref.shape[-1] == 1:
            return ref[...]
        return lanes_to_column(ref[...], self.offset, self.tiling.size)

    def write_rows(self, ref: Any, values_R1: jax.Array) -> None:
        """Writes numbers of this block's rows along lanes; other rows' numbers stay."""
        lanes, is_block_lane = column_to_lanes(values_R1, self.offset, ref.shape[-1])
        ref[...] = jnp.where(is_block_lane, lanes, ref[...])

    def reduce_row(
        self,
        refs: dict[str, Any],
        start: Callable[[], tuple],
        add: Callable[[tuple], tuple],
        use: Callable[[tuple], None],
    ) -> None:
        """Reduces a row to a total, and calls `use` with the total for each of its blocks.

        Computes total = add(add(start())...), with one `add` for each block of the row in the first
        phase, and calls use(total) in the last phase.

        Args:
          refs: the kernel's refs by name.
          start: returns the total of no blocks.
          add: adds the current block to a total.
          use: writes results of the current block.
        """
        if self.tiling.phases == 1:
            use(add(start()))
            return
        totals = [refs[name] for name in TOTALS if name in refs]

        def store(arrays):
            for ref, array in zip(totals, arrays, strict=True):
                ref[...] = array

        def load():
            return tuple(ref[...] for ref in totals)

        pl.when((self.phase == 0) & (self.chunk == 0))(lambda: store(start()))
        pl.when(self.phase == 0)(lambda: store(add(load())))
        pl.when(self.phase == 1)(lambda: use(load()))


def call_in_blocks(
    body: Callable[[dict[str, Any], CurrentBlock], None],
    tiling: Tiling,
    operands: Mapping[str, tuple[jax.Array, pl.BlockSpec]],
    out_shapes: Mapping[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    name: str,
    n_totals: int = 0,
) -> dict[str, jax.Array]:
    """Calls `call_on_tpu` over all blocks of a tiling.

    Args:
      body: the computation of a block; gets {name: ref} and the block.
      tiling: the blocks.
      operands: (array, blocks) by name.
      out_shapes: (shape and type, blocks) of the results by name.
      name: the kernel's name in traces.
      n_totals: how many totals `reduce_row` has.

    Returns:
      The results by name.
    """

    def run_block(refs):
        block = CurrentBlock.from_grid(tiling)
        if tiling.has_all_blocks:
            body(refs, block)
        else:
            group, i = pl.program_id(1), pl.program_id(2)
            pl.when(tiling.has_block(group, i))(lambda: body(refs, block))

    entries = math.prod(tiling.lead) * tiling.rows * tiling.width
    reads, writes = (
        sum(math.prod(array.shape) * itemsize(array) for array, _ in arrays.values())
        for arrays in (operands, out_shapes)
    )
    total = pltpu.VMEM((tiling.size, 1), jnp.float32)
    return call_on_tpu(
        run_block,
        operands,
        out_shapes,
        grid=tiling.grid,
        # Blocks of rows that share a block of numbers must stay on one core.
        semantics=('parallel', 'parallel', *(['arbitrary'] * 3)),
        limit=memory_limit(tiling.size, tiling.columns, tiling.bytes_per_entry),
        cost=(8 * entries, entries, tiling.phases * reads + writes),
        name=name,
        scratch=dict.fromkeys(TOTALS[:n_totals], total) if tiling.chunks > 1 else {},
    )
