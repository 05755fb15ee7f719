"""Numbers as a mantissa and an exponent of 2, which no exponential overflows (arXiv:2001.04438)."""

import jax
import jax.numpy as jnp

# ln 2 in two parts, of which the first has 9 bits: its products with n up to 2^15 are exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
LOG2_E = 1.4426950408889634


def power_of_two(n: jax.Array) -> jax.Array:
    """2^n of whole numbers n <= 0, from its bits, exactly; 0 below the least normal number."""
    bits = (jnp.clip(n, -127.0, 0.0).astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def mantissa_of_exp(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(n, r) with exp(z) = exp(r) 2^n, n whole and |r| at most ln(2) / 2 but for rounding."""
    n = jnp.round(z * LOG2_E)
    return n, (z - n * LN2_HIGH) - n * LN2_LOW
