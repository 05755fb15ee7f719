"""Measurements of activations [B, T, D]: of the residual stream and of sublayers' outputs."""

import jax
import jax.numpy as jnp

SINK_SHARE = 0.01  # the share of the coordinates that forms the sink


@jax.named_scope('diagnostics')
def moments(x_BTD: jax.Array, valid_BT: jax.Array | None = None) -> dict[str, jax.Array]:
    """Returns rms, largest and kurtosis over all coordinates of tokens without padding; float32.

        rms = sqrt(mean x^2)    largest = max |x|    kurtosis = mean (x - m)^4 / (mean (x - m)^2)^2

    with m = mean x. Kurtosis is 3 for a normal distribution, more with outliers (arXiv:2405.19279).
    valid_BT is 0 for padding; None: no padding.
    """
    x_BTD, weights_BT1 = _mask_padding(x_BTD, valid_BT)
    count = jnp.maximum(jnp.sum(weights_BT1), 1.0) * x_BTD.shape[-1]
    rms = jnp.sqrt(jnp.sum(jnp.square(x_BTD)) / count)
    unit_BTD = x_BTD / jnp.where(rms > 0, rms, 1.0)  # the fourth power of x may overflow
    centered_BTD = (unit_BTD - jnp.sum(unit_BTD) / count) * weights_BT1
    variance = jnp.sum(jnp.square(centered_BTD)) / count
    return {
        'rms': rms,
        'largest': jnp.max(jnp.abs(x_BTD)),
        'kurtosis': jnp.sum(jnp.square(jnp.square(centered_BTD))) / count / jnp.square(variance),
    }


@jax.named_scope('diagnostics')
def sink_share(x_BTD: jax.Array, valid_BT: jax.Array | None = None) -> jax.Array:
    """Returns the share of the squared norm in the largest SINK_SHARE of coordinates, at least one.

    This is the sum of the largest e_d = mean over tokens of x_td^2, over the sum of all e_d:
    SINK_SHARE if all are equal. Coordinates that stand out in every token are the residual sinks of
    arXiv:2601.22966.
    """
    x_BTD, _ = _mask_padding(x_BTD, valid_BT)
    x_BTD = x_BTD / jnp.maximum(jnp.max(jnp.abs(x_BTD)), jnp.finfo(jnp.float32).tiny)
    energy_D = jnp.sum(jnp.square(x_BTD), (0, 1))
    largest, _ = jax.lax.top_k(energy_D, max(1, round(SINK_SHARE * len(energy_D))))
    return jnp.sum(largest) / jnp.sum(energy_D)


def _mask_padding(x_BTD, valid_BT):
    """Returns (x in float32, 0 for padding; token weights [B, T, 1], 0 or 1); no gradient."""
    x_BTD = jax.lax.stop_gradient(x_BTD).astype(jnp.float32)
    if valid_BT is None:
        return x_BTD, jnp.ones((*x_BTD.shape[:2], 1))
    weights_BT1 = (jnp.broadcast_to(valid_BT, x_BTD.shape[:2]) > 0).astype(jnp.float32)[..., None]
    return jnp.where(weights_BT1 > 0, x_BTD, 0.0), weights_BT1
