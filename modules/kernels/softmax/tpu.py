"""Softmax and logsumexp on TPUs: one kernel forward, one backward.

Least bytes for N rows of V entries, of b bytes each, where a row is in fast memory at a time: 2NVb
forward and 3NVb backward for softmax, NVb + 4N and 2NVb for logsumexp. Rows in several blocks are
read once more by softmax: 3NVb and 5NVb.
"""

import functools

import jax
import jax.numpy as jnp

from modules.choices import choose
from modules.kernels.devices import over_devices
from modules.kernels.softmax.blocks import most_columns
from modules.kernels.softmax.tpu_logsumexp import log_of_rows
from modules.kernels.softmax.tpu_passes import (
    FORMS,
    Softmax,
    backward_rows,
    bytes_an_entry,
    forward_rows,
)
from modules.kernels.tpu_rows import itemsize, refuse_types

NAME = 'kernels.softmax=pallas'


def softmax(
    x: jax.Array,
    mask: jax.Array | None = None,
    sink: jax.Array | None = None,
    *,
    causal: bool = False,
    segments: tuple[jax.Array, jax.Array] | None = None,
    softcap: float = 0.0,
    form: str | None = None,
) -> jax.Array:
    """`reference` with one kernel forward and one backward.

    form: `row` has whole rows in fast memory, up to 367,000 entries of bfloat16 and 229,000 of
    float32; `online` and `two_pass` have blocks of them, and differ in their sums (`sums`). None:
    each pass is `row` where it can be, else `online`.

    The gradient is p (g - sum p g), which reads p and g. With a softcap it reads x in the place of
    p, and computes p again from the sums that the forward pass saves. Under
    `jax.sharding.use_abstract_mesh` the first axis of x is cut over the mesh axis `data`; arrays
    whose first axis has another length are whole on each device. ValueError: a type that kernels do
    not take, shapes that do not broadcast, rows too long for `row`.
    """
    moved = itemsize(x, x, x) + (mask is not None)
    _check(x, form, bytes_an_entry(moved, 'row', softcap))
    of_queries = causal or segments is not None
    shape = (1,) * max(0, 2 + of_queries - x.ndim) + x.shape
    if of_queries and x.ndim < 2:
        raise ValueError(f'queries and keys are the last two axes; got {x.shape}.')
    queries, keys = (None, None) if segments is None else segments
    arrays = {
        'mask': _of_rank(mask, shape, 'mask'),
        'queries': _of_rank(queries, shape[:-1], 'segments of queries'),
        'keys': _of_rank(keys, (*shape[:-2], shape[-1]), 'segments of keys'),
        'sink': _of_rank(sink, shape[:-1], 'sink'),
    }
    if mask is not None and mask.dtype != bool:
        raise ValueError(f'a mask is boolean, True where x may be seen; got {mask.dtype}.')
    how = Softmax(causal, softcap, form)
    p = _softmax(x.reshape(shape), *arrays.values(), how)
    return p.reshape(x.shape)


def logsumexp(x: jax.Array, *, form: str | None = None) -> jax.Array:
    """float32: log sum exp(x) over the last axis; x is read once, whatever the form."""
    _check(x, form, bytes_an_entry(itemsize(x), 'row'))
    return log_of_rows(x[None] if x.ndim == 1 else x, form).reshape(x.shape[:-1])


def _check(x, form, needed):
    """needed: by `row`, bytes an entry in the direction that needs more."""
    refuse_types(NAME, x)
    if form is not None:
        choose({name: sums for name, sums in FORMS.items() if name}, form, 'form')
    longest = most_columns(needed)
    if form == 'row' and x.shape[-1] > longest:
        raise ValueError(
            f'form=row has whole rows in vector memory, at most {longest:,} entries of '
            f'{x.dtype.name} here; got {x.shape[-1]:,}. Choose online.'
        )


def _of_rank(array, shape, name):
    """With leading axes of length 1, so that it has as many as `shape`; None stays."""
    if array is None:
        return None
    fits = array.ndim <= len(shape) and all(
        own in (1, length) for own, length in zip(array.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f'{name} must broadcast to {shape}; got {array.shape}.')
    full = (1,) * (len(shape) - array.ndim) + array.shape
    if name.startswith('segments') and full[-1] != shape[-1]:
        raise ValueError(f'{name} must be {shape[-1]} ids; got {array.shape}.')
    return array.reshape(full)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _softmax(x, mask, queries, keys, sink, how):
    return _forward(x, (mask, queries, keys, sink), how, saves=False)[0]


def _saved(x, mask, queries, keys, sink, how):
    others = (mask, queries, keys, sink)
    saves = bool(how.softcap) or sink is not None
    p, sums = _forward(x, others, how, saves)
    return p, (x if how.softcap else p, sums, others)


def _backward(how, saved, g):
    x_or_p, sums, others = saved
    sink = others[-1]

    def on_device(x_or_p, g, sums, *others):
        return backward_rows(x_or_p, g, sums, others, how)

    arrays = (x_or_p, g, sums, *others)
    of_rows = (True, True, True, *_of_rows(g, others))
    dx, dsink = over_devices(on_device, arrays, of_rows, (True, True))
    if sink is not None:
        summed = tuple(axis for axis, length in enumerate(sink.shape) if length == 1)
        dsink = jnp.sum(dsink, summed, keepdims=True).astype(sink.dtype)
    return dx, None, None, None, dsink


_softmax.defvjp(_saved, _backward)


def _of_rows(x, others):
    return [array is None or array.shape[0] == x.shape[0] for array in others]


def _forward(x, others, how, saves):
    """(p, the sums of its rows as two arrays [..., T], or None)."""

    def on_device(x, *others):
        return forward_rows(x, others, how, saves)

    arrays, of_rows = (x, *others), (True, *_of_rows(x, others))
    return over_devices(on_device, arrays, of_rows, (True, (True, True) if saves else True))
