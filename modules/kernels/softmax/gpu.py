"""Softmax on one GPU.

Each thread sums its part of a row from slice to slice, and threads add their sums at its end. A row
that is written is read again: short ones from registers, others from the cache.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from modules.kernels.common.exponentials import NO_EXPONENT, add_terms, probabilities
from modules.kernels.common.gpu_rows import (
    THREADS,
    RowSlices,
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
    """Rows of x [..., T, S] and of the arrays beside it, as kernels have them.

    beside: rows of a matrix, or a vector of numbers for arrays with one number for all of S.
    leading: x's axes before the last. own: those of each array beside it, of x's length or 1.
    """

    row: RowSlices
    leading: tuple[int, ...]
    width: int
    side_arrays: dict[str, jax.Array]
    side_lengths: dict[str, tuple[int, ...]]
    options: SoftmaxOptions

    @classmethod
    def from_arrays(cls, x, mask, sink, options) -> 'SoftmaxRows':
        leading, beside, own = x.shape[:-1], {}, {}
        given = {} if mask is None else {'mask': mask}
        for name, array in (given if sink is None else given | {'sink': sink[..., None]}).items():
            own[name] = (1,) * (x.ndim - array.ndim) + array.shape[:-1]
            beside[name] = (
                pad_columns(flatten_rows(array)) if array.shape[-1] > 1 else array.reshape(-1)
            )
        row = RowSlices.for_arrays(max(x.shape[-1], THREADS), x)
        return cls(row, leading, x.shape[-1], beside, own, options)

    def read_number(self, refs, name, n):
        """Reads the number of the n-th row of x."""
        return refs[name][broadcast_index(n, self.leading, self.side_lengths[name])]

    def read_mask(self, refs, n, part):
        """Reads a slice of the mask of the n-th row of x, or one number for all of it."""
        if self.side_arrays['mask'].ndim == 1:
            return self.read_number(refs, 'mask', n)
        row = broadcast_index(n, self.leading, self.side_lengths['mask'])
        return self.row.load(refs['mask'], row, part)

    def column_mask(self, part):
        """Returns which entries of a slice are in a row; None for all."""
        return None if self.row.width == self.width else self.row.columns(part) < self.width

    def slice_logits(self, refs, n, part):
        """Returns `logits_of` a slice."""
        x, seen = self.row.read(refs['x'], n, part), [self.column_mask(part)]
        if 'mask' in self.side_arrays:
            seen.append(self.read_mask(refs, n, part).astype(jnp.int32) != 0)
        return capped_logits(x, seen, self.options.softcap, _tanh)

    def call(self, body, operands, out_shapes, name):
        rows, programs = math.prod(self.leading), count_programs(self.row.width, 2)
        found = call_on_gpu(body, operands, out_shapes, rows=rows, programs=programs, name=name)
        return {key: a[:, : self.width] if a.ndim == 2 else a for key, a in found.items()}


def forward_rows(x, mask, sink, *, how, saves):
    """Returns p and, if they are saved, SUMS, by name."""
    rows, base = SoftmaxRows.from_arrays(x, mask, sink, how), FORMS[how.form]
    row, x_NS = rows.row, pad_columns(flatten_rows(x))
    made = {'p': jax.ShapeDtypeStruct(x_NS.shape, x.dtype)}
    if saves:
        made |= dict.fromkeys(SUMS, jax.ShapeDtypeStruct(x_NS.shape[:1], jnp.float32))

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

    return rows.call(body, {'x': x_NS, **rows.side_arrays}, made, 'softmax')


def backward_rows(x_or_p, g, sums, mask, sink, *, how):
    """Returns dx = p (g - sum p g) dz/dx and, with a sink, dsink = - p_sink sum p g, by name."""
    rows = SoftmaxRows.from_arrays(g, mask if how.softcap else None, sink, how)
    row, base = rows.row, FORMS[how.form]
    given = {
        'x' if how.softcap else 'p': pad_columns(flatten_rows(x_or_p)),
        'g': pad_columns(flatten_rows(g)),
        **rows.side_arrays,
    }
    given |= {name: sums[name].reshape(-1) for name in sums}
    made = {'dx': jax.ShapeDtypeStruct(given['g'].shape, x_or_p.dtype)}
    if 'sink' in given:
        made['dsink'] = jax.ShapeDtypeStruct(made['dx'].shape[:1], jnp.float32)

    def body(refs, n, _):
        total = tuple(refs[key][n] for key in SUMS if key in refs)

        def read(part):
            g = row.read(refs['g'], n, part)
            if not how.softcap:
                return row.read(refs['p'], n, part), g, None
            z, slope = rows.slice_logits(refs, n, part)
            return probabilities(base, z, total), g, slope

        def masked_product(part, values):
            p, g, _ = values
            inside = rows.column_mask(part)
            return row.mask_repeated(
                part, p * g if inside is None else jnp.where(inside, p * g, 0.0)
            )

        def write(part, values, mean):
            p, g, slope = values
            dx = p * (g - mean)
            row.write(refs['dx'], n, part, dx if slope is None else dx * slope)

        def sum_products(products, start):
            return functools.reduce(jnp.add, products, start)

        mean = row.reduce(read, masked_product, sum_products, row.full(0.0), jnp.sum, write)
        if 'dsink' in refs:
            sink = rows.read_number(refs, 'sink', n).astype(jnp.float32)
            refs['dsink'][n] = -probabilities(base, sink, total) * mean

    return rows.call(body, given, made, 'softmax_backward')
