"""Blocks of a TPU kernel over the rows of [..., T, S]: blocks of rows, and of columns in a row.

Arrays come as [1, L, T, S], with all leading axes in L: the axis of a `vmap` goes before the first
axis, where it costs nothing. Numbers of rows come along lanes, as [1, L, 1, T].
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
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
COLUMNS = 2048  # of a block with a part of a row: a multiple of LANES
TOTALS = ('first_total', 'second_total')  # over the blocks of a row, in fast memory


def merge_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Merges the axes before the last of [..., T, S] where that moves little: T is whole registers,
    or few rows.
    """
    is_free = shape[-2] % SUBLANES == 0 or shape[-2] < 4 * SUBLANES
    return (math.prod(shape[:-1]), shape[-1]) if is_free else shape


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Blocks of `size` rows and `columns` columns of an array [*lead, rows, width]."""

    lead: tuple[int, ...]
    rows: int
    width: int
    size: int
    columns: int
    bytes_per_entry: float

    @classmethod
    def for_shape(cls, shape: tuple[int, ...], columns: int, bytes_per_entry: float) -> 'Tiling':
        """Picks as many rows as fit. bytes_per_entry: of all buffers together."""
        *lead, rows, width = shape
        columns = width if width <= columns else columns
        fitting = int(DEFAULT_BYTES / row_bytes(columns, bytes_per_entry))
        # A power of two, so that it divides a register's lanes or they divide it.
        size = 2 ** int(math.log2(max(MIN_ROWS, min(fitting, MAX_ROWS))))
        return cls(tuple(lead), rows, width, min(size, rows), columns, bytes_per_entry)

    @property
    def chunks(self) -> int:
        return math.ceil(self.width / self.columns)

    @property
    def phases(self) -> int:
        """Reads of a row: two where it has several blocks, of which the first reduces it."""
        return 2 if self.chunks > 1 else 1

    @property
    def group(self) -> int:
        """Rows whose numbers are in one block along lanes."""
        return max(self.size, LANES)

    @property
    def grid(self) -> tuple[int, ...]:
        """(leading index, group, block of rows in it, phase, block of columns)."""
        groups = math.ceil(self.rows / self.group)
        each = math.ceil(min(self.group, self.rows) / self.size)
        return (math.prod(self.lead), groups, each, self.phases, self.chunks)

    @property
    def row_blocks(self) -> int:
        return math.ceil(self.rows / self.size)

    @property
    def has_all_blocks(self) -> bool:
        return self.grid[1] * self.grid[2] == self.row_blocks

    def has_block(self, group: Any, i: Any) -> Any:
        """Whether the rows have this block: the last group may have fewer."""
        return group * (self.group // self.size) + i < self.row_blocks

    def clamp_block(self, group: Any, i: Any, phase: Any, chunk: Any) -> tuple:
        """Returns (block of rows, phase, block of columns); the last of each where there is none,
        so that nothing is moved.
        """
        row = jnp.minimum(group * (self.group // self.size) + i, self.row_blocks - 1)
        if self.has_all_blocks:
            return row, phase, chunk
        there = self.has_block(group, i)
        phase = jnp.where(there, phase, self.phases - 1)
        return row, phase, jnp.where(there, chunk, self.chunks - 1)

    def matrix_operand(
        self, array: jax.Array, is_output: bool = False
    ) -> tuple[jax.Array, pl.BlockSpec]:
        """Returns [..., T or 1, S or 1] as the kernel has it, and its blocks.

        written: it is an output, of which nothing is written before the last phase.
        """
        *own, rows, columns = array.shape

        def index(group, i, phase, chunk):
            row, phase, chunk = self.clamp_block(group, i, phase, chunk)
            if is_output and self.phases == 2:
                chunk = chunk * phase
            return row if rows > 1 else 0, chunk if columns > 1 else 0

        block = (self.size if rows > 1 else 1, self.columns if columns > 1 else 1)
        return self._make_operand(array, own, (rows, columns), block, index)

    def row_operand(self, array: jax.Array) -> tuple[jax.Array, pl.BlockSpec]:
        """Returns [..., T or 1] along lanes, and its blocks."""
        *own, rows = array.shape

        def index(group, i, phase, chunk):
            return 0, group if rows > 1 else 0

        return self._make_operand(array, own, (1, rows), (1, min(self.group, rows)), index)

    def _make_operand(self, array, leading: Sequence[int], shape, block, index):
        """Returns an array, or its description, as [1, L, *shape], and its blocks. own: its leading
        axes, those of `lead` or 1.
        """
        shape = (1, math.prod(leading), *shape)
        leading = (1,) * (len(self.lead) - len(leading)) + tuple(leading)

        def index_map(lead, *at):
            lead = lead if leading == self.lead else broadcast_index(lead, self.lead, leading)
            return 0, lead, *index(*at)

        if isinstance(array, jax.ShapeDtypeStruct):
            array = jax.ShapeDtypeStruct(shape, array.dtype)
        else:
            array = array.reshape(shape)
        return array, pl.BlockSpec((None, None, *block), index_map)


@dataclasses.dataclass(frozen=True)
class CurrentBlock:
    """The block that a kernel computes; `offset` is its first row among those of a group."""

    blocks: Tiling
    offset: Any
    phase: Any
    chunk: Any

    @classmethod
    def from_grid(cls, blocks: Tiling) -> 'CurrentBlock':
        group, i, phase, chunk = (pl.program_id(axis) for axis in range(1, 5))
        row = blocks.clamp_block(group, i, phase, chunk)[0] * blocks.size
        return cls(blocks, row - group * blocks.group, phase, chunk)

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.size, self.blocks.columns

    def columns(self) -> jax.Array:
        """Returns the index in S of each entry."""
        first = self.chunk * self.blocks.columns
        return first + jax.lax.broadcasted_iota(jnp.int32, self.shape, 1)

    def column_mask(self) -> jax.Array | None:
        """Returns which entries are in the array's columns; None for all."""
        if self.blocks.width % self.blocks.columns == 0:
            return None
        return self.columns() < self.blocks.width

    def read_rows(self, ref: Any) -> jax.Array:
        """Returns a block along lanes as [size or 1, 1]."""
        if ref.shape[-1] == 1:
            return ref[...]
        return lanes_to_column(ref[...], self.offset, self.blocks.size)

    def write_rows(self, ref: Any, values_R1: jax.Array) -> None:
        """Writes numbers of this block's rows along lanes and keeps those of other rows."""
        new, is_own = column_to_lanes(values_R1, self.offset, ref.shape[-1])
        ref[...] = jnp.where(is_own, new, ref[...])

    def reduce_row(
        self,
        refs: dict[str, Any],
        start: Callable[[], tuple],
        add: Callable[[tuple], tuple],
        use: Callable[[tuple], None],
    ) -> None:
        """Computes total = add(add(start())...), once for each block of a row, and calls use(total)
        with each block in the last phase.
        """
        if self.blocks.phases == 1:
            use(add(start()))
            return
        totals = [refs[name] for name in TOTALS if name in refs]

        def store(values):
            for ref, value in zip(totals, values, strict=True):
                ref[...] = value

        def load():
            return tuple(ref[...] for ref in totals)

        pl.when((self.phase == 0) & (self.chunk == 0))(lambda: store(start()))
        pl.when(self.phase == 0)(lambda: store(add(load())))
        pl.when(self.phase == 1)(lambda: use(load()))


def call_in_blocks(
    body: Callable[[dict[str, Any], CurrentBlock], None],
    blocks: Tiling,
    operands: dict[str, tuple[jax.Array, pl.BlockSpec]],
    out_shapes: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    name: str,
    n_totals: int = 0,
) -> dict[str, jax.Array]:
    """Calls `call_on_tpu` over all blocks, with so many totals of the blocks of a row."""

    def run_block(refs):
        here = CurrentBlock.from_grid(blocks)
        if blocks.has_all_blocks:
            body(refs, here)
        else:
            group, i = pl.program_id(1), pl.program_id(2)
            pl.when(blocks.has_block(group, i))(lambda: body(refs, here))

    entries = math.prod(blocks.lead) * blocks.rows * blocks.width
    reads, writes = (
        sum(math.prod(array.shape) * itemsize(array) for array, _ in arrays.values())
        for arrays in (operands, out_shapes)
    )
    total = pltpu.VMEM((blocks.size, 1), jnp.float32)
    return call_on_tpu(
        run_block,
        operands,
        out_shapes,
        grid=blocks.grid,
        # Blocks of rows whose numbers are in one block along lanes belong to one core.
        semantics=('parallel', 'parallel', *(['arbitrary'] * 3)),
        limit=memory_limit(blocks.size, blocks.columns, blocks.bytes_per_entry),
        cost=(8 * entries, entries, blocks.phases * reads + writes),
        name=name,
        scratch=dict.fromkeys(TOTALS[:n_totals], total) if blocks.chunks > 1 else {},
    )
