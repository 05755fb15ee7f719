"""Sums of exponentials that neither overflow nor vanish, as pairs (exponent, mantissa).

A pair stands for mantissa * base^exponent. Exponents are finite: that of an empty sum is
`NO_EXPONENT`, with a mantissa of 0. Logits are -inf where nothing is seen.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

Pair = tuple[jax.Array, jax.Array]

NO_EXPONENT = float(jnp.finfo(jnp.float32).min)  # a logit may be this small too
MIN_LOGIT = -1e38  # of a logit that is seen: its exponent is still a float32
# ln 2 in two parts, of which the first has 9 bits: its products with n up to 2^15 are exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
LOG2_E = 1.4426950408889634


class ExponentialForm(NamedTuple):
    """exponent: n of logits z, with exp(z) = m base^n. terms: exp(z) / base^most, for n <= most.
    power: base^n of n <= 0. log: the log of a pair in two parts, of which the first is exact
    enough for logits of any size.
    """

    exponent: Callable[[jax.Array], jax.Array]
    terms: Callable[[jax.Array, jax.Array], jax.Array]
    power: Callable[[jax.Array], jax.Array]
    log: Callable[[Pair], Pair]


def _split(z):
    """Returns (n, r, hidden): exp(z) = exp(r) 2^n, n is whole and |r| at most ln(2) / 2."""
    hidden = z == -jnp.inf
    z = jnp.maximum(jnp.where(hidden, 0.0, z), MIN_LOGIT)
    n = jnp.round(z * LOG2_E)
    # Beyond 2^15 the remainder is rounded, and far beyond it is arbitrary.
    rest = jnp.clip((z - n * LN2_HIGH) - n * LN2_LOW, -0.35, 0.35)
    return jnp.where(hidden, NO_EXPONENT, n), rest, hidden


def _terms_two_pass(z, max_exponent):
    n, rest, hidden = _split(z)
    return jnp.where(hidden, 0.0, jnp.exp(rest)) * exact_exp2(n - max_exponent)


def exact_exp2(n: jax.Array) -> jax.Array:
    """Returns 2^n of whole numbers n <= 0, exactly, from its bits; 0 below normal numbers."""
    bits = (jnp.clip(n, -127.0, 0.0).astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


# Base e, where each exponential needs the largest logit so far (arXiv:1805.02867, algorithm 3).
ONLINE = ExponentialForm(
    exponent=lambda z: z,
    terms=lambda z, most: jnp.exp(z - most),
    power=jnp.exp,
    log=lambda pair: (pair[0], jnp.log(pair[1])),
)
# Base 2, where an exponential is a mantissa and an exponent by itself (arXiv:2001.04438).
TWO_PASS = ExponentialForm(
    exponent=lambda z: _split(z)[0],
    terms=_terms_two_pass,
    power=exact_exp2,
    log=lambda pair: (pair[0] * LN2_HIGH, pair[0] * LN2_LOW + jnp.log(pair[1])),
)


def empty_sum(shape: tuple[int, ...]) -> Pair:
    return jnp.full(shape, NO_EXPONENT, jnp.float32), jnp.zeros(shape, jnp.float32)


def add_terms(
    form: ExponentialForm, pair: Pair, logits: Sequence[jax.Array], axis: int | None = None
) -> Pair:
    """Adds the exponentials of several arrays to a pair, entry by entry or summed along an axis."""

    def reduce_axis(reducer, values):
        return values if axis is None else reducer(values, axis, keepdims=True)

    exponent, mantissa = pair
    largest = [reduce_axis(jnp.max, form.exponent(z)) for z in logits]
    most = functools.reduce(jnp.maximum, largest, exponent)
    mantissa = mantissa * form.power(exponent - most)
    for z in logits:
        mantissa = mantissa + reduce_axis(jnp.sum, form.terms(z, most))
    return most, mantissa


def add_pairs(form: ExponentialForm, first: Pair, second: Pair) -> Pair:
    """Adds two pairs."""
    most = jnp.maximum(first[0], second[0])
    terms = (mantissa * form.power(exponent - most) for exponent, mantissa in (first, second))
    return most, functools.reduce(jnp.add, terms)


def probabilities(form: ExponentialForm, z: jax.Array, pair: Pair) -> jax.Array:
    """Returns exp(z) over the sum; 0 where the sum is 0."""
    exponent, mantissa = pair
    return form.terms(z, exponent) * jnp.where(mantissa == 0, 0.0, 1.0 / mantissa)
