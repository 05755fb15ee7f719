"""A pre-norm decoder written the usual way in Linen: what `tests.bench.step` compares with.

Activations [B, T, D], Flax's own attention, optax's AdamW. The same function as Evenkeel's model
with norm=layernorm, position=learned, activation=gelu, but for biases of the norms' own. dtype: of
products; None: float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn


class PlainBlock(nn.Module):
    n_heads: int
    d_ff: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x_BTD):
        norm = lambda: nn.LayerNorm(dtype=self.dtype)  # noqa: E731
        dense = lambda width: nn.Dense(width, use_bias=False, dtype=self.dtype)  # noqa: E731
        mask = nn.make_causal_mask(x_BTD[..., 0])
        attention = nn.MultiHeadDotProductAttention(self.n_heads, use_bias=False, dtype=self.dtype)
        x_BTD = x_BTD + attention(norm()(x_BTD), mask=mask)
        h_BTF = nn.gelu(dense(self.d_ff)(norm()(x_BTD)))
        return x_BTD + dense(x_BTD.shape[-1])(h_BTF)


class PlainDecoder(nn.Module):
    d_model: int
    n_heads: int
    n_layers: int
    d_ff: int
    vocab_size: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens_BT):
        length = tokens_BT.shape[1]
        x_BTD = nn.Embed(self.vocab_size, self.d_model, dtype=self.dtype)(tokens_BT)
        x_BTD = x_BTD + nn.Embed(length, self.d_model, dtype=self.dtype)(jnp.arange(length)[None])
        for _ in range(self.n_layers):
            x_BTD = PlainBlock(self.n_heads, self.d_ff, self.dtype)(x_BTD)
        x_BTD = nn.LayerNorm(dtype=self.dtype)(x_BTD)
        logits = nn.Dense(self.vocab_size, use_bias=False, dtype=self.dtype)(x_BTD)
        return logits.astype(jnp.float32)


def make_step(model: PlainDecoder, lr: float):
    """(init(key, tokens) -> state, step(state, tokens) -> (state, loss)), not jitted."""
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=0.1)
    )

    def init(key, tokens):
        params = model.init(key, tokens[:, :-1])
        return params, tx.init(params)

    def step(state, tokens):
        params, opt_state = state

        def loss(params):
            logits = model.apply(params, tokens[:, :-1])
            ce = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return ce.mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return init, step
