"""Sums of exponentials that neither overflow nor underflow, as pairs (exponent, mantissa).

A pair stands for mantissa * base^exponent. Exponents are finite: an empty sum has the exponent
`NO_EXPONENT` and the mantissa 0. Hidden logits are -inf.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

Pair = tuple[jax.Array, jax.Array]

NO_EXPONENT = float(jnp.finfo(jnp.float32).min)  # a logit may be this small too
MIN_LOGIT = -1e38  # bound of visible logits, so that their exponents fit into float32
# ln 2 in two parts. The first has 9 bits, so its products with n up to 2^15 are exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
LOG2_E = 1.4426950408889634


class ExponentialForm(NamedTuple):
    """Functions for sums of exponentials in one base.

    exponent: n of logits z, with exp(z) = m base^n. terms: exp(z) / base^N, for n <= N. power:
    base^n of n <= 0. log: the log of a pair in two parts, the first of which is exact enough for
    logits of any size.
    """

    exponent: Callable[[jax.Array], jax.Array]
    terms: Callable[[jax.Array, jax.Array], jax.Array]
    power: Callable[[jax.Array], jax.Array]
    log: Callable[[Pair], Pair]


def _split(z):
    """Returns (n, r, hidden): exp(z) = exp(r) 2^n with n whole and |r| <= ln(2) / 2."""
    hidden = z == -jnp.inf
    z = jnp.maximum(jnp.where(hidden, 0.0, z), MIN_LOGIT)
    n = jnp.round(z * LOG2_E)
    # For |n| > 2^15 the remainder is rounded, and far beyond it is arbitrary, hence the bounds.
    r = jnp.clip((z - n * LN2_HIGH) - n * LN2_LOW, -0.35, 0.35)
    return jnp.where(hidden, NO_EXPONENT, n), r, hidden


def _terms_two_pass(z, max_exponent):
    n, r, hidden = _split(z)
    return jnp.where(hidden, 0.0, jnp.exp(r)) * exact_exp2(n - max_exponent)


def exact_exp2(n: jax.Array) -> jax.Array:
    """Returns 2^n exactly for whole numbers n <= 0, from its bits; 0 below normal numbers."""
    # Float32 has its exponent, plus 127, in bits 23 to 30; -127 gives the bits of 0.
    bits = (jnp.clip(n, -127.0, 0.0).astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


# Base e, where each exponential needs the largest logit so far (arXiv:1805.02867, algorithm 3).
ONLINE = ExponentialForm(
    exponent=lambda z: z,
    terms=lambda z, max_exponent: jnp.exp(z - max_exponent),
    power=jnp.exp,
    log=lambda pair: (pair[0], jnp.log(pair[1])),
)
# Base 2, where each exponential is a mantissa and an exponent on its own (arXiv:2001.04438).
TWO_PASS = ExponentialForm(
    exponent=lambda z: _split(z)[0],
    terms=_terms_two_pass,
    power=exact_exp2,
    log=lambda pair: (pair[0] * LN2_HIGH, pair[0] * LN2_LOW + jnp.log(pair[1])),
)


def empty_sum(shape: tuple[int, ...]) -> Pair:
    """Returns the pair of a sum without terms, in arrays of `shape`."""
    return jnp.full(shape, NO_EXPONENT, jnp.float32), jnp.zeros(shape, jnp.float32)


def add_terms(
    form: ExponentialForm, pair: Pair, logits: Sequence[jax.Array], axis: int | None = None
) -> Pair:
    """Adds the exponentials of several arrays to a pair, elementwise or summed along an axis.

    Args:
      form: the base.
      pair: the sum so far.
      logits: arrays of logits, -inf where hidden.
      axis: the axis to sum over, kept with length 1; None: elementwise.
    """

    def reduce_axis(reducer, x):
        return x if axis is None else reducer(x, axis, keepdims=True)

    exponent, mantissa = pair
    largest = [reduce_axis(jnp.max, form.exponent(z)) for z in logits]
    max_exponent = functools.reduce(jnp.maximum, largest, exponent)
    mantissa = mantissa * form.power(exponent - max_exponent)
    for z in logits:
        mantissa = mantissa + reduce_axis(jnp.sum, form.terms(z, max_exponent))
    return max_exponent, mantissa


def add_pairs(form: ExponentialForm, first: Pair, second: Pair) -> Pair:
    """Adds two pairs.

    Args:
      form: the base.
      first: a pair.
      second: another pair.
    """
    max_exponent = jnp.maximum(first[0], second[0])
    terms = (
        mantissa * form.power(exponent - max_exponent) for exponent, mantissa in (first, second)
    )
    return max_exponent, functools.reduce(jnp.add, terms)


def probabilities(form: ExponentialForm, z: jax.Array, pair: Pair) -> jax.Array:
    """Returns exp(z) divided by the sum; 0 if the sum is 0.

    Args:
      form: the base.
      z: logits.
      pair: the sum.
    """
    exponent, mantissa = pair
    # One division per row and a product per entry.
    return form.terms(z, exponent) * jnp.where(mantissa == 0, 0.0, 1.0 / mantissa)
