"""Products of activations and matrices: the seam for sharding, quantised and approximate products.

Activations are [B, T, D] in the model and flattened here, because XLA:CPU multiplies [B*T, D] far
faster than [B, T, D] in the backward pass. A matrix is a float32 parameter, cast where it is used.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from modules.params import declare


def matrix(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    fan_in: tuple[str, ...],
    *,
    init_gain: float = 1.0,
    role: str = 'hidden',
) -> jax.Array:
    """The parameter `name` of `module`, declared (`modules.params`), at unit scale."""
    normal = nn.initializers.normal(1.0)
    return module.param(name, declare(normal, role, axes, fan_in, init_gain=init_gain), shape)


def product(
    module: nn.Module,
    name: str,
    x: jax.Array,
    axes: tuple[str, ...],
    fan_in: tuple[str, ...],
    features: int | tuple[int, ...],
    *,
    matmul: Callable[..., jax.Array],
    dtype: jnp.dtype,
    bias: bool = False,
    init_gain: float = 1.0,
    role: str = 'hidden',
) -> jax.Array:
    """x W, or x W + b, in `dtype`: the parameters `name` and, with `bias`, `name`_bias.

    `axes` are those of W: batch axes, then `fan_in`, then those of the result, of sizes `features`.
    x has the batch axes first and those of `fan_in` last, such as

        [B, T, D]     ('embed', 'heads', 'head_dim')     over ('embed',)              [B, T, N, H]
        [B, T, N, H]  ('heads', 'head_dim', 'embed')     over ('heads', 'head_dim')   [B, T, D]
        [E, C, D]     ('expert', 'embed', 'mlp')         over ('embed',)              [E, C, F]

    `matmul` (`modules.kernels.matmul`) sees two dimensions and is mapped over batch axes.
    """
    features = (features,) if isinstance(features, int) else tuple(features)
    n_batch = axes.index(fan_in[0])
    after = n_batch + len(fan_in)
    if axes[n_batch:after] != tuple(fan_in) or len(axes) != after + len(features):
        raise ValueError(
            f'axes must be batch axes, then fan_in, then one for each of the features; got {axes} '
            f'with fan_in={fan_in} and features={features}'
        )
    batch, summed = x.shape[:n_batch], x.shape[x.ndim - len(fan_in) :]
    options = {'init_gain': init_gain, 'role': role}
    w = matrix(module, name, (*batch, *summed, *features), axes, fan_in, **options)
    flat_x = x.astype(dtype).reshape(*batch, -1, math.prod(summed))
    flat_w = w.reshape(*batch, math.prod(summed), -1).astype(dtype)
    for _ in batch:
        matmul = jax.vmap(matmul)
    y = matmul(flat_x, flat_w)
    if bias:
        zeros = declare(nn.initializers.zeros, 'vector', (*axes[:n_batch], *axes[after:]))
        b = module.param(f'{name}_bias', zeros, (*batch, *features)).astype(dtype)
        y = y + jnp.broadcast_to(b.reshape(*batch, 1, -1), y.shape)
    return y.reshape(*x.shape[: x.ndim - len(fan_in)], *features)


class Readout(struct.PyTreeNode):
    """logits = x W + b, float32 at least; softcap * tanh(logits / softcap) where that is not 0.

    Called on x [..., D] of any number of axes, so that a loss can take the logits of some tokens at
    a time. weight_DV: as stored, cast to `dtype` for the product; bias_V: None for none.
    """

    weight_DV: jax.Array
    bias_V: jax.Array | None
    softcap: float = struct.field(pytree_node=False)
    matmul: Callable[..., jax.Array] = struct.field(pytree_node=False)
    dtype: jnp.dtype = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., V]."""
        exact = jnp.promote_types(self.dtype, jnp.float32)
        x_MD, weight_DV = x.reshape(-1, x.shape[-1]), self.weight_DV.astype(self.dtype)
        logits_MV = self.matmul(x_MD, weight_DV, exact)
        if self.bias_V is not None:
            logits_MV = logits_MV + jnp.broadcast_to(self.bias_V, logits_MV.shape)
        if self.softcap:
            logits_MV = self.softcap * jnp.tanh(logits_MV / self.softcap)
        return logits_MV.reshape(*x.shape[:-1], -1)
