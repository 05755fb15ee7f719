"""Softmax cross-entropy on TPUs: a forward and a backward kernel, each reading the logits once."""

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

# The gradient overwrites the logits, so that a small enough chunk of a loss never leaves the chip.
# XLA copies logits that are used afterwards. Interpreted kernels cannot do this if blocks do not
# divide an array.
ALIASES: dict[str, str] = {'logits': 'gradient'}


def _out_shape(logits_MV, shape, dtype):
    """Describes a result that varies over the same devices as the logits."""
    manual = jax.typeof(logits_MV).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual)


def forward_rows(logits_MV: jax.Array, labels_M: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the state of each row, a tuple of [M].

    Rows are whole in vector memory if SUBLANES of them fit into DEFAULT_BYTES. Otherwise each block
    of columns has its own maximum and sum of exponentials, and the states of blocks are added.
    """
    rows, width = logits_MV.shape
    # Logits twice, as the next block arrives while this one is computed; 8 bytes for the compiler's
    # temporaries.
    bytes_per_entry = 2 * itemsize(logits_MV) + 8
    fits = SUBLANES * row_bytes(width, bytes_per_entry) <= DEFAULT_BYTES
    blocks = select_matrix_blocks(rows, width, bytes_per_entry, whole_rows=fits)
    labels_1M = stack_lanes(labels_M)
    state = _out_shape(logits_MV, (STATE, labels_1M.shape[1]), jnp.float32)
    moved = itemsize(logits_MV) * rows * width + 4 * (1 + STATE) * rows
    states = call_on_tpu(
        functools.partial(_forward_block, width=width),
        {'logits': (logits_MV, blocks.matrix_spec), 'labels': (labels_1M, blocks.number_spec(1))},
        {'state': (state, blocks.number_spec(STATE))},
        grid=blocks.grid,
        # Blocks along the last two axes update the same block of states, one after the other.
        semantics=('parallel', 'arbitrary', 'arbitrary'),
        limit=memory_limit(*blocks.shape, bytes_per_entry),
        cost=(8 * rows * width, rows * width, moved),
        name='cross_entropy',
    )
    return tuple(states['state'][:, :rows])


def _column_index(x):
    """Returns the column of each entry of a block."""
    return pl.program_id(2) * x.shape[1] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _forward_block(refs, width):
    """Computes the state of a block, and adds it to the state of the same rows' earlier blocks."""
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
    sums = [jnp.sum(terms, -1, keepdims=True) for terms in sums]
    pair = add_terms(ONLINE, empty_sum((len(x), 1)), [x], axis=-1)
    lanes = refs['state'].shape[1]
    columns = (*pair, *sums)
    state, masks = zip(*(column_to_lanes(a, first, lanes) for a in columns), strict=True)
    stored = [refs['state'][n : n + 1, :] for n in range(STATE)]
    sums = (a + b for a, b in zip(stored[2:], state[2:], strict=True))
    total = *add_pairs(ONLINE, (stored[0], stored[1]), (state[0], state[1])), *sums
    for n in range(STATE):
        # The first block of a row finds arbitrary numbers and overwrites them. Lanes of the other
        # rows that share this block of numbers stay.
        updated = jnp.where(pl.program_id(2) == 0, state[n], total[n])
        refs['state'][n : n + 1, :] = jnp.where(masks[n], updated, stored[n])


def backward_rows(logits_MV: jax.Array, *numbers: jax.Array) -> jax.Array:
    """Computes `logit_gradient` over the logits' memory.

    Args:
      logits_MV: logits of each row.
      *numbers: COEFFICIENTS numbers per row, [M] each.
    """
    rows, width = logits_MV.shape
    # Logits and gradient, twice each.
    bytes_per_entry = 4 * itemsize(logits_MV) + 8
    blocks = select_matrix_blocks(rows, width, bytes_per_entry, whole_rows=False)
    operands = {'logits': (logits_MV, blocks.matrix_spec)}
    operands['numbers'] = (stack_lanes(*numbers), blocks.number_spec(COEFFICIENTS))
    gradient = _out_shape(logits_MV, logits_MV.shape, logits_MV.dtype)
    moved = 2 * itemsize(logits_MV) * rows * width + 4 * COEFFICIENTS * rows
    arrays = call_on_tpu(
        _backward_block,
        operands,
        {'gradient': (gradient, blocks.matrix_spec)},
        grid=blocks.grid,
        semantics=('parallel', 'parallel', 'parallel'),
        limit=memory_limit(*blocks.shape, bytes_per_entry),
        cost=(8 * rows * width, rows * width, moved),
        name='cross_entropy_backward',
        aliases=ALIASES,
    )
    return arrays['gradient']


def _backward_block(refs):
    x = refs['logits'][...]
    first = pl.program_id(1) * len(x)
    numbers = (refs['numbers'][n : n + 1, :] for n in range(COEFFICIENTS))
    label, *numbers = (lanes_to_column(number, first, len(x)) for number in numbers)
    column = _column_index(x)
    refs['gradient'][...] = logit_gradient(x, column, label.astype(jnp.int32), *numbers)


class MatrixBlocks(NamedTuple):
    """Blocks of rows and columns of a matrix; the last axis of the grid is over columns.

    Numbers per row, [numbers, rows], come in blocks of at least LANES rows. If a block of the
    matrix has fewer rows, the second axis of the grid is over the blocks that share a block of
    numbers.

    grid: (blocks of numbers, blocks per group, blocks of columns). shape: of a block.
    blocks_per_group: blocks of rows that share a block of numbers. row_blocks: blocks of rows in
    all.
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
        """Returns the blocks of an array of `numbers` numbers per row."""
        return pl.BlockSpec((numbers, max(self.shape[0], LANES)), lambda i, j, k: (0, i))


def select_matrix_blocks(
    rows: int, width: int, bytes_per_entry: float, *, whole_rows: bool
) -> MatrixBlocks:
    """Selects blocks of LANES rows and as many columns as fit, or of as many whole rows as fit.

    Args:
      rows: rows of the matrix.
      width: columns of the matrix.
      bytes_per_entry: as in `block_rows`.
      whole_rows: whether a block has all columns.
    """
    columns = width
    if not whole_rows:
        min_rows = min(LANES, math.ceil(rows / SUBLANES) * SUBLANES)
        columns = min(width, block_columns(min_rows, bytes_per_entry))
    size = block_rows(rows, columns, bytes_per_entry, NAME)
    # Fewer rows than LANES are a power of two, so that blocks divide a register of numbers.
    size = size // LANES * LANES if size >= LANES else 2 ** int(math.log2(size))
    blocks_of_rows, group_rows = math.ceil(rows / size), max(size, LANES)
    sharing = min(group_rows // size, blocks_of_rows)
    grid = (math.ceil(rows / group_rows), sharing, math.ceil(width / columns))
    return MatrixBlocks(grid, (size, columns), sharing, blocks_of_rows)


def stack_lanes(*numbers_M: jax.Array) -> jax.Array:
    """Returns [numbers, M] in float32, padded to whole registers; labels below 2^24 are exact."""
    rows_XM = jnp.stack([number_M.astype(jnp.float32) for number_M in numbers_M])
    return jnp.pad(rows_XM, ((0, 0), (0, -rows_XM.shape[1] % LANES)))
