"""Linear recurrences as attention: a state that decays, with a causal convolution in front of it.

A layer caches the state and the last inputs of the convolutions, whatever the length of the row.
"""

import math
from typing import Annotated, Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from modules.attention.base import CACHE, QKV, MultiHead, ValueSources, swap_heads
from modules.choices import check_divides
from modules.interventions import HEADS, intervene_within
from modules.kernels.attention.base import repeat_kv_heads
from modules.kernels.recurrence.chunked import CHUNK
from modules.kernels.rms_norm import reference as rms_norm
from modules.numerics import ATTENTION_PRODUCTS
from modules.options import Option
from modules.parallel.kernel_calls import map_shards
from modules.params import NORM, declare
from modules.products import prepare_input, product
from modules.sequence import Sequence, segment_starts
from modules.statistics import at_least_float32

# As in the authors' code (github fla-org/flash-linear-attention).
NORM_EPS = 1e-5  # of the norm of the output
UNIT_EPS = 1e-6  # added to |q|^2 and |k|^2
LARGEST_A = 16.0  # e^A_log is uniform in (0, 16]
STEP_RANGE = (1e-3, 1e-1)  # of softplus(dt_bias), log-uniform
SMALLEST_STEP = 1e-4


def draw_log_a(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draws A_log: e^A_log is uniform in (0, 16].

    Args:
      key: random key.
      shape: of the result.
      dtype: of the result.
    """
    return jnp.log(LARGEST_A * (1 - jax.random.uniform(key, shape, dtype)))


def draw_step_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draws dt_bias: softplus(dt_bias) is log-uniform in `STEP_RANGE`.

    Args:
      key: random key.
      shape: of the result.
      dtype: of the result.
    """
    low, high = map(math.log, STEP_RANGE)
    step = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    step = jnp.maximum(step, SMALLEST_STEP)
    return step + jnp.log(-jnp.expm1(-step))  # the inverse of softplus


def draw_taps(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draws the weights of a convolution [..., W] uniformly in +- 1 / sqrt(W), as PyTorch does.

    Args:
      key: random key.
      shape: of the result.
      dtype: of the result.
    """
    bound = 1 / math.sqrt(shape[-1])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


class GatedLinearAttention(MultiHead):
    """Gated linear attention with a decay per head (arXiv:2312.06635, arXiv:2405.21060).

    `S_t = e^(g_t) S_(t - 1) + k_t v_t^T`

    `o_t = S_t^T q_t / sqrt(K)`

    `y = (norm(o) * silu(x W_gate)) W_out`

    `g = -e^a softplus(x W_decay + d)`

    `S` [K, V] is 0 before each document. `K` is the width of a head, and `V` is `expand_value`
    times `K`. Each of `x W_query`, `x W_key` and `x W_value` passes a causal depthwise convolution
    over `conv_width` tokens and a SiLU; with `conv_width=1` there is neither. `norm` is an RMSNorm
    of each head with a gain. There is no denominator. `a` and `d` are numbers of each head.

    The update, the convolution, the norm and the gate are those of the layer SimpleGLA of
    flash-linear-attention; its `g` is `log(sigmoid(x W + d)) / 16`. The form of `g`, and how `a`
    and `d` start, are those of Mamba-2, which also multiplies `v` by `softplus(x W_decay + d)`,
    adds `v` to `o`, and has no `1 / sqrt(K)`. As in SimpleGLA, heads may share keys and values
    (`model.n_kv_heads`), but each has its own decay, and so its own state. If the model has a
    `qk_norm`, it applies before the convolutions, and positions rotate behind them; the published
    layers have neither.

    With `value_heads`, values, states, decays and gates have that many heads, and `key_heads` heads
    of queries and keys are each repeated for neighbouring states (Qwen3-Next); `key_width` is `K`.
    In a model with several kinds of blocks, these sizes may differ from those of its other layers.

    The state is computed in float32 or wider, with the kernels of `kernels.recurrence`.
    """

    # Drops options of `MultiHead`: the gate of these layers is a SiLU, behind a norm, and their
    # values may have another width than those of other layers and of tables.
    gate: str = 'none'
    value_residual: str = 'none'
    value_embeddings: bool = False
    output_gate: Annotated[
        str,
        Option('gate of the normalized output of a recurrence', choices=('silu', 'none')),
    ] = 'silu'
    expand_value: Annotated[
        int, Option('width of the values of a recurrence, in widths of a head', 1)
    ] = 1
    conv_width: Annotated[
        int, Option('tokens in the convolutions of a recurrence; 1: no convolution', 1)
    ] = 4

    key_heads: Annotated[
        int | None,
        Option('heads of queries and keys of a recurrence; None: those of the model', 1),
    ] = None
    value_heads: Annotated[
        int | None,
        Option('heads of values and states of a recurrence; None: those of the model', 1),
    ] = None
    key_width: Annotated[
        int | None,
        Option('width of the keys of a recurrence, for each head; None: that of a head', 1),
    ] = None
    output_norm_eps: Annotated[
        float, Option('eps of the norm of the output of a recurrence', 0, 1)
    ] = NORM_EPS

    operation: ClassVar[str] = 'recurrence'
    #: Whether SiLU applies to queries, keys and values that have no convolution too.
    always_activates: ClassVar[bool] = False
    #: FLOPs of a token's state, forward, in units of K V: 2 to add k v^T and 2 to read it.
    state_flops: ClassVar[int] = 4
    #: Products of a token with the others of its chunk, in the chunked form: over K and over V.
    chunk_products: ClassVar[tuple[int, int]] = (2, 2)

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:
        """Raises ValueError for heads that do not divide, or that would not grow with a model.

        Args:
          recipe: the resolved config.
          part: the layer with its options.
        """
        super().check(recipe, part)
        key_heads, value_heads = part.options['key_heads'], part.options['value_heads']
        if (key_heads is None) != (value_heads is None):
            raise ValueError(
                'attention.key_heads and attention.value_heads are the two numbers of heads of a '
                f'recurrence; got {key_heads} and {value_heads}. Set both, or leave both out.'
            )
        if key_heads is not None:
            check_divides(
                'attention.key_heads', key_heads, 'attention.value_heads', cast(int, value_heads)
            )
        for name in ('value_heads', 'key_width'):
            value = part.options[name]
            if value is not None and recipe.base.model.d_model != recipe.model.d_model:
                raise ValueError(
                    f'attention.{name}={value} is the same in the base model of {recipe.scaling}, '
                    'so that the layer would not grow with the model. Leave it out: model.n_heads '
                    'and model.head_dim grow.'
                )

    @classmethod
    def mixed_sizes(cls, n_heads: int, head_dim: int, **options) -> tuple[int, int]:
        """Returns the number of states, and the width of their keys.

        Args:
          n_heads: of the model.
          head_dim: of the model.
          **options: `value_heads` and `key_width` replace them; others are ignored.
        """
        return options.get('value_heads') or n_heads, options.get('key_width') or head_dim

    @classmethod
    def attended_tokens(cls, length: int, head_dim: int, block: int, **options) -> float:
        """Returns the FLOPs of the state in the recurrence, token by token.

        The convolutions are not counted.

        Args:
          length: tokens in a row.
          head_dim: the width of a head, K.
          block: the number of the layer.
          **options: `expand_value` is V / K; others are ignored.
        """
        return cls.state_flops * head_dim * options['expand_value'] / 4

    @classmethod
    def attended_tokens_unmasked(cls, length: int, head_dim: int, block: int, **options) -> float:
        """Returns the FLOPs of the chunked form with its default chunk.

        Adds all pairs of tokens in a chunk, and the triangular system of the delta rule.

        Args:
          length: tokens in a row.
          head_dim: the width of a head, K.
          block: the number of the layer.
          **options: `expand_value` is V / K; others are ignored.
        """
        state = cls.attended_tokens(length, head_dim, block, **options)
        over_keys, over_values = cls.chunk_products
        return state + min(CHUNK, length) * (over_keys + over_values * options['expand_value']) / 4

    @nn.compact
    def __call__(self, x_BTD, sequence: Sequence, values: ValueSources | None = None):
        d_model = x_BTD.shape[-1]
        n_states, key_dim = self.n_states, self.key_width or self.head_dim
        value_dim = self.expand_value * key_dim
        # Keys and values have as many heads, unless `value_heads` sets both numbers.
        n_query_heads, n_key_heads, n_value_heads = self.n_heads, self.n_kv_heads, self.n_kv_heads
        if self.value_heads is not None:
            n_query_heads = n_key_heads = cast(int, self.key_heads)
            n_value_heads = self.value_heads
        x_BTD = prepare_input(
            self, 'input', x_BTD, matmul=self.kernels.matmul_for('attention'), dtype=self.dtype
        )
        q_BNTK = self.normalize_heads(
            'query_norm', self.project_heads('query', x_BTD, n_query_heads, width=key_dim)
        )
        k_BKTK = self.normalize_heads(
            'key_norm', self.project_heads('key', x_BTD, n_key_heads, width=key_dim)
        )
        axes, features = ('embed', 'kv_heads', 'head_dim'), (n_value_heads, value_dim)
        v_BTKV = self.project('value', x_BTD, axes, features, self.init_gain)
        v_BKTV = (
            self.normalize_heads('value_norm', v_BTKV) if self.norm_values else swap_heads(v_BTKV)
        )
        mixed_BNTV = self.mix(x_BTD, q_BNTK, k_BKTK, v_BKTV, sequence)
        gain = declare(nn.initializers.ones, 'vector', ('head_dim',), part=NORM)
        gain_V: Any = self.param('output_scale', gain, (value_dim,))  # unboxed by Flax
        mixed_BTNV = swap_heads(rms_norm(mixed_BNTV, gain_V, self.output_norm_eps))
        axes, features = ('embed', 'heads', 'head_dim'), (n_states, value_dim)
        if self.output_gate == 'silu':
            gate_BTNV = self.project('gate', x_BTD, axes, features)
            mixed_BTNV = mixed_BTNV * jax.nn.silu(at_least_float32(gate_BTNV))
        axes = ('heads', 'head_dim', 'embed')
        mixed_BTNV = intervene_within(self, HEADS, mixed_BTNV.astype(self.dtype))
        return self.project('out', mixed_BTNV, axes, d_model, self.init_gain, fan_in=axes[:2])

    @property
    def n_states(self) -> int:
        """The number of states."""
        return self.value_heads or self.n_heads

    def mix(
        self,
        x_BTD: Any,
        q_BNTH: jax.Array,
        k_BKTH: jax.Array,
        v_BKTH: jax.Array,
        sequence: Sequence,
    ) -> jax.Array:
        """Reads the state at each token, [B, N, T, V]; the arguments are as in `MultiHead.mix`.

        Args:
          x_BTD: the layer's input, which sets the decay.
          q_BNTH: queries, normalized but without positions.
          k_BKTH: keys, likewise.
          v_BKTH: values, [B, K, T, V].
          sequence: positions, segments and validity of the tokens.
        """
        g_BNT, beta_BNT = self.log_decay(x_BTD), self.write_strength(x_BTD)
        q_BNTK, k_BKTK, v_BKTV = (
            self.convolve(name, y, sequence)
            for name, y in zip(QKV, (q_BNTH, k_BKTH, v_BKTH), strict=True)
        )
        q_BNTK, k_BKTK = (self.finish(self.apply_positions(y, sequence)) for y in (q_BNTK, k_BKTK))
        k_BNTK, v_BNTV = (repeat_kv_heads(y, self.n_states) for y in (k_BKTK, v_BKTV))
        q_BNTK = repeat_kv_heads(q_BNTK, self.n_states)
        if self.is_initializing():  # only the parameters matter
            return jnp.zeros((*q_BNTK.shape[:3], v_BNTV.shape[-1]), v_BNTV.dtype)
        segments_BT, state = sequence.segments_BT, None
        if sequence.capacity is not None:
            if sequence.valid_BT is not None:  # padding neither writes nor decays
                valid_BT = sequence.valid_BT.astype(g_BNT.dtype)
                g_BNT = jnp.einsum('bt,bnt->bnt', valid_BT, g_BNT)
                k_BNTK = jnp.einsum('bt,bntk->bntk', valid_BT, k_BNTK)
            shape = (*q_BNTK.shape[:2], q_BNTK.shape[-1], v_BNTV.shape[-1])
            state = self.variable(CACHE, 'state', jnp.zeros, shape, v_BNTV.dtype)
        # Each device computes its rows and heads: XLA might gather all of them for the solver.
        out_BNTV, state_BNKV = map_shards(
            self.kernels.recurrence,
            (
                *(q_BNTK, k_BNTK, v_BNTV, g_BNT, beta_BNT, segments_BT),
                None if state is None else zero_first(state.value, sequence),
            ),
            (*['BN'] * 5, 'B', 'BN'),
            ('BN', 'BN'),
        )
        if state is not None:
            state.value = state_BNKV
        return out_BNTV

    def finish(self, y_BNTK: jax.Array) -> jax.Array:
        """Returns the queries or keys that the recurrence takes, from those with positions."""
        return y_BNTK

    def write_strength(self, x_BTD: Any) -> jax.Array | None:
        """Returns b of the delta rule, [B, N, T]; None: the layer has no delta rule."""
        return None

    def log_decay(self, x_BTD: Any) -> jax.Array:
        """Returns g = -e^a softplus(x W + d), [B, N, T] in float32 at least."""
        logits_BTN = self.project_numbers('decay', x_BTD)
        log_a_N: Any = self.param(
            'decay_log_rate', declare(draw_log_a, 'vector', ('heads',)), (self.n_states,)
        )
        bias_N: Any = self.param(
            'decay_step_bias', declare(draw_step_bias, 'vector', ('heads',)), (self.n_states,)
        )
        step_BTN = jax.nn.softplus(logits_BTN + bias_N[None, None])
        return -swap_heads(jnp.exp(log_a_N)[None, None] * step_BTN)

    def project_numbers(self, name: str, x_BTD: Any) -> jax.Array:
        """Returns x W, a number of each head, [B, T, N] in float32 at least."""
        axes = ('embed', 'heads')
        options: dict[str, Any] = {
            'matmul': self.kernels.matmul_for('attention'),
            'dtype': self.dtype,
        }
        # Without the layer's bias, which would come on top of `decay_step_bias`.
        y_BTN = product(self, name, x_BTD, axes, axes[:1], self.n_states, **options)
        return at_least_float32(checkpoint_name(y_BTN, ATTENTION_PRODUCTS))

    def convolve(self, name: str, x_BNTH: jax.Array, sequence: Sequence) -> jax.Array:
        """Computes silu(sum_d w_d x_(t - d)) for each feature, within documents.

        The cache keeps the last inputs of each row. The weights have the role of a vector: each
        feature has its own filter, so that no side of a matrix grows with the width, and there are
        no singular values for a spectral optimizer. They decay, as in the authors' code.

        Args:
          name: query, key or value.
          x_BNTH: the projection.
          sequence: positions, segments and validity of the tokens.

        Returns:
          [B, N, T, H], in float32 at least.
        """
        if self.conv_width == 1:
            x_BNTH = at_least_float32(x_BNTH)
            return jax.nn.silu(x_BNTH) if self.always_activates else x_BNTH
        heads, (_, n_heads, length, width) = (
            'heads' if name == 'query' else 'kv_heads',
            x_BNTH.shape,
        )
        taps = declare(draw_taps, 'vector', (heads, 'head_dim', 'tap'), decayed=True)
        taps_NHW: Any = self.param(f'{name}_conv', taps, (n_heads, width, self.conv_width))
        if self.is_initializing():
            return at_least_float32(x_BNTH)
        earlier = self.conv_width - 1
        if sequence.capacity is None:
            padded_BNSH = jnp.pad(x_BNTH, ((0, 0), (0, 0), (earlier, 0), (0, 0)))
        else:
            padded_BNSH = self.extend_window(f'{name}_window', x_BNTH, sequence)
        padded_BNSH, age_BT, terms = at_least_float32(padded_BNSH), None, []
        if sequence.segments_BT is not None:
            place_1T = jnp.arange(length, dtype=jnp.int32)[None]
            age_BT = place_1T - segment_starts(sequence.segments_BT)
        for distance in range(self.conv_width):
            start = earlier - distance  # the last tap is that of the token itself
            earlier_BNTH = padded_BNSH[:, :, start : start + length]
            if age_BT is not None and distance:
                is_inside_B1T1 = (age_BT >= distance)[:, None, :, None]
                is_inside_BNTH = jnp.broadcast_to(is_inside_B1T1, earlier_BNTH.shape)
                earlier_BNTH = jnp.where(is_inside_BNTH, earlier_BNTH, 0.0)
            tap_NH = at_least_float32(taps_NHW[..., start])
            terms.append(tap_NH[None, :, None] * earlier_BNTH)
        return jax.nn.silu(sum(terms))

    def extend_window(self, name: str, x_BNTH: jax.Array, sequence: Sequence) -> jax.Array:
        """Returns x behind the cached inputs of earlier tokens, and caches the last ones.

        Args:
          name: the variable in the collection `cache`.
          x_BNTH: the inputs of the convolution.
          sequence: positions and validity of the tokens.
        """
        batch, n_heads, length, width = x_BNTH.shape
        earlier = self.conv_width - 1
        shape = (batch, n_heads, earlier, width)
        window = self.variable(CACHE, name, jnp.zeros, shape, x_BNTH.dtype)
        padded_BNSH = jnp.concatenate([zero_first(window.value, sequence), x_BNTH], 2)
        count_B = jnp.full(batch, length, jnp.int32)
        if sequence.valid_BT is not None:
            count_B = jnp.sum(sequence.valid_BT, 1).astype(jnp.int32)

        def last_inputs(padded_NSH, count):
            return jax.lax.dynamic_slice_in_dim(padded_NSH, count, earlier, 1)

        window.value = jax.vmap(last_inputs)(padded_BNSH, count_B)
        return padded_BNSH


class GatedDeltaAttention(GatedLinearAttention):
    """Gated DeltaNet (arXiv:2412.06464): a key replaces its value in a state that decays.

    `S <- e^(g_t) S`

    `S <- S + b_t k_t (v_t - S^T k_t)^T`

    `o_t = S^T q_t / sqrt(K)`

    `b = sigmoid(x W_write)`

    Queries and keys have length 1 (L2). All else is as in `gla`, with values twice as wide
    (`expand_value`), and a SiLU even without convolutions. Published heads have width 256, and all
    heads together 3/4 of the width of the model (`model.head_dim`, `model.n_heads`). With
    `negative_eigenvalues`, `b` is doubled: a state may then change sign (arXiv:2411.12537).

    Source: the authors' code in flash-linear-attention. Weights of the convolutions start as in
    PyTorch and Mamba-2; matrices as `scaling.init` says.
    """

    expand_value: Annotated[
        int, Option('width of the values of a recurrence, in widths of a head', 1)
    ] = 2
    negative_eigenvalues: Annotated[
        bool, Option('whether the strength of the delta rule lies in 0 to 2, not 0 to 1')
    ] = False

    always_activates = True
    state_flops = 6  # and 2 to read the value that the key replaces
    # With the solution of the triangular system, of C^2 for each of its K + V columns.
    chunk_products = (5, 3)

    def finish(self, y_BNTK: jax.Array) -> jax.Array:
        squares_BNT1 = jnp.sum(jnp.square(y_BNTK), -1, keepdims=True)
        return y_BNTK * jnp.broadcast_to(jax.lax.rsqrt(squares_BNT1 + UNIT_EPS), y_BNTK.shape)

    def write_strength(self, x_BTD: Any) -> jax.Array | None:
        strength_BTN = jax.nn.sigmoid(self.project_numbers('write', x_BTD))
        return swap_heads((2.0 if self.negative_eigenvalues else 1.0) * strength_BTN)


def zero_first(x: jax.Array, sequence: Sequence) -> jax.Array:
    """Zeroes the cached x [B, ...] of each row that starts with its first token."""
    continues_B = jnp.broadcast_to(sequence.positions_BT[:, 0] > 0, x.shape[:1])
    continues = continues_B.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(jnp.broadcast_to(continues, x.shape), x, jnp.zeros_like(x))
