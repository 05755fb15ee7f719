"""Shared parts of attention layers: heads, norms, the gate, the output, and the cache.

A layer caches the tokens it has read, in the Linen collection `cache`, where its `Sequence` has a
capacity: rows are then read in parts, one token or many at a time, each behind what the cache holds
of its row. Rows may differ in length: padding behind the tokens of a row is not kept.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from modules.kernels import Kernels
from modules.numerics import ATTENTION_PRODUCTS
from modules.options import Option
from modules.products import prepare_input, product
from modules.sequence import Sequence
from modules.statistics import DIAGNOSTICS, is_recording

CACHE = 'cache'
QKV = ('query', 'key', 'value')  # the names of their matrices


class MultiHead(nn.Module):
    """out = (gate * mix(q, k, v)) Wo with q = norm(x Wq), k = norm(x Wk), v = x Wv.

    Subclasses define `mix`. `qk_norm(name, over)` makes the norm of queries or keys, over the
    features of a head or over all heads together, before any rotation (arXiv:2302.05442), and of
    values with `norm_values` (arXiv:2503.04598). The gate is sigmoid(x Wg), of the layer's own
    input, so about one half at the start (arXiv:2505.06708). `rotate` applies the positions
    (`modules.positions`). `bias` adds one to each product, `qkv_bias` to those of queries, keys and
    values (Qwen2, arXiv:2407.10671). `init_gain` is for the value and output matrices. Grouped
    heads: arXiv:2305.13245.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    qk_norm: Callable[[str, str], nn.Module]
    rotate: Callable[..., jax.Array]
    kernels: Kernels
    dtype: jnp.dtype
    norm_values: Annotated[bool, Option('whether values are normalized as keys are')] = False
    qk_norm_over: Annotated[
        str, Option('what model.qk_norm is over: a head, or all heads', choices=('head', 'model'))
    ] = 'head'
    gate: Annotated[
        str, Option('of results, by head or feature', choices=('none', 'headwise', 'elementwise'))
    ] = 'none'
    bias: bool = False
    qkv_bias: bool = False
    init_gain: float = 1.0

    # Whether it has logits of pairs, which `scores()` describes and kernels of attention compute;
    # whether slopes are added to them; whether rows of tokens may be cut over devices.
    has_scores: ClassVar[bool] = False
    takes_slopes: ClassVar[bool] = False
    supports_context_axis: ClassVar[bool] = False

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:
        """Raises ValueError for norms of queries, keys or values where there is none."""
        if recipe.qk_norm.name != 'none':
            return
        if part.options['qk_norm_over'] == 'model':
            raise ValueError(
                'attention.qk_norm_over=model is about model.qk_norm, which is none; set it, to '
                'rmsnorm as in OLMo 2'
            )
        if part.options['norm_values']:
            raise ValueError(
                'attention.norm_values normalizes values by model.qk_norm, which is none '
                f'({recipe.placement}); set it, to rmsnorm as published'
            )

    @nn.compact
    def __call__(self, x_BTD, sequence: Sequence):
        d_model = x_BTD.shape[-1]
        x_BTD = prepare_input(self, 'input', x_BTD, matmul=self.kernels.matmul, dtype=self.dtype)
        q_BNTH = self.normalize_heads(
            'query_norm', self.project_heads('query', x_BTD, self.n_heads)
        )
        k_BKTH = self.normalize_heads('key_norm', self.project_heads('key', x_BTD, self.n_kv_heads))
        v_BTKH = self.project_heads('value', x_BTD, self.n_kv_heads, self.init_gain)
        v_BKTH = (
            self.normalize_heads('value_norm', v_BTKH) if self.norm_values else swap_heads(v_BTKH)
        )
        mixed_BTNH = swap_heads(self.mix(x_BTD, q_BNTH, k_BKTH, v_BKTH, sequence))
        axes, gated_BTNH = ('heads', 'head_dim', 'embed'), self.apply_gate(x_BTD, mixed_BTNH)
        return self.project('out', gated_BTNH, axes, d_model, self.init_gain, fan_in=axes[:2])

    def mix(self, x_BTD, q_BNTH, k_BKTH, v_BKTH, sequence):
        """Returns the mean of the values that each token sees, as it weighs them, [B, N, T, H]."""
        raise NotImplementedError

    @classmethod
    def attended_tokens(cls, length: int, head_dim: int, block: int, **options) -> float:
        """Returns how many pairs of a query and a key cost as much as one token in a row of
        `length`, in layer `block` (from 1), with the options of the config (`lm.training.flops`).
        """
        raise NotImplementedError

    @classmethod
    def attended_tokens_unmasked(cls, length: int, head_dim: int, block: int, **options) -> float:
        """Returns `attended_tokens` where no mask leaves pairs of tokens out."""
        return cls.attended_tokens(length, head_dim, block, **options)

    def project_heads(self, name, x_BTD, n_heads, init_gain=1.0):
        """Projects x to [B, T, heads, H]."""
        axes = ('embed', 'heads' if name == 'query' else 'kv_heads', 'head_dim')
        return self.project(name, x_BTD, axes, (n_heads, self.head_dim), init_gain)

    def normalize_heads(self, name, y_BTNH):
        """Normalizes [B, T, N, H] and returns [B, N, T, H]."""
        norm = self.qk_norm(name, self.qk_norm_over)
        if self.qk_norm_over == 'head':
            return norm(swap_heads(y_BTNH))
        y_BTD = norm(y_BTNH.reshape(*y_BTNH.shape[:2], -1))
        return swap_heads(y_BTD.reshape(y_BTNH.shape))

    def apply_positions(self, y_BNTH, sequence):
        """Turns [B, N, T, H] by its positions; a cache may hold more tokens than are read here."""
        if self.is_initializing():
            return y_BNTH
        return self.rotate(y_BNTH, sequence.positions_BT, capacity=sequence.capacity)

    def apply_gate(self, x_BTD, mixed_BTNH):
        if self.gate == 'none':
            return mixed_BTNH
        axes, features = ('embed', 'heads', 'head_dim'), (self.n_heads, self.head_dim)
        if self.gate == 'headwise':
            gate_BTN = self.project('gate', x_BTD, axes[:2], features[:1])
            gate_BTNH = jnp.broadcast_to(gate_BTN[..., None], mixed_BTNH.shape)
        else:
            gate_BTNH = self.project('gate', x_BTD, axes, features)
        gate_BTNH = jax.nn.sigmoid(gate_BTNH.astype(jnp.promote_types(self.dtype, jnp.float32)))
        return (mixed_BTNH * gate_BTNH).astype(mixed_BTNH.dtype)

    def project(self, name, x, axes, features, init_gain=1.0, fan_in=('embed',)):
        biased = self.bias or (self.qkv_bias and name in QKV)
        options = {'matmul': self.kernels.matmul, 'dtype': self.dtype, 'bias': biased}
        y = product(self, name, x, axes, fan_in, features, init_gain=init_gain, **options)
        return checkpoint_name(y, ATTENTION_PRODUCTS)

    def record(self, statistics: Callable[[], dict[str, jax.Array]]) -> None:
        """Sows diagnostics of the weights, {name: [N]}, where they are asked for."""
        if is_recording(self):
            for name, value_N in statistics().items():
                self.sow(DIAGNOSTICS, name, value_N)

    def update_cache(self, name: str, x_BKTH: jax.Array, sequence: Sequence) -> jax.Array:
        """Caches x, and returns that of all tokens so far by position, [B, K, S, H]; S: capacity,
        or as many as the cache that is given has room for.

        Places beyond the tokens of a row hold what no query may read: zeros, or earlier values.
        """
        batch, n_heads, _, head_dim = x_BKTH.shape
        shape = (batch, n_heads, sequence.capacity, head_dim)
        kept = self.variable(CACHE, name, jnp.zeros, shape, x_BKTH.dtype)
        places_BT = sequence.positions_BT
        if sequence.valid_BT is not None:  # what is written beyond the last place is dropped
            places_BT = jnp.where(sequence.valid_BT > 0, places_BT, kept.value.shape[2])

        def write(kept_KSH, x_KTH, places_T):
            return kept_KSH.at[:, places_T].set(x_KTH, mode='drop')

        kept.value = jax.vmap(write)(kept.value, x_BKTH, places_BT)
        return kept.value


def swap_heads(x: jax.Array) -> jax.Array:
    """Swaps [B, T, N, H] to [B, N, T, H], or back."""
    return jnp.swapaxes(x, 1, 2)
