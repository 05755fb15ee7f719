"""JAX's splash attention on TPUs: a Pallas kernel that skips blocks hidden by the mask.

If the tokens of a row are sharded over C devices, each device gathers all keys and values. With
queries in order the last device would do 2 C - 1 times the work of the first. So device i and its
mirror C - 1 - i exchange the second halves of their queries before the kernel, and the outputs
after it. Each then has two of 2 C pieces, which together see as many keys as any other such pair.
Llama 3 (arXiv:2407.21783, section 3.3.2) distributes the text itself, pieces i and 2 C - 1 - i to
device i; here all other layers have it in order, and half of the queries stay.
"""

import functools
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from modules.kernels.attention.base import Scores
from modules.numerics import ATTENTION_OUTPUT
from modules.options import Option
from modules.parallel.axes import count_axis_shards
from modules.parallel.kernel_calls import gather_tokens, map_shards

BLOCKS = (1024, 512, 256, 128)  # of queries and keys; 2,048 needs more fast memory than v5e has
# Larger blocks than the default need rows of several blocks, a window at least as large, and heads
# of at most MAX_HEAD_BYTES: the compiler for v5p finds no fast memory for more.
DEFAULT_BLOCK, MAX_HEAD_BYTES = 512, 512
DEFAULT_COMPUTE_KEYS = 512  # keys of a block that are multiplied at a time
# Up to this many blocks of keys per row, the fused backward kernel writes a gradient of the queries
# for each block, and they are summed outside. Beyond, a separate kernel computes that gradient, and
# the scores again.
MAX_FUSED_BLOCKS = 8
LANES = 128  # of a vector register; blocks are multiples
AXIS = 'context'  # the mesh axis that shards tokens


class BlockSizes(NamedTuple):
    """Sizes of blocks, by the names of the options of `splash`."""

    splash_block_q: int | None = None
    splash_block_kv: int | None = None
    splash_block_kv_compute: int | None = None


AUTO_SIZES = BlockSizes()


def splash(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    splash_block_q: Annotated[
        int | None, Option('queries per block; None: chosen by row length', LANES)
    ] = None,
    splash_block_kv: Annotated[
        int | None, Option('keys loaded per block; None: chosen by row length', LANES)
    ] = None,
    splash_block_kv_compute: Annotated[
        int | None,
        Option('keys multiplied at once within a block; None: chosen by block size', LANES),
    ] = None,
) -> jax.Array:
    """Attention by JAX's splash kernel for TPUs, if a block size divides T.

    Computes the same as `reference`, with `scale`, `softcap`, `window` and `sinks`. Queries are
    scaled in their own type before the kernel, which has no scale. Batch and heads are sharded over
    the traced mesh, and so are tokens if a block divides the halves that devices exchange. Block
    sizes are multiples of 128. If a row has another length than the config's and the requested
    sizes do not divide it, the defaults for its length are used.

    Args:
      q_BNTH: queries.
      k_BKSH: keys, S = T; K divides N.
      v_BKSH: values.
      scores: scale, softcap, window and sinks.
      segments_BT: the number of each token's segment; None: a single segment.
      sinks_N: a logit of each head that stands for no token.
      splash_block_q: queries per block.
      splash_block_kv: keys per block.
      splash_block_kv_compute: keys of a block that are multiplied at a time.

    Returns:
      [B, N, T, H] in the type of v.
    """
    requested = BlockSizes(splash_block_q, splash_block_kv, splash_block_kv_compute)
    q_BNTH = q_BNTH * scores.compute_scale(q_BNTH.shape[-1])
    length, parts = q_BNTH.shape[2], count_axis_shards('T')
    is_sharded = parts > 1 and largest_block(length, parts) is not None
    compute = functools.partial(
        _attend_split_rows if is_sharded else _attend_whole_rows, scores=scores, requested=requested
    )
    arrays = (q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N)
    if is_sharded:
        return map_shards(compute, arrays, ('BNT', 'BKT', 'BKT', 'B', 'N'), 'BNT')
    return map_shards(compute, arrays, ('BN', 'BK', 'BK', 'B', 'N'), 'BN')


def largest_block(
    length: int, parts: int = 1, window: int | None = None, head_bytes: int = 0
) -> int | None:
    """Returns the largest block that divides a row or, if it is sharded, half of each part.

    Args:
      length: tokens in a row.
      parts: devices that share a row.
      window: tokens that a query sees; None: all earlier tokens.
      head_bytes: bytes of a head of a token.
    """
    piece = length if parts == 1 else length / (2 * parts)
    is_wide = head_bytes > MAX_HEAD_BYTES
    limit = DEFAULT_BLOCK if is_wide else max(DEFAULT_BLOCK, min(piece / 2, window or math.inf))
    return next((size for size in BLOCKS if size <= limit and piece % size == 0), None)


def select_block_sizes(
    length: int,
    parts: int = 1,
    window: int | None = None,
    head_bytes: int = 0,
    requested: BlockSizes = AUTO_SIZES,
) -> tuple[int, int, int]:
    """Returns the requested sizes that fit, and `largest_block` and its divisors for the others.

    A size fits if it divides the row or, if it is sharded, half of each part.

    Args:
      length: tokens in a row.
      parts: devices that share a row.
      window: tokens that a query sees; None: all earlier tokens.
      head_bytes: bytes of a head of a token.
      requested: sizes from the config; None: the default.

    Returns:
      (queries, keys, keys that are multiplied at a time) of a block.
    """
    default: Any = largest_block(length, parts, window, head_bytes)
    piece = length if parts == 1 else length // (2 * parts)
    *sizes, compute_keys = requested
    q, kv = (size if size and piece % size == 0 else default for size in sizes)
    if not compute_keys or kv % compute_keys:
        compute_keys = next(
            size for size in (DEFAULT_COMPUTE_KEYS, 384, 256, 128) if kv % size == 0
        )
    return q, kv, compute_keys


def check_blocks(recipe: Any, part: Any) -> None:
    """Raises ValueError for block sizes that are not multiples of 128, or do not divide a row.

    Args:
      recipe: the resolved config.
      part: the kernel with its options.
    """
    length, parts = recipe.data.seq_len, max(1, recipe.mesh.context)
    length += -length % LANES  # as rows are padded
    piece, row_name = length, 'data.seq_len'
    if parts > 1:
        piece = length // (2 * parts)
        row_name = f'half of the part of a row that each of mesh.context={parts} devices holds'
    window, head_bytes = recipe.attention.options.get('window'), recipe.head_dim
    head_bytes *= jnp.dtype(recipe.model.dtype).itemsize
    default = largest_block(length, parts, window, head_bytes)  # the smallest, where layers differ
    block = part.options['splash_block_kv'] or default or LANES
    divisible = {
        'splash_block_q': (piece, row_name),
        'splash_block_kv': (piece, row_name),
        'splash_block_kv_compute': (block, 'kernels.splash_block_kv'),
    }
    for name, (total, total_name) in divisible.items():
        size = part.options[name]
        if size and (size % LANES or total % size):
            valid_sizes = [n for n in range(LANES, total + 1, LANES) if total % n == 0]
            raise ValueError(
                f'kernels.{name} must be a multiple of {LANES} that divides {total_name}, {total}; '
                f'got {size}. Choose one of {", ".join(map(str, valid_sizes)) or "no size"}, or '
                'leave it out.'
            )


def check_context_axis(length: int, parts: int) -> None:
    """Raises ValueError if no block divides a row over this number of devices."""
    if largest_block(length, parts) is None:
        multiple = 2 * parts * BLOCKS[-1]
        nearest = max(1, round(length / multiple)) * multiple
        raise ValueError(
            f'kernels.attention=splash computes two pieces of a row on each of mesh.{AXIS}={parts} '
            f'devices, in blocks of {BLOCKS[-1]} tokens, so data.seq_len must be a multiple of '
            f'{multiple}; got {length}. Nearest that works: {nearest}.'
        )


def computed_share(
    length: int, window: int | None, parts: int = 1, requested: BlockSizes = AUTO_SIZES
) -> float:
    """Returns the share of the T x T scores that the kernel computes.

    These are the scores in blocks that are not entirely hidden; if no block divides the row, the
    visible scores.

    Args:
      length: tokens in a row, T.
      window: tokens that a query sees; None: all earlier tokens.
      parts: devices that share a row.
      requested: block sizes from the config.
    """
    parts = parts if largest_block(length, parts, window) else 1
    has_blocks = largest_block(length, parts, window) is not None
    q, kv, _ = (
        select_block_sizes(length, parts, window, requested=requested) if has_blocks else (1, 1, 1)
    )
    ends = np.arange(q, length + 1, q)
    first = 0 if window is None else np.maximum(ends - q - window + 1, 0) // kv
    return float(np.sum((ends - 1) // kv - first + 1)) * q * kv / length**2


def _attend_whole_rows(q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, scores, requested):
    positions = np.arange(q_BNTH.shape[2], dtype=np.int32)
    kernel = _make_kernel(q_BNTH, positions[None], scores, requested)
    return _call_kernel(kernel, q_BNTH, k_BKSH, v_BKSH, segments_BT, segments_BT, sinks_N)


def _attend_split_rows(q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, scores, requested):
    """Computes sharded rows: q, k and v are local tokens, segments cover all tokens."""
    parts, index = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    positions = device_queries(q_BNTH.shape[2] * parts, parts)
    kernel = _make_kernel(q_BNTH, positions, scores, requested)
    k_BKSH, v_BKSH = (gather_tokens(x, AXIS) for x in (k_BKSH, v_BKSH))
    local_segments_BT = (
        None if segments_BT is None else segments_BT[:, jnp.asarray(positions)[index]]
    )
    q_BNTH = _exchange_halves(q_BNTH, parts)
    kernel = _slice_kernel(kernel, parts, index)
    mixed_BNTH = _call_kernel(
        kernel, q_BNTH, k_BKSH, v_BKSH, local_segments_BT, segments_BT, sinks_N
    )
    return _exchange_halves(mixed_BNTH, parts)


def device_queries(length: int, parts: int) -> np.ndarray:
    """Returns which queries each device computes, [parts, T / parts] int32."""
    pieces = np.arange(length, dtype=np.int32).reshape(parts, 2, -1)
    return np.stack([pieces[:, 0], pieces[::-1, 1]], 1).reshape(parts, -1)


def _exchange_halves(x_BNTH: jax.Array, parts: int) -> jax.Array:
    """Exchanges the second half of this device's tokens with its mirror's."""
    first, second = jnp.split(x_BNTH, 2, axis=2)
    mirrors = [(device, parts - 1 - device) for device in range(parts)]
    return jnp.concatenate([first, jax.lax.ppermute(second, AXIS, mirrors)], axis=2)


def _make_kernel(
    q_BNTH: jax.Array, positions: np.ndarray, scores: Scores, requested: BlockSizes
) -> Any:
    """Builds the kernel for queries at `positions` [parts, T / parts] in rows of T tokens."""
    # Imported late, as the import takes half a second.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, parts = positions.size, len(positions)
    mask = masks.CausalMask((length, length))
    if scores.window is not None:
        mask = masks.LocalMask((length, length), (scores.window - 1, 0), 0)
    mask.q_sequence = positions.reshape(-1)  # positions of the queries, which may be exchanged
    head_bytes = q_BNTH.shape[-1] * q_BNTH.dtype.itemsize
    blocks = select_block_sizes(length, parts, scores.window, head_bytes, requested)
    return kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * q_BNTH.shape[1]),
        block_sizes=kernels.BlockSizes(**kernel_block_sizes(blocks, length, parts)),
        attn_logits_soft_cap=scores.softcap or None,
        # `map_shards` has split the heads already: the kernel sees those of one device.
        head_shards=1,
        q_seq_shards=parts,
        residual_checkpoint_name=ATTENTION_OUTPUT,
    )


def kernel_block_sizes(blocks: tuple[int, int, int], length: int, parts: int = 1) -> dict[str, Any]:
    """Returns the block sizes by the argument names of JAX's kernel.

    Args:
      blocks: the sizes.
      length: tokens in a row.
      parts: devices that share a row; the backward pass is fused only for 1.
    """
    q, kv, compute_keys = blocks
    sizes = {'block_q': q, 'block_kv': kv, 'block_q_dkv': q, 'block_kv_dkv': kv}
    sizes |= dict.fromkeys(['block_kv_compute', 'block_kv_dkv_compute'], compute_keys)
    if parts == 1 and length // kv <= MAX_FUSED_BLOCKS:
        return sizes | {'use_fused_bwd_kernel': True}
    return sizes | {'block_q_dq': q, 'block_kv_dq': kv}


def _slice_kernel(kernel: Any, parts: int, index: jax.Array) -> Any:
    """Selects one device's queries in the arrays of a kernel.

    Queries are the only axis of their positions, and the second axis of arrays about blocks.
    """

    def slice_leaf(x):
        axis = 0 if x.ndim == 1 else 1
        size = x.shape[axis] // parts
        return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)

    return jax.tree.map(slice_leaf, kernel)


def _call_kernel(kernel, q_BNTH, k_BKSH, v_BKSH, segments_BT, segments_BS, sinks_N):
    """Calls the kernel for each row; it maps query heads to key heads itself."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    def attend_row(q_NTH, k_KSH, v_KSH, segments_T, segments_S):
        ids = None if segments_T is None else kernels.SegmentIds(segments_T, segments_S)
        return kernel(q_NTH, k_KSH, v_KSH, ids, sinks_N)

    return jax.vmap(attend_row)(q_BNTH, k_BKSH, v_BKSH, segments_BT, segments_BS)
