"""Softmax cross-entropy on GPUs: a forward kernel, which reads the logits once.

Each thread has the state of the columns that it reads, and threads add their states at the end of a
row. There is no backward kernel: XLA's own program reads once and writes once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from modules.kernels.common.exponentials import NO_EXPONENT, ONLINE, add_terms
from modules.kernels.common.gpu_rows import (
    RowSlices,
    call_on_gpu,
    count_programs,
    pad_columns,
    sum_threads,
)

NAMES = ('exponent', 'mantissa', 'label_logit', 'total', 'count')


def forward_rows(logits_MV: jax.Array, labels_M: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the state of each row, a tuple of [M]."""
    rows = logits_MV.shape[0]
    logits_MV = pad_columns(logits_MV, -jnp.inf)
    row = RowSlices.for_arrays(logits_MV.shape[1], logits_MV)

    def body(refs, n, _):
        def step(parts, carry):
            pair, total = carry
            logits = [row.read(refs['logits'], n, part) for part in parts]
            for part, x in zip(parts, logits, strict=True):
                total = total + row.mask_repeated(part, x)
            logits = [
                row.mask_repeated(part, x, -jnp.inf) for part, x in zip(parts, logits, strict=True)
            ]
            return add_terms(ONLINE, pair, logits), total

        empty = row.full(NO_EXPONENT), row.full(0.0)
        pair, total = row.loop(step, (empty, row.full(0.0)))
        total = jnp.sum(total)
        # Few rows have logits of -inf; counting them in every row would add a fourth of the work.
        total, count = jax.lax.cond(
            total == -jnp.inf,
            lambda: _sum_and_count(row, refs['logits'], n),
            lambda: (total, jnp.float32(row.width)),
        )
        label = refs['labels'][n]
        # -1 stands for a label that is no column (`api.statistics`); the read must stay in the row.
        label_logit = refs['logits'][n, jnp.maximum(label, 0)].astype(jnp.float32)
        label_logit = jnp.where(label >= 0, label_logit, 0.0)
        numbers = (*sum_threads(ONLINE, pair), label_logit, total, count)
        for name, number in zip(NAMES, numbers, strict=True):
            refs[name][n] = number

    operands = {'logits': logits_MV, 'labels': labels_M}
    out_shapes = dict.fromkeys(NAMES, jax.ShapeDtypeStruct((rows,), jnp.float32))
    programs = count_programs(row.width, 1)
    states = call_on_gpu(
        body, operands, out_shapes, rows=rows, programs=programs, name='cross_entropy'
    )
    return tuple(states.values())


def _sum_and_count(row: RowSlices, ref: Any, n: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the sum and the number of a row's logits that are not -inf."""

    def step(parts, carry):
        total, count = carry
        for part in parts:
            x = row.mask_repeated(part, row.read(ref, n, part), -jnp.inf)
            total = total + jnp.where(x == -jnp.inf, 0.0, x)
            count = count + jnp.where(x == -jnp.inf, 0.0, 1.0)
        return total, count

    total, count = row.loop(step, (row.full(0.0), row.full(0.0)))
    return jnp.sum(total), jnp.sum(count)
