"""Programs of GPU kernels over the rows of a matrix, and the slices that they read rows in.

A program has 128 threads, a warpgroup, and loops over rows. It reads a row in slices, up to 16
bytes a thread at once. The last slice ends with the row and so may overlap the one before it: no
slice reaches beyond a row of any width. Entries of two slices are written twice, the same both
times, and counted once.

All slices have one shape, and threads exchange only one sum at the end of a row: a program's reads
wait for each other nowhere else.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from modules.kernels.common.exponentials import ExponentialForm, Pair

THREADS = 128  # of a program
MAX_THREAD_BYTES = 16  # that a thread moves at once
PROCESSORS = 132  # of an H100 and an H200: programs come in multiples of it
MAX_PROGRAMS = 16  # programs of a processor
THREAD_ENTRIES = 32  # of a row, for each thread, where registers do not hold the whole row
MAX_REGISTER_ROW = THREADS * THREAD_ENTRIES  # the longest rows that registers hold


class Slice(NamedTuple):
    """Columns from `start` on. fresh: the first one that no slice before it has; None: all."""

    start: Any
    first_new: int | None = None


class RowSlices(NamedTuple):
    """Slices of a row of `width` entries, as programs read them: `vector` entries a thread."""

    width: int
    vector: int

    @classmethod
    def for_arrays(cls, width: int, *arrays: Any) -> 'RowSlices':
        """Picks the longest vector at whose multiples every row of the arrays begins."""
        least = min(array.dtype.itemsize for array in arrays)
        vector = MAX_THREAD_BYTES // least
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
        """Returns the slices from the column `first` on, a multiple of a slice."""
        whole = range(first, self.width - self.size + 1, self.size)
        rest = (self.width - first) % self.size
        last = [Slice(self.width - self.size, self.width - rest)] if rest else []
        return [*map(Slice, whole), *last]

    def full(self, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)

    def columns(self, part: Slice) -> jax.Array:
        index = plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout)
        return index + part.start

    def mask_repeated(self, part: Slice, values: jax.Array, fill: float = 0.0) -> jax.Array:
        """Replaces the values that a slice before this one has by `otherwise`."""
        if part.first_new is None:
            return values
        return jnp.where(self.columns(part) >= part.first_new, values, fill)

    def load(self, ref: Any, row: Any, part: Slice) -> jax.Array:
        """Reads a slice of a row; of a vector where `row` is None."""
        there = pl.ds(part.start, self.size)
        ref = ref.at[there] if row is None else ref.at[row, there]
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def read(self, ref: Any, row: Any, part: Slice) -> jax.Array:
        """Reads a slice in float32."""
        return self.load(ref, row, part).astype(jnp.float32)

    def write(self, ref: Any, row: Any, part: Slice, values: jax.Array) -> None:
        ref[row, pl.ds(part.start, self.size)] = values.astype(ref.dtype)

    def batch_slices(self, slices: Iterable[Any]) -> Iterator[tuple]:
        """Batches slices: of a batch everything is read before anything is written, as the
        compiler does not move a read over a write.
        """
        return itertools.batched(slices, max(1, THREAD_ENTRIES // self.vector))

    def loop(self, step: Callable[[list[Slice], Any], Any], carry: Any = None) -> Any:
        """Loops over a row, carry = step(slices, carry), with as many slices as registers hold."""
        together = max(1, THREAD_ENTRIES // self.vector) * self.size
        times = self.width // together if self.width > together else 0

        def step_batch(i, carry):
            starts = range(0, together, self.size)
            return step([Slice(i * together + start) for start in starts], carry)

        carry = jax.lax.fori_loop(0, times, step_batch, carry)
        rest = self.slices(times * together)
        return step(rest, carry) if rest else carry

    def reduce(
        self,
        read_slice: Callable[[Slice], Any],
        slice_terms: Callable[[Slice, Any], Any],
        add: Callable[[list, Any], Any],
        start: Any,
        finish: Callable[[Any], Any],
        use_slice: Callable[[Slice, Any, Any], None],
    ) -> Any:
        """Computes total = finish(add([counted(slice, read(slice)) ...], start)) and calls
        use(slice, read(slice), total) for each. A row that registers do not hold is read twice.
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


def pad_columns(x_ND: jax.Array | None, fill: float = 0.0) -> jax.Array | None:
    """Pads rows with `fill` to at least as many columns as a program has threads."""
    if x_ND is None or x_ND.shape[-1] >= THREADS:
        return x_ND
    added = [(0, 0)] * (x_ND.ndim - 1) + [(0, THREADS - x_ND.shape[-1])]
    return jnp.pad(x_ND, added, constant_values=fill)


def sum_slices(slices: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of all entries, a number that each thread has."""
    return jnp.sum(functools.reduce(jnp.add, slices))


def sum_threads(form: ExponentialForm, pair: Pair) -> Pair:
    """Adds the pairs of all threads to two numbers that each thread has."""
    exponent, mantissa = pair
    most = jnp.max(exponent)
    return most, jnp.sum(mantissa * form.power(exponent - most))


def call_on_gpu(
    body: Callable[[dict[str, Any], Any, Any], Any],
    operands: dict[str, jax.Array | None],
    out_shapes: dict[str, jax.ShapeDtypeStruct],
    *,
    rows: int,
    programs: int,
    name: str,
    start: Callable[[dict[str, Any]], Any] = lambda refs: None,
    finish: Callable[[dict[str, Any], Any, Any], None] = lambda refs, program, carry: None,
) -> dict[str, jax.Array]:
    """Calls a GPU kernel on the arrays in `given` and returns those in `made`, by name.

    Each of the programs loops over every `programs`-th row: carry = start(refs), then carry =
    body(refs, row, carry), then finish(refs, program, carry). refs: {name: ref} of both; arrays
    that are None are left out.
    """
    operands = {name: array for name, array in operands.items() if array is not None}
    programs = min(programs, rows)
    names = [*operands, *out_shapes]

    def kernel(*refs):
        refs = dict(zip(names, refs, strict=True))
        program = jax.lax.axis_index('program')
        count = (rows - program + programs - 1) // programs

        def step_row(i, carry):
            return body(refs, program + i * programs, carry)

        carry = jax.lax.fori_loop(0, count, step_row, start(refs))
        finish(refs, program, carry)

    kernel.__name__ = name
    results = plgpu.kernel(
        kernel,
        out_type=list(out_shapes.values()),
        grid=(programs,),
        grid_names=('program',),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # exp by the GPU's own instruction
            unsafe_no_auto_barriers=True,  # no kernel reads what it has written
        ),
    )(*operands.values())
    return dict(zip(out_shapes, results, strict=True))


def count_programs(width: int, n_arrays: int) -> int:
    """Returns how many programs fill the GPU, whose threads hold ENTRIES_AT_ONCE entries of each
    array.
    """
    at_once = math.ceil(min(width, MAX_REGISTER_ROW) * n_arrays / MAX_REGISTER_ROW)
    return PROCESSORS * max(2, min(MAX_PROGRAMS, 8 // at_once))
