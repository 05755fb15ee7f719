"""Pointwise activations of the MLP. A gated one multiplies by a second projection."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from modules.facts import demands_nothing
from modules.options import Option

# The fixed point (0, 1) of mean and variance fixes both (arXiv:1706.02515, equation 14).
SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805

Dropout = Callable[[jax.Array, jax.Array], jax.Array]  # (hidden activations, key)


def no_dropout() -> Dropout | None:
    return None


@dataclasses.dataclass(frozen=True)
class Activation:
    """`fn` on the up projection or, where `gated`, fn(gate) * up (GLU, arXiv:2002.05202).

    summary: one line of what it is with its source. dropout: makes, of the options it declares,
    what training does to the hidden activations; None: nothing. check: its own rule
    (`modules.facts`).
    """

    summary: str
    fn: Callable[[jax.Array], jax.Array]
    gated: bool = False
    dropout: Callable[..., Dropout | None] = no_dropout
    check: Callable[[Any, Any], None] = demands_nothing


def gelu(x: jax.Array) -> jax.Array:
    """x * Phi(x) in its tanh form (arXiv:1606.08415); differs from the exact one by under 5e-4."""
    return jax.nn.gelu(x, approximate=True)


def squared_relu(x: jax.Array) -> jax.Array:
    """max(x, 0)^2 (Primer, arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


def gelu_exact(x: jax.Array) -> jax.Array:
    """x * Phi(x), by the error function (arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=False)


def selu(x: jax.Array) -> jax.Array:
    """SELU_SCALE * (x where x > 0, else SELU_ALPHA * (exp(x) - 1)) (arXiv:1706.02515, equation 2).

    Layers of it draw activations to mean 0 and variance 1 where matrices start with variance
    1 / fan_in (LeCun), which is how scaling.name=standard draws them, and have no biases. Residual
    connections add to the variance all the same.
    """
    return jax.nn.selu(x)


def selu_dropout(
    alpha_dropout: Annotated[
        float, Option('share of the hidden activations that training sets to their least', 0, 0.99)
    ] = 0.0,
) -> Dropout | None:
    return functools.partial(drop_to_least, alpha_dropout) if alpha_dropout else None


def drop_to_least(rate: float, x: jax.Array, key: jax.Array) -> jax.Array:
    """a (x or, with probability `rate`, l) + b, where l = -SELU_SCALE * SELU_ALPHA.

    l is what selu has far below 0. a and b keep a mean of 0 and a variance of 1
    (alpha-dropout, arXiv:1706.02515, section 3).
    """
    least, kept = -SELU_SCALE * SELU_ALPHA, 1 - rate
    a = 1 / math.sqrt(kept + least**2 * kept * rate)
    b = -a * rate * least
    dropped = jnp.where(jax.random.bernoulli(key, rate, x.shape), least, x)
    return (a * dropped + b).astype(x.dtype)


ACTIVATIONS = {
    'elu': Activation('x where x > 0, else exp(x) - 1: ELU (arXiv:1511.07289)', jax.nn.elu),
    'geglu': Activation('gelu(gate) * up (arXiv:2002.05202)', gelu, gated=True),
    'gelu': Activation('x * Phi(x) in its tanh form (arXiv:1606.08415)', gelu),
    'gelu_exact': Activation('x * Phi(x), by the error function (arXiv:1606.08415)', gelu_exact),
    'relu': Activation('max(x, 0)', jax.nn.relu),
    'selu': Activation(
        'ELU, scaled so that layers of it keep mean 0 and variance 1: SELU (arXiv:1706.02515)',
        selu,
        dropout=selu_dropout,
    ),
    'silu': Activation('x * sigmoid(x) (arXiv:1702.03118)', jax.nn.silu),
    'squared_relu': Activation('max(x, 0)^2: Primer (arXiv:2109.08668)', squared_relu),
    'swiglu': Activation('silu(gate) * up (arXiv:2002.05202)', jax.nn.silu, gated=True),
}
