"""Products of groups of rows with a matrix of each group: ragged matmuls."""

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

# Summed over the rows of a group, [N, I] and [N, O] give [E, I, O].
_WEIGHT_GRADIENT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


@jax.custom_vjp
def grouped_product(x_NI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns x W_e for the rows of each group e: `jax.lax.ragged_dot`.

    TPUs and GPUs get one instruction for it. On CPUs JAX computes E N I O products, most of them
    with zeros (jax 0.12). JAX cannot map the gradient over runs, so `vmap` computes one run after
    another here. There is no forward-mode derivative.

    Args:
      x_NI: rows, sorted by group.
      w_EIO: a matrix for each group.
      sizes_E: the number of rows of each group, int32; they sum to N.

    Returns:
      [N, O], in the type of x.
    """
    return _multiply(x_NI, w_EIO, sizes_E)


@sequential_vmap
def _multiply(x_NI, w_EIO, sizes_E):
    return jax.lax.ragged_dot(x_NI, w_EIO, sizes_E)


@sequential_vmap
def _sum_outer_products(x_NI, grad_NO, sizes_E):
    return jax.lax.ragged_dot_general(x_NI, grad_NO, sizes_E, _WEIGHT_GRADIENT)


def _forward(x_NI, w_EIO, sizes_E):
    return _multiply(x_NI, w_EIO, sizes_E), (x_NI, w_EIO, sizes_E)


def _backward(residuals, grad_NO):
    x_NI, w_EIO, sizes_E = residuals
    x_grad_NI = _multiply(grad_NO, jnp.swapaxes(w_EIO, 1, 2), sizes_E)
    return x_grad_NI, _sum_outer_products(x_NI, grad_NO, sizes_E), None


grouped_product.defvjp(_forward, _backward)
