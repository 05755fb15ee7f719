"""Multi-head causal softmax attention with grouped key and value heads."""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.kernels import Kernels
from modules.options import Option
from modules.params import declare
from modules.sequence import Sequence


class SoftmaxAttention(nn.Module):
    """out = softmax(rotate(x Wq) rotate(x Wk)^T / sqrt(H)) (x Wv) Wo.

    x_MD holds M = B * T tokens. `rotate` applies the positions (`modules.positions`);
    `qk_norm(name)` makes the norm of queries or keys, per head over H, before the rotation
    (arXiv:2302.05442), and of values with `norm_values` (arXiv:2503.04598). `bias` adds one to each
    product. `init_gain` is for the value and output matrices. Sources: arXiv:1706.03762; grouped
    heads arXiv:2305.13245.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    qk_norm: Callable[[str], nn.Module]
    rotate: Callable[[jax.Array, jax.Array], jax.Array]
    kernels: Kernels
    dtype: jnp.dtype
    norm_values: Annotated[
        bool, Option('whether values are normalized too, as queries and keys are')
    ] = False
    bias: bool = False
    init_gain: float = 1.0

    @nn.compact
    def __call__(self, x_MD, sequence: Sequence):
        d_model = x_MD.shape[-1]
        q_BNTH = self.heads('query', x_MD, self.n_heads, sequence.length)
        k_BKTH = self.heads('key', x_MD, self.n_kv_heads, sequence.length)
        v_BKTH = self.heads('value', x_MD, self.n_kv_heads, sequence.length, self.init_gain)
        q_BNTH = self.rotate(self.qk_norm('query_norm')(q_BNTH), sequence.positions_BT)
        k_BKTH = self.rotate(self.qk_norm('key_norm')(k_BKTH), sequence.positions_BT)
        if self.norm_values:
            v_BKTH = self.qk_norm('value_norm')(v_BKTH)
        mixed_BNTH = self.kernels.attention(q_BNTH, k_BKTH, v_BKTH, sequence.segments_BT)
        mixed_MI = jnp.swapaxes(mixed_BNTH, 1, 2).reshape(x_MD.shape[0], -1)
        init = declare(
            nn.initializers.normal(1.0),
            role='hidden',
            axes=('heads', 'head_dim', 'embed'),
            fan_in=('heads', 'head_dim'),
            init_gain=self.init_gain,
        )
        out_NHD = self.param('out', init, (self.n_heads, self.head_dim, d_model))
        y_MD = self.kernels.matmul(mixed_MI, out_NHD.reshape(-1, d_model).astype(self.dtype))
        return self.with_bias('out', y_MD, ('embed',), (d_model,))

    def heads(self, name, x_MD, n_heads, length, init_gain=1.0):
        """x_MD projected to [B, heads, T, H]."""
        axes = ('embed', 'heads' if name == 'query' else 'kv_heads', 'head_dim')
        init = declare(
            nn.initializers.normal(1.0), 'hidden', axes, fan_in=('embed',), init_gain=init_gain
        )
        w_DNH = self.param(name, init, (x_MD.shape[-1], n_heads, self.head_dim))
        y_MI = self.kernels.matmul(x_MD, w_DNH.reshape(x_MD.shape[-1], -1).astype(self.dtype))
        y_MI = self.with_bias(name, y_MI, axes[1:], (n_heads, self.head_dim))
        return jnp.swapaxes(y_MI.reshape(-1, length, n_heads, self.head_dim), 1, 2)

    def with_bias(self, name, y_MO, axes, shape):
        if not self.bias:
            return y_MO
        zeros = declare(nn.initializers.zeros, 'vector', axes)
        b_O = self.param(f'{name}_bias', zeros, shape).reshape(-1).astype(self.dtype)
        return y_MO + jnp.broadcast_to(b_O, y_MO.shape)
