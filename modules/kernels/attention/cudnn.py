"""cuDNN's fused attention on GPUs, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp

from modules.kernels.attention.base import Scores


def cudnn(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    scores: Scores,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """Computes `reference` with `scale` and `window`; no T x T scores are kept without segments.

    Segments are a mask, of which JAX makes a bias [B, 1, T, T] in the type of q for cuDNN to read:
    2 B T T bytes in bfloat16, and no block of keys is skipped. JAX cuts the call over the batch.
    """
    same_B1TS = None
    if segments_BT is not None:
        same_B1TS = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    out_BTNH = jax.nn.dot_product_attention(
        *(jnp.swapaxes(x, 1, 2) for x in (q_BNTH, k_BKSH, v_BKSH)),
        mask=same_B1TS,
        scale=scores.scale_of(q_BNTH.shape[-1]),
        is_causal=True,
        # (back, ahead), without the token itself
        local_window_size=None if scores.window is None else (scores.window - 1, 0),
        implementation='cudnn',
    )
    return jnp.swapaxes(out_BTNH, 1, 2)
