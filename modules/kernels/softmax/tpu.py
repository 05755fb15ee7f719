"""The kernels of softmax and logsumexp on TPUs, on one device."""

import functools

import jax
import jax.numpy as jnp

from modules.kernels.exponentials import add, log_of, nothing, probabilities
from modules.kernels.rows import itemsize, refuse_width
from modules.kernels.softmax.blocks import COLUMNS, Blocks, call_in_blocks, merged, most_columns
from modules.kernels.softmax.fused import BESIDE, FORMS, SUMS, Softmax


def bytes_an_entry(moved: int, form: str | None, softcap: float = 0.0) -> int:
    """Of a block: what is moved, twice, and what is computed from it, as the compiler says."""
    return 2 * moved + (18 if form == 'two_pass' else 8) + (4 if softcap else 0)


def refuse_form(
    form: str | None,
    name: str,
    x: jax.Array,
    arrays: int,
    has_mask: bool = False,
    softcap: float = 0.0,
) -> None:
    """ValueError where whole rows are asked for that are too long, in the direction with more.

    arrays: as large as x, that are moved.
    """
    if form == 'row':
        needed = bytes_an_entry(arrays * itemsize(x) + has_mask, form, softcap)
        refuse_width(f'form=row of {name}', 'vector memory', x.shape[-1], most_columns(needed))


def columns_at_once(form: str | None, width: int, needed: int) -> int:
    """Of a block, of which an entry needs so many bytes."""
    if form == 'row' or (form is None and width <= most_columns(needed)):
        return width
    return COLUMNS


def _shape(x, others, how):
    """In which a kernel has x: its queries count where they see or are given something."""
    of_queries = how.causal or any(array is not None for array in others)
    return x.shape if of_queries else merged(x.shape)


def _given(blocks, others, names):
    """Those of the arrays beside x that are there, by name, with their blocks."""
    there = dict(zip(BESIDE, others, strict=True))
    as_blocks = {
        'mask': lambda mask: blocks.matrix(mask.astype(jnp.int8)),
        'queries': lambda ids: blocks.of_rows(ids.astype(jnp.int32)),
        'keys': lambda ids: blocks.of_columns(ids.astype(jnp.int32)),
        'sink': blocks.of_rows,
    }
    return {name: as_blocks[name](there[name]) for name in names if there[name] is not None}


def _blocks(shape, moved, how):
    needed = bytes_an_entry(moved, how.form, how.softcap)
    columns = columns_at_once(how.form, shape[-1], needed)
    return Blocks.of(shape, columns, phases=2, bytes_an_entry=needed)


def forward_rows(x, others, how, saves):
    shape = _shape(x, others, how)
    moved = 2 * itemsize(x) + (others[0] is not None)
    blocks = _blocks(shape, moved, how)
    given = {'x': blocks.matrix(x.reshape(shape)), **_given(blocks, others, BESIDE)}
    made = {'p': blocks.matrix(jax.ShapeDtypeStruct(shape, x.dtype), written=True)}
    if saves:
        of_rows = blocks.of_rows(jax.ShapeDtypeStruct(shape[:-1], jnp.float32))
        made |= dict.fromkeys(SUMS, of_rows)
    body = functools.partial(_forward_block, how=how)
    found = call_in_blocks(body, blocks, given, made, 'softmax', totals=2)
    sums = tuple(found[name].reshape(x.shape[:-1]) for name in SUMS) if saves else None
    return found['p'].reshape(x.shape), sums


def _forward_block(refs, here, how):
    base = FORMS[how.form]
    z, _ = logits(refs, here, how)

    def start():
        sinks = [_sink(refs, here)] if 'sink' in refs else []
        return add(base, nothing((here.blocks.size, 1)), sinks)

    def write(total):
        refs['p'][...] = probabilities(base, z, total).astype(refs['p'].dtype)
        for name, values in zip(SUMS, total, strict=True):
            if name in refs:
                here.write_rows(refs[name], values)

    here.reduce_row(refs, start, lambda total: add(base, total, [z], axis=-1), write)


def _sink(refs, here):
    sink = here.read_rows(refs['sink']).astype(jnp.float32)
    return jnp.broadcast_to(sink, (here.blocks.size, 1))


def logits(refs, here, how):
    """(z of a block, -inf where nothing is seen, and dz / dx)."""
    x, seen = refs['x'][...].astype(jnp.float32), _seen(refs, here, how)
    slope = None
    if seen is not None:
        x = jnp.where(seen, x, 0.0)
    if how.softcap:
        bounded = jnp.tanh(x / how.softcap)
        x, slope = how.softcap * bounded, 1 - bounded * bounded
    return x if seen is None else jnp.where(seen, x, -jnp.inf), slope


def _seen(refs, here, how):
    """Which entries of a block are in the array and may be seen; None: all."""
    parts = [] if here.inside() is None else [here.inside()]
    if how.causal:
        parts.append(here.columns() <= here.rows() + (here.blocks.width - here.blocks.rows))
    if 'keys' in refs:
        queries = jnp.broadcast_to(here.read_rows(refs['queries']), here.shape)
        parts.append(queries == jnp.broadcast_to(refs['keys'][...], here.shape))
    if 'mask' in refs:
        parts.append(jnp.broadcast_to(refs['mask'][...].astype(jnp.int32), here.shape) != 0)
    return functools.reduce(jnp.logical_and, parts) if parts else None


def backward_rows(x_or_p, g, sums, others, how):
    shape = _shape(g, others, how)
    has_mask, has_sink = others[0] is not None, others[-1] is not None
    moved = itemsize(x_or_p, g, x_or_p) + bool(has_mask and how.softcap)
    blocks = _blocks(shape, moved, how)
    arrays = {'x' if how.softcap else 'p': x_or_p, 'g': g}
    given = {name: blocks.matrix(array.reshape(shape)) for name, array in arrays.items()}
    given |= _given(blocks, others, BESIDE if how.softcap else ('sink',))
    if sums is not None:
        pairs = zip(SUMS, sums, strict=True)
        given |= {name: blocks.of_rows(array.reshape(shape[:-1])) for name, array in pairs}
    made = {'dx': blocks.matrix(jax.ShapeDtypeStruct(shape, x_or_p.dtype), written=True)}
    if has_sink:
        made['dsink'] = blocks.of_rows(jax.ShapeDtypeStruct(shape[:-1], jnp.float32))
    body = functools.partial(_backward_block, how=how)
    found = call_in_blocks(body, blocks, given, made, 'softmax_backward', totals=1)
    dsink = found['dsink'].reshape(g.shape[:-1]) if has_sink else None
    return found['dx'].reshape(g.shape), dsink


def _backward_block(refs, here, how):
    """dx = p (g - sum p g) dz/dx; dsink = - p_sink sum p g, with what the sink takes of 1."""
    base, slope = FORMS[how.form], None
    g = refs['g'][...].astype(jnp.float32)
    total = tuple(here.read_rows(refs[name]) for name in SUMS if name in refs)
    if how.softcap:
        z, slope = logits(refs, here, how)
        p = probabilities(base, z, total)
    else:
        p = refs['p'][...].astype(jnp.float32)

    def start():
        return (jnp.zeros((here.blocks.size, 1), jnp.float32),)

    def add(mean):
        terms = p * g if here.inside() is None else jnp.where(here.inside(), p * g, 0.0)
        return (mean[0] + jnp.sum(terms, -1, keepdims=True),)

    def write(mean):
        dx = p * (g - mean[0])
        refs['dx'][...] = (dx if slope is None else dx * slope).astype(refs['dx'].dtype)
        if 'dsink' in refs:
            taken = probabilities(base, _sink(refs, here), total)
            here.write_rows(refs['dsink'], -taken * mean[0])

    here.reduce_row(refs, start, add, write)


def log_rows(x, form):
    shape = merged(x.shape)
    needed = bytes_an_entry(itemsize(x), form)
    columns = columns_at_once(form, shape[-1], needed)
    blocks = Blocks.of(shape, columns, phases=1, bytes_an_entry=needed)
    of_rows = blocks.of_rows(jax.ShapeDtypeStruct(shape[:-1], jnp.float32))
    found = call_in_blocks(
        functools.partial(_logsumexp_block, form=form),
        blocks,
        {'x': blocks.matrix(x.reshape(shape))},
        dict.fromkeys(('log', *SUMS), of_rows),
        'logsumexp',
        totals=2,
    )
    log, *sums = (found[name].reshape(x.shape[:-1]) for name in ('log', *SUMS))
    return log, tuple(sums)


def _logsumexp_block(refs, here, form):
    base = FORMS[form]
    z, _ = logits(refs, here, Softmax(causal=False, softcap=0.0, form=form, platform='tpu'))

    def write(total):
        for name, values in zip(('log', *SUMS), (log_of(base, total), *total), strict=True):
            here.write_rows(refs[name], values)

    def start():
        return nothing((here.blocks.size, 1))

    here.reduce_row(refs, start, lambda total: add(base, total, [z], axis=-1), write)


def log_backward_rows(x, sums, g, form):
    shape = merged(x.shape)
    blocks = Blocks.of(
        shape, COLUMNS, phases=1, bytes_an_entry=bytes_an_entry(itemsize(x, x), form)
    )
    given = {'x': blocks.matrix(x.reshape(shape))}
    rows = dict(zip((*SUMS, 'g'), (*sums, g), strict=True))
    given |= {name: blocks.of_rows(array.reshape(shape[:-1])) for name, array in rows.items()}
    made = {'dx': blocks.matrix(jax.ShapeDtypeStruct(shape, x.dtype))}
    body = functools.partial(_logsumexp_backward_block, form=form)
    found = call_in_blocks(body, blocks, given, made, 'logsumexp_backward')
    return found['dx'].reshape(x.shape)


def _logsumexp_backward_block(refs, here, form):
    """dx = g p."""
    total = tuple(here.read_rows(refs[name]) for name in SUMS)
    p = probabilities(FORMS[form], refs['x'][...].astype(jnp.float32), total)
    refs['dx'][...] = (here.read_rows(refs['g']) * p).astype(refs['dx'].dtype)
