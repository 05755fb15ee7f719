"""Softmax cross-entropy on TPUs: a kernel forward and one backward; each reads the logits once."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from modules.kernels.common.exponentials import ONLINE, add, nothing, together
from modules.kernels.common.rows import itemsize
from modules.kernels.common.tpu_rows import (
    LANES,
    SUBLANES,
    USUAL_BYTES,
    as_column,
    as_lanes,
    call_on_tpu,
    columns_at_once,
    memory_limit,
    row_bytes,
    rows_at_once,
)
from modules.kernels.cross_entropy.base import COEFFICIENTS, NAME, STATE, gradient_of

# The gradient takes the logits' memory, so that a chunk of a loss that fits never leaves a chip.
# XLA copies logits that are used afterwards. The interpreter of kernels cannot do this where blocks
# do not divide an array.
IN_PLACE: dict[str, str] = {'logits': 'gradient'}


def _made(logits_MV, shape, dtype):
    """Describes a result that differs over the devices that the logits differ over."""
    manual = jax.typeof(logits_MV).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual)


def forward_rows(logits_MV: jax.Array, labels_M: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the state of each row, a tuple of [M].

    Rows are whole in vector memory where SUBLANES of them fit into USUAL_BYTES; otherwise each
    block of columns has its maximum and the sum of exponentials below it.
    """
    rows, width = logits_MV.shape
    bytes_an_entry = 2 * itemsize(logits_MV) + 8
    fits = SUBLANES * row_bytes(width, bytes_an_entry) <= USUAL_BYTES
    blocks = blocks_of(rows, width, bytes_an_entry, whole_rows=fits)
    labels_1M = along_lanes(labels_M)
    state = _made(logits_MV, (STATE, labels_1M.shape[1]), jnp.float32)
    moved = itemsize(logits_MV) * rows * width + 4 * (1 + STATE) * rows
    found = call_on_tpu(
        functools.partial(_forward_block, width=width),
        {'logits': (logits_MV, blocks.matrix), 'labels': (labels_1M, blocks.beside(1))},
        {'state': (state, blocks.beside(STATE))},
        grid=blocks.grid,
        semantics=('parallel', 'arbitrary', 'arbitrary'),
        limit=memory_limit(*blocks.shape, bytes_an_entry),
        cost=(8 * rows * width, rows * width, moved),
        name='cross_entropy',
    )
    return tuple(found['state'][:, :rows])


def _column(x):
    """Returns the column of each entry of a block."""
    return pl.program_id(2) * x.shape[1] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _forward_block(refs, width):
    x = refs['logits'][...].astype(jnp.float32)
    column = _column(x)
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
    pair = add(ONLINE, nothing((len(x), 1)), [x], axis=-1)
    lanes = refs['state'].shape[1]
    new, owned = zip(*(as_lanes(one, first, lanes) for one in (*pair, *sums)), strict=True)
    old = [refs['state'][n : n + 1, :] for n in range(STATE)]
    sums = (a + b for a, b in zip(old[2:], new[2:], strict=True))
    both = *together(ONLINE, tuple(old[:2]), tuple(new[:2])), *sums
    for n in range(STATE):
        value = jnp.where(pl.program_id(2) == 0, new[n], both[n])
        refs['state'][n : n + 1, :] = jnp.where(owned[n], value, old[n])


def backward_rows(logits_MV: jax.Array, *numbers: jax.Array) -> jax.Array:
    """Computes `gradient_of` with COEFFICIENTS numbers a row, [M] each, over the logits' memory."""
    rows, width = logits_MV.shape
    bytes_an_entry = 4 * itemsize(logits_MV) + 8
    blocks = blocks_of(rows, width, bytes_an_entry, whole_rows=False)
    given = {'logits': (logits_MV, blocks.matrix)}
    given['numbers'] = (along_lanes(*numbers), blocks.beside(COEFFICIENTS))
    gradient = _made(logits_MV, logits_MV.shape, logits_MV.dtype)
    moved = 2 * itemsize(logits_MV) * rows * width + 4 * COEFFICIENTS * rows
    found = call_on_tpu(
        _backward_block,
        given,
        {'gradient': (gradient, blocks.matrix)},
        grid=blocks.grid,
        semantics=('parallel', 'parallel', 'parallel'),
        limit=memory_limit(*blocks.shape, bytes_an_entry),
        cost=(8 * rows * width, rows * width, moved),
        name='cross_entropy_backward',
        aliases=IN_PLACE,
    )
    return found['gradient']


def _backward_block(refs):
    x = refs['logits'][...]
    first = pl.program_id(1) * len(x)
    numbers = (refs['numbers'][n : n + 1, :] for n in range(COEFFICIENTS))
    label, *numbers = (as_column(number, first, len(x)) for number in numbers)
    column = _column(x)
    refs['gradient'][...] = gradient_of(x, column, label.astype(jnp.int32), *numbers)


class MatrixBlocks(NamedTuple):
    """Blocks of rows and columns of a matrix; the last axis of the grid is over columns.

    Numbers of a row, [numbers, rows], come in blocks of at least LANES rows. Where a block of the
    matrix has fewer rows, the second axis of the grid is over the blocks that share them.
    """

    grid: tuple[int, int, int]
    shape: tuple[int, int]
    sharing: int
    blocks_of_rows: int

    @property
    def matrix(self) -> pl.BlockSpec:
        def index(i, j, k):
            return jnp.minimum(i * self.sharing + j, self.blocks_of_rows - 1), k

        return pl.BlockSpec(self.shape, index)

    def beside(self, numbers: int) -> pl.BlockSpec:
        """Returns the blocks of so many numbers a row."""
        return pl.BlockSpec((numbers, max(self.shape[0], LANES)), lambda i, j, k: (0, i))


def blocks_of(rows: int, width: int, bytes_an_entry: float, *, whole_rows: bool) -> MatrixBlocks:
    """Returns blocks of LANES rows and as many columns as fit, or of whole rows, as many as fit.

    bytes_an_entry: as in `rows_at_once`.
    """
    columns = width
    if not whole_rows:
        fewest = min(LANES, math.ceil(rows / SUBLANES) * SUBLANES)
        columns = min(width, columns_at_once(fewest, bytes_an_entry))
    size = rows_at_once(rows, columns, bytes_an_entry, NAME)
    size = size // LANES * LANES if size >= LANES else 2 ** int(math.log2(size))
    blocks_of_rows, together = math.ceil(rows / size), max(size, LANES)
    sharing = min(together // size, blocks_of_rows)
    grid = (math.ceil(rows / together), sharing, math.ceil(width / columns))
    return MatrixBlocks(grid, (size, columns), sharing, blocks_of_rows)


def along_lanes(*numbers_M: jax.Array) -> jax.Array:
    """Returns [numbers, M] in float32, padded to whole registers: labels below 2^24 are exact."""
    numbers_XM = jnp.stack([number_M.astype(jnp.float32) for number_M in numbers_M])
    return jnp.pad(numbers_XM, ((0, 0), (0, -numbers_XM.shape[1] % LANES)))
