"""Affine-scaled attention: the probabilities times one number and shifted by another."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.kernels.attention.reference import sees
from modules.sequence import Sequence, start_of
from modules.statistics import STATS, at_least_float32, is_training, token_mean

KEPT = 0.9  # share of its running mean that an update keeps


def affine_scaled(
    module: nn.Module,
    alpha_BTN: jax.Array,
    mixed_BNTH: jax.Array,
    mean_BNTH: jax.Array,
    valid_BT1: jax.Array | None,
) -> jax.Array:
    """sum_s (alpha_t p_ts + (m - alpha_t) / n_t) v_s, for the n_t tokens s that t sees.

    mixed_BNTH: sum_s p_ts v_s. mean_BNTH: the mean of the v_s. m, of each head, is the running mean
    of alpha, carried as a statistic; rows of weights sum to m where those of p sum to 1, and single
    weights may be negative. Source: arXiv:2602.23057, whose m starts at 0. Here it starts at 0.5,
    which is what alpha starts at, takes no gradient, and is the one from before the present batch,
    so that no token sees a later one.
    """
    start = jnp.full(alpha_BTN.shape[-1:], 0.5)
    mean_N = module.variable(STATS, 'affine_mean', lambda: start)
    alpha_BTN = at_least_float32(alpha_BTN)
    m_BTN = jnp.broadcast_to(jax.lax.stop_gradient(mean_N.value), alpha_BTN.shape)
    if is_training(module):
        now_N = token_mean(jax.lax.stop_gradient(alpha_BTN), valid_BT1)
        mean_N.value = KEPT * mean_N.value + (1 - KEPT) * now_N
    alpha_BNT1, m_BNT1 = (jnp.swapaxes(a, 1, 2)[..., None] for a in (alpha_BTN, m_BTN))
    out = alpha_BNT1 * mixed_BNTH + (m_BNT1 - alpha_BNT1) * mean_BNTH
    return out.astype(mixed_BNTH.dtype)


def mean_seen(
    v_BKTH: jax.Array, sequence: Sequence, window: int | None, is_full: jax.Array | None
) -> jax.Array:
    """[B, K, T, H] float32: the mean of v over the tokens that each one sees, its own included."""
    length = v_BKTH.shape[2]
    place_1T = jnp.arange(length, dtype=jnp.int32)[None]
    start_BT = jnp.zeros_like(place_1T)
    if sequence.segments_BT is not None:
        start_BT = start_of(sequence.segments_BT)
    place_BT = jnp.broadcast_to(place_1T, start_BT.shape)
    if window is not None:
        narrow_BT = jnp.maximum(start_BT, place_BT - window + 1)
        start_BT = narrow_BT if is_full is None else jnp.where(is_full, start_BT, narrow_BT)
    total = jnp.cumsum(at_least_float32(v_BKTH), 2)
    before = jnp.pad(total, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    index = jnp.broadcast_to(start_BT[:, None, :, None], (len(total), 1, length, 1))
    count = (place_BT - start_BT + 1)[:, None, :, None].astype(total.dtype)
    return (total - jnp.take_along_axis(before, index, 2)) / count


def mean_seen_from(
    v_BKSH: jax.Array, positions_BT: jax.Array, window: int | None, is_full: jax.Array | None
) -> jax.Array:
    """`mean_seen` for queries at `positions_BT` among the values of tokens 0 to S - 1."""
    back_BTS = positions_BT[..., None] - jnp.arange(v_BKSH.shape[2], dtype=jnp.int32)[None, None]
    seen_BTS = sees(back_BTS, window, is_full)
    weights_BTS = seen_BTS / jnp.sum(seen_BTS, -1, keepdims=True)
    return jnp.einsum('bts,bksh->bkth', weights_BTS, at_least_float32(v_BKSH))
