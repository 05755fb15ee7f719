"""Shared parts of attention layers: heads, norms, the gate, the output, and the cache.

If its `Sequence` has a capacity, a layer caches the tokens it has read, in the Linen collection
`cache`. Each call then appends tokens to the rows of the cache, a single token or many. Rows may
differ in length: the cache does not store the padding behind the tokens of a row.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from modules.interventions import HEADS, intervene_within
from modules.kernels import Kernels
from modules.numerics import ATTENTION_PRODUCTS
from modules.options import Option
from modules.params import declare
from modules.products import prepare_input, product
from modules.sequence import Sequence
from modules.statistics import DIAGNOSTICS, at_least_float32, is_recording

CACHE = 'cache'
QKV = ('query', 'key', 'value')  # the names of the matrices that `qkv_bias` is for


VALUE_SHARES = (0.5, 0.5)  # of a layer's values and of the first layer's, in ResFormer's code
# Of nanochat: the gate reads this many features of the input, and lies between 0 and its bound.
GATE_FEATURES, GATE_BOUND, GATE_START = 12, 3.0, 0.02


class ValueSources(NamedTuple):
    """Values that a layer adds to those of its projection."""

    block: jax.Array | float = 1.0  # number of the layer, from 1
    first_BTKH: jax.Array | None = None  # values of layer 1, with `value_residual`
    token_values: jax.Array | None = None  # [B, T, K H], with `value_embeddings`


class MultiHead(nn.Module):
    """Attention with several heads: `y = (g * mix(q, k, v)) W_o`.

    `q = norm(x W_q)`

    `k = norm(x W_k)`

    `v = x W_v`

    Subclasses define `mix`. ``qk_norm(name, over)`` builds the norm of queries or keys, over the
    features of a head or over all heads together, before any rotation (arXiv:2302.05442), and the
    norm of values with `norm_values` (arXiv:2503.04598). The gate is `g = sigmoid(x W_g)`, which
    starts near 0.5 (arXiv:2505.06708); without `gate`, `g = 1`. `rotate` applies the positions
    (`modules.positions`). `bias` adds a bias to each product, `qkv_bias` to the products of
    queries, keys and values (Qwen2, arXiv:2407.10671). `init_gain` scales the initial value and
    output matrices. Grouped heads: arXiv:2305.13245.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    qk_norm: Callable[[str, str], nn.Module]
    rotate: Callable[..., jax.Array]
    kernels: Kernels
    dtype: jnp.dtype
    norm_values: Annotated[bool, Option('whether model.qk_norm also normalizes values')] = False
    qk_norm_over: Annotated[
        str,
        Option(
            'normalize queries and keys per head, over all heads together, or not in these layers',
            choices=('head', 'model', 'none'),
        ),
    ] = 'head'
    gate: Annotated[
        str,
        Option(
            'gate of the attention output: none, per head, or per feature',
            choices=('none', 'headwise', 'elementwise'),
        ),
    ] = 'none'
    value_residual: Annotated[
        str,
        Option(
            "add the first layer's values: none, halves of both (constant), or learned shares",
            choices=('none', 'constant', 'learned'),
        ),
    ] = 'none'
    value_embeddings: Annotated[
        bool, Option('add values looked up by token, in every second layer and the last')
    ] = False
    bias: bool = False
    qkv_bias: bool = False
    init_gain: float = 1.0

    #: The operation whose kernels it calls (`modules.kernels.OPERATIONS`).
    operation: ClassVar[str] = 'attention'
    #: Whether it has logits of pairs, which `scores()` describes and attention kernels compute.
    has_scores: ClassVar[bool] = False
    #: Whether slopes (ALiBi) are added to the logits.
    takes_slopes: ClassVar[bool] = False
    #: Whether the tokens of a row may be sharded over the mesh axis `context`.
    supports_context_axis: ClassVar[bool] = False

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:
        """Raises ValueError for an option that needs a `qk_norm` when there is none.

        Args:
          recipe: the resolved config.
          part: the attention layer with its options.
        """
        over = part.options['qk_norm_over']
        if recipe.qk_norm.name != 'none' and over == 'none' and part.options['norm_values']:
            raise ValueError(
                'attention.norm_values=True normalizes values as queries and keys are normalized, '
                'but attention.qk_norm_over=none leaves their norms out. Leave one of them out.'
            )
        if recipe.qk_norm.name != 'none':
            return
        if over == 'model':
            raise ValueError(
                'attention.qk_norm_over=model needs a norm of queries and keys, but '
                'model.qk_norm=none. Set model.qk_norm, such as rmsnorm (OLMo 2).'
            )
        if part.options['norm_values']:
            raise ValueError(
                'attention.norm_values=True normalizes values by model.qk_norm, which is none '
                f'({recipe.placement}). Set model.qk_norm, such as rmsnorm (as published).'
            )

    @nn.compact
    def __call__(self, x_BTD, sequence: Sequence, values: ValueSources | None = None):
        """Returns y, [B, T, D], or (y, values of layer 1) with `value_residual`."""
        inputs_BTD, d_model = x_BTD, x_BTD.shape[-1]
        x_BTD = prepare_input(
            self, 'input', x_BTD, matmul=self.kernels.matmul_for('attention'), dtype=self.dtype
        )
        q_BNTH = self.normalize_heads(
            'query_norm', self.project_heads('query', x_BTD, self.n_heads)
        )
        k_BKTH = self.normalize_heads('key_norm', self.project_heads('key', x_BTD, self.n_kv_heads))
        v_BTKH = self.project_heads('value', x_BTD, self.n_kv_heads, self.init_gain)
        values = values or ValueSources()
        v_BTKH, first_BTKH = self.add_first_values(v_BTKH, values)
        v_BTKH = self.add_token_values(inputs_BTD, v_BTKH, values)
        v_BKTH = (
            self.normalize_heads('value_norm', v_BTKH) if self.norm_values else swap_heads(v_BTKH)
        )
        mixed_BTNH = swap_heads(self.mix(x_BTD, q_BNTH, k_BKTH, v_BKTH, sequence))
        axes, gated_BTNH = ('heads', 'head_dim', 'embed'), self.apply_gate(x_BTD, mixed_BTNH)
        gated_BTNH = intervene_within(self, HEADS, gated_BTNH)
        y_BTD = self.project('out', gated_BTNH, axes, d_model, self.init_gain, fan_in=axes[:2])
        return y_BTD if first_BTKH is None else (y_BTD, first_BTKH)

    def add_first_values(
        self, v_BTKH: jax.Array, values: ValueSources
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the values with those of layer 1, and these (None without `value_residual`)."""
        if self.value_residual == 'none' or values.first_BTKH is None:
            return v_BTKH, None
        shares = VALUE_SHARES
        if self.value_residual == 'learned':
            names = ('value_share', 'first_value_share')
            shares = [
                cast(
                    jax.Array,
                    self.param(name, declare(nn.initializers.constant(start), 'vector', ()), ()),
                ).astype(v_BTKH.dtype)
                for name, start in zip(names, VALUE_SHARES, strict=True)
            ]
        is_first = values.block == 1
        mixed_BTKH = shares[0] * v_BTKH + shares[1] * values.first_BTKH
        first_BTKH = jnp.where(is_first, v_BTKH, values.first_BTKH)
        return jnp.where(is_first, v_BTKH, mixed_BTKH), first_BTKH

    def add_token_values(
        self, x_BTD: jax.Array, v_BTKH: jax.Array, values: ValueSources
    ) -> jax.Array:
        """Adds the values that layers look up for tokens, times a gate for each head.

        Args:
          x_BTD: the layer's input.
          v_BTKH: the layer's values.
          values: have the values by token.
        """
        if not self.value_embeddings or values.token_values is None:
            return v_BTKH
        features = min(GATE_FEATURES, x_BTD.shape[-1])
        shape, axes = (features, self.n_kv_heads), ('gate_features', 'kv_heads')
        init = declare(nn.initializers.uniform(GATE_START), 'vector', axes)
        w_FK = cast(jax.Array, self.param('value_gate', init, shape))
        logits_BTK = at_least_float32(x_BTD[..., :features]) @ w_FK
        gate_BTK1 = GATE_BOUND * jax.nn.sigmoid(logits_BTK)[..., None]
        added_BTKH = values.token_values.reshape(v_BTKH.shape)
        return v_BTKH + gate_BTK1.astype(v_BTKH.dtype) * added_BTKH

    def mix(
        self,
        x_BTD: Any,
        q_BNTH: jax.Array,
        k_BKTH: jax.Array,
        v_BKTH: jax.Array,
        sequence: Sequence,
    ) -> jax.Array:
        """Returns the weighted mean of the values that each token attends to, [B, N, T, H].

        Args:
          x_BTD: the layer's input.
          q_BNTH: queries, normalized but without positions.
          k_BKTH: keys, likewise.
          v_BKTH: values.
          sequence: positions, segments and validity of the tokens.
        """
        raise NotImplementedError

    @classmethod
    def mixed_sizes(cls, n_heads: int, head_dim: int, **options) -> tuple[int, int]:
        """Returns the number of heads that mix tokens, and the width of their queries.

        Args:
          n_heads: of the model.
          head_dim: of the model.
          **options: the layer's options in the config; here ignored.
        """
        return n_heads, head_dim

    @classmethod
    def attended_tokens(cls, length: int, head_dim: int, block: int, **options) -> float:
        """Returns the FLOPs of mixing, counted in pairs of a query and a key for each token.

        Args:
          length: tokens in a row.
          head_dim: the width of a head, H.
          block: the number of the layer, from 1.
          **options: the layer's options in the config (`lm.training.flops`).
        """
        raise NotImplementedError

    @classmethod
    def attended_tokens_unmasked(cls, length: int, head_dim: int, block: int, **options) -> float:
        """Returns `attended_tokens` of a kernel that computes masked pairs too.

        Args:
          length: tokens in a row.
          head_dim: the width of a head, H.
          block: the number of the layer, from 1.
          **options: the layer's options in the config.
        """
        return cls.attended_tokens(length, head_dim, block, **options)

    def project_heads(
        self,
        name: str,
        x_BTD: Any,
        n_heads: int,
        init_gain: float = 1.0,
        width: int | None = None,
    ) -> jax.Array:
        """Projects x to [B, T, heads, H].

        Args:
          name: the name of the matrix: query, key or value.
          x_BTD: the layer's input.
          n_heads: the number of heads of the result.
          init_gain: factor of the initial weights.
          width: H; None: that of the layer.
        """
        axes = ('embed', 'heads' if name == 'query' else 'kv_heads', 'head_dim')
        return self.project(name, x_BTD, axes, (n_heads, width or self.head_dim), init_gain)

    def normalize_heads(self, name: str, y_BTNH: jax.Array) -> jax.Array:
        """Normalizes [B, T, N, H] with the norm `name` and returns [B, N, T, H]."""
        if self.qk_norm_over == 'none':
            return swap_heads(y_BTNH)
        norm = self.qk_norm(name, self.qk_norm_over)
        if self.qk_norm_over == 'head':
            return norm(swap_heads(y_BTNH))
        y_BTD = norm(y_BTNH.reshape(*y_BTNH.shape[:2], -1))
        return swap_heads(y_BTD.reshape(y_BTNH.shape))

    def apply_positions(self, y_BNTH: jax.Array, sequence: Sequence) -> jax.Array:
        """Rotates [B, N, T, H] by positions, which may exceed T if there is a cache."""
        if self.is_initializing():  # positions have no parameters
            return y_BNTH
        return self.rotate(y_BNTH, sequence.positions_BT, capacity=sequence.capacity)

    def apply_gate(self, x_BTD: Any, mixed_BTNH: jax.Array) -> jax.Array:
        """Multiplies the heads [B, T, N, H] by sigmoid(x Wg), at least in float32."""
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

    def project(
        self,
        name: str,
        x: Any,
        axes: tuple[str, ...],
        features: int | tuple[int, ...],
        init_gain: float = 1.0,
        fan_in: tuple[str, ...] = ('embed',),
    ) -> jax.Array:
        """Computes x W (+ b) in the layer's `dtype`, with the kernel for matrix products.

        Args:
          name: the name of the matrix.
          x: the input, whose last axes are `fan_in`.
          axes: the logical axes of W.
          features: the size or sizes of the result's axes.
          init_gain: factor of the initial weights.
          fan_in: the logical axes of W that are summed over.
        """
        has_bias = self.bias or (self.qkv_bias and name in QKV)
        options: dict[str, Any] = {
            'matmul': self.kernels.matmul_for('attention'),
            'dtype': self.dtype,
            'bias': has_bias,
        }
        y = product(self, name, x, axes, fan_in, features, init_gain=init_gain, **options)
        return checkpoint_name(y, ATTENTION_PRODUCTS)

    def record(self, statistics: Callable[[], dict[str, jax.Array]]) -> None:
        """Sows diagnostics of the attention weights, {name: [N]}, if they are recorded."""
        if is_recording(self):
            for name, value_N in statistics().items():
                self.sow(DIAGNOSTICS, name, value_N)

    def update_cache(self, sequence: Sequence, **tokens: jax.Array) -> tuple[jax.Array, ...]:
        """Writes tokens into the cache and returns the cache, arrays [B, K, S, H] by position.

        S is the capacity, or the capacity of the cache passed in. Slots beyond the tokens of a row
        hold zeros or earlier values, which no query reads.

        Args:
          sequence: positions and validity of the tokens. Positions of a row are consecutive, and
            its padding comes last.
          **tokens: keys or values [B, K, T, H] by the name of the variable in the collection
            `cache`.
        """
        variables = []
        for name, x_BKTH in tokens.items():
            batch, n_heads, _, head_dim = x_BKTH.shape
            shape = (batch, n_heads, sequence.capacity, head_dim)
            variables.append(self.variable(CACHE, name, jnp.zeros, shape, x_BKTH.dtype))
        positions_BT, x = sequence.positions_BT, tuple(tokens.values())
        start_B, count_B = positions_BT[:, 0], jnp.full(len(positions_BT), positions_BT.shape[1])
        if sequence.valid_BT is not None:
            count_B = jnp.sum(sequence.valid_BT > 0, 1)
        caches = jax.lax.platform_dependent(
            tuple(variable.value for variable in variables),
            x,
            start_B,
            count_B,
            cpu=write_row_by_row,
            default=scatter_rows,
        )
        for variable, cache_BKSH in zip(variables, caches, strict=True):
            variable.value = cache_BKSH
        return caches


def write_row_by_row(
    caches: tuple[jax.Array, ...], tokens: tuple[jax.Array, ...], start_B, count_B
) -> tuple[jax.Array, ...]:
    """Computes `scatter_rows` in a loop over rows, each of which is a single write.

    XLA's CPU compiler expands a scatter to a loop over tokens, and copies the cache for a batch of
    one row: decoding a token took twice as long.

    Args:
      caches: arrays [B, K, S, H].
      tokens: arrays [B, K, T, H].
      start_B: slot of the first token of each row.
      count_B: number of tokens of each row.
    """
    length = caches[0].shape[2]
    tokens = tuple(x_BKTH[:, :, :length] for x_BKTH in tokens)
    width = tokens[0].shape[2]

    def write_row(row, caches):
        # The last slots that a row of tokens may be written to; `shift` tokens do not fit there.
        slot = jnp.minimum(start_B[row], length - width)
        shift = start_B[row] - slot
        column_T = jnp.arange(width, dtype=jnp.int32) - shift
        is_new_1T1 = ((column_T >= 0) & (column_T < count_B[row]))[None, :, None]
        updated = []
        for cache_BKSH, x_BKTH in zip(caches, tokens, strict=True):
            x_KTH = jax.lax.dynamic_index_in_dim(x_BKTH, row, keepdims=False)
            x_KTH = jnp.roll(x_KTH, shift, 1) if width > 1 else x_KTH
            origin, (_, n_heads, _, head_dim) = (row, 0, slot, 0), cache_BKSH.shape
            old_1KTH = jax.lax.dynamic_slice(cache_BKSH, origin, (1, n_heads, width, head_dim))
            new_1KTH = jnp.where(is_new_1T1, x_KTH, old_1KTH[0])[None]
            updated.append(jax.lax.dynamic_update_slice(cache_BKSH, new_1KTH, origin))
        return tuple(updated)

    caches = jax.lax.fori_loop(0, len(start_B), write_row, caches)
    # Without it, XLA fuses the write into each reader of the cache, and copies the cache for each.
    return jax.lax.optimization_barrier(caches)


def scatter_rows(
    caches: tuple[jax.Array, ...], tokens: tuple[jax.Array, ...], start_B, count_B
) -> tuple[jax.Array, ...]:
    """Writes the first count_B tokens of each row into slots from start_B on, except beyond S.

    Args:
      caches: arrays [B, K, S, H].
      tokens: arrays [B, K, T, H].
      start_B: slot of the first token of each row.
      count_B: number of tokens of each row.
    """
    length, width = caches[0].shape[2], tokens[0].shape[2]
    column_1T = jnp.arange(width, dtype=jnp.int32)[None]
    # Slots out of bounds are dropped.
    slot_BT = jnp.where(column_1T < count_B[:, None], start_B[:, None] + column_1T, length)

    def write(cache_KSH, x_KTH, slot_T):
        return cache_KSH.at[:, slot_T].set(x_KTH, mode='drop')

    return tuple(
        jax.vmap(write)(cache_BKSH, x_BKTH, slot_BT)
        for cache_BKSH, x_BKTH in zip(caches, tokens, strict=True)
    )


def swap_heads(x: jax.Array) -> jax.Array:
    """Swaps [B, T, N, H] to [B, N, T, H], or back."""
    return jnp.swapaxes(x, 1, 2)
