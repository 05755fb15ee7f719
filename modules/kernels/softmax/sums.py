"""Sums of exponentials that neither overflow nor vanish, as pairs of numbers a row: two forms.

z_RC are logits, -inf where nothing is seen; a pair is two arrays [R, 1].
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from modules.kernels.powers_of_two import LN2_HIGH, LN2_LOW, mantissa_of_exp, power_of_two

Pair = tuple[jax.Array, jax.Array]

LEAST = -1e38  # of a logit that is seen: its exponent is still a float32
NO_EXPONENT = -3e38  # of a sum of nothing


class Sums(NamedTuple):
    """nothing: the sum of no logits, for R rows. add: a sum and the logits of a block.
    probabilities: exp(z) over the sum, 0 where that is. log: of the sum, [R, 1].
    """

    nothing: Callable[[int], Pair]
    add: Callable[[Pair, jax.Array], Pair]
    probabilities: Callable[[jax.Array, Pair], jax.Array]
    log: Callable[[Pair], jax.Array]


def _online_nothing(rows):
    return jnp.full((rows, 1), -jnp.inf, jnp.float32), jnp.zeros((rows, 1), jnp.float32)


def _shift(top):
    return jnp.where(top == -jnp.inf, 0.0, top)  # -inf less itself is NaN


def _online_add(pair, z_RC):
    top, total = pair
    new = jnp.maximum(top, jnp.max(z_RC, -1, keepdims=True))
    shift = _shift(new)
    return new, total * jnp.exp(top - shift) + jnp.sum(jnp.exp(z_RC - shift), -1, keepdims=True)


def _online_probabilities(z_RC, pair):
    top, total = pair
    return jnp.exp(z_RC - _shift(top)) * _inverse(total)


def _online_log(pair):
    top, total = pair
    return jnp.where(total == 0, -jnp.inf, _shift(top) + jnp.log(total))


def _inverse(total):
    return jnp.where(total == 0, 0.0, 1.0 / total)


def _two_pass_nothing(rows):
    return jnp.full((rows, 1), NO_EXPONENT, jnp.float32), jnp.zeros((rows, 1), jnp.float32)


def _mantissas(z_RC):
    """(n, m) with exp(z) = m 2^n and m in [0.70, 1.42], or 0."""
    is_hidden = z_RC == -jnp.inf
    z = jnp.maximum(jnp.where(is_hidden, 0.0, z_RC), LEAST)
    n, rest = mantissa_of_exp(z)
    # Beyond 2^15 the rest is rounded, far beyond to anything: it is at most ln(2) / 2.
    m = jnp.exp(jnp.clip(rest, -0.35, 0.35))
    return jnp.where(is_hidden, NO_EXPONENT, n), jnp.where(is_hidden, 0.0, m)


def _two_pass_add(pair, z_RC):
    exponent, total = pair
    n, m = _mantissas(z_RC)
    new = jnp.maximum(exponent, jnp.max(n, -1, keepdims=True))
    terms = m * power_of_two(n - new)
    return new, total * power_of_two(exponent - new) + jnp.sum(terms, -1, keepdims=True)


def _two_pass_probabilities(z_RC, pair):
    exponent, total = pair
    n, m = _mantissas(z_RC)
    return m * power_of_two(n - exponent) * _inverse(total)


def _two_pass_log(pair):
    exponent, total = pair
    log = exponent * LN2_HIGH + (exponent * LN2_LOW + jnp.log(total))
    return jnp.where(total == 0, -jnp.inf, log)


# online: total exp(top), with the largest logit so far (arXiv:1805.02867, algorithm 3).
# two_pass: total 2^exponent, each exponential a mantissa and an exponent (arXiv:2001.04438).
ONLINE = Sums(_online_nothing, _online_add, _online_probabilities, _online_log)
TWO_PASS = Sums(_two_pass_nothing, _two_pass_add, _two_pass_probabilities, _two_pass_log)
