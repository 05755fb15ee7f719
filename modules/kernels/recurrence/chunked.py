"""A linear recurrence by chunks of tokens: matrix products within, and a state between chunks."""

import math
from typing import Annotated

import jax
import jax.numpy as jnp

from modules.kernels.linear_attention.base import causal_mask, document_starts
from modules.kernels.linear_attention.chunked import split_chunks
from modules.kernels.recurrence.base import kernel_row, zero_state
from modules.options import Option
from modules.statistics import at_least_float32

CHUNK = 64  # as in the code of flash-linear-attention
SOLVE_BLOCK = 16  # rows that are solved one after another


@kernel_row()
def chunked_recurrence(
    q_BNTK: jax.Array,
    k_BNTK: jax.Array,
    v_BNTV: jax.Array,
    g_BNT: jax.Array,
    beta_BNT: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    state_BNKV: jax.Array | None = None,
    *,
    recurrence_chunk: Annotated[int, Option('tokens in a chunk of a recurrence', 1)] = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """A linear recurrence in chunks of C tokens (arXiv:2412.06464, arXiv:2312.06635).

    Computes the same as `token_by_token`. `G` are the sums of `g` from the start of the chunk, or
    of the document if it begins in the chunk. `B` is the diagonal matrix of `b`, and `S_0` the
    state before the chunk, which is 0 for the tokens of another document:

    `M_ij = e^(G_i - G_j)` for `j <= i` in the same document, else 0

    `A_ij = b_i M_ij k_i^T k_j` for `j < i`, else 0

    `U = (I + A)^(-1) B (V - e^G K S_0)`, or `U = V` without the delta rule

    `O = (e^G Q S_0 + (M * (Q K^T)) U) / sqrt(K)`

    `S_C = e^(G_C) S_0 + (e^(G_C - G) K)^T U`

    All chunks at once solve for the two parts of `U`, which is linear in `S_0`; only the state is
    scanned. Sources: arXiv:2412.06464, section 3.3; the code of flash-linear-attention.
    Exponents are masked before `exp`: above the diagonal they are positive, and an overflow that is
    masked later has the gradient NaN.

    Args:
      q_BNTK: queries.
      k_BNTK: keys.
      v_BNTV: values.
      g_BNT: logarithms of the decay, at most 0.
      beta_BNT: how much of the difference to the value a key writes; None: no delta rule.
      segments_BT: the number of each token's segment; None: a single segment.
      state_BNKV: the state before the first token; None: zeros.
      recurrence_chunk: tokens per chunk.

    Returns:
      ([B, N, T, V], the state after the last token).

    Raises:
      ValueError: for a state together with segments.
    """
    batch, n_heads, length, width = k_BNTK.shape
    chunk = min(recurrence_chunk, length)
    starts_BT = document_starts(length, segments_BT, state_BNKV)
    starts_BT = jnp.broadcast_to(starts_BT, (batch, length))
    q_BNTK, k_BNTK, v_BNTV, g_BNT = map(at_least_float32, (q_BNTK, k_BNTK, v_BNTV, g_BNT))
    if state_BNKV is None:
        state_BNKV = zero_state(k_BNTK, v_BNTV)

    # The first axis Z counts chunks and T the tokens of one. Padding of the last chunk has keys of
    # 0 and no decay, so that it leaves the state as it is.
    q, k, v, g = (
        split_chunks(x, 2, chunk) for x in (q_BNTK / math.sqrt(width), k_BNTK, v_BNTV, g_BNT)
    )
    starts_ZBT = split_chunks(starts_BT, 1, chunk, 'edge')
    first_Z = jnp.arange(len(q), dtype=jnp.int32) * chunk
    place_T = jnp.arange(chunk, dtype=jnp.int32)
    # Relative to the chunk: a document that began before it starts at a negative place.
    starts_ZBT = starts_ZBT - first_Z[:, None, None]
    visible_ZBTS = jax.vmap(lambda starts_BT: causal_mask(place_T, place_T, starts_BT))(starts_ZBT)
    continues_ZBT = starts_ZBT < 0

    # As a product with the mask, not a cumulative sum, which would carry the rounding error of
    # another document's sum, and its gradient. HIGHEST: a sum of logarithms must not be rounded.
    seen_ZBTS, highest = visible_ZBTS.astype(g.dtype), jax.lax.Precision.HIGHEST
    sums_ZBNT = jnp.einsum('zbts,zbns->zbnt', seen_ZBTS, g, precision=highest)
    masks_ZBNTS = jnp.broadcast_to(visible_ZBTS[:, :, None], (*sums_ZBNT.shape, chunk))
    decay_ZBNTS = masked_exp(sums_ZBNT[..., None] - sums_ZBNT[..., None, :], masks_ZBNTS)
    continues_ZBNT = jnp.broadcast_to(continues_ZBT[:, :, None], sums_ZBNT.shape)
    decay_ZBNT = masked_exp(sums_ZBNT, continues_ZBNT)
    end_decay_ZBNT, end_decay_ZBN = decay_ZBNTS[..., -1, :], decay_ZBNT[..., -1]

    weights_ZBNTS = decay_ZBNTS * jnp.einsum('zbntk,zbnsk->zbnts', q, k)
    reads_ZBNTK = jnp.einsum('zbnt,zbntk->zbntk', decay_ZBNT, q)
    writes_ZBNTK = jnp.einsum('zbnt,zbntk->zbntk', end_decay_ZBNT, k)
    erases_ZBNTK = None
    if beta_BNT is not None:
        beta_ZBNT = split_chunks(at_least_float32(beta_BNT), 2, chunk)
        overlap_ZBNTS = decay_ZBNTS * jnp.einsum('zbnt,zbntk,zbnsk->zbnts', beta_ZBNT, k, k)
        erased = jnp.einsum('zbnt,zbnt,zbntk->zbntk', beta_ZBNT, decay_ZBNT, k)
        values = jnp.einsum('zbnt,zbntv->zbntv', beta_ZBNT, v)
        solved = solve_unit_lower(overlap_ZBNTS, jnp.concatenate([values, erased], -1))
        v, erases_ZBNTK = jnp.split(solved, [v.shape[-1]], -1)

    def read_chunk(state_BNKV, parts):
        reads_BNTK, writes_BNTK, erases_BNTK, weights_BNTS, u_BNTV, end_decay_BN = parts
        if erases_BNTK is not None:
            u_BNTV = u_BNTV - jnp.einsum('bntk,bnkv->bntv', erases_BNTK, state_BNKV)
        out_BNTV = jnp.einsum('bntk,bnkv->bntv', reads_BNTK, state_BNKV)
        out_BNTV = out_BNTV + jnp.einsum('bnts,bnsv->bntv', weights_BNTS, u_BNTV)
        state_BNKV = jnp.einsum('bn,bnkv->bnkv', end_decay_BN, state_BNKV)
        return state_BNKV + jnp.einsum('bntk,bntv->bnkv', writes_BNTK, u_BNTV), out_BNTV

    parts = reads_ZBNTK, writes_ZBNTK, erases_ZBNTK, weights_ZBNTS, v, end_decay_ZBN
    state_BNKV, out_ZBNTV = jax.lax.scan(read_chunk, state_BNKV, parts)
    out_BNTV = jnp.moveaxis(out_ZBNTV, 0, 2).reshape(batch, n_heads, -1, v.shape[-1])
    return out_BNTV[:, :, :length], state_BNKV


def solve_unit_lower(matrix: jax.Array, right: jax.Array) -> jax.Array:
    """Returns `(I + L)^(-1) right` with `L` the part of the matrix below its diagonal.

    By blocks of SOLVE_BLOCK rows, so that most of the work is matrix products. On CPUs a solver of
    64 rows calls several threads of BLAS, which wait for each other on a busy machine.

    Args:
      matrix: [..., T, T]; the diagonal and above are not read.
      right: [..., T, V].
    """
    highest = jax.lax.Precision.HIGHEST  # a solution, which must not be rounded to bfloat16
    solved: list[jax.Array] = []
    for first in range(0, matrix.shape[-1], SOLVE_BLOCK):
        rows = slice(first, first + SOLVE_BLOCK)
        remaining = right[..., rows, :]
        if solved:
            above = jnp.concatenate(solved, -2)
            product = jnp.matmul(matrix[..., rows, :first], above, precision=highest)
            remaining = remaining - product
        block = jax.lax.linalg.triangular_solve(
            matrix[..., rows, rows], remaining, left_side=True, lower=True, unit_diagonal=True
        )
        solved.append(block)
    return jnp.concatenate(solved, -2)


def masked_exp(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns exp(x) where the mask is true, else 0, with gradients that are finite for any x."""
    return jnp.exp(jnp.where(mask, x, -jnp.inf))
