"""Sums of exponentials that neither overflow nor vanish, as pairs (exponent, mantissa): two forms.

A pair stands for mantissa * base^exponent. Exponents are finite: that of nothing is `NO_EXPONENT`,
with a mantissa of 0. Logits are -inf where nothing is seen.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

Pair = tuple[jax.Array, jax.Array]

NO_EXPONENT = float(jnp.finfo(jnp.float32).min)  # what a logit may be, too
LEAST = -1e38  # of a logit that is seen: its exponent is still a float32
# ln 2 in two parts, of which the first has 9 bits: its products with n up to 2^15 are exact.
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
LOG2_E = 1.4426950408889634


class Form(NamedTuple):
    """exponent: n of logits z, with exp(z) = m base^n. terms: exp(z) / base^most, for n <= most.
    power: base^n of n <= 0. log: of a pair's sum, in two parts of which the first is exact enough
    for logits of any size.
    """

    exponent: Callable[[jax.Array], jax.Array]
    terms: Callable[[jax.Array, jax.Array], jax.Array]
    power: Callable[[jax.Array], jax.Array]
    log: Callable[[Pair], Pair]


def _log_online(pair):
    exponent, mantissa = pair
    return exponent, jnp.log(mantissa)


def _split(z):
    """(n, r, hidden) with exp(z) = exp(r) 2^n, n whole and |r| at most ln(2) / 2."""
    hidden = z == -jnp.inf
    z = jnp.maximum(jnp.where(hidden, 0.0, z), LEAST)
    n = jnp.round(z * LOG2_E)
    # Beyond 2^15 the rest is rounded, far beyond to anything.
    rest = jnp.clip((z - n * LN2_HIGH) - n * LN2_LOW, -0.35, 0.35)
    return jnp.where(hidden, NO_EXPONENT, n), rest, hidden


def _terms_two_pass(z, most):
    n, rest, hidden = _split(z)
    return jnp.where(hidden, 0.0, jnp.exp(rest)) * power_of_two(n - most)


def power_of_two(n: jax.Array) -> jax.Array:
    """2^n of whole numbers n <= 0, from its bits, exactly; 0 below the least normal number."""
    bits = (jnp.clip(n, -127.0, 0.0).astype(jnp.int32) + 127) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _log_two_pass(pair):
    exponent, mantissa = pair
    return exponent * LN2_HIGH, exponent * LN2_LOW + jnp.log(mantissa)


# online: base e, where an exponential waits for the largest logit so far (arXiv:1805.02867,
# algorithm 3). two_pass: base 2, where it is a mantissa and an exponent (arXiv:2001.04438).
ONLINE = Form(lambda z: z, lambda z, most: jnp.exp(z - most), jnp.exp, _log_online)
TWO_PASS = Form(lambda z: _split(z)[0], _terms_two_pass, power_of_two, _log_two_pass)


def nothing(shape: tuple[int, ...]) -> Pair:
    return jnp.full(shape, NO_EXPONENT, jnp.float32), jnp.zeros(shape, jnp.float32)


def add(form: Form, pair: Pair, logits: Sequence[jax.Array], axis: int | None = None) -> Pair:
    """The pair with several arrays of logits added, entry by entry, or to sums along an axis."""

    def along(reduce, values):
        return values if axis is None else reduce(values, axis, keepdims=True)

    exponent, mantissa = pair
    largest = [along(jnp.max, form.exponent(z)) for z in logits]
    most = functools.reduce(jnp.maximum, largest, exponent)
    mantissa = mantissa * form.power(exponent - most)
    for z in logits:
        mantissa = mantissa + along(jnp.sum, form.terms(z, most))
    return most, mantissa


def together(form: Form, one: Pair, other: Pair) -> Pair:
    """The sum of two sums."""
    most = jnp.maximum(one[0], other[0])
    terms = (mantissa * form.power(exponent - most) for exponent, mantissa in (one, other))
    return most, functools.reduce(jnp.add, terms)


def probabilities(form: Form, z: jax.Array, pair: Pair) -> jax.Array:
    """exp(z) over the sum; 0 where that is."""
    exponent, mantissa = pair
    return form.terms(z, exponent) * jnp.where(mantissa == 0, 0.0, 1.0 / mantissa)


def log_of(form: Form, pair: Pair) -> jax.Array:
    """Of the sum; -inf of nothing."""
    high, low = form.log(pair)
    return jnp.where(pair[1] == 0, -jnp.inf, high + low)
