"""Products of activations and parameters, which layers compute here and nowhere else.

Activations are [B, T, D] in the model and flattened here, because XLA:CPU multiplies [B*T, D] far
faster than [B, T, D] in the backward pass. A matrix is a float32 parameter, cast where it is used.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from modules.kernels.matmul.wta_crs import WTACRS, SampledRows, sampled_product
from modules.parallel.axes import count_axis_shards, gather_weights
from modules.params import declare
from modules.statistics import (
    INPUT_MOMENTS,
    INPUTS,
    at_least_float32,
    is_training,
    next_key,
)

NORMAL = nn.initializers.normal(1.0)


def make_matrix(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    fan_in: tuple[str, ...],
    *,
    init: Callable[..., jax.Array] = NORMAL,
    role: str = 'hidden',
    **spec_fields: Any,
) -> jax.Array:
    """Makes the parameter `name` of `module`, declared (`modules.params`), at unit scale."""
    return module.param(name, declare(init, role, axes, fan_in, **spec_fields), shape)


class SharedInput(struct.PyTreeNode):
    """x [..., D] in the type of products, and the rows that stand for it in weight gradients; None:
    all do.
    """

    x: jax.Array
    rows: SampledRows | None


class RowSampler(nn.Module):
    """Draws the rows of an input by a key of its own, another for each layer and update. It is a
    module, so that the keys of parameters do not change.
    """

    matmul: WTACRS

    @nn.compact
    def __call__(self, flat_x):
        """Draws from each [M, I] of [..., M, I]; None in evaluation, and where all are kept."""
        if not (is_training(self) or self.is_initializing()):
            return None  # there may be no key
        key = next_key(self)
        if key is None:
            return None
        rows_of = self.matmul.sample_rows
        if flat_x.ndim == 3:
            key, rows_of = jax.random.split(key, len(flat_x)), jax.vmap(rows_of)
        return rows_of(key, flat_x)


def prepare_input(
    module: nn.Module,
    name: str,
    x: jax.Array,
    *,
    matmul: Callable[..., jax.Array],
    dtype: jnp.dtype,
    n_batch: int = 0,
    n_summed: int = 1,
) -> jax.Array | SharedInput:
    """Prepares x, with `n_batch` batch axes and `n_summed` summed ones, for several products.

    Where `matmul` keeps some rows of x for weight gradients, one set serves them all.
    """
    if not isinstance(matmul, WTACRS):
        return x
    rows = RowSampler(matmul, name=f'{name}_rows')(
        flatten_tokens(x.astype(dtype), n_batch, n_summed)
    )
    return SharedInput(x.astype(dtype), rows)


def flatten_tokens(x: jax.Array, n_batch: int, n_summed: int) -> jax.Array:
    """Flattens x to [batch axes, M, I]; to [B, T, I] where T is cut over devices, as XLA cannot cut
    B and T as one axis.
    """
    kept = n_batch
    if n_batch == 0 and x.ndim - n_summed > 1 and count_axis_shards('T') > 1:
        kept = 1
    return x.reshape(*x.shape[:kept], -1, math.prod(x.shape[x.ndim - n_summed :]))


def record_inputs(module: nn.Module, name: str, x: jax.Array, n_batch: int, n_summed: int) -> None:
    """Records sums over tokens under the name of the parameter: in INPUTS of x^2, [batch axes,
    summed axes], and in INPUT_MOMENTS of x_i x_j, [batch axes, I, I], with the summed axes as one.
    Each is computed where its collection is mutable.
    """
    if module.is_initializing():
        return
    if module.is_mutable_collection(INPUTS):
        tokens = tuple(range(n_batch, x.ndim - n_summed))
        module.put_variable(INPUTS, name, jnp.sum(at_least_float32(x) ** 2, tokens))
    if module.is_mutable_collection(INPUT_MOMENTS):
        n_inputs = math.prod(x.shape[x.ndim - n_summed :])
        flat_x = at_least_float32(x).reshape(*x.shape[:n_batch], -1, n_inputs)
        sums_II = jnp.einsum('...mi,...mj->...ij', flat_x, flat_x)
        module.put_variable(INPUT_MOMENTS, name, sums_II)


def product(
    module: nn.Module,
    name: str,
    x: jax.Array | SharedInput,
    axes: tuple[str, ...],
    fan_in: tuple[str, ...],
    features: int | tuple[int, ...],
    *,
    matmul: Callable[..., jax.Array],
    dtype: jnp.dtype,
    bias: bool = False,
    **matrix_options: Any,
) -> jax.Array:
    """Computes x W, or x W + b, in `dtype`, with the parameters `name` and `name`_bias.

    `axes` are those of W: batch axes, then `fan_in`, then those of the result, of sizes `features`.
    x has the batch axes first and those of `fan_in` last, for example

        [B, T, D]     ('embed', 'heads', 'head_dim')     over ('embed',)              [B, T, N, H]
        [B, T, N, H]  ('heads', 'head_dim', 'embed')     over ('heads', 'head_dim')   [B, T, D]
        [E, C, D]     ('expert', 'embed', 'mlp')         over ('embed',)              [E, C, F]

    `matmul` (`modules.kernels.matmul`) sees two dimensions and is mapped over batch axes, or all
    where it is not flat. An input of several products comes from `prepare_input`. `more` is that of
    `matrix`: init, init_gain, frozen.
    """
    features = (features,) if isinstance(features, int) else features
    n_batch = axes.index(fan_in[0])
    after = n_batch + len(fan_in)
    if axes[n_batch:after] != tuple(fan_in) or len(axes) != after + len(features):
        raise ValueError(
            f'axes must be batch axes, then fan_in, then one for each of the features; got {axes} '
            f'with fan_in={fan_in} and features={features}'
        )
    if isinstance(x, jax.Array):
        sizes = {'n_batch': n_batch, 'n_summed': len(fan_in)}
        x = prepare_input(module, name, x, matmul=matmul, dtype=dtype, **sizes)
    rows, flat = (), matmul.flat
    if isinstance(x, SharedInput):
        if x.rows is not None:
            matmul, rows = sampled_product, (x.rows,)
        x = x.x
    record_inputs(module, name, x, n_batch, len(fan_in))
    batch, summed = x.shape[:n_batch], x.shape[x.ndim - len(fan_in) :]
    shape = (*batch, *summed, *features)
    w = make_matrix(module, name, shape, axes, fan_in, **matrix_options)
    if bias:
        zeros = declare(nn.initializers.zeros, 'vector', (*axes[:n_batch], *axes[after:]))
        b = module.param(f'{name}_bias', zeros, (*batch, *features)).astype(dtype)
    of_result = (*x.shape[: x.ndim - len(fan_in)], *features)
    if module.is_initializing():  # of which the parameters alone are wanted
        return jnp.zeros(of_result, dtype)
    if flat:
        flat_x = flatten_tokens(x.astype(dtype), n_batch, len(fan_in))
        flat_w = w.reshape(*batch, math.prod(summed), -1).astype(dtype)
        if flat_x.ndim > n_batch + 2:
            matmul = jax.vmap(matmul, (0, None))
        for _ in batch:
            matmul = jax.vmap(matmul)
        groups = [*([axis] for axis in axes[:n_batch]), fan_in, axes[after:]]
        y = gather_weights(matmul, groups)(flat_x, flat_w, *rows)
    else:
        matmul = functools.partial(matmul, n_batch=n_batch, n_summed=len(fan_in))
        y = gather_weights(matmul, [[axis] for axis in axes])(x.astype(dtype), w.astype(dtype))
    if bias:
        last = (-1,) if flat else features
        ones = [1] * (y.ndim - n_batch - len(last))
        y = y + jnp.broadcast_to(b.reshape(*batch, *ones, *last), y.shape)
    return y.reshape(of_result)


class Readout(struct.PyTreeNode):
    """logits = x W + b, float32 at least; softcap * tanh(logits / softcap) where that is not 0.

    A loss calls it on the activations of some tokens at a time. weight_DV: as stored, cast to
    `dtype` for the product. bias_V: None for none. is_table: the weight is the table of embeddings,
    transposed, and cut over devices as that is.
    """

    weight_DV: jax.Array
    bias_V: jax.Array | None
    softcap: float = struct.field(pytree_node=False)
    matmul: Callable[..., jax.Array] = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)
    is_table: bool = struct.field(pytree_node=False, default=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits [..., V] of x [..., D]."""
        exact = jnp.promote_types(self.dtype, jnp.float32)
        flat_x, weight_DV = flatten_tokens(x, 0, 1), self.weight_DV.astype(self.dtype)
        matmul = functools.partial(self.matmul, out_dtype=exact)
        logits = (matmul if flat_x.ndim == 2 else jax.vmap(matmul, (0, None)))(flat_x, weight_DV)
        if self.bias_V is not None:
            logits = logits + jnp.broadcast_to(self.bias_V, logits.shape)
        if self.softcap:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        return logits.reshape(*x.shape[:-1], -1)
