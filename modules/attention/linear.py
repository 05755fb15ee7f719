"""Causal linear attention: weights are products of features, so a running sum over keys suffices.

A layer caches a state of fixed size; softmax attention caches all tokens.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.attention.base import CACHE, MultiHead
from modules.kernels.attention.base import MASKED, repeat_kv_heads
from modules.kernels.attention.observed import weight_statistics
from modules.kernels.linear_attention.base import AttentionSums
from modules.sequence import Sequence
from modules.statistics import at_least_float32

EPS = 1e-6  # added to the denominator, as in both papers' code
NORM_EPS = 1e-12  # added to |q|^2; NaLa's code divides by |q| alone
POWER = 3  # the power of key features; queries have 1/2 to 3/2 times this

Features = tuple[jax.Array, ...]


def elu_features(x: jax.Array) -> Features:
    """Returns elu(x) + 1: exp(x) for x <= 0, x + 1 for x > 0."""
    return (jax.nn.elu(x) + 1,)


def split_signs(x: jax.Array) -> Features:
    """Returns the positive and the negative part of x, both nonnegative."""
    return jax.nn.relu(x), jax.nn.relu(-x)


def nala_query_features(q: jax.Array) -> Features:
    """Returns relu(q / |q|)^p and relu(-q / |q|)^p with p = 3 (1/2 + tanh |q|)."""
    norm = jnp.sqrt(jnp.sum(jnp.square(q), -1, keepdims=True) + NORM_EPS)
    power = jnp.broadcast_to(POWER * (0.5 + jnp.tanh(norm)), q.shape)

    def raise_to_power(x):
        # x^power for x >= 0. log 0 has no derivative; the double `where` makes it 0 there.
        positive = x > 0
        return jnp.where(positive, jnp.exp(power * jnp.log(jnp.where(positive, x, 1.0))), 0.0)

    return tuple(raise_to_power(x) for x in split_signs(q / norm))


def nala_key_features(k: jax.Array) -> Features:
    """Returns relu(k^3) and relu(-k^3)."""
    return split_signs(k**POWER)


class LinearAttention(MultiHead):
    """Linear attention (arXiv:2006.16236): products of features replace the exponentials of
    softmax.

    `y_t = sum_(s <= t) w_ts v_s / (sum_(s <= t) phi(q_t)^T phi(k_s) + epsilon)`
    `w_ts = rotate(phi(q_t))^T rotate(phi(k_s))`
    `phi(x) = elu(x) + 1`

    Positions rotate the features in the numerator only, so that the denominator stays positive
    (arXiv:2104.09864, equation 19). With rotation, the weights may be negative and need not sum to
    1. `epsilon` is the constant EPS. Computed in float32 or wider. The kernels are those of
    `kernels.linear_attention`.
    """

    operation: ClassVar[str] = 'linear_attention'
    query_features: ClassVar[Callable[[jax.Array], Features]] = staticmethod(elu_features)
    key_features: ClassVar[Callable[[jax.Array], Features]] = staticmethod(elu_features)
    features_per_width = 1  # features of a head for each of its dimensions, F / H

    @classmethod
    def attended_tokens(cls, length: int, head_dim: int, block: int, **options) -> float:
        """Returns F, as each feature is added to the state and read from it.

        The pairs within a chunk are not counted.

        Args:
          length: tokens in a row.
          head_dim: the width of a head, H.
          block: the number of the layer.
          **options: ignored.
        """
        return cls.features_per_width * head_dim

    def mix(
        self,
        x_BTD: Any,
        q_BNTH: jax.Array,
        k_BKTH: jax.Array,
        v_BKTH: jax.Array,
        sequence: Sequence,
    ) -> jax.Array:
        """Computes causal linear attention; the arguments are as in `MultiHead.mix`.

        Args:
          x_BTD: not used.
          q_BNTH: queries, normalized but without positions.
          k_BKTH: keys, likewise.
          v_BKTH: values.
          sequence: positions, segments and validity of the tokens.
        """
        del x_BTD
        queries = self.query_features(at_least_float32(q_BNTH))
        keys = self.key_features(at_least_float32(k_BKTH))
        if sequence.capacity is not None and sequence.valid_BT is not None:
            valid_BT = sequence.valid_BT.astype(keys[0].dtype)
            keys = tuple(jnp.einsum('bt,bkth->bkth', valid_BT, k_BKTH) for k_BKTH in keys)
        rotated_queries, rotated_keys = (
            tuple(self.apply_positions(y, sequence) for y in features)
            for features in (queries, keys)
        )
        features = (
            jnp.concatenate(parts, -1) for parts in (rotated_queries, rotated_keys, queries, keys)
        )

        def log_weights(rows_Q):
            return self.log_weights(jnp.take(q_BNTH, rows_Q, axis=2), k_BKTH)

        attend = self.kernels.linear_attention
        if sequence.capacity is None:
            rows: dict[str, Any] = {
                'segments_BT': sequence.segments_BT,
                'valid_BT': sequence.valid_BT,
            }
            self.record(lambda: weight_statistics(log_weights, q_BNTH.shape[2], **rows))
            mixed_BNTH, _ = attend(*features, v_BKTH, EPS, sequence.segments_BT)
            return mixed_BNTH
        variables = self.cache_variables(v_BKTH)
        state = reset_state(AttentionSums(*(variable.value for variable in variables)), sequence)
        mixed_BNTH, state = attend(*features, v_BKTH, EPS, state=state)
        for variable, array in zip(variables, (state.products_BKFH, state.keys_BKF), strict=True):
            variable.value = array
        return mixed_BNTH

    def cache_variables(self, v_BKTH: jax.Array) -> tuple[nn.Variable, nn.Variable]:
        """Returns the variables `state` [B, K, F, H] and `normalizer` [B, K, F] of the cache."""
        batch, n_heads, _, head_dim = v_BKTH.shape
        dtype = at_least_float32(v_BKTH).dtype
        shape = (batch, n_heads, self.features_per_width * head_dim)
        return (
            self.variable(CACHE, 'state', jnp.zeros, (*shape, head_dim), dtype),
            self.variable(CACHE, 'normalizer', jnp.zeros, shape, dtype),
        )

    @classmethod
    def log_weights(cls, q_BNTH: jax.Array, k_BKSH: jax.Array) -> jax.Array:
        """Returns log phi(q_t) . phi(k_s) of all pairs, without rotation, [B, N, T, S] float32.

        q and k are normalized, as in `mix`. A weight of 0 has the logarithm MASKED.
        """
        n_heads = q_BNTH.shape[1]
        q_BNTF = jnp.concatenate(cls.query_features(at_least_float32(q_BNTH)), -1)
        k_BKSF = jnp.concatenate(cls.key_features(at_least_float32(k_BKSH)), -1)
        weights_BNTS = jnp.einsum('bntf,bnsf->bnts', q_BNTF, repeat_kv_heads(k_BKSF, n_heads))
        positive = weights_BNTS > 0
        return jnp.where(positive, jnp.log(jnp.where(positive, weights_BNTS, 1.0)), MASKED)


class NaLaAttention(LinearAttention):
    """NaLa (arXiv:2506.21137): linear attention that is sharper for longer queries.

    `phi(q) = [relu(q / |q|)^p, relu(-q / |q|)^p] with p = 3 (1/2 + tanh |q|)`
    `phi(k) = [relu(k^3), relu(-k^3)]`

    These features replace `elu(x) + 1` of linear attention, as in the authors' code
    (https://github.com/ZacharyMeng/NaLaFormer); positions rotate each half. If the model has a
    `qk_norm`, its gain sets `|q|`; the authors' code has no such norm.

    Their code is for images: each token attends to all tokens, and both sums are divided by the
    number of tokens. The causal sums, with EPS added to the plain sum, are our reading. If
    positions rotate, the first tokens divide by a sum over few keys and may get large outputs: for
    normal q, k and v the largest was 249 in heads of width 8, and 8 in heads of width 64. We omit
    the convolution of the values (LePE), and the LayerNorm and SiLU gate after the attention;
    `gate` takes the place of the latter.
    """

    query_features = staticmethod(nala_query_features)
    key_features = staticmethod(nala_key_features)
    features_per_width = 2


def reset_state(state: AttentionSums, sequence: Sequence) -> AttentionSums:
    """Zeroes the state of each row that starts with its first token."""
    continues_B = (sequence.positions_BT[:, 0] > 0).astype(state.keys_BKF.dtype)
    continues_B = jnp.broadcast_to(continues_B, state.keys_BKF.shape[:1])
    return jax.tree.map(lambda x: jnp.einsum('b,b...->b...', continues_B, x), state)
