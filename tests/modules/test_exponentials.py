"""Reference: sums of exponentials as an exponent and a mantissa match float64."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from modules.kernels.common.exponentials import (
    ONLINE,
    TWO_PASS,
    add_pairs,
    add_terms,
    empty_sum,
    exact_exp2,
    probabilities,
)
from tests.modules.test_softmax_kernels import numpy_softmax


def log_sum(form, pair):
    high, low = form.log(pair)
    return jnp.where(pair[1] == 0, -jnp.inf, high + low)


@pytest.mark.default_rows('online')
@pytest.mark.parametrize('form', [ONLINE, TWO_PASS], ids=['online', 'two_pass'])
def test_block_sums_equal_row_sums(form):
    """Logits at 1e4 and -1e4, scaled by 2000, at -1e30 and the least float32, with -inf first, last
    or everywhere. Catches a sum that is not rescaled when its exponent grows, or an exponent of
    -inf.
    """
    z = np.random.default_rng(0).normal(size=(10, 64)).astype(np.float32)
    z[1:4] = z[1:4] * [[2000], [1], [1]] + [[0], [1e4], [-1e4]]
    z[4], z[5] = -1e30, np.finfo(np.float32).min
    z[6:8] -= 1e4
    z[6, :32], z[7, 32:], z[8], z[9] = -np.inf, -np.inf, -np.inf, np.sort(z[1])
    pair = empty_sum((10, 1))
    for block in np.split(z, 4, axis=1):
        pair = add_terms(form, pair, [jnp.asarray(block)], axis=-1)
    p, log = probabilities(form, jnp.asarray(z), pair), log_sum(form, pair)
    exact, *_ = numpy_softmax(z, np.ones_like(z))
    np.testing.assert_allclose(p, exact, rtol=0, atol=8 * 2**-23)
    exact_log = special.logsumexp(z.astype(np.float64), -1)
    finite = np.arange(10) != 5  # a finite number for two_pass, though a larger one
    rounding = 4 * 2**-23
    np.testing.assert_allclose(log[finite, 0], exact_log[finite], rtol=rounding, atol=rounding)


@pytest.mark.default_rows('online')
@pytest.mark.parametrize('form', [ONLINE, TWO_PASS], ids=['online', 'two_pass'])
def test_pairs_are_added(form):
    """Pairs come from devices or threads; one has an empty sum. Catches a sum that is not rescaled
    to the larger exponent, or the exponent of an empty sum that wins.
    """
    z = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    z[1:4] += [[1e4], [-1e4], [-2e5]]
    z[3, 32:] += 1e4
    z[4, :32] = -np.inf
    parts = [
        add_terms(form, empty_sum((5, 1)), [jnp.asarray(part)], axis=-1)
        for part in np.split(z, 2, axis=1)
    ]
    pair = functools.reduce(functools.partial(add_pairs, form), parts, empty_sum((5, 1)))
    exact = special.logsumexp(z.astype(np.float64), -1)
    np.testing.assert_allclose(log_sum(form, pair)[:, 0], exact, rtol=4 * 2**-23, atol=4 * 2**-23)
    assert log_sum(form, empty_sum((1, 1))) == -np.inf


def test_exact_exp2_is_exact():
    """Down to the least normal number. Catches an earlier end, which would lose sums of logits 50
    and more apart.
    """
    n = jnp.float32([0, -1, -63, -64, -126, -127, -1e9])
    assert exact_exp2(n).tolist() == [1, 0.5, 2.0**-63, 2.0**-64, 2.0**-126, 0, 0]
