"""Softmax cross-entropy on TPUs: one kernel forward, one backward, each of which reads the logits
once.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from modules.kernels.cross_entropy.fused import BASES, COEFFICIENTS, NAME, STATE, gradient_of
from modules.kernels.cross_entropy.lanes import along_lanes, as_column, as_lanes, blocks_of
from modules.kernels.exponentials import add, nothing, together
from modules.kernels.rows import itemsize
from modules.kernels.tpu_rows import LANES, SUBLANES, USUAL_BYTES, call_on_tpu, memory_limit

# The gradient takes the logits' memory: a chunk of a loss that fits never leaves a chip. XLA copies
# them before where they are used afterwards. The interpreter of kernels cannot do this where blocks
# do not divide an array.
IN_PLACE: dict[str, str] = {'logits': 'gradient'}


def form_of(form: str, logits_MV: jax.Array) -> str:
    """What 'auto' is, of `fused.statistics`."""
    if form != 'auto':
        return form
    row_bytes = math.ceil(logits_MV.shape[-1] / LANES) * LANES * _forward_bytes(logits_MV, 'row')
    return 'row' if SUBLANES * row_bytes <= USUAL_BYTES else 'online'


def _forward_bytes(logits_MV, form):
    return 2 * itemsize(logits_MV) + (16 if form == 'two_pass' else 8)


def _like(logits_MV, shape, dtype):
    """An array that differs over the devices that the logits differ over."""
    manual = jax.typeof(logits_MV).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual)


def forward_rows(logits_MV: jax.Array, labels_M: jax.Array, form: str) -> tuple[jax.Array, ...]:
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
    sums = [jnp.sum(one, -1, keepdims=True) for one in sums]
    pair = add(BASES[form], nothing((len(x), 1)), [x], axis=-1)
    new = [as_lanes(one, first) for one in (*pair, *sums)]
    lane = jax.lax.broadcasted_iota(jnp.int32, new[0].shape, 1)
    own = (lane >= first) & (lane < first + len(x))
    old = [refs['state'][n : n + 1, :] for n in range(STATE)]
    sums = (a + b for a, b in zip(old[2:], new[2:], strict=True))
    both = *together(BASES[form], tuple(old[:2]), tuple(new[:2])), *sums
    for n in range(STATE):
        value = jnp.where(pl.program_id(2) == 0, new[n], both[n])
        refs['state'][n : n + 1, :] = jnp.where(own, value, old[n])


def backward_rows(logits_MV: jax.Array, *numbers: jax.Array) -> jax.Array:
    """`gradient_of` with COEFFICIENTS numbers a row, [M] each, over the logits' memory."""
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
    refs['gradient'][...] = gradient_of(x, column, label.astype(jnp.int32), *numbers)
