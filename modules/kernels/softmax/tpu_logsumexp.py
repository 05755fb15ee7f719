"""Logsumexp on TPUs: a kernel forward and one backward, each of which reads x once."""

import functools

import jax
import jax.numpy as jnp

from modules.kernels.devices import over_devices
from modules.kernels.softmax.blocks import COLUMNS, Blocks, call_in_blocks, merged
from modules.kernels.softmax.tpu_passes import (
    FORMS,
    SUMS,
    Softmax,
    bytes_an_entry,
    columns_at_once,
    logits,
)
from modules.kernels.tpu_rows import itemsize


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def log_of_rows(x, form):
    return _logsumexp_saved(x, form)[0]


def _logsumexp_saved(x, form):
    """The sums are saved in two numbers: the log alone is rounded by more where it is large."""
    log, sums = over_devices(
        functools.partial(_logsumexp_rows, form=form), (x,), (True,), (True, (True, True))
    )
    return log, (x, sums)


def _logsumexp_rows(x, form):
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
    sums = FORMS[form]
    z, _ = logits(refs, here, Softmax(causal=False, softcap=0.0, form=form))

    def write(total):
        for name, values in zip(('log', *SUMS), (sums.log(total), *total), strict=True):
            here.write_rows(refs[name], values)

    def add(total):
        return sums.add(total, z)

    here.reduce_row(refs, lambda: sums.nothing(here.blocks.size), add, write)


def _logsumexp_backward(form, saved, g):
    x, sums = saved
    compute = functools.partial(_logsumexp_backward_rows, form=form)
    return (over_devices(compute, (x, sums, g), (True, True, True), True),)


log_of_rows.defvjp(_logsumexp_saved, _logsumexp_backward)


def _logsumexp_backward_rows(x, sums, g, form):
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
    p = FORMS[form].probabilities(refs['x'][...].astype(jnp.float32), total)
    refs['dx'][...] = (here.read_rows(refs['g']) * p).astype(refs['dx'].dtype)
