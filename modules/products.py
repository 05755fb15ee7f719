"""Matmuls of activations and parameters, which layers compute here and nowhere else.

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

from modules.kernels.matmul.low_precision import Simulated
from modules.kernels.matmul.wta_crs import WTACRS, SampledRows, sampled_product
from modules.parallel.axes import count_axis_shards, gather_weights
from modules.params import declare
from modules.precision.blocks import ROUNDING_ERRORS
from modules.precision.formats import WIDE
from modules.precision.products import record_gradient
from modules.statistics import (
    DIAGNOSTICS,
    GRADIENT_ERRORS,
    INPUT_MOMENTS,
    INPUTS,
    at_least_float32,
    is_recording,
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
    """Makes the parameter `name` of `module`, declared (`modules.params`), at unit scale.

    Args:
      module: the module that gets the parameter.
      name: its name.
      shape: its shape.
      axes: a logical name for each dimension.
      fan_in: the axes summed over in the forward pass.
      init: draws at unit scale.
      role: a row of `modules.params.ROLES`.
      **spec_fields: other fields of its `ParamSpec`.

    Returns:
      The parameter, float32.
    """
    return module.param(name, declare(init, role, axes, fan_in, **spec_fields), shape)


class SharedInput(struct.PyTreeNode):
    """x [..., D] in the type of matmuls, and the rows that stand for it in weight gradients.

    rows: None if all rows are kept.
    """

    x: jax.Array
    rows: SampledRows | None


class RowSampler(nn.Module):
    """Samples rows of an input by a random key of this module, another for each layer and update.

    It is a module so that the keys of parameters do not change.
    """

    matmul: WTACRS

    @nn.compact
    def __call__(self, flat_x: jax.Array) -> SampledRows | None:
        """Samples from each [M, I] of [..., M, I].

        Returns None in evaluation, and if all rows are kept.
        """
        if not (is_training(self) or self.is_initializing()):
            return None  # evaluation may have no key
        key = next_key(self)
        if key is None:
            return None
        sample_rows = self.matmul.sample_rows
        if flat_x.ndim == 3:
            key, sample_rows = jax.random.split(key, len(flat_x)), jax.vmap(sample_rows)
        return sample_rows(key, flat_x)


class RoundingKey(nn.Module):
    """A random key for stochastic rounding, another for each product and update.

    It is a module so that the keys of parameters do not change.
    """

    @nn.compact
    def __call__(self) -> jax.Array | None:
        """Returns the key; None in evaluation, which may have none."""
        if not (is_training(self) or self.is_initializing()):
            return None
        return next_key(self)


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
    """Prepares x for several matmuls.

    If `matmul` keeps only some rows of x for weight gradients, all matmuls share one sample.

    Args:
      module: the layer.
      name: of the input; the sampler is called `name`_rows.
      x: [batch axes, ..., summed axes].
      matmul: a row of `modules.kernels.matmul`.
      dtype: the type of the matmul.
      n_batch: the number of batch axes.
      n_summed: the number of summed axes.

    Returns:
      x, or a `SharedInput` for a matmul that samples rows.
    """
    if not isinstance(matmul, WTACRS):
        return x
    rows = RowSampler(matmul, name=f'{name}_rows')(
        flatten_tokens(x.astype(dtype), n_batch, n_summed)
    )
    return SharedInput(x.astype(dtype), rows)


def flatten_tokens(x: jax.Array, n_batch: int, n_summed: int) -> jax.Array:
    """Flattens x to [batch axes, M, I].

    If T is sharded, the shape is [B, T, I]: XLA cannot shard B and T as a single axis.

    Args:
      x: [batch axes, ..., summed axes].
      n_batch: the number of batch axes.
      n_summed: the number of summed axes.

    Returns:
      The flattened x.
    """
    n_leading = n_batch
    if n_batch == 0 and x.ndim - n_summed > 1 and count_axis_shards('T') > 1:
        n_leading = 1
    return x.reshape(*x.shape[:n_leading], -1, math.prod(x.shape[x.ndim - n_summed :]))


def record_inputs(module: nn.Module, name: str, x: jax.Array, n_batch: int, n_summed: int) -> None:
    """Records sums over tokens under the name of a parameter, for collections that are mutable.

    In INPUTS: of x^2, [batch axes, summed axes]. In INPUT_MOMENTS: of x_i x_j, [batch axes, I, I],
    with the summed axes flattened.

    Args:
      module: the layer.
      name: of the parameter.
      x: [batch axes, ..., summed axes].
      n_batch: the number of batch axes.
      n_summed: the number of summed axes.
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
    matmul: Any,
    dtype: jnp.dtype,
    bias: bool = False,
    **matrix_options: Any,
) -> jax.Array:
    """Computes x W, or x W + b, in `dtype`, with the parameters `name` and `name`_bias.

        x             axes of W                          fan_in                       result
        [B, T, D]     ('embed', 'heads', 'head_dim')     ('embed',)                   [B, T, N, H]
        [B, T, N, H]  ('heads', 'head_dim', 'embed')     ('heads', 'head_dim')        [B, T, D]
        [E, C, D]     ('expert', 'embed', 'mlp')         ('embed',)                   [E, C, F]

    Args:
      module: the layer.
      name: of the parameter.
      x: batch axes first, the axes of `fan_in` last; from `prepare_input` if several matmuls share
        it.
      axes: of W: batch axes, then `fan_in`, then the axes of the result.
      fan_in: the summed axes.
      features: the sizes of the result's axes.
      matmul: a row of `modules.kernels.matmul`. It sees two dimensions and is mapped over batch
        axes, or all dimensions if it is not flat.
      dtype: the type of the matmul.
      bias: whether b is added.
      **matrix_options: init, init_gain and frozen, as in `make_matrix`.

    Returns:
      The result, [batch axes, ..., features].

    Raises:
      ValueError: for axes in another order.
    """
    features = (features,) if isinstance(features, int) else features
    n_batch = axes.index(fan_in[0])
    end = n_batch + len(fan_in)
    if axes[n_batch:end] != tuple(fan_in) or len(axes) != end + len(features):
        raise ValueError(
            'axes must be the batch axes, then fan_in, then one axis per feature dimension; got '
            f'{axes} with fan_in={fan_in} and features={features}'
        )
    if isinstance(x, jax.Array):
        sizes = {'n_batch': n_batch, 'n_summed': len(fan_in)}
        x = prepare_input(module, name, x, matmul=matmul, dtype=dtype, **sizes)
    kernel, extra, flat, any_rank = matmul, (), matmul.flat, matmul.any_rank
    if isinstance(x, SharedInput):
        if x.rows is not None:
            matmul, extra = sampled_product, (x.rows,)
        x = x.x
    elif isinstance(matmul, Simulated) and matmul.precision.is_random:
        key = RoundingKey(name=f'{name}_rounding')()
        if key is not None:
            n_batch_sizes = x.shape[:n_batch]
            matmul = matmul.multiply_with_key
            extra = (jax.random.split(key, n_batch_sizes) if n_batch_sizes else key,)
    record_inputs(module, name, x, n_batch, len(fan_in))
    batch, summed = x.shape[:n_batch], x.shape[x.ndim - len(fan_in) :]
    shape = (*batch, *summed, *features)
    w = make_matrix(module, name, shape, axes, fan_in, **matrix_options)
    if bias:
        zeros = declare(nn.initializers.zeros, 'vector', (*axes[:n_batch], *axes[end:]))
        b = module.param(f'{name}_bias', zeros, (*batch, *features)).astype(dtype)
    result_shape = (*x.shape[: x.ndim - len(fan_in)], *features)
    if module.is_initializing():  # only the parameters matter
        return jnp.zeros(result_shape, dtype)
    if flat:
        flat_x = flatten_tokens(x.astype(dtype), n_batch, len(fan_in))
        flat_w = w.reshape(*batch, math.prod(summed), -1).astype(dtype)
        if isinstance(kernel, Simulated) and is_recording(module):
            measure = kernel.measure_rounding
            for _ in batch:
                measure = jax.vmap(measure)
            for quantity, values in measure(flat_x, flat_w).items():
                module.sow(DIAGNOSTICS, f'{quantity}_{name}', jnp.mean(values))
        if flat_x.ndim > n_batch + 2 and not any_rank:  # [B, T, I], where T is sharded
            matmul = jax.vmap(matmul, (0, None))
        for _ in batch:
            matmul = jax.vmap(matmul)
        groups = [*([axis] for axis in axes[:n_batch]), fan_in, axes[end:]]
        y = gather_weights(matmul, groups)(flat_x, flat_w, *extra)
        if isinstance(kernel, Simulated) and kernel.precision.rounded_g.format != WIDE:
            y = record_rounded_gradient(module, name, kernel, y, batch)
    else:
        matmul = functools.partial(matmul, n_batch=n_batch, n_summed=len(fan_in))
        y = gather_weights(matmul, [[axis] for axis in axes])(x.astype(dtype), w.astype(dtype))
    if bias:
        last = (-1,) if flat else features
        ones = [1] * (y.ndim - n_batch - len(last))
        y = y + jnp.broadcast_to(b.reshape(*batch, *ones, *last), y.shape)
    return y.reshape(result_shape)


def record_rounded_gradient(
    module: nn.Module, name: str, kernel: Simulated, y: jax.Array, batch: tuple[int, ...]
) -> jax.Array:
    """Returns y; if GRADIENT_ERRORS are requested, rounding of its gradient is measured.

    Args:
      module: the layer.
      name: of the matrix.
      kernel: rounds the gradient.
      y: the product.
      batch: sizes of the first axes of y, for each of which the gradient is rounded by itself.
    """
    errors = {}
    for quantity in ROUNDING_ERRORS:
        variable = f'{quantity}_g_{name}'
        if module.is_mutable_collection(GRADIENT_ERRORS):
            module.variable(GRADIENT_ERRORS, variable, jnp.zeros, ())
        if module.has_variable(GRADIENT_ERRORS, variable):
            # The gradient of the share is the mean over the first axes.
            share = module.get_variable(GRADIENT_ERRORS, variable) / math.prod(batch)
            errors[quantity] = jnp.broadcast_to(share, batch)
    if not errors:
        return y
    numbers = dict(kernel.numbers)

    def record(y, errors):
        return record_gradient(kernel.precision, y, errors, numbers)

    for _ in batch:
        record = jax.vmap(record)
    return record(y, errors)


class Readout(struct.PyTreeNode):
    """logits = x W + b, float32 at least; softcap * tanh(logits / softcap) if softcap is not 0.

    A loss calls it on the activations of a chunk of tokens.

    weight_DV: as stored, cast to `dtype` for the matmul.

    bias_V: None without a bias.

    is_table: whether the weight is the transposed table of embeddings, and sharded as that table.
    """

    weight_DV: jax.Array
    bias_V: jax.Array | None
    softcap: float = struct.field(pytree_node=False)
    matmul: Any = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)
    is_table: bool = struct.field(pytree_node=False, default=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits [..., V] of x [..., D]."""
        exact = jnp.promote_types(self.dtype, jnp.float32)
        flat_x, weight_DV = flatten_tokens(x, 0, 1), self.weight_DV.astype(self.dtype)
        matmul = functools.partial(self.matmul, out_dtype=exact)
        is_whole = flat_x.ndim == 2 or self.matmul.any_rank
        logits = (matmul if is_whole else jax.vmap(matmul, (0, None)))(flat_x, weight_DV)
        if self.bias_V is not None:
            logits = logits + jnp.broadcast_to(self.bias_V, logits.shape)
        if self.softcap:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        return logits.reshape(*x.shape[:-1], -1)
