"""Softmax on one GPU.

Each thread sums its part of a row from slice to slice, and threads add their sums at the end of the
row. A row is read again to be written: short rows from registers, others from the cache.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from modules.kernels.common.exponentials import NO_EXPONENT, add_terms, probabilities
from modules.kernels.common.gpu_rows import (
    THREADS,
    RowSlices,
    Slice,
    call_on_gpu,
    count_programs,
    pad_columns,
    sum_threads,
)
from modules.kernels.common.rows import broadcast_index, flatten_rows
from modules.kernels.softmax.base import FORMS, SUMS, SoftmaxOptions, capped_logits


def _tanh(x, softcap):
    return 1 - 2 / (jnp.exp(2 * x / softcap) + 1)  # the GPU's instruction for tanh has 11 bits


class SoftmaxRows(NamedTuple):
    """Rows of x [..., T, S] and of the arrays beside it, as the kernels have them.

    row: the slices of a row. leading: x's axes before the last. width: S, without padding.
    side_arrays: mask and sink by name, as the rows of a matrix, or as a vector if all of S shares a
    number. side_lengths: the leading axes of each of them, of x's length or 1. options: of the
    softmax.
    """

    row: RowSlices
    leading: tuple[int, ...]
    width: int
    side_arrays: dict[str, jax.Array]
    side_lengths: dict[str, tuple[int, ...]]
    options: SoftmaxOptions

    @classmethod
    def from_arrays(cls, x, mask, sink, options) -> 'SoftmaxRows':
        """Lays out x and the arrays beside it.

        Args:
          x: [..., S].
          mask: like x, with axes of length 1 where it is broadcast; None: there is none.
          sink: like x without its last axis; None: there is none.
          options: of the softmax.
        """
        leading, side_arrays, side_lengths = x.shape[:-1], {}, {}
        arrays = {} if mask is None else {'mask': mask}
        for name, array in (arrays if sink is None else arrays | {'sink': sink[..., None]}).items():
            side_lengths[name] = (1,) * (x.ndim - array.ndim) + array.shape[:-1]
            side_arrays[name] = (
                pad_columns(flatten_rows(array)) if array.shape[-1] > 1 else array.reshape(-1)
            )
        # Shorter rows are padded to a column per thread (`pad_columns`).
        row = RowSlices.for_arrays(max(x.shape[-1], THREADS), x)
        return cls(row, leading, x.shape[-1], side_arrays, side_lengths, options)

    def read_number(self, refs: dict[str, Any], name: str, n: Any) -> jax.Array:
        """Reads the number of the n-th row of x.

        Args:
          refs: the kernel's refs by name.
          name: the array of numbers.
          n: the index of the row.
        """
        return refs[name][broadcast_index(n, self.leading, self.side_lengths[name])]

    def read_mask(self, refs: dict[str, Any], n: Any, part: Slice) -> jax.Array:
        """Reads a slice of the mask of the n-th row of x, or a single number for all of it.

        Args:
          refs: the kernel's refs by name.
          n: the index of the row.
          part: the slice.
        """
        if self.side_arrays['mask'].ndim == 1:
            return self.read_number(refs, 'mask', n)
        row = broadcast_index(n, self.leading, self.side_lengths['mask'])
        return self.row.load(refs['mask'], row, part)

    def column_mask(self, part: Slice) -> jax.Array | None:
        """Returns which entries of a slice are in the row; None: all."""
        return None if self.row.width == self.width else self.row.columns(part) < self.width

    def slice_logits(
        self, refs: dict[str, Any], n: Any, part: Slice
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns `capped_logits` of a slice.

        Args:
          refs: the kernel's refs by name.
          n: the index of the row.
          part: the slice.
        """
        x, masks = self.row.read(refs['x'], n, part), [self.column_mask(part)]
        if 'mask' in self.side_arrays:
            masks.append(self.read_mask(refs, n, part).astype(jnp.int32) != 0)
        return capped_logits(x, masks, self.options.softcap, _tanh)

    def call(
        self,
        body: Callable[[dict[str, Any], Any, Any], Any],
        operands: Mapping[str, jax.Array],
        out_shapes: Mapping[str, jax.ShapeDtypeStruct],
        name: str,
    ) -> dict[str, jax.Array]:
        """Calls a kernel and removes the padding of its results.

        Args:
          body: the computation of a row.
          operands: arrays by name.
          out_shapes: shapes and types of the results by name.
          name: the kernel's name in traces.
        """
        rows, programs = math.prod(self.leading), count_programs(self.row.width, 2)
        arrays = call_on_gpu(body, operands, out_shapes, rows=rows, programs=programs, name=name)
        return {key: a[:, : self.width] if a.ndim == 2 else a for key, a in arrays.items()}


def forward_rows(
    x: jax.Array,
    mask: jax.Array | None,
    sink: jax.Array | None,
    *,
    options: SoftmaxOptions,
    saves: bool,
) -> dict[str, jax.Array]:
    """Returns p and, if they are saved, SUMS, by name.

    Args:
      x: [..., S].
      mask: as in `SoftmaxRows.from_arrays`.
      sink: as in `SoftmaxRows.from_arrays`.
      options: of the softmax.
      saves: whether to return SUMS.
    """
    rows, base = SoftmaxRows.from_arrays(x, mask, sink, options), FORMS[options.form]
    row, x_NS = rows.row, pad_columns(flatten_rows(x))
    out_shapes = {'p': jax.ShapeDtypeStruct(x_NS.shape, x.dtype)}
    if saves:
        out_shapes |= dict.fromkeys(SUMS, jax.ShapeDtypeStruct(x_NS.shape[:1], jnp.float32))

    def body(refs, n, _):
        def add_sink(pair):
            total = sum_threads(base, pair)
            if 'sink' not in refs:
                return total
            return add_terms(base, total, [rows.read_number(refs, 'sink', n).astype(jnp.float32)])

        total = row.reduce(
            lambda part: rows.slice_logits(refs, n, part)[0],
            lambda part, z: row.mask_repeated(part, z, -jnp.inf),
            lambda logits, pair: add_terms(base, pair, logits),
            (row.full(NO_EXPONENT), row.full(0.0)),
            add_sink,
            lambda part, z, total: row.write(refs['p'], n, part, probabilities(base, z, total)),
        )
        for name, number in zip(SUMS, total, strict=True):
            if name in refs:
                refs[name][n] = number

    return rows.call(body, {'x': x_NS, **rows.side_arrays}, out_shapes, 'softmax')


def backward_rows(
    x_or_p: jax.Array,
    g: jax.Array,
    sums: dict[str, jax.Array],
    mask: jax.Array | None,
    sink: jax.Array | None,
    *,
    options: SoftmaxOptions,
) -> dict[str, jax.Array]:
    """Returns dx = p (g - sum p g) dz/dx and, with a sink, dsink = - p_sink sum p g, by name.

    Args:
      x_or_p: x with a softcap, otherwise the output p.
      g: the gradient of the output.
      sums: SUMS of the rows by name, if the forward pass saved them.
      mask: as in `SoftmaxRows.from_arrays`.
      sink: as in `SoftmaxRows.from_arrays`.
      options: of the softmax.
    """
    # Without a softcap dx follows from p alone, which is 0 at hidden entries: no mask is read.
    rows = SoftmaxRows.from_arrays(g, mask if options.softcap else None, sink, options)
    row, base = rows.row, FORMS[options.form]
    x_or_p_NS, g_NS = pad_columns(flatten_rows(x_or_p)), pad_columns(flatten_rows(g))
    operands = {
        'x' if options.softcap else 'p': x_or_p_NS,
        'g': g_NS,
        **rows.side_arrays,
    }
    operands |= {name: sums[name].reshape(-1) for name in sums}
    out_shapes = {'dx': jax.ShapeDtypeStruct(g_NS.shape, x_or_p.dtype)}
    if 'sink' in operands:
        out_shapes['dsink'] = jax.ShapeDtypeStruct(out_shapes['dx'].shape[:1], jnp.float32)

    def body(refs, n, _):
        total = tuple(refs[key][n] for key in SUMS if key in refs)

        def read_slice(part):
            g = row.read(refs['g'], n, part)
            if not options.softcap:
                return row.read(refs['p'], n, part), g, None
            z, slope = rows.slice_logits(refs, n, part)
            return probabilities(base, z, total), g, slope

        def masked_product(part, values):
            p, g, _ = values
            in_row = rows.column_mask(part)
            return row.mask_repeated(
                part, p * g if in_row is None else jnp.where(in_row, p * g, 0.0)
            )

        def write(part, values, mean):
            p, g, slope = values
            dx = p * (g - mean)
            row.write(refs['dx'], n, part, dx if slope is None else dx * slope)

        def sum_products(products, start):
            return functools.reduce(jnp.add, products, start)

        mean = row.reduce(read_slice, masked_product, sum_products, row.full(0.0), jnp.sum, write)
        if 'dsink' in refs:
            sink = rows.read_number(refs, 'sink', n).astype(jnp.float32)
            refs['dsink'][n] = -probabilities(base, sink, total) * mean

    return rows.call(body, operands, out_shapes, 'softmax_backward')
