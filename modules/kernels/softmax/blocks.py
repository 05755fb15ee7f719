"""How a TPU kernel walks over the rows of [..., T, S]: in blocks of rows, and along a row.

Arrays come as [1, L, T, S], with all leading axes in L: the first axis is there so that the axis of
a `vmap` goes before all of them, where it costs nothing. What there is once a row comes as
[1, L, 1, T], along lanes: as a column each number would take a register's whole row in memory.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from modules.kernels.rows import itemsize
from modules.kernels.tpu_rows import (
    LANES,
    MOST_BYTES,
    MOST_ROWS,
    SUBLANES,
    USUAL_BYTES,
    call_on_tpu,
    memory_limit,
)

LEAST_ROWS = 8  # of a block
COLUMNS = 2048  # of a block of those that have a part of a row: a multiple of LANES
TOTALS = ('first_total', 'second_total')  # over the blocks of a row, in fast memory


def merged(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[..., T, S] with the axes before the last as one, where T is whole registers, so that nothing
    has to be moved, or where it is few rows; else as it is.
    """
    is_free = shape[-2] % SUBLANES == 0 or shape[-2] < 4 * SUBLANES
    return (math.prod(shape[:-1]), shape[-1]) if is_free else shape


def row_bytes(columns: int, bytes_an_entry: float) -> float:
    return math.ceil(columns / LANES) * LANES * bytes_an_entry


def most_columns(bytes_an_entry: float) -> int:
    """The longest row of which the fewest rows fit into fast memory."""
    return int(MOST_BYTES / LEAST_ROWS / bytes_an_entry) // LANES * LANES


@dataclasses.dataclass(frozen=True)
class Blocks:
    """lead, rows, width: of the array, [*lead, T, S]. size, columns: of a block. phases: how often
    a row is read, 2 where it is reduced before it is written and has several blocks.
    """

    lead: tuple[int, ...]
    rows: int
    width: int
    size: int
    columns: int
    phases: int
    bytes_an_entry: float

    @classmethod
    def of(cls, shape: tuple[int, ...], columns: int, phases: int, bytes_an_entry: float):
        """bytes_an_entry: of all buffers together."""
        *lead, rows, width = shape
        columns = width if width <= columns else columns
        fitting = int(USUAL_BYTES / row_bytes(columns, bytes_an_entry))
        # A power of two, so that it divides a register's lanes or they divide it.
        size = 2 ** int(math.log2(max(LEAST_ROWS, min(fitting, MOST_ROWS))))
        phases = phases if columns < width else 1
        return cls(tuple(lead), rows, width, min(size, rows), columns, phases, bytes_an_entry)

    @property
    def chunks(self) -> int:
        return math.ceil(self.width / self.columns)

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
    def limit(self) -> int | None:
        return memory_limit(self.size, self.columns, self.bytes_an_entry)

    @property
    def blocks_of_rows(self) -> int:
        return math.ceil(self.rows / self.size)

    def is_there(self, group: Any, i: Any) -> Any:
        """Whether the rows have this block: the last group may have fewer."""
        return group * (self.group // self.size) + i < self.blocks_of_rows

    def block(self, group: Any, i: Any, phase: Any, chunk: Any) -> tuple:
        """(block of rows, phase, block of columns); where there is none the last, which stays."""
        row = jnp.minimum(group * (self.group // self.size) + i, self.blocks_of_rows - 1)
        if self.every_is_there:
            return row, phase, chunk
        there = self.is_there(group, i)
        phase = jnp.where(there, phase, self.phases - 1)
        return row, phase, jnp.where(there, chunk, self.chunks - 1)

    @property
    def every_is_there(self) -> bool:
        return self.grid[1] * self.grid[2] == self.blocks_of_rows

    def matrix(self, array: jax.Array, written: bool = False) -> tuple[jax.Array, pl.BlockSpec]:
        """[..., T or 1, S or 1] as the kernel has it, and its blocks.

        written: it is an output. Of those nothing is written before the last phase.
        """
        *own, rows, columns = array.shape

        def index(lead, group, i, phase, chunk):
            row, phase, chunk = self.block(group, i, phase, chunk)
            if written and self.phases == 2:
                chunk = chunk * phase
            at = (row if rows > 1 else 0, chunk if columns > 1 else 0)
            return 0, self._leading(lead, own), *at

        block = (self.size if rows > 1 else 1, self.columns if columns > 1 else 1)
        return _reshaped(array, (1, math.prod(own), rows, columns)), _spec(block, index)

    def of_rows(self, array: jax.Array) -> tuple[jax.Array, pl.BlockSpec]:
        """[..., T or 1] along lanes, and its blocks."""
        *own, rows = array.shape

        def index(lead, group, i, phase, chunk):
            return 0, self._leading(lead, own), 0, group if rows > 1 else 0

        block = (1, min(self.group, rows))
        return _reshaped(array, (1, math.prod(own), 1, rows)), _spec(block, index)

    def of_columns(self, array: jax.Array) -> tuple[jax.Array, pl.BlockSpec]:
        """[..., S], and its blocks."""
        return self.matrix(_reshaped(array, (*array.shape[:-1], 1, array.shape[-1])))

    def _leading(self, lead, own: Sequence[int]):
        """The index among all leading axes of an array whose axes are those of `lead` or 1."""
        own = (1,) * (len(self.lead) - len(own)) + tuple(own)
        if own == self.lead:
            return lead
        index, stride = 0, 1
        for length, own_length in reversed(list(zip(self.lead, own, strict=True))):
            if own_length > 1:
                index = index + jax.lax.rem(lead, length) * stride
                stride *= own_length
            lead = jax.lax.div(lead, length)
        return index

    def scratch(self, totals: int) -> dict[str, Any]:
        return {name: pltpu.VMEM((self.size, 1), jnp.float32) for name in TOTALS[:totals]}


def _reshaped(array, shape):
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, array.dtype)
    return array.reshape(shape)


def _spec(block, index):
    return pl.BlockSpec((None, None, *block), index)


@dataclasses.dataclass(frozen=True)
class Here:
    """Which block a kernel has: `offset` is its first row among those of a group."""

    blocks: Blocks
    row: Any
    offset: Any
    phase: Any
    chunk: Any

    @classmethod
    def of(cls, blocks: Blocks) -> 'Here':
        group, i, phase, chunk = (pl.program_id(axis) for axis in range(1, 5))
        row = blocks.block(group, i, phase, chunk)[0] * blocks.size
        return cls(blocks, row, row - group * blocks.group, phase, chunk)

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.size, self.blocks.columns

    def rows(self) -> jax.Array:
        """The index among T of each entry."""
        return self.row + jax.lax.broadcasted_iota(jnp.int32, self.shape, 0)

    def columns(self) -> jax.Array:
        """The index among S of each entry."""
        first = self.chunk * self.blocks.columns
        return first + jax.lax.broadcasted_iota(jnp.int32, self.shape, 1)

    def inside(self) -> jax.Array | None:
        """Which entries are in the array's columns; None: all."""
        if self.blocks.width % self.blocks.columns == 0:
            return None
        return self.columns() < self.blocks.width

    def read_rows(self, ref: Any) -> jax.Array:
        """[size or 1, 1] of a block along lanes."""
        if ref.shape[-1] == 1:
            return ref[...]
        pieces = []
        for first, there in self._pieces(ref.shape[-1]):
            row, lane = (jax.lax.broadcasted_iota(jnp.int32, there, axis) for axis in (0, 1))
            values = jnp.broadcast_to(ref[:, first : first + there[1]], there)
            mine = jnp.where(lane == row + self.offset, values, 0)
            pieces.append(jnp.sum(mine, 1, keepdims=True))
        return jnp.concatenate(pieces, 0)

    def write_rows(self, ref: Any, values_R1: jax.Array) -> None:
        """Puts them into a block along lanes; those of its other rows stay."""
        for first, there in self._pieces(ref.shape[-1]):
            row, lane = (jax.lax.broadcasted_iota(jnp.int32, there, axis) for axis in (0, 1))
            values = jnp.broadcast_to(values_R1[first : first + there[0]], there)
            mine = jnp.where(lane == row + self.offset, values, 0)
            lane = lane[:1]
            is_mine = (lane >= self.offset) & (lane < self.offset + there[0])
            old = ref[:, first : first + there[1]]
            new = jnp.where(is_mine, jnp.sum(mine, 0, keepdims=True), old)
            ref[:, first : first + there[1]] = new

    def _pieces(self, lanes: int):
        """(first row and lane, (rows, lanes)): at most a register's lanes at a time."""
        size = self.blocks.size
        for first in range(0, size, LANES):
            yield first, (min(LANES, size - first), min(LANES, lanes - first))

    def reduce_row(
        self,
        refs: dict[str, Any],
        start: Callable[[], tuple],
        add: Callable[[tuple], tuple],
        use: Callable[[tuple], None],
    ) -> None:
        """use(total) where total = add(add(start())...), once for each block of a row.

        It is used with each block in the last phase, or, of one phase, with the last block.
        """
        blocks = self.blocks
        if blocks.chunks == 1:
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
        is_last = self.phase == 1 if blocks.phases == 2 else self.chunk == blocks.chunks - 1
        pl.when(is_last)(lambda: use(load()))


def call_in_blocks(
    body: Callable[[dict[str, Any], Here], None],
    blocks: Blocks,
    given: dict[str, tuple[jax.Array, pl.BlockSpec]],
    made: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    name: str,
    totals: int = 0,
) -> dict[str, jax.Array]:
    """`call_on_tpu` over all of the blocks, with as many totals of the blocks of a row."""

    def where_there(refs):
        here = Here.of(blocks)
        if blocks.every_is_there:
            body(refs, here)
        else:
            group, i = pl.program_id(1), pl.program_id(2)
            pl.when(blocks.is_there(group, i))(lambda: body(refs, here))

    entries = math.prod(blocks.lead) * blocks.rows * blocks.width
    reads = sum(math.prod(a.shape) * itemsize(a) for a, _ in given.values())
    writes = sum(math.prod(a.shape) * itemsize(a) for a, _ in made.values())
    return call_on_tpu(
        where_there,
        given,
        made,
        grid=blocks.grid,
        # Blocks of rows whose numbers are in one block along lanes are one core's.
        semantics=('parallel', 'parallel', *(['arbitrary'] * 3)),
        limit=blocks.limit,
        cost=pl.CostEstimate(
            flops=8 * entries,
            transcendentals=entries,
            bytes_accessed=blocks.phases * reads + writes,
        ),
        name=name,
        scratch=blocks.scratch(totals) if blocks.chunks > 1 else {},
    )
