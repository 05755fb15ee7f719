"""Softmax and logsumexp with one kernel forward and one backward, those of a platform.

Least bytes for N rows of V entries, of b bytes each, where a row is in fast memory at a time: 2NVb
forward and 3NVb backward for softmax, NVb + 4N and 2NVb for logsumexp. Rows in several blocks are
read once more by softmax: 3NVb and 5NVb.
"""

import dataclasses
import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from modules.choices import choose
from modules.kernels.devices import letters_of, over_devices
from modules.kernels.exponentials import ONLINE, TWO_PASS, probabilities
from modules.kernels.rows import refuse_types

NAME = 'kernels.softmax=pallas'
# row: all of a row in fast memory. The others have a part of its columns there. None: `row` where
# a pass can, else `online`; they save the same.
FORMS = {'row': ONLINE, 'online': ONLINE, 'two_pass': TWO_PASS, None: ONLINE}
BESIDE = ('mask', 'queries', 'keys', 'sink')  # arrays that may come with x
SUMS = ('exponent', 'mantissa')  # of rows, that the forward pass saves


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Static: what is computed, and how."""

    causal: bool
    softcap: float
    form: str | None
    platform: str


def kernels_on(platform: str) -> ModuleType:
    """`refuse_form`, `forward_rows`, `backward_rows` and `log_rows` of a platform, for rows on one
    device; on TPUs `log_backward_rows` as well.
    """
    if platform == 'tpu':
        from modules.kernels.softmax import tpu as kernels
    else:
        from modules.kernels.softmax import gpu as kernels
    return kernels


def softmax(
    x: jax.Array,
    mask: jax.Array | None = None,
    sink: jax.Array | None = None,
    *,
    causal: bool = False,
    segments: tuple[jax.Array, jax.Array] | None = None,
    softcap: float = 0.0,
    form: str | None = None,
    platform: str,
) -> jax.Array:
    """`reference` with one kernel forward and one backward.

    form: `row` has whole rows in fast memory, on a TPU up to 367,000 entries of bfloat16 and
    229,000 of float32; `online` and `two_pass` have blocks of them, and differ in their sums
    (modules/kernels/exponentials.py). None: each pass is `row` where it can be, else `online`.

    The gradient is p (g - sum p g), which reads p and g. With a softcap it reads x in the place of
    p, and computes p again from the sums that the forward pass saves. Under
    `jax.sharding.use_abstract_mesh` the rows of x are cut over the mesh; axes of length 1 of other
    arrays are whole on each device. ValueError: a type that kernels do not take, shapes that do not
    broadcast, rows too long for `row`.
    """
    _check(x, form)
    kernels_on(platform).refuse_form(form, NAME, x, 3, mask is not None, softcap)
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
    how = Softmax(causal, softcap, form, platform)
    p = _softmax(x.reshape(shape), *arrays.values(), how)
    return p.reshape(x.shape)


def logsumexp(x: jax.Array, *, form: str | None = None, platform: str) -> jax.Array:
    """float32: log sum exp(x) over the last axis; x is read once, whatever the form."""
    _check(x, form)
    kernels_on(platform).refuse_form(form, NAME, x, 1)
    return _logsumexp(x[None] if x.ndim == 1 else x, form, platform).reshape(x.shape[:-1])


def _check(x, form):
    refuse_types(NAME, x)
    if form is not None:
        choose({name: sums for name, sums in FORMS.items() if name}, form, 'form')


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
        return kernels_on(how.platform).backward_rows(x_or_p, g, sums, others, how)

    rows, of_others = _letters(g, how)
    arrays, letters = (x_or_p, g, sums, *others), (rows, rows, rows, *of_others)
    dx, dsink = over_devices(on_device, arrays, letters, (rows, rows))
    if sink is not None:
        summed = tuple(axis for axis, length in enumerate(sink.shape) if length == 1)
        dsink = jnp.sum(dsink, summed, keepdims=True).astype(sink.dtype)
    return dx, None, None, None, dsink


_softmax.defvjp(_saved, _backward)


def _letters(x, how):
    """(of x, of (mask, queries, keys, sink)): queries stay whole where a row's number says what it
    sees.
    """
    rows = letters_of(x)
    keys = rows[: x.ndim - 2]
    rows = keys if how.causal else rows
    return rows, (rows, rows, keys, rows)


def _forward(x, others, how, saves):
    """(p, the sums of its rows as two arrays [..., T], or None)."""

    def on_device(x, *others):
        return kernels_on(how.platform).forward_rows(x, others, how, saves)

    rows, of_others = _letters(x, how)
    out = (rows, (rows, rows) if saves else rows)
    return over_devices(on_device, (x, *others), (rows, *of_others), out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _logsumexp(x, form, platform):
    return _logsumexp_saved(x, form, platform)[0]


def _logsumexp_saved(x, form, platform):
    """The sums are saved in two numbers: the log alone is rounded by more where it is large."""
    compute = functools.partial(kernels_on(platform).log_rows, form=form)
    rows = letters_of(x)
    log, sums = over_devices(compute, (x,), (rows,), (rows, (rows, rows)))
    return log, (x, sums)


def _logsumexp_backward(form, platform, saved, g):
    """dx = g p; on GPUs left to the compiler, which reads once and writes once by itself."""
    x, sums = saved
    if platform != 'tpu':
        total = tuple(numbers[..., None] for numbers in sums)
        p = probabilities(FORMS[form], x.astype(jnp.float32), total)
        return ((g[..., None] * p).astype(x.dtype),)
    compute = functools.partial(kernels_on(platform).log_backward_rows, form=form)
    rows = letters_of(x)
    return (over_devices(compute, (x, sums, g), (rows, rows, rows), rows),)


_logsumexp.defvjp(_logsumexp_saved, _logsumexp_backward)
