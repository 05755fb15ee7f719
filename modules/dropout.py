"""Dropout: training sets a share of activations to 0 and scales the others up to the same mean."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from modules.statistics import next_key

KEY_NAME = 'dropout_key'  # the name of a key among what a layer carries


class Dropout(struct.PyTreeNode):
    """y = m x / (1 - rate) with m drawn from the key: 0 with probability `rate`, else 1.

    The rate may be a tracer; at 0 all is kept as it is. Source: arXiv:1207.0580, scaled in training
    as in https://jmlr.org/papers/v15/srivastava14a.html, section 10.
    """

    rate: jax.Array
    key: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        kept = 1 - self.rate
        scaled = (x / kept).astype(x.dtype)
        return jnp.where(jax.random.bernoulli(self.key, kept, x.shape), scaled, jnp.zeros_like(x))


class DropoutKey(nn.Module):
    """Carries a random key and nothing else, so that no parameter beside it is drawn anew."""

    @nn.compact
    def __call__(self) -> jax.Array | None:
        return next_key(self, KEY_NAME)
