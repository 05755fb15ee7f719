"""The kernels of softmax and logsumexp on GPUs, on one device.

Each thread sums up its part of a row from slice to slice, and threads put their sums together at
its end. A row that is written is read again: short ones are in registers, others come from what
cache still has of them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from modules.kernels.exponentials import NO_EXPONENT, add, log_of, probabilities
from modules.kernels.gpu_rows import Row, call_on_gpu, gathered, programs_of, wide
from modules.kernels.softmax.fused import BESIDE, FORMS, SUMS


def refuse_form(form: str | None, name: str, *_: Any) -> None:
    """ValueError for `row`, as rows may be longer than a processor's memory."""
    if form == 'row':
        raise ValueError(f'form=row of {name} is for TPUs; choose online or two_pass.')


class Beside(NamedTuple):
    """An array [..., T or 1, S or 1] that comes with x [..., T, S], as a kernel has it: rows of a
    matrix, or a vector of numbers where there is one for all of S. leading, own: the axes before
    the last, of x and of the array.
    """

    array: jax.Array
    leading: tuple[int, ...]
    own: tuple[int, ...]

    @classmethod
    def of(cls, array: jax.Array, leading: tuple[int, ...]) -> 'Beside':
        own, columns = array.shape[:-1], array.shape[-1]
        array = wide(array.reshape(-1, columns)) if columns > 1 else array.reshape(-1)
        return cls(array, leading, (1,) * (len(leading) - len(own)) + own)

    def row(self, n: Any) -> Any:
        """Its row for the n-th of x."""
        index, stride = 0, 1
        for length, own in reversed(list(zip(self.leading, self.own, strict=True))):
            if own > 1:
                index = index + jax.lax.rem(n, length) * stride
                stride *= own
            n = jax.lax.div(n, length)
        return index


def _beside(others, leading):
    """Those of the arrays beside x that are there, by name."""
    mask, queries, keys, sink = others
    whole = {
        'mask': None if mask is None else mask.astype(jnp.int8),
        'queries': None if queries is None else queries.astype(jnp.int32)[..., None],
        'keys': None if keys is None else keys.astype(jnp.int32)[..., None, :],
        'sink': None if sink is None else sink[..., None],
    }
    return {name: Beside.of(whole[name], leading) for name in BESIDE if whole[name] is not None}


class Rows(NamedTuple):
    """Rows of x [..., T, S] and what comes with them, as kernels have them."""

    row: Row
    leading: tuple[int, ...]
    width: int
    beside: dict[str, Beside]
    how: Any

    @classmethod
    def of(cls, x: jax.Array, others: tuple, how: Any) -> 'Rows':
        row = Row.of(max(x.shape[-1], wide(x.reshape(-1, x.shape[-1])).shape[-1]), x)
        return cls(row, x.shape[:-1], x.shape[-1], _beside(others, x.shape[:-1]), how)

    def arrays(self, names: tuple[str, ...] = BESIDE) -> dict[str, jax.Array]:
        return {name: self.beside[name].array for name in names if name in self.beside}

    def number(self, refs, name, n):
        """Of the n-th row."""
        return refs[name][self.beside[name].row(n)]

    def entries(self, refs, name, n, part):
        """Of the n-th row, a slice of them or one number for all."""
        beside = self.beside[name]
        if beside.array.ndim == 1:
            return self.number(refs, name, n)
        return self.row.load(refs[name], beside.row(n), part)

    def inside(self, part):
        """Which entries of a slice are in a row; None: all."""
        return None if self.row.width == self.width else self.row.columns(part) < self.width

    def logits(self, refs, n, part):
        """(z of a slice, -inf where nothing is seen, and dz / dx)."""
        x, seen, slope = self.row.read(refs['x'], n, part), self._seen(refs, n, part), None
        if seen is not None:
            x = jnp.where(seen, x, 0.0)
        if self.how.softcap:
            # The GPU's own instruction for tanh has 11 bits.
            bounded = 1 - 2 / (jnp.exp(2 * x / self.how.softcap) + 1)
            x, slope = self.how.softcap * bounded, 1 - bounded * bounded
        return x if seen is None else jnp.where(seen, x, -jnp.inf), slope

    def _seen(self, refs, n, part):
        parts = [] if self.inside(part) is None else [self.inside(part)]
        if self.how.causal:
            queries = self.leading[-1]
            last = jax.lax.rem(n, queries) + (self.width - queries)
            parts.append(self.row.columns(part) <= last)
        if 'keys' in self.beside:
            of_query = self.number(refs, 'queries', n)
            parts.append(self.entries(refs, 'keys', n, part) == of_query)
        if 'mask' in self.beside:
            parts.append(self.entries(refs, 'mask', n, part).astype(jnp.int32) != 0)
        return functools.reduce(jnp.logical_and, parts) if parts else None


def forward_rows(x: jax.Array, others: tuple, how: Any, saves: bool) -> tuple:
    """(p, the sums of its rows as two arrays [..., T], or None)."""
    rows, base = Rows.of(x, others, how), FORMS[how.form]
    row, x_NS = rows.row, wide(x.reshape(-1, x.shape[-1]))
    made = {'p': jax.ShapeDtypeStruct(x_NS.shape, x.dtype)}
    if saves:
        made |= dict.fromkeys(SUMS, jax.ShapeDtypeStruct(x_NS.shape[:1], jnp.float32))

    def body(refs, n, _):
        def total_of(pair):
            total = gathered(base, pair)
            if 'sink' not in refs:
                return total
            return add(base, total, [rows.number(refs, 'sink', n).astype(jnp.float32)])

        def write(part, z, total):
            row.write(refs['p'], n, part, probabilities(base, z, total))

        total = row.reduce(
            lambda part: rows.logits(refs, n, part)[0],
            lambda part, z: row.counted(part, z, -jnp.inf),
            lambda logits, pair: add(base, pair, logits),
            (row.full(NO_EXPONENT), row.full(0.0)),
            total_of,
            write,
        )
        for name, number in zip(SUMS, total, strict=True):
            if name in refs:
                refs[name][n] = number

    found = _call(body, {'x': x_NS, **rows.arrays()}, made, row, 'softmax')
    p = found['p'][:, : rows.width].reshape(x.shape)
    return p, tuple(found[name].reshape(x.shape[:-1]) for name in SUMS) if saves else None


def _call(body, given, made, row, name):
    rows = given['x' if 'x' in given else 'p'].shape[0]
    programs = programs_of(row.width, 2)
    return call_on_gpu(body, given, made, rows=rows, programs=programs, name=name)


def backward_rows(
    x_or_p: jax.Array, g: jax.Array, sums: tuple | None, others: tuple, how: Any
) -> tuple[jax.Array, jax.Array | None]:
    """(dx, dsink): dx = p (g - sum p g) dz/dx; dsink = - p_sink sum p g, with what the sink takes
    of 1.
    """
    rows, base = Rows.of(g, others, how), FORMS[how.form]
    row, name = rows.row, 'x' if how.softcap else 'p'
    given = {key: wide(a.reshape(-1, a.shape[-1])) for key, a in ((name, x_or_p), ('g', g))}
    given |= rows.arrays(BESIDE if how.softcap else ('sink',))
    if sums is not None:
        given |= {key: numbers.reshape(-1) for key, numbers in zip(SUMS, sums, strict=True)}
    made = {'dx': jax.ShapeDtypeStruct(given['g'].shape, x_or_p.dtype)}
    if others[-1] is not None:
        made['dsink'] = jax.ShapeDtypeStruct(made['dx'].shape[:1], jnp.float32)

    def body(refs, n, _):
        total = tuple(refs[key][n] for key in SUMS if key in refs)

        def read(part):
            g = row.read(refs['g'], n, part)
            if not how.softcap:
                return row.read(refs['p'], n, part), g, None
            z, slope = rows.logits(refs, n, part)
            return probabilities(base, z, total), g, slope

        def counted(part, values):
            p, g, _ = values
            inside = rows.inside(part)
            return row.counted(part, p * g if inside is None else jnp.where(inside, p * g, 0.0))

        def write(part, values, mean):
            p, g, slope = values
            dx = p * (g - mean)
            row.write(refs['dx'], n, part, dx if slope is None else dx * slope)

        mean = row.reduce(
            read,
            counted,
            lambda products, sum_: functools.reduce(jnp.add, products, sum_),
            row.full(0.0),
            jnp.sum,
            write,
        )
        if 'dsink' in refs:
            sink = rows.number(refs, 'sink', n).astype(jnp.float32)
            refs['dsink'][n] = -probabilities(base, sink, total) * mean

    found = _call(body, given, made, row, 'softmax_backward')
    dsink = found['dsink'].reshape(g.shape[:-1]) if 'dsink' in found else None
    return found['dx'][:, : rows.width].reshape(g.shape), dsink


def log_rows(x: jax.Array, form: str | None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """(log sum exp(x), the sums of the rows as two arrays)."""
    x_NS, base = wide(x.reshape(-1, x.shape[-1]), -jnp.inf), FORMS[form]
    row = Row.of(x_NS.shape[-1], x_NS)

    def body(refs, n, _):
        def step(parts, pair):
            logits = [row.read(refs['x'], n, part) for part in parts]
            return add(
                base,
                pair,
                [row.counted(part, z, -jnp.inf) for part, z in zip(parts, logits, strict=True)],
            )

        total = gathered(base, row.over(step, (row.full(NO_EXPONENT), row.full(0.0))))
        for name, number in zip(('log', *SUMS), (log_of(base, total), *total), strict=True):
            refs[name][n] = number

    numbers = jax.ShapeDtypeStruct(x_NS.shape[:1], jnp.float32)
    found = _call(body, {'x': x_NS}, dict.fromkeys(('log', *SUMS), numbers), row, 'logsumexp')
    log, *sums = (found[name].reshape(x.shape[:-1]) for name in ('log', *SUMS))
    return log, tuple(sums)
