"""Products of activations and a weight matrix, and their table. `modules.products` calls it.

A row is a function (x [M, I], w [I, O], out_dtype) -> [M, O], accumulated and returned in
`out_dtype`; None: the type of x and w. flat: whether it supports only these two axes; `einsum`
supports any. any_rank: whether x may also be [B, T, I]. A row with options is a class, and its
instances are such functions: `wta_crs`, which estimates weight gradients, and the recipes of
`modules.kernels.matmul.low_precision`, which round the operands.
"""

import jax
import jax.numpy as jnp

from modules.facts import accept_any, row_decorator
from modules.kernels.matmul.low_precision import (
    MXFP8,
    NVFP4,
    BitNet,
    DeepSeekFP8,
    FP8Rowwise,
    FP8RowwiseWideDw,
    FP8Tensorwise,
    Int6,
    Int8,
    Simulated,
)
from modules.kernels.matmul.wta_crs import WTACRS

__all__ = ['MATMUL_KERNELS', 'direct', 'einsum']

matmul_row = row_decorator(flat=True, any_rank=False, check=accept_any)


@matmul_row()
def direct(x_MI: jax.Array, w_IO: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Matmul of flattened arrays, left to the compiler: `y = x w`.

    Args:
      x_MI: activations.
      w_IO: a weight matrix.
      out_dtype: the type of the result and of its accumulation; None: the type of x and w.

    Returns:
      [M, O].
    """
    return jnp.matmul(x_MI, w_IO, preferred_element_type=out_dtype)


@matmul_row()
def narrow_first(x_MI: jax.Array, w_IO: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Matmul whose weight gradient suits XLA:CPU, with its narrower side first: `y = x w`.

    The weight gradient sums over M. XLA:CPU runs [I, M] x [M, O] at half the speed if I > O (209
    against 363 GFLOP/s at M = 4096, I = 1024, O = 256). Multiplying by an explicit transpose makes
    autodiff compute [O, M] x [M, I] instead; the barrier keeps XLA from undoing the transpose.

    Args:
      x_MI: activations.
      w_IO: a weight matrix.
      out_dtype: the type of the result and of its accumulation; None: the type of x and w.

    Returns:
      [M, O].
    """
    if w_IO.shape[0] <= w_IO.shape[1]:
        return direct(x_MI, w_IO, out_dtype)
    w_OI = jax.lax.optimization_barrier(jnp.swapaxes(w_IO, 0, 1))
    contract = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x_MI, w_OI, contract, preferred_element_type=out_dtype)


@matmul_row(flat=False)
def einsum(
    x: jax.Array,
    w: jax.Array,
    out_dtype: jnp.dtype | None = None,
    n_batch: int = 0,
    n_summed: int = 1,
) -> jax.Array:
    """Matmul over all axes without flattening, so that the compiler chooses the layouts: `y = x w`.

    XLA for TPUs then writes heads in the order that attention reads, and reads them in the order
    that attention writes. A flat product would cost a copy of the whole array.

    Args:
      x: activations, batch axes first and summed axes last.
      w: weights, batch axes first, then the summed axes.
      out_dtype: the type of the result and of its accumulation; None: the type of x and w.
      n_batch: the number of batch axes.
      n_summed: the number of summed axes.

    Returns:
      Batch axes, then the other axes of x, then the other axes of w.
    """
    batch = tuple(range(n_batch))
    summed = tuple(range(x.ndim - n_summed, x.ndim)), tuple(range(n_batch, n_batch + n_summed))
    return jax.lax.dot_general(x, w, (summed, (batch, batch)), preferred_element_type=out_dtype)


MATMUL_KERNELS = {
    'direct': direct,
    'einsum': einsum,
    'narrow_first': narrow_first,
    'wta_crs': WTACRS,
    'simulated': Simulated,
    'fp8_tensorwise': FP8Tensorwise,
    'fp8_rowwise': FP8Rowwise,
    'fp8_rowwise_gw_hp': FP8RowwiseWideDw,
    'deepseek_fp8': DeepSeekFP8,
    'mxfp8': MXFP8,
    'nvfp4': NVFP4,
    'int8': Int8,
    'int6': Int6,
    'bitnet': BitNet,
}
