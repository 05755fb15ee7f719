"""Softmax as a Pallas kernel, and the table of softmax kernels.

Least bytes for N rows of V entries of b bytes: 2NVb forward and 3NVb backward if a row fits into
fast memory. Rows in several blocks are read once more: 3NVb and 5NVb.
"""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp

from modules.choices import choose
from modules.kernels.common.rows import PALLAS, Kernel, check_types
from modules.kernels.softmax.base import FORMS, NAME, SUMS, SoftmaxOptions, reference
from modules.parallel.kernel_calls import map_shards, row_letters


def kernels_on(platform: str) -> ModuleType:
    """Imports `forward_rows` and `backward_rows` of a platform, for rows on a single device."""
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
    softcap: float = 0.0,
    form: str = 'online',
    platform: str,
) -> jax.Array:
    """Softmax by Pallas kernels, one forward and one backward.

    Computes the same as `reference`. On TPUs a pass holds whole rows in fast memory if they fit,
    and otherwise blocks of them. The gradient is `p_v (g_v - sum_v p_v g_v)`, which reads `p` and
    `g`. With a softcap it reads x instead of `p`, and recomputes `p` from the sums that the forward
    pass saves. Under `jax.sharding.use_abstract_mesh` the rows of x are sharded over the mesh; axes
    of length 1 of other arrays are whole on each device.

    Args:
      x: [..., V].
      mask: True where x is visible; broadcasts to x. None: everywhere.
      sink: a logit per row without an output; broadcasts to x.shape[:-1].
      softcap: the bound of the logits; 0: none.
      form: `online` or `two_pass` sums (`modules.kernels.common.exponentials`).
      platform: 'tpu' or 'gpu'.

    Raises:
      ValueError: for types that kernels do not support, and for shapes that do not broadcast.
    """
    check_types(NAME, x)
    choose(FORMS, form, 'form')
    shape = (1,) * max(0, 2 - x.ndim) + x.shape
    mask, sink = _expand_rank(mask, shape, 'mask'), _expand_rank(sink, shape[:-1], 'sink')
    if mask is not None and mask.dtype != bool:
        raise ValueError(f'a mask must be boolean, True for visible entries; got {mask.dtype}.')
    mask = None if mask is None else mask.astype(jnp.int8)  # kernels have no arrays of booleans
    options = SoftmaxOptions(softcap, form, platform)
    return _softmax(x.reshape(shape), mask, sink, options).reshape(x.shape)


def _expand_rank(array, shape, name):
    """Adds leading axes of length 1, so that the array has as many as `shape`."""
    if array is None:
        return None
    fits = array.ndim <= len(shape) and all(
        array_length in (1, length)
        for array_length, length in zip(array.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f'{name} must broadcast to {shape}; got {array.shape}.')
    return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)


def _call(kernel, arrays, names):
    """Calls a kernel on each device.

    `p` and `dx` have the shape of the first array. Other results have one number per row: its shape
    without the last axis.
    """
    letters = row_letters(arrays[0])

    def on_device(*arrays):
        shape = arrays[0].shape
        return {
            name: array.reshape(shape if name in ('p', 'dx') else shape[:-1])
            for name, array in kernel(*arrays).items()
        }

    return map_shards(on_device, arrays, [letters] * len(arrays), dict.fromkeys(names, letters))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _softmax(x, mask, sink, options):
    return _compute(x, mask, sink, options, saves=False)[0]


def _compute(x, mask, sink, options, saves):
    """Returns (p, the SUMS of its rows by name, if they are saved)."""
    kernel = functools.partial(
        kernels_on(options.platform).forward_rows, options=options, saves=saves
    )
    sums = _call(kernel, (x, mask, sink), ('p', *SUMS) if saves else ('p',))
    return sums.pop('p'), sums


def _forward_with_residuals(x, mask, sink, options):
    # The backward pass needs the sums to recompute p from x, and for the probability of a sink,
    # which p does not contain.
    p, sums = _compute(x, mask, sink, options, bool(options.softcap) or sink is not None)
    return p, (x if options.softcap else p, sums, mask, sink)


def _backward(options, residuals, g):
    x_or_p, sums, mask, sink = residuals
    kernel = functools.partial(kernels_on(options.platform).backward_rows, options=options)
    names = ('dx',) if sink is None else ('dx', 'dsink')
    arrays = _call(kernel, (x_or_p, g, sums, mask, sink), names)
    dsink = None
    if sink is not None:
        # A sink that is shared by rows gets the sum of their gradients.
        broadcast_axes = tuple(axis for axis, length in enumerate(sink.shape) if length == 1)
        dsink = jnp.sum(arrays['dsink'], broadcast_axes, keepdims=True).astype(sink.dtype)
    return arrays['dx'], None, dsink


_softmax.defvjp(_forward_with_residuals, _backward)


# (x, mask, sink, softcap=) -> p, as in `reference`
SOFTMAX_KERNELS = {
    'reference': Kernel(reference),
    'pallas': Kernel(softmax, PALLAS, is_forward_mode=False),
}
