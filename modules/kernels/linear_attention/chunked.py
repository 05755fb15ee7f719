"""Linear attention by chunks of tokens, which pass on a state of fixed size."""

import jax
import jax.numpy as jnp

from modules.kernels.linear_attention.base import (
    AttentionSums,
    causal_mask,
    divide,
    document_starts,
)
from modules.statistics import at_least_float32

CHUNK = 128  # tokens; all pairs in a chunk are computed: 2 CHUNK (F + H) operations per token


def chunked_linear_attention(
    q_num_BNTF: jax.Array,
    k_num_BKTF: jax.Array,
    q_den_BNTF: jax.Array,
    k_den_BKTF: jax.Array,
    v_BKTH: jax.Array,
    eps: float,
    segments_BT: jax.Array | None = None,
    state: AttentionSums | None = None,
    chunk: int = CHUNK,
) -> tuple[jax.Array, AttentionSums]:
    """Linear attention in chunks, with memory that grows with T (arXiv:2006.16236,
    arXiv:2312.06635).

    Computes the same as `quadratic`, from the pairs of tokens within a chunk and a state per chunk.
    The backward pass recomputes each chunk from the state before it. The last chunk is padded with
    features of 0. Sources: arXiv:2006.16236, section 3.3; chunks arXiv:2312.06635.

    Args:
      q_num_BNTF: query features of the numerator.
      k_num_BKTF: key features of the numerator; K divides N.
      q_den_BNTF: query features of the denominator.
      k_den_BKTF: key features of the denominator.
      v_BKTH: values.
      eps: added to the denominator.
      segments_BT: the number of each token's segment; None: a single segment.
      state: sums over the tokens before the first; None: there are none.
      chunk: tokens per chunk.

    Returns:
      ([B, N, T, H] in the type of v, the state after the last token).
    """
    batch, n_kv_heads, length, head_dim = v_BKTH.shape
    groups, chunk = q_num_BNTF.shape[1] // n_kv_heads, min(chunk, length)
    start_BT = jnp.broadcast_to(document_starts(length, segments_BT, state), (batch, length))
    arrays = q_num_BNTF, k_num_BKTF, q_den_BNTF, k_den_BKTF, v_BKTH
    q_num, k_num, q_den, k_den, v = (split_chunks(at_least_float32(x), 2, chunk) for x in arrays)
    if state is None:
        zeros_BKFH = jnp.zeros((batch, n_kv_heads, k_num.shape[-1], head_dim), v.dtype)
        state = AttentionSums(zeros_BKFH, zeros_BKFH[..., 0])
    q_num, q_den = (
        x.reshape(len(x), batch, n_kv_heads, groups, *x.shape[3:]) for x in (q_num, q_den)
    )
    first_C = jnp.arange(len(v), dtype=jnp.int32) * chunk

    def body(state, parts):
        return attend_chunk(state, *parts, eps)

    parts = q_num, k_num, q_den, k_den, v, split_chunks(start_BT, 1, chunk, 'edge'), first_C
    # In a scan XLA cannot merge the recomputation with the forward pass, so that the barriers of
    # prevent_cse would only cost time (documentation of jax.checkpoint).
    state, out_CBKGTH = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), state, parts)
    out_BKGTH = jnp.moveaxis(out_CBKGTH, 0, 3).reshape(batch, n_kv_heads, groups, -1, head_dim)
    out_BNTH = out_BKGTH.reshape(batch, n_kv_heads * groups, -1, head_dim)[:, :, :length]
    return out_BNTH.astype(v_BKTH.dtype), state


def attend_chunk(
    state: AttentionSums,
    q_num_BKGTF: jax.Array,
    k_num_BKTF: jax.Array,
    q_den_BKGTF: jax.Array,
    k_den_BKTF: jax.Array,
    v_BKTH: jax.Array,
    start_BT: jax.Array,
    first: jax.Array,
    eps: float,
) -> tuple[AttentionSums, jax.Array]:
    """Returns (the state after a chunk, the output of the chunk [B, K, G, T, H]).

    Args:
      state: sums over the tokens before the chunk.
      q_num_BKGTF: query features of the numerator; G queries share a key.
      k_num_BKTF: key features of the numerator.
      q_den_BKGTF: query features of the denominator.
      k_den_BKTF: key features of the denominator.
      v_BKTH: values.
      start_BT: where the document of each token begins in the row.
      first: the position of the chunk's first token.
      eps: added to the denominator.
    """
    position_T = first + jnp.arange(v_BKTH.shape[2], dtype=jnp.int32)
    visible_BTS = causal_mask(position_T, position_T, start_BT).astype(v_BKTH.dtype)
    # The state belongs to the document of the last token before the chunk.
    continues_BT = (start_BT < first).astype(v_BKTH.dtype)
    # As a product with the mask, not a cumulative sum, which would run across documents.
    keys_BKTF = jnp.einsum('bts,bksf->bktf', visible_BTS, k_den_BKTF)
    keys_BKTF = keys_BKTF + jnp.einsum('bt,bkf->bktf', continues_BT, state.keys_BKF)
    weights_BKGTS = jnp.einsum('bkgtf,bksf->bkgts', q_num_BKGTF, k_num_BKTF)
    visible_BKGTS = jnp.broadcast_to(visible_BTS[:, None, None], weights_BKGTS.shape)
    numerator_BKGTH = jnp.einsum('bkgts,bksh->bkgth', weights_BKGTS * visible_BKGTS, v_BKTH)
    before_BKGTH = jnp.einsum('bkgtf,bkfh->bkgth', q_num_BKGTF, state.products_BKFH)
    numerator_BKGTH = numerator_BKGTH + jnp.einsum('bt,bkgth->bkgth', continues_BT, before_BKGTH)
    denominator_BKGT = jnp.einsum('bkgtf,bktf->bkgt', q_den_BKGTF, keys_BKTF)
    last_v_BKTH = jnp.einsum('bt,bkth->bkth', visible_BTS[:, -1], v_BKTH)
    products_BKFH = jnp.einsum('bktf,bkth->bkfh', k_num_BKTF, last_v_BKTH)
    before_BKFH = jnp.einsum('b,bkfh->bkfh', continues_BT[:, -1], state.products_BKFH)
    next_state = AttentionSums(products_BKFH + before_BKFH, keys_BKTF[:, :, -1])
    return next_state, divide(numerator_BKGTH, denominator_BKGT, eps)


def split_chunks(x: jax.Array, axis: int, chunk: int, mode: str = 'constant') -> jax.Array:
    """Splits x along `axis` to [chunks, ..., chunk, ...].

    Args:
      x: the array.
      axis: the axis to split.
      chunk: the length of a chunk.
      mode: how `jnp.pad` pads the last chunk.
    """
    count = -(-x.shape[axis] // chunk)
    width = [(0, 0)] * x.ndim
    width[axis] = (0, count * chunk - x.shape[axis])
    shape = (*x.shape[:axis], count, chunk, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, width, mode).reshape(shape), axis, 0)
