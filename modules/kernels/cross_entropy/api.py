"""Softmax cross-entropy as Pallas kernels, and the table of its kernels.

Least bytes for M rows of V logits of b bytes: MVb forward and 2MVb backward, beside some numbers a
row. The kernels make three statistics a row; a loss is plain operations on these, so that its
weights are no part of a kernel.
"""

import functools
from types import ModuleType
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from modules.kernels.common.platforms import PALLAS, Kernel
from modules.kernels.common.rows import by_rows, refuse_types
from modules.kernels.cross_entropy import base
from modules.kernels.cross_entropy.base import BASES, COEFFICIENTS, NAME, STATE, Statistics
from modules.parallel.kernel_calls import over_devices

Form = Literal['auto', 'row', 'online', 'two_pass']
Gradient = Literal['kernel', 'plain']


def kernels_on(platform: str) -> ModuleType:
    """Imports `form_of`, `forward_rows` and, on TPUs, `backward_rows`, for rows on one device."""
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
    axis_name: str | None = None,
    *,
    platform: str,
) -> Statistics:
    """Returns (log_z, label_logit, mean_logit), [M] float32, as `base.statistics` does.

    form: 'row' has whole rows in a TPU's vector memory; 'online' blocks of columns, each with its
    maximum and the sum of exponentials below it, scaled to the largest so far; 'two_pass' blocks of
    columns with an exponent of 2 and a mantissa, where no exponential waits for a maximum
    (arXiv:2001.04438); 'auto' is 'row' where that takes no more memory than usual, else 'online'.
    All read the logits once.

    gradient: 'kernel' reads the logits once more and writes their gradient once. 'plain' leaves it
    to the compiler, which may compute it inside the two products of a readout's backward pass and
    write it nowhere, or may copy the logits to another layout. GPUs always have 'plain': there the
    compiler reads once and writes once by itself.

    axis_name: a mesh axis that columns are cut over, inside `jax.shard_map`, with labels of all
    columns. Forward has two collectives: the maximum of one number a row and the sum of four.
    Backward has none, but where `shard_map` does not track which values devices share
    (check_vma=False), a device has its share of a cotangent, and the three of a row are summed.

    Raises ValueError for types other than bfloat16 and float32, and for rows too long for 'row'.
    """
    width = logits_MV.shape[-1]
    if axis_name is not None:
        labels_M = labels_M - jax.lax.axis_index(axis_name) * width
    # Others become -1, which no column of a block is.
    labels_M = jnp.where((labels_M >= 0) & (labels_M < width), labels_M, -1)
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
    """Computes `base.cross_entropy`, reading the logits once forward and once backward.

    On TPUs their gradient is written over them where nothing else reads them.
    """
    found = statistics(logits_MV, labels_M, form, gradient, platform=platform)
    return base.terms(found, z_loss, label_smoothing)


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
        return base.gradient_of(logits_MV, column_1V, *numbers), None
    compute = by_rows(kernels_on(platform).backward_rows)
    return over_devices(compute, (logits_MV, *numbers), 'M' * (1 + COEFFICIENTS), 'M'), None


_statistics.defvjp(_saved, _backward)


def _over_columns(state, axis_name, form):
    """Adds the states of all devices' columns."""
    exponent_M, mantissa_M, *sums = state
    most_M = jax.lax.pmax(exponent_M, axis_name)
    mantissa_M = mantissa_M * form.power(exponent_M - most_M)
    return most_M, *jax.lax.psum(jnp.stack([mantissa_M, *sums]), axis_name)


# (logits [M, V], labels [M], z_loss, label_smoothing) -> {'objective', 'ce', 'z_loss'}, [M] each
CROSS_ENTROPY_KERNELS = {
    'reference': Kernel(base.cross_entropy, is_plain=True),
    'pallas': Kernel(cross_entropy, PALLAS, is_forward_mode=False),
}
