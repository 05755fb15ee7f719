"""Multi-head causal softmax attention with grouped key and value heads."""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.kernels import Kernels
from modules.kernels.attention.scores import Scores
from modules.options import Option
from modules.products import product
from modules.sequence import Sequence


class SoftmaxAttention(nn.Module):
    """out = softmax(rotate(x Wq) rotate(x Wk)^T / sqrt(H)) (x Wv) Wo.

    `rotate` applies the positions (`modules.positions`); `qk_norm(name)` makes the norm of queries
    or keys, per head over H, before the rotation (arXiv:2302.05442), and of values with
    `norm_values` (arXiv:2503.04598). `bias` adds one to each product. `init_gain` is for the value
    and output matrices. Sources: arXiv:1706.03762; grouped heads arXiv:2305.13245.
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
    def __call__(self, x_BTD, sequence: Sequence):
        q_BNTH = self.heads('query', x_BTD, self.n_heads)
        k_BKTH = self.heads('key', x_BTD, self.n_kv_heads)
        v_BKTH = self.heads('value', x_BTD, self.n_kv_heads, self.init_gain)
        q_BNTH = self.rotate(self.qk_norm('query_norm')(q_BNTH), sequence.positions_BT)
        k_BKTH = self.rotate(self.qk_norm('key_norm')(k_BKTH), sequence.positions_BT)
        if self.norm_values:
            v_BKTH = self.qk_norm('value_norm')(v_BKTH)
        mixed_BNTH = self.kernels.attention(q_BNTH, k_BKTH, v_BKTH, Scores(), sequence.segments_BT)
        return self.project(
            'out',
            jnp.swapaxes(mixed_BNTH, 1, 2),
            ('heads', 'head_dim', 'embed'),
            ('heads', 'head_dim'),
            x_BTD.shape[-1],
            self.init_gain,
        )

    def heads(self, name, x_BTD, n_heads, init_gain=1.0):
        """x_BTD projected to [B, heads, T, H]."""
        axes = ('embed', 'heads' if name == 'query' else 'kv_heads', 'head_dim')
        features = (n_heads, self.head_dim)
        y_BTNH = self.project(name, x_BTD, axes, ('embed',), features, init_gain)
        return jnp.swapaxes(y_BTNH, 1, 2)

    def project(self, name, x, axes, fan_in, features, init_gain):
        return product(
            self,
            name,
            x,
            axes,
            fan_in,
            features,
            matmul=self.kernels.matmul,
            dtype=self.dtype,
            bias=self.bias,
            init_gain=init_gain,
        )
