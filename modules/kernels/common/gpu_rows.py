"""Programs of GPU kernels over the rows of a matrix, and the slices of a row that they read.

A program has 128 threads, a warpgroup, and loops over rows. It reads a row in slices: each thread
moves up to 16 bytes of a slice at once. The last slice ends with the row and may overlap the
previous one, so that no slice exceeds the row, whatever its width. Entries in two slices are
written twice, with the same value, and counted once.

All slices have the same shape, and threads exchange a single sum at the end of a row: the reads of
a program wait for each other nowhere else.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from modules.kernels.common.exponentials import ExponentialForm, Pair

THREADS = 128  # of a program
MAX_THREAD_BYTES = 16  # that a thread moves at once
PROCESSORS = 132  # of an H100 and an H200: the number of programs is a multiple of it
MAX_PROGRAMS = 16  # of a processor
THREAD_ENTRIES = 32  # of a row, for each thread, where registers do not hold the whole row
MAX_REGISTER_ROW = THREADS * THREAD_ENTRIES  # the longest rows that registers hold


class Slice(NamedTuple):
    """Columns from `start` on. first_new: the first column not in earlier slices; None: `start`."""

    start: Any
    first_new: int | None = None


class RowSlices(NamedTuple):
    """Slices of a row of `width` entries; each thread reads `vector` entries of a slice."""

    width: int
    vector: int

    @classmethod
    def for_arrays(cls, width: int, *arrays: Any) -> 'RowSlices':
        """Picks the longest vector such that every row of the arrays starts at a multiple of it."""
        min_itemsize = min(array.dtype.itemsize for array in arrays)
        vector = MAX_THREAD_BYTES // min_itemsize
        # A slice must not be longer than a row.
        while vector > 1 and (width % vector or THREADS * vector > width):
            vector //= 2
        return cls(width, vector)

    @property
    def size(self) -> int:
        """Entries of a slice."""
        return THREADS * self.vector

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vector)

    def slices(self, first: int = 0) -> list[Slice]:
        """Returns the slices from the column `first` on, which is a multiple of a slice."""
        whole = range(first, self.width - self.size + 1, self.size)
        remainder = (self.width - first) % self.size
        last = [Slice(self.width - self.size, self.width - remainder)] if remainder else []
        return [*map(Slice, whole), *last]

    def full(self, value: float) -> jax.Array:
        """Returns a slice filled with `value`, float32."""
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)

    def columns(self, part: Slice) -> jax.Array:
        """Returns the column of each entry of a slice."""
        index = plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout)
        return index + part.start

    def mask_repeated(self, part: Slice, values: jax.Array, fill: float = 0.0) -> jax.Array:
        """Replaces the entries that an earlier slice also has by `fill`.

        Args:
          part: the slice.
          values: its entries.
          fill: the replacement.
        """
        if part.first_new is None:
            return values
        return jnp.where(self.columns(part) >= part.first_new, values, fill)

    def load(self, ref: Any, row: Any, part: Slice) -> jax.Array:
        """Loads a slice of a row, or of a vector.

        Args:
          ref: the matrix or vector.
          row: the index of the row; None: `ref` is a vector.
          part: the slice.
        """
        columns = pl.ds(part.start, self.size)
        ref = ref.at[columns] if row is None else ref.at[row, columns]
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def read(self, ref: Any, row: Any, part: Slice) -> jax.Array:
        """Loads a slice in float32.

        Args:
          ref: the matrix or vector.
          row: the index of the row; None: `ref` is a vector.
          part: the slice.
        """
        return self.load(ref, row, part).astype(jnp.float32)

    def write(self, ref: Any, row: Any, part: Slice, values: jax.Array) -> None:
        """Writes a slice of a row, in the type of the matrix.

        Args:
          ref: the matrix.
          row: the index of the row.
          part: the slice.
          values: its entries.
        """
        ref[row, pl.ds(part.start, self.size)] = values.astype(ref.dtype)

    def batch_slices(self, slices: Iterable[Any]) -> Iterator[tuple]:
        """Batches slices, so that a batch is read before any of it is written.

        The compiler does not move a read ahead of a write, so alternating them would be slow.
        """
        return itertools.batched(slices, max(1, THREAD_ENTRIES // self.vector))

    def loop(self, step: Callable[[list[Slice], Any], Any], carry: Any = None) -> Any:
        """Loops over a row, carry = step(slices, carry), with as many slices as registers hold."""
        batch_width = max(1, THREAD_ENTRIES // self.vector) * self.size
        n_batches = self.width // batch_width if self.width > batch_width else 0

        def step_batch(i, carry):
            starts = range(0, batch_width, self.size)
            return step([Slice(i * batch_width + start) for start in starts], carry)

        carry = jax.lax.fori_loop(0, n_batches, step_batch, carry)
        remaining = self.slices(n_batches * batch_width)
        return step(remaining, carry) if remaining else carry

    def reduce(
        self,
        read_slice: Callable[[Slice], Any],
        slice_terms: Callable[[Slice, Any], Any],
        add: Callable[[list, Any], Any],
        start: Any,
        finish: Callable[[Any], Any],
        use_slice: Callable[[Slice, Any, Any], None],
    ) -> Any:
        """Reduces a row to a total, and calls a function with each slice and the total.

        Computes total = finish(add([slice_terms(slice, read_slice(slice)) ...], start)), then calls
        use_slice(slice, read_slice(slice), total) for each slice. A row that exceeds the registers
        is read twice.

        Args:
          read_slice: reads what `slice_terms` and `use_slice` need of a slice.
          slice_terms: maps a slice and its entries to terms, without repeated entries.
          add: adds a list of terms to the sum so far.
          start: the sum of no terms.
          finish: maps the sum to the total, such as a sum over threads.
          use_slice: writes results, given a slice, its entries and the total.

        Returns:
          The total.
        """

        def read_all(parts):
            return [(part, read_slice(part)) for part in parts]

        def add_slices(pairs, carry):
            return add([slice_terms(*pair) for pair in pairs], carry)

        def use_all(pairs, total):
            for pair in pairs:
                use_slice(*pair, total)

        if self.width <= MAX_REGISTER_ROW:
            pairs = read_all(self.slices())
            total = finish(add_slices(pairs, start))
            use_all(pairs, total)
        else:
            total = finish(
                self.loop(lambda parts, carry: add_slices(read_all(parts), carry), start)
            )
            self.loop(lambda parts, _: use_all(read_all(parts), total))
        return total


@overload
def pad_columns(x_ND: jax.Array, fill: float = 0.0) -> jax.Array: ...
@overload
def pad_columns(x_ND: None, fill: float = 0.0) -> None: ...
def pad_columns(x_ND: jax.Array | None, fill: float = 0.0) -> jax.Array | None:
    """Pads rows with `fill` to at least as many columns as a program has threads."""
    if x_ND is None or x_ND.shape[-1] >= THREADS:
        return x_ND
    padding = [(0, 0)] * (x_ND.ndim - 1) + [(0, THREADS - x_ND.shape[-1])]
    return jnp.pad(x_ND, padding, constant_values=fill)


def sum_slices(slices: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of all entries, a number that each thread has."""
    return jnp.sum(functools.reduce(jnp.add, slices))


def sum_threads(form: ExponentialForm, pair: Pair) -> Pair:
    """Adds the pairs of all threads to a pair of numbers that each thread has."""
    exponent, mantissa = pair
    max_exponent = jnp.max(exponent)
    return max_exponent, jnp.sum(mantissa * form.power(exponent - max_exponent))


def call_on_gpu(
    body: Callable[[dict[str, Any], Any, Any], Any],
    operands: Mapping[str, jax.Array | None],
    out_shapes: Mapping[str, jax.ShapeDtypeStruct],
    *,
    rows: int,
    programs: int,
    name: str,
    start: Callable[[dict[str, Any]], Any] = lambda refs: None,
    finish: Callable[[dict[str, Any], Any, Any], None] = lambda refs, program, carry: None,
) -> dict[str, jax.Array]:
    """Calls a GPU kernel over the rows of its operands.

    Each program handles every `programs`-th row. It computes carry = start(refs), then carry =
    body(refs, row, carry) for each of its rows, then finish(refs, program, carry).

    Args:
      body: the computation of a row; refs is {name: ref} of operands and results.
      operands: arrays by name; the kernel has no ref for None.
      out_shapes: shapes and types of the results by name.
      rows: the number of rows.
      programs: the number of programs, if there are as many rows.
      name: the kernel's name in traces.
      start: makes the first carry.
      finish: handles the last carry.

    Returns:
      The results by name.
    """
    operands = {name: array for name, array in operands.items() if array is not None}
    programs = min(programs, rows)
    names = [*operands, *out_shapes]

    def kernel(*refs):
        refs = dict(zip(names, refs, strict=True))
        program = jax.lax.axis_index('program')
        # Rows program, program + programs, ...: ceil((rows - program) / programs) of them.
        count = (rows - program + programs - 1) // programs

        def step_row(i, carry):
            return body(refs, program + i * programs, carry)

        carry = jax.lax.fori_loop(0, count, step_row, start(refs))
        finish(refs, program, carry)

    kernel.__name__ = name
    arrays = plgpu.kernel(
        kernel,
        out_type=list(out_shapes.values()),
        grid=(programs,),
        grid_names=('program',),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # exp by the GPU's own instruction
            unsafe_no_auto_barriers=True,  # no kernel reads what it has written
        ),
    )(*operands.values())
    return dict(zip(out_shapes, arrays, strict=True))


def count_programs(width: int, n_arrays: int) -> int:
    """Returns how many programs fill the GPU.

    The threads of a program hold THREAD_ENTRIES entries of each of `n_arrays` arrays in registers,
    for rows of `width` entries.
    """
    register_share = math.ceil(min(width, MAX_REGISTER_ROW) * n_arrays / MAX_REGISTER_ROW)
    return PROCESSORS * max(2, min(MAX_PROGRAMS, 8 // register_share))
