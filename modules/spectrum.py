"""Singular values of matrices."""

import jax
import jax.numpy as jnp

ITERATIONS = 30


def largest_singular_value(weight_LIO: jax.Array, iterations: int = ITERATIONS) -> jax.Array:
    """[...]: of each matrix of [..., I, O], by power iteration in float32 from a fixed start.

        u <- W^T W u / |W^T W u|, then sigma = |W u|

    Always from below: by a relative tan(a)^2 (s2 / s1)^(4 iterations) / 2 at most, s1 and s2 being
    the first two singular values and a the angle of the start to the first singular vector. With
    matrices of independent entries, whose largest singular values lie closest, ITERATIONS end 0.6%
    below on average and 2.5% at most (8 each of widths 64 to 1,024). 0 for a matrix of zeros.
    """
    weight_LIO = jax.lax.stop_gradient(weight_LIO).astype(jnp.float32)
    start_O = jax.random.normal(jax.random.key(0), weight_LIO.shape[-1:])
    start_LO = jnp.broadcast_to(start_O, (*weight_LIO.shape[:-2], *start_O.shape))

    def unit(x_LO):
        norm_L1 = jnp.linalg.norm(x_LO, axis=-1, keepdims=True)
        return x_LO / jnp.where(norm_L1 > 0, norm_L1, 1.0)

    def through(u_LO):
        return jnp.einsum('...io,...o->...i', weight_LIO, u_LO)

    def iterate(_, u_LO):
        return unit(jnp.einsum('...io,...i->...o', weight_LIO, unit(through(u_LO))))

    u_LO = jax.lax.fori_loop(0, iterations, iterate, unit(start_LO))
    return jnp.linalg.norm(through(u_LO), axis=-1)
