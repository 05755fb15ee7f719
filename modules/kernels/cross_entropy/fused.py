"""Softmax cross-entropy with one kernel forward, which reads the logits once, and a backward pass,
which reads them and writes their gradient once.

Least bytes for M rows of V logits, of b bytes each: MVb forward and 2MVb backward, beside some
numbers a row. The kernels make three statistics a row; a loss is plain operations on these, so that
its weights are no part of a kernel.

What is known of some columns of a row is its state: (exponent, mantissa, label's logit, sum,
count), with sum_v exp(z_v) = mantissa * base^exponent. Columns are put together by the same rule
from block to block and from device to device.
"""

import functools
from types import ModuleType
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from modules.kernels.cross_entropy.reference import Statistics, terms
from modules.kernels.devices import over_devices
from modules.kernels.exponentials import ONLINE, TWO_PASS
from modules.kernels.mapped_rows import by_rows
from modules.kernels.rows import refuse_types

Form = Literal['auto', 'row', 'online', 'two_pass']
Gradient = Literal['kernel', 'plain']
NAME = 'kernels.cross_entropy=pallas'
STATE = 5  # numbers a row
COEFFICIENTS = 6  # numbers a row that the backward pass is given
BASES = {'row': ONLINE, 'online': ONLINE, 'two_pass': TWO_PASS}


def kernels_on(platform: str) -> ModuleType:
    """`form_of`, `forward_rows` and, on TPUs, `backward_rows`, for rows on one device."""
    if platform == 'tpu':
        from modules.kernels.cross_entropy import tpu as kernels
    else:
        from modules.kernels.cross_entropy import gpu as kernels
    return kernels


def statistics(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    form: Form = 'auto',
    gradient: Gradient = 'kernel',
    *,
    platform: str,
) -> Statistics:
    """(log_z, label_logit, mean_logit), [M] each in float32, as `reference.statistics` has them.

    form: 'row' has whole rows in a TPU's fast memory; 'online' blocks of columns, each with its
    maximum and the sum of exponentials below it, scaled to the largest so far; 'two_pass' blocks of
    columns with an exponent of 2 and a mantissa, where no exponential waits for a maximum
    (arXiv:2001.04438); 'auto' is 'row' where that takes no more memory than usual, else 'online'.
    All read the logits once.

    gradient: 'kernel' reads them once more and writes their gradient once; 'plain' operations leave
    it to the compiler, which may make it inside of the two products that a readout's backward pass
    has, and then writes it nowhere. It may also want them in another layout, and copies them. On
    GPUs it is always plain: there the compiler reads once and writes once by itself.

    ValueError for logits of other types than bfloat16 and float32, and rows too long for 'row'.
    """
    labels_M = _own(labels_M, logits_MV)
    return _statistics(logits_MV, labels_M, form, gradient, None, platform)


def statistics_of_part(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    first_column: jax.Array | int,
    axis_name: str,
    form: Form = 'auto',
    gradient: Gradient = 'kernel',
    *,
    platform: str,
) -> Statistics:
    """`statistics` of rows whose columns are cut over a mesh axis, on each of its devices.

    To be called inside of `jax.shard_map`. logits_MV: the device's own columns, of which the first
    is `first_column` of all; labels_M: those of all columns. Two collectives forward: the maximum
    of one number a row and the sum of four. The backward kernel needs none; where `shard_map` does
    not follow which values are equal on all devices (check_vma=False), a device has its share of a
    cotangent alone, and the three of a row are summed first.
    """
    labels_M = _own(labels_M - first_column, logits_MV)
    return _statistics(logits_MV, labels_M, form, gradient, axis_name, platform)


def cross_entropy(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    z_loss: jax.Array | float,
    label_smoothing: jax.Array | float,
    form: Form = 'auto',
    gradient: Gradient = 'kernel',
    *,
    platform: str,
) -> dict[str, jax.Array]:
    """{'objective', 'ce', 'z_loss'} [M], as `reference.cross_entropy` has them."""
    found = statistics(logits_MV, labels_M, form, gradient, platform=platform)
    return terms(found, z_loss, label_smoothing)


def _own(labels_M, logits_MV):
    """Labels among the columns at hand; -1 for others, which must not meet a block's empty end."""
    is_own_M = (labels_M >= 0) & (labels_M < logits_MV.shape[-1])
    return jnp.where(is_own_M, labels_M, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _statistics(logits_MV, labels_M, form, gradient, axis_name, platform):
    return _saved(logits_MV, labels_M, form, gradient, axis_name, platform)[0]


def _saved(logits_MV, labels_M, form, gradient, axis_name, platform):
    for what, name, names in (('form', form, Form), ('gradient', gradient, Gradient)):
        if name not in get_args(names):
            known = ', '.join(get_args(names))
            raise ValueError(f'the {what} of {NAME} is one of {known}; got {name!r}.')
    refuse_types(NAME, logits_MV)
    kernels = kernels_on(platform)
    form = kernels.form_of(form, logits_MV)
    compute = by_rows(functools.partial(kernels.forward_rows, form=form))
    state = over_devices(compute, (logits_MV, labels_M), 'MM', tuple('M' * STATE))
    if axis_name is not None:
        state = _over_columns(state, axis_name, BASES[form])
    exponent_M, mantissa_M, label_logit_M, total_M, count_M = state
    high_M, low_M = BASES[form].log((exponent_M, mantissa_M))
    some_M = count_M > 0
    count_M = jnp.maximum(count_M, 1.0)
    log_z_M, label_logit_M = (
        jnp.where(some_M, value_M, 0.0) for value_M in (high_M + low_M, label_logit_M)
    )
    # log_z in two parts: of logits of 10^4, one number would be 10^-3 off, and so probabilities.
    saved = logits_MV, labels_M, high_M, low_M, count_M
    return (log_z_M, label_logit_M, total_M / count_M), saved


def _backward(form, gradient, axis_name, platform, saved, cotangents):
    del form
    logits_MV, labels_M, high_M, low_M, count_M = saved
    if axis_name is not None and axis_name not in jax.typeof(logits_MV).manual_axis_type.varying:
        cotangents = jax.lax.psum(cotangents, axis_name)
    of_log_z_M, of_label_M, of_mean_M = cotangents
    numbers = (labels_M, of_log_z_M, of_label_M, of_mean_M / count_M, high_M, low_M)
    if gradient == 'plain' or platform != 'tpu':
        column_1V = jnp.arange(logits_MV.shape[1])[None]
        numbers = (number_M[:, None] for number_M in numbers)
        return gradient_of(logits_MV, column_1V, *numbers), None
    compute = by_rows(kernels_on(platform).backward_rows)
    letters = 'M' * (1 + COEFFICIENTS)
    return over_devices(compute, (logits_MV, *numbers), letters, 'M'), None


_statistics.defvjp(_saved, _backward)


def gradient_of(
    x: jax.Array,
    column: jax.Array,
    label: jax.Array,
    of_log_z: jax.Array,
    of_label: jax.Array,
    of_each: jax.Array,
    high: jax.Array,
    low: jax.Array,
) -> jax.Array:
    """of_log_z p_v + of_label [v = label] + of_each, with p_v = exp(x_v - high - low)."""
    x32 = x.astype(jnp.float32)
    gradient = of_log_z * jnp.exp((x32 - high) - low) + of_each
    gradient = gradient + jnp.where(column == label, of_label, 0.0)
    return jnp.where(x32 != -jnp.inf, gradient, 0.0).astype(x.dtype)


def _over_columns(state, axis_name, base):
    """The state of all columns of those of each device's."""
    exponent_M, mantissa_M, *sums = state
    most_M = jax.lax.pmax(exponent_M, axis_name)
    mantissa_M = mantissa_M * base.power(exponent_M - most_M)
    return most_M, *jax.lax.psum(jnp.stack([mantissa_M, *sums]), axis_name)
