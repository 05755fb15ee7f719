"""Softmax cross-entropy on TPUs: a kernel forward and one backward; each reads the logits once."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from modules.kernels.common.exponentials import ONLINE, add_pairs, add_terms, empty_sum
from modules.kernels.common.rows import itemsize
from modules.kernels.common.tpu_rows import (
    DEFAULT_BYTES,
    LANES,
    SUBLANES,
    block_columns,
    block_rows,
    call_on_tpu,
    column_to_lanes,
    lanes_to_column,
    memory_limit,
    row_bytes,
)
from modules.kernels.cross_entropy.base import COEFFICIENTS, NAME, STATE, logit_gradient

# The gradient takes the logits' memory, so that a chunk of a loss that fits never leaves a chip.
# XLA copies logits that are used afterwards. The interpreter of kernels cannot do this where blocks
# do not divide an array.
ALIASES: dict[str, str] = {'logits': 'gradient'}


def _out_shape(logits_MV, shape, dtype):
    """Describes a result that differs over the devices that the logits differ over."""
    manual = jax.typeof(logits_MV).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual)


def forward_rows(logits_MV: jax.Array, labels_M: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the state of each row, a tuple of [M].

    Rows are whole in vector memory where SUBLANES of them fit into USUAL_BYTES; otherwise each
    block of columns has its maximum and the sum of exponentials below it.
    """
    rows, width = logits_MV.shape
    bytes_per_entry = 2 * itemsize(logits_MV) + 8
    fits = SUBLANES * row_bytes(width, bytes_per_entry) <= DEFAULT_BYTES
    blocks = select_matrix_blocks(rows, width, bytes_per_entry, whole_rows=fits)
    labels_1M = stack_lanes(labels_M)
    state = _out_shape(logits_MV, (STATE, labels_1M.shape[1]), jnp.float32)
    moved = itemsize(logits_MV) * rows * width + 4 * (1 + STATE) * rows
    found = call_on_tpu(
        functools.partial(_forward_block, width=width),
        {'logits': (logits_MV, blocks.matrix_spec), 'labels': (labels_1M, blocks.number_spec(1))},
        {'state': (state, blocks.number_spec(STATE))},
        grid=blocks.grid,
        semantics=('parallel', 'arbitrary', 'arbitrary'),
        limit=memory_limit(*blocks.shape, bytes_per_entry),
        cost=(8 * rows * width, rows * width, moved),
        name='cross_entropy',
    )
    return tuple(found['state'][:, :rows])


def _column_index(x):
    """Returns the column of each entry of a block."""
    return pl.program_id(2) * x.shape[1] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _forward_block(refs, width):
    x = refs['logits'][...].astype(jnp.float32)
    column = _column_index(x)
    if width % x.shape[1]:
        x = jnp.where(column < width, x, -jnp.inf)
    present = x != -jnp.inf
    first = pl.program_id(1) * len(x)
    label = lanes_to_column(refs['labels'][...], first, len(x)).astype(jnp.int32)
    sums = (
        jnp.where(column == label, x, 0.0),
        jnp.where(present, x, 0.0),
        jnp.where(present, 1.0, 0.0),
    )
    sums = [jnp.sum(one, -1, keepdims=True) for one in sums]
    pair = add_terms(ONLINE, empty_sum((len(x), 1)), [x], axis=-1)
    lanes = refs['state'].shape[1]
    new, owned = zip(*(column_to_lanes(one, first, lanes) for one in (*pair, *sums)), strict=True)
    old = [refs['state'][n : n + 1, :] for n in range(STATE)]
    sums = (a + b for a, b in zip(old[2:], new[2:], strict=True))
    both = *add_pairs(ONLINE, tuple(old[:2]), tuple(new[:2])), *sums
    for n in range(STATE):
        value = jnp.where(pl.program_id(2) == 0, new[n], both[n])
        refs['state'][n : n + 1, :] = jnp.where(owned[n], value, old[n])


def backward_rows(logits_MV: jax.Array, *numbers: jax.Array) -> jax.Array:
    """Computes `gradient_of` with COEFFICIENTS numbers a row, [M] each, over the logits' memory."""
    rows, width = logits_MV.shape
    bytes_per_entry = 4 * itemsize(logits_MV) + 8
    blocks = select_matrix_blocks(rows, width, bytes_per_entry, whole_rows=False)
    given = {'logits': (logits_MV, blocks.matrix_spec)}
    given['numbers'] = (stack_lanes(*numbers), blocks.number_spec(COEFFICIENTS))
    gradient = _out_shape(logits_MV, logits_MV.shape, logits_MV.dtype)
    moved = 2 * itemsize(logits_MV) * rows * width + 4 * COEFFICIENTS * rows
    found = call_on_tpu(
        _backward_block,
        given,
        {'gradient': (gradient, blocks.matrix_spec)},
        grid=blocks.grid,
        semantics=('parallel', 'parallel', 'parallel'),
        limit=memory_limit(*blocks.shape, bytes_per_entry),
        cost=(8 * rows * width, rows * width, moved),
        name='cross_entropy_backward',
        aliases=ALIASES,
    )
    return found['gradient']


def _backward_block(refs):
    x = refs['logits'][...]
    first = pl.program_id(1) * len(x)
    numbers = (refs['numbers'][n : n + 1, :] for n in range(COEFFICIENTS))
    label, *numbers = (lanes_to_column(number, first, len(x)) for number in numbers)
    column = _column_index(x)
    refs['gradient'][...] = logit_gradient(x, column, label.astype(jnp.int32), *numbers)


class MatrixBlocks(NamedTuple):
    """Blocks of rows and columns of a matrix; the last axis of the grid is over columns.

    Numbers of a row, [numbers, rows], come in blocks of at least LANES rows. Where a block of the
    matrix has fewer rows, the second axis of the grid is over the blocks that share them.
    """

    grid: tuple[int, int, int]
    shape: tuple[int, int]
    blocks_per_group: int
    row_blocks: int

    @property
    def matrix_spec(self) -> pl.BlockSpec:
        def index(i, j, k):
            return jnp.minimum(i * self.blocks_per_group + j, self.row_blocks - 1), k

        return pl.BlockSpec(self.shape, index)

    def number_spec(self, numbers: int) -> pl.BlockSpec:
        """Returns the blocks of so many numbers a row."""
        return pl.BlockSpec((numbers, max(self.shape[0], LANES)), lambda i, j, k: (0, i))


def select_matrix_blocks(
    rows: int, width: int, bytes_per_entry: float, *, whole_rows: bool
) -> MatrixBlocks:
    """Returns blocks of LANES rows and as many columns as fit, or of whole rows, as many as fit.

    bytes_per_entry: as in `block_rows`.
    """
    columns = width
    if not whole_rows:
        fewest = min(LANES, math.ceil(rows / SUBLANES) * SUBLANES)
        columns = min(width, block_columns(fewest, bytes_per_entry))
    size = block_rows(rows, columns, bytes_per_entry, NAME)
    size = size // LANES * LANES if size >= LANES else 2 ** int(math.log2(size))
    blocks_of_rows, together = math.ceil(rows / size), max(size, LANES)
    sharing = min(together // size, blocks_of_rows)
    grid = (math.ceil(rows / together), sharing, math.ceil(width / columns))
    return MatrixBlocks(grid, (size, columns), sharing, blocks_of_rows)


def stack_lanes(*numbers_M: jax.Array) -> jax.Array:
    """Returns [numbers, M] in float32, padded to whole registers: labels below 2^24 are exact."""
    numbers_XM = jnp.stack([number_M.astype(jnp.float32) for number_M in numbers_M])
    return jnp.pad(numbers_XM, ((0, 0), (0, -numbers_XM.shape[1] % LANES)))
