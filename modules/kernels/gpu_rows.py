"""What GPU kernels over the rows of a matrix have in common: programs, and slices of rows.

A program has 128 threads, a warpgroup, and goes over rows. It has a row in slices, each of which
its threads move at once, up to 16 bytes a thread. The last slice ends with the row and so may begin
within the one before it: no slice reaches out of a row, whatever its width. What two slices have is
written twice, the same both times, and counted once.

Slices are arrays of the same shape and nothing but one sum at the end of a row goes from thread to
thread, so that a program's reads wait for each other nowhere else.
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

from modules.kernels.exponentials import Form, Pair

THREADS = 128  # of a program
MOST_BYTES = 16  # that a thread moves at once
PROCESSORS = 132  # of an H100 and an H200: programs come in multiples of it
MOST_EACH = 16  # programs of a processor
ENTRIES_AT_ONCE = 32  # of a row, for each thread, where a row is not all there
KEPT = THREADS * ENTRIES_AT_ONCE  # of rows that registers hold


class Slice(NamedTuple):
    """start: its first column. fresh: the first column that no slice before it has; None: all."""

    start: Any
    fresh: int | None = None


class Row(NamedTuple):
    """How programs have rows of `width` entries: in slices of `vector` entries a thread."""

    width: int
    vector: int

    @classmethod
    def of(cls, width: int, *arrays: Any) -> 'Row':
        """Each row of the arrays begins where a thread may read as many bytes at once."""
        least = min(array.dtype.itemsize for array in arrays if array is not None)
        vector = MOST_BYTES // least
        while vector > 1 and (width % vector or THREADS * vector > width):
            vector //= 2
        return cls(width, vector)

    @property
    def size(self) -> int:
        """Of a slice."""
        return THREADS * self.vector

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vector)

    def slices(self, first: int = 0) -> list[Slice]:
        """Those from the column `first` on, which is a multiple of a slice."""
        whole = range(first, self.width - self.size + 1, self.size)
        rest = (self.width - first) % self.size
        last = [Slice(self.width - self.size, self.width - rest)] if rest else []
        return [*map(Slice, whole), *last]

    def full(self, value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self.size,), value, jnp.float32), self.layout)

    def columns(self, part: Slice) -> jax.Array:
        index = plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout)
        return index + part.start

    def counted(self, part: Slice, values: jax.Array, otherwise: float = 0.0) -> jax.Array:
        """Values of a slice, with `otherwise` where a slice before it has them."""
        if part.fresh is None:
            return values
        return jnp.where(self.columns(part) >= part.fresh, values, otherwise)

    def load(self, ref: Any, row: Any, part: Slice) -> jax.Array:
        """A slice. row: None for a vector."""
        there = pl.ds(part.start, self.size)
        ref = ref.at[there] if row is None else ref.at[row, there]
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def read(self, ref: Any, row: Any, part: Slice) -> jax.Array:
        """The same in float32."""
        return self.load(ref, row, part).astype(jnp.float32)

    def write(self, ref: Any, row: Any, part: Slice, values: jax.Array) -> None:
        ref[row, pl.ds(part.start, self.size)] = values.astype(ref.dtype)

    def at_once(self, slices: Iterable[Any]) -> Iterator[tuple]:
        """So many of what there is for each slice that all of it is read before any is written:
        the compiler does not move a read over a write.
        """
        return itertools.batched(slices, max(1, ENTRIES_AT_ONCE // self.vector))

    def over(self, step: Callable[[list[Slice], Any], Any], carry: Any = None) -> Any:
        """carry = step(slices, carry), for as many slices at a time as registers hold."""
        together = max(1, ENTRIES_AT_ONCE // self.vector) * self.size
        times = self.width // together if self.width > together else 0

        def some(i, carry):
            starts = range(0, together, self.size)
            return step([Slice(i * together + start) for start in starts], carry)

        carry = jax.lax.fori_loop(0, times, some, carry)
        rest = self.slices(times * together)
        return step(rest, carry) if rest else carry

    def reduce(
        self,
        read: Callable[[Slice], Any],
        counted: Callable[[Slice, Any], Any],
        add: Callable[[list, Any], Any],
        start: Any,
        finish: Callable[[Any], Any],
        use: Callable[[Slice, Any, Any], None],
    ) -> Any:
        """total = finish(add([counted(slice, read(slice)) ...], start)), then use(slice, value,
        total) of each. Slices are read again for that where registers do not hold the row.
        """

        def added(parts, values, carry):
            pairs = zip(parts, values, strict=True)
            return add([counted(part, value) for part, value in pairs], carry)

        if self.width <= KEPT:
            parts = self.slices()
            values = [read(part) for part in parts]
            total = finish(added(parts, values, start))
            for part, value in zip(parts, values, strict=True):
                use(part, value, total)
            return total
        total = finish(
            self.over(lambda parts, carry: added(parts, [read(p) for p in parts], carry), start)
        )

        def again(parts, _):
            for part, value in zip(parts, [read(part) for part in parts], strict=True):
                use(part, value, total)

        self.over(again)
        return total


def wide(x_ND: jax.Array | None, fill: float = 0.0) -> jax.Array | None:
    """With as many columns as a program has threads at least, of which the new ones have `fill`."""
    if x_ND is None or x_ND.shape[-1] >= THREADS:
        return x_ND
    added = [(0, 0)] * (x_ND.ndim - 1) + [(0, THREADS - x_ND.shape[-1])]
    return jnp.pad(x_ND, added, constant_values=fill)


def total(slices: Sequence[jax.Array]) -> jax.Array:
    """The sum of all their entries, a number that each thread has."""
    return jnp.sum(functools.reduce(jnp.add, slices))


def gathered(form: Form, pair: Pair) -> Pair:
    """The sum of the pairs of all threads, two numbers that each of them has."""
    exponent, mantissa = pair
    most = jnp.max(exponent)
    return most, jnp.sum(mantissa * form.power(exponent - most))


def call_on_gpu(
    body: Callable[[dict[str, Any], Any, Any], Any],
    given: dict[str, jax.Array | None],
    made: dict[str, jax.ShapeDtypeStruct],
    *,
    rows: int,
    programs: int,
    name: str,
    start: Callable[[dict[str, Any]], Any] = lambda refs: None,
    finish: Callable[[dict[str, Any], Any, Any], None] = lambda refs, program, carry: None,
) -> dict[str, jax.Array]:
    """{name: array} of what a GPU kernel makes of the arrays that are `given`.

    Each of so many programs goes over every `programs`-th row: carry = body(refs, row, carry), with
    {name: ref} of both for refs, from start(refs) on; then finish(refs, program, carry). Arrays
    that are None are left out.
    """
    given = {name: array for name, array in given.items() if array is not None}
    programs = min(programs, rows)
    names = [*given, *made]

    def kernel(*refs):
        refs = dict(zip(names, refs, strict=True))
        program = jax.lax.axis_index('program')
        count = (rows - program + programs - 1) // programs

        def one(i, carry):
            return body(refs, program + i * programs, carry)

        carry = jax.lax.fori_loop(0, count, one, start(refs))
        finish(refs, program, carry)

    kernel.__name__ = name
    results = plgpu.kernel(
        kernel,
        out_type=list(made.values()),
        grid=(programs,),
        grid_names=('program',),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # exp by the GPU's own instruction
            # No kernel reads what it has written, so that reads need not wait for writes.
            unsafe_no_auto_barriers=True,
        ),
    )(*given.values())
    return dict(zip(made, results, strict=True))


def programs_of(width: int, arrays: int) -> int:
    """As many as fill the GPU: threads have some 32 entries of so many arrays at a time."""
    at_once = math.ceil(min(width, KEPT) * arrays / KEPT)
    return PROCESSORS * max(2, min(MOST_EACH, 8 // at_once))
