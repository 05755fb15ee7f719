"""Dropout: sets a share of activations to 0 in training, and scales the rest to the same mean."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from modules.statistics import next_key

KEY_NAME = 'dropout_key'  # the name of a key among what a layer carries


class Dropout(struct.PyTreeNode):
    """y = m x / (1 - rate), with m drawn from the key: 0 with probability `rate`, else 1.

    The rate may be a tracer; 0 changes nothing. Source: arXiv:1207.0580, scaled in training as in
    https://jmlr.org/papers/v15/srivastava14a.html, section 10.
    """

    rate: jax.Array
    key: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        keep_rate = 1 - self.rate
        scaled = (x / keep_rate).astype(x.dtype)
        return jnp.where(
            jax.random.bernoulli(self.key, keep_rate, x.shape), scaled, jnp.zeros_like(x)
        )


class DropoutKey(nn.Module):
    """A module with a random key as its only state, so that it changes no key of a parameter."""

    @nn.compact
    def __call__(self) -> jax.Array | None:
        return next_key(self, KEY_NAME)
