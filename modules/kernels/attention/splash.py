"""JAX's splash attention on TPUs: a Pallas kernel that skips the blocks which a mask hides."""

import functools

import jax

from modules.kernels.attention.scores import Scores
from modules.kernels.devices import over_devices

BLOCKS = (512, 256, 128)  # of queries and keys: the largest that divides the length


def splash(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`reference` with `scale`, `softcap`, `window` and `sinks`, for lengths that a block divides.

    Queries are scaled before the kernel, which has no scale, in their own type. A program of
    several devices is traced under `jax.sharding.use_abstract_mesh`: XLA cannot cut the call, so
    that its rows and heads are cut over the mesh here. interpret: in plain operations, for tests.
    """
    q_BNTH = q_BNTH * scores.scale_of(q_BNTH.shape[-1])
    compute = functools.partial(_of_rows, scores=scores, interpret=interpret)
    arrays = (q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N)
    return over_devices(compute, arrays, ('BN', 'BK', 'BK', 'B', 'N'), 'BN')


def block_of(length: int) -> int | None:
    """The largest block that divides a row; None where none does."""
    return next((size for size in BLOCKS if length % size == 0), None)


def share_computed(length: int, window: int | None) -> float:
    """Of all pairs of tokens, those in blocks that are not hidden as a whole; of a row without a
    block, those that are not hidden.
    """
    size = block_of(length) or 1
    blocks = length // size
    reach = blocks if window is None else -(-(window - 1) // size)  # blocks before a query's own
    return sum(min(i, reach) + 1 for i in range(blocks)) / blocks**2


def _of_rows(q_BNTH, k_BKSH, v_BKSH, segments_BT, sinks_N, scores, interpret):
    """The kernel takes one row; it finds the key head of each query head by itself."""
    # Here, as it takes half a second to import.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    n_heads, length = q_BNTH.shape[1:3]
    mask = masks.CausalMask((length, length))
    if scores.window is not None:
        mask = masks.LocalMask((length, length), (scores.window - 1, 0), 0)
    block = block_of(length)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * n_heads),
        block_sizes=kernels.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        attn_logits_soft_cap=scores.softcap or None,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def of_row(q_NTH, k_KSH, v_KSH, segments_T):
        ids = None if segments_T is None else kernels.SegmentIds(segments_T, segments_T)
        return kernel(q_NTH, k_KSH, v_KSH, ids, sinks_N)

    return jax.vmap(of_row)(q_BNTH, k_BKSH, v_BKSH, segments_BT)
