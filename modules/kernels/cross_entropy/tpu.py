"""Softmax cross-entropy on TPUs: one kernel forward, which reads the logits once, and one backward,
which reads them and writes their gradient once.

Least bytes for M rows of V logits, of b bytes each: MVb forward and 2MVb backward, beside some
numbers a row. The kernels make three statistics a row; a loss is plain operations on these, so that
its weights are no part of a kernel.

What is known of some columns of a row is its state: (exponent, mantissa, label's logit, sum,
count), with sum_v exp(z_v) = mantissa * base^exponent. Columns are put together by the same rule
from block to block and from device to device.
"""

import functools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from modules.kernels.cross_entropy.lanes import along_lanes, as_column, as_lanes, blocks_of, by_rows
from modules.kernels.cross_entropy.reference import Statistics, terms
from modules.kernels.devices import over_devices
from modules.kernels.powers_of_two import LN2_HIGH, LN2_LOW, mantissa_of_exp, power_of_two
from modules.kernels.tpu_rows import (
    LANES,
    SUBLANES,
    USUAL_BYTES,
    call_on_tpu,
    itemsize,
    memory_limit,
)

Form = Literal['auto', 'row', 'online', 'two_pass']
Gradient = Literal['kernel', 'plain']
NAME = 'kernels.cross_entropy=pallas'
STATE = 5  # numbers a row
COEFFICIENTS = 6  # numbers a row that the backward kernel is given
# The gradient takes the logits' memory: a chunk of a loss that fits never leaves a chip. XLA copies
# them before where they are used afterwards. The interpreter of kernels cannot do this where blocks
# do not divide an array.
IN_PLACE: dict[str, str] = {'logits': 'gradient'}
LEAST = float(jnp.finfo(jnp.float32).min)
LEAST_OF_TWO_PASS = -(2.0**20)


def statistics(
    logits_MV: jax.Array, labels_M: jax.Array, form: Form = 'auto', gradient: Gradient = 'kernel'
) -> Statistics:
    """(log_z, label_logit, mean_logit), [M] each in float32, as `reference.statistics` has them.

    form: 'row' has whole rows in fast memory; 'online' blocks of columns, each with its maximum and
    the sum of exponentials below it, scaled to the largest so far; 'two_pass' blocks of columns
    with an exponent of 2 and a mantissa, where no exponential waits for a maximum
    (arXiv:2001.04438), for logits of at most 10^6, and what is below -10^6 counts as that; 'auto'
    is 'row' where that takes no more memory than usual, else 'online'. All read the logits once.

    gradient: 'kernel' reads them once more and writes their gradient once; 'plain' operations leave
    it to the compiler, which may make it inside of the two products that a readout's backward pass
    has, and then writes it nowhere. It may also want them in another layout, and copies them.

    ValueError for logits of other types than bfloat16 and float32, and rows too long for 'row'.
    """
    return _statistics(logits_MV, _own(labels_M, logits_MV), form, gradient, None)


def statistics_of_part(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    first_column: jax.Array | int,
    axis_name: str,
    form: Form = 'auto',
    gradient: Gradient = 'kernel',
) -> Statistics:
    """`statistics` of rows whose columns are cut over a mesh axis, on each of its devices.

    To be called inside of `jax.shard_map`. logits_MV: the device's own columns, of which the first
    is `first_column` of all; labels_M: those of all columns. Two collectives forward: the maximum
    of one number a row and the sum of four. The backward kernel needs none; where `shard_map` does
    not follow which values are equal on all devices (check_vma=False), a device has its share of a
    cotangent alone, and the three of a row are summed first.
    """
    labels_M = _own(labels_M - first_column, logits_MV)
    return _statistics(logits_MV, labels_M, form, gradient, axis_name)


def cross_entropy(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    z_loss: jax.Array | float,
    label_smoothing: jax.Array | float,
    form: Form = 'auto',
    gradient: Gradient = 'kernel',
) -> dict[str, jax.Array]:
    """{'objective', 'ce', 'z_loss'} [M], as `reference.cross_entropy` has them."""
    return terms(statistics(logits_MV, labels_M, form, gradient), z_loss, label_smoothing)


def _own(labels_M, logits_MV):
    """Labels among the columns at hand; -1 for others, which must not meet a block's empty end."""
    is_own_M = (labels_M >= 0) & (labels_M < logits_MV.shape[-1])
    return jnp.where(is_own_M, labels_M, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _statistics(logits_MV, labels_M, form, gradient, axis_name):
    return _saved(logits_MV, labels_M, form, gradient, axis_name)[0]


def _saved(logits_MV, labels_M, form, gradient, axis_name):
    form = _chosen(form, gradient, logits_MV)
    compute = by_rows(functools.partial(_forward_rows, form=form))
    state = over_devices(compute, (logits_MV, labels_M), (True, True), (True,) * STATE)
    if axis_name is not None:
        state = _over_columns(state, axis_name, form)
    exponent_M, mantissa_M, label_logit_M, total_M, count_M = state
    if form == 'two_pass':
        high_M, low_M = exponent_M * LN2_HIGH, exponent_M * LN2_LOW + jnp.log(mantissa_M)
    else:
        high_M, low_M = exponent_M, jnp.log(mantissa_M)
    some_M = count_M > 0
    count_M = jnp.maximum(count_M, 1.0)
    log_z_M, label_logit_M = (
        jnp.where(some_M, value_M, 0.0) for value_M in (high_M + low_M, label_logit_M)
    )
    # log_z in two parts: of logits of 10^4, one number would be 10^-3 off, and so probabilities.
    saved = logits_MV, labels_M, high_M, low_M, count_M
    return (log_z_M, label_logit_M, total_M / count_M), saved


def _backward(form, gradient, axis_name, saved, cotangents):
    del form
    logits_MV, labels_M, high_M, low_M, count_M = saved
    if axis_name is not None and axis_name not in jax.typeof(logits_MV).manual_axis_type.varying:
        cotangents = jax.lax.psum(cotangents, axis_name)
    of_log_z_M, of_label_M, of_mean_M = cotangents
    numbers = (labels_M, of_log_z_M, of_label_M, of_mean_M / count_M, high_M, low_M)
    if gradient == 'plain':
        column_1V = jnp.arange(logits_MV.shape[1])[None]
        numbers = (number_M[:, None] for number_M in numbers)
        return _gradient(logits_MV, column_1V, *numbers), None
    of_rows = (True,) * (1 + COEFFICIENTS)
    compute = by_rows(_backward_rows)
    return over_devices(compute, (logits_MV, *numbers), of_rows, True), None


_statistics.defvjp(_saved, _backward)


def _gradient(x, column, label, of_log_z, of_label, of_each, high, low):
    """of_log_z p_v + of_label [v = label] + of_mean / count, with p_v = exp(x_v - log_z)."""
    x32 = x.astype(jnp.float32)
    gradient = of_log_z * jnp.exp((x32 - high) - low) + of_each
    gradient = gradient + jnp.where(column == label, of_label, 0.0)
    return jnp.where(x32 != -jnp.inf, gradient, 0.0).astype(x.dtype)


def _chosen(form: Form, gradient: Gradient, logits_MV: jax.Array) -> Form:
    for what, name, names in (('form', form, Form), ('gradient', gradient, Gradient)):
        if name not in get_args(names):
            known = ', '.join(get_args(names))
            raise ValueError(f'the {what} of {NAME} is one of {known}; got {name!r}.')
    if logits_MV.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f'{NAME} takes logits of bfloat16 or float32; got {logits_MV.dtype}. Choose reference.'
        )
    if form != 'auto':
        return form
    row_bytes = math.ceil(logits_MV.shape[-1] / LANES) * LANES * _forward_bytes(logits_MV, 'row')
    return 'row' if SUBLANES * row_bytes <= USUAL_BYTES else 'online'


def _over_columns(state, axis_name, form):
    """The state of all columns of those of each device's."""
    exponent_M, mantissa_M, *sums = state
    most_M = jax.lax.pmax(exponent_M, axis_name)
    mantissa_M = mantissa_M * _power(form)(exponent_M - most_M)
    return most_M, *jax.lax.psum(jnp.stack([mantissa_M, *sums]), axis_name)


def _forward_bytes(logits_MV, form):
    return 2 * itemsize(logits_MV) + (16 if form == 'two_pass' else 8)


def _like(logits_MV, shape, dtype):
    """An array that differs over the devices that the logits differ over."""
    manual = jax.typeof(logits_MV).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual)


def _forward_rows(logits_MV, labels_M, form):
    """The state of each row, a tuple of [M]."""
    rows, width = logits_MV.shape
    bytes_an_entry = _forward_bytes(logits_MV, form)
    blocks = blocks_of(
        rows, width, bytes_an_entry, whole_rows=form == 'row', name=f'form={form} of {NAME}'
    )
    labels_1M = along_lanes(labels_M)
    state = _like(logits_MV, (STATE, labels_1M.shape[1]), jnp.float32)
    found = call_on_tpu(
        functools.partial(_forward_block, form=form, width=width),
        {'logits': (logits_MV, blocks.matrix), 'labels': (labels_1M, blocks.beside(1))},
        {'state': (state, blocks.beside(STATE))},
        grid=blocks.grid,
        semantics=('parallel', 'arbitrary', 'arbitrary'),
        limit=memory_limit(*blocks.shape, bytes_an_entry),
        cost=pl.CostEstimate(
            flops=8 * rows * width,
            transcendentals=rows * width,
            bytes_accessed=itemsize(logits_MV) * rows * width + 4 * (1 + STATE) * rows,
        ),
        name='cross_entropy',
    )
    return tuple(found['state'][:, :rows])


def _forward_block(refs, form, width):
    x = refs['logits'][...].astype(jnp.float32)
    column = pl.program_id(2) * x.shape[1] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    if width % x.shape[1]:
        x = jnp.where(column < width, x, -jnp.inf)
    present = x != -jnp.inf
    first = pl.program_id(1) * len(x)
    label = as_column(refs['labels'][...], first, len(x)).astype(jnp.int32)
    sums = (
        jnp.where(column == label, x, 0.0),
        jnp.where(present, x, 0.0),
        jnp.where(present, 1.0, 0.0),
    )
    exponent, exponentials = (_two_pass if form == 'two_pass' else _below_maximum)(x)
    sums = (jnp.sum(one, -1, keepdims=True) for one in (exponentials, *sums))
    new = [as_lanes(one, first) for one in (exponent, *sums)]
    lane = jax.lax.broadcasted_iota(jnp.int32, new[0].shape, 1)
    own = (lane >= first) & (lane < first + len(x))
    old = [refs['state'][n : n + 1, :] for n in range(STATE)]
    both = _together(old, new, form)
    for n in range(STATE):
        value = jnp.where(pl.program_id(2) == 0, new[n], both[n])
        refs['state'][n : n + 1, :] = jnp.where(own, value, old[n])


def _together(one, other, form):
    """The state of the columns of both."""
    (e1, m1, *sums1), (e2, m2, *sums2) = one, other
    most, power = jnp.maximum(e1, e2), _power(form)
    mantissa = m1 * power(e1 - most) + m2 * power(e2 - most)
    return most, mantissa, *(a + b for a, b in zip(sums1, sums2, strict=True))


def _power(form):
    """The base's powers; of exponents that are not above 0."""
    return power_of_two if form == 'two_pass' else jnp.exp


def _below_maximum(x):
    """The maximum of each row, and exponentials of what the entries are below it."""
    most = jnp.maximum(jnp.max(x, -1, keepdims=True), LEAST)
    return most, jnp.exp(x - most)


def _two_pass(x):
    """The largest n of each row, and 2^(n_v - n) exp(t_v) of x_v = n_v ln 2 + t_v."""
    x = jnp.maximum(x, LEAST_OF_TWO_PASS)  # of -inf t is NaN
    n, t = mantissa_of_exp(x)
    most = jnp.max(n, -1, keepdims=True)
    return most, jnp.exp(t) * power_of_two(n - most)


def _backward_rows(logits_MV, *numbers):
    rows, width = logits_MV.shape
    bytes_an_entry = 4 * itemsize(logits_MV) + 8
    blocks = blocks_of(rows, width, bytes_an_entry, whole_rows=False, name=NAME)
    gradient = _like(logits_MV, logits_MV.shape, logits_MV.dtype)
    found = call_on_tpu(
        _backward_block,
        {
            'logits': (logits_MV, blocks.matrix),
            'numbers': (along_lanes(*numbers), blocks.beside(COEFFICIENTS)),
        },
        {'gradient': (gradient, blocks.matrix)},
        grid=blocks.grid,
        semantics=('parallel', 'parallel', 'parallel'),
        limit=memory_limit(*blocks.shape, bytes_an_entry),
        cost=pl.CostEstimate(
            flops=8 * rows * width,
            transcendentals=rows * width,
            bytes_accessed=2 * itemsize(logits_MV) * rows * width + 4 * COEFFICIENTS * rows,
        ),
        name='cross_entropy_backward',
        aliases=IN_PLACE,
    )
    return found['gradient']


def _backward_block(refs):
    x = refs['logits'][...]
    first = pl.program_id(1) * len(x)
    numbers = (refs['numbers'][n : n + 1, :] for n in range(COEFFICIENTS))
    label, *numbers = (as_column(number, first, len(x)) for number in numbers)
    column = pl.program_id(2) * x.shape[1] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    refs['gradient'][...] = _gradient(x, column, label.astype(jnp.int32), *numbers)
