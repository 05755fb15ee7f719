"""Pointwise activations of the MLP. A gated activation multiplies by a second projection."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.facts import accept_any
from modules.options import Option

# SELU is SELU_SCALE * (x where x > 0, else SELU_ALPHA * (exp(x) - 1)). These numbers keep mean 0
# and variance 1 (arXiv:1706.02515, equations 2 and 14) in layers without biases whose matrices
# start with variance 1 / fan_in (LeCun), as with scaling.name=standard. Residual connections still
# add to the variance.
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805

# gpt-oss (arXiv:2508.10925): x sigmoid(1.702 x) is near x Phi(x) (arXiv:1606.08415).
GLU_ALPHA, GLU_LIMIT = 1.702, 7.0

DropoutFn = Callable[[jax.Array, jax.Array], jax.Array]  # (hidden activations, key)


@dataclasses.dataclass(frozen=True)
class Activation:
    """`fn` of the up projection; if `gated`, fn(gate) * up_fn(up) (GLU, arXiv:2002.05202)."""

    summary: str  # a sentence with source and equation; more paragraphs may follow
    fn: Callable[[jax.Array], jax.Array]
    gated: bool = False
    up_fn: Callable[[jax.Array], jax.Array] = lambda up: up
    # Takes its declared options, and returns a map of hidden activations in training.
    dropout: Callable[..., DropoutFn | None] = lambda: None
    check: Callable[[Any, Any], None] = accept_any  # of the rest of a config (`modules.facts`)


def selu_dropout(
    alpha_dropout: Annotated[
        float,
        Option(
            'share of hidden activations set to their lowest value in training; 0: none', 0, 0.99
        ),
    ] = 0.0,
) -> DropoutFn | None:
    return functools.partial(apply_alpha_dropout, alpha_dropout) if alpha_dropout else None


def apply_alpha_dropout(rate: float, x: jax.Array, key: jax.Array) -> jax.Array:
    """Computes a (x or, with probability `rate`, l) + b, where l = -SELU_SCALE * SELU_ALPHA.

    SELU tends to l for large negative inputs. a and b keep a mean of 0 and a variance of 1
    (alpha-dropout, arXiv:1706.02515, section 3).

    Args:
      rate: the probability that an activation is dropped.
      x: hidden activations.
      key: a random key.

    Returns:
      Activations of the shape and type of x.
    """
    floor, keep_rate = -SELU_SCALE * SELU_ALPHA, 1 - rate
    a = 1 / math.sqrt(keep_rate + floor**2 * keep_rate * rate)
    b = -a * rate * floor
    dropped = jnp.where(jax.random.bernoulli(key, rate, x.shape), floor, x)
    return (a * dropped + b).astype(x.dtype)


def clamped_silu(gate: jax.Array) -> jax.Array:
    """g sigmoid(GLU_ALPHA g) with g = min(gate, GLU_LIMIT)."""
    gate = jnp.minimum(gate, GLU_LIMIT)
    return gate * jax.nn.sigmoid(GLU_ALPHA * gate)


def clamped_up(up: jax.Array) -> jax.Array:
    """1 + up, with up clipped to [-GLU_LIMIT, GLU_LIMIT]."""
    return 1 + jnp.clip(up, -GLU_LIMIT, GLU_LIMIT)


# The two forms of GELU differ by under 5e-4.
GELU, GELU_EXACT = (functools.partial(jax.nn.gelu, approximate=form) for form in (True, False))

ACTIVATIONS = {
    'elu': Activation('ELU (arXiv:1511.07289): `y = x if x > 0 else exp(x) - 1`', jax.nn.elu),
    'geglu': Activation('GEGLU (arXiv:2002.05202): `y = gelu(gate) * up`', GELU, gated=True),
    'gelu': Activation(
        'GELU in its tanh form (arXiv:1606.08415): `y = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 '
        'x^3))) / 2`',
        GELU,
    ),
    'gelu_exact': Activation(
        'GELU (arXiv:1606.08415): `y = x Phi(x) with Phi(x) = (1 + erf(x / sqrt(2))) / 2`.\n\n'
        "This is PyTorch's `nn.GELU()`.",
        GELU_EXACT,
    ),
    'relu': Activation('ReLU: `y = max(x, 0)`', jax.nn.relu),
    'selu': Activation(
        'SELU, a scaled ELU (arXiv:1706.02515): `y = s x if x > 0 else s a (exp(x) - 1)`.\n\n'
        'The constants `s` and `a` are such that layers keep mean 0 and variance 1.',
        jax.nn.selu,
        dropout=selu_dropout,
    ),
    'silu': Activation('SiLU (arXiv:1702.03118): `y = x sigmoid(x)`', jax.nn.silu),
    'squared_relu': Activation(
        'Squared ReLU, from Primer (arXiv:2109.08668): `y = max(x, 0)^2`',
        lambda x: jnp.square(jax.nn.relu(x)),
    ),
    'swiglu': Activation(
        'SwiGLU (arXiv:2002.05202): `y = silu(gate) * up`', jax.nn.silu, gated=True
    ),
    'swiglu_oai': Activation(
        'SwiGLU of gpt-oss (arXiv:2508.10925): `y = g sigmoid(1.702 g) * (u + 1)`.\n\n'
        '`g = min(gate, 7)`, and `u` is the up projection, clipped to the range from -7 to 7.',
        clamped_silu,
        gated=True,
        up_fn=clamped_up,
    ),
}
