"""Reference and property: what is dropped, of activations and of attention's probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.dropout import Dropout
from modules.kernels.attention import attend
from modules.kernels.attention.base import Scores


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_share_is_0_and_the_rest_is_larger_by_what_keeps_the_mean(dtype):
    """Whatever the type, which stays; a rate of 0, traced too, keeps every bit."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), dtype)
    rates = jnp.float32([0.0, 0.25])
    dropped = jax.jit(jax.vmap(lambda rate: Dropout(rate, jax.random.key(1))(x)))(rates)
    assert dropped.dtype == x.dtype
    np.testing.assert_array_equal(dropped[0], x)
    kept = np.float32(dropped[1]) != 0
    np.testing.assert_allclose(np.mean(~kept), 0.25, atol=0.02)  # deviation 0.0068
    wanted = np.float32(x)[kept] / 0.75
    np.testing.assert_allclose(np.float32(dropped[1])[kept], wanted, rtol=5e-3)


@pytest.mark.default_rows('True')
@pytest.mark.parametrize('sinks', [False, True])
def test_probabilities_are_dropped_behind_the_softmax(sinks):
    """With unit vectors as values the result is the probabilities. Catches dropped logits, whose
    rows would still sum to 1.
    """
    rng, tokens = np.random.default_rng(0), 6
    q, k = (jnp.float32(rng.normal(size=(2, 3, tokens, tokens))) for _ in 'qk')
    v = jnp.broadcast_to(jnp.eye(tokens), q.shape)
    given = {'sinks_N': jnp.zeros(3)} if sinks else {}
    drop = Dropout(jnp.float32(0.5), jax.random.key(0))
    plain = attend('reference', q, k, v, Scores(sinks=sinks), **given)
    scores = Scores(sinks=sinks, dropout=True)
    found = attend('reference', q, k, v, scores, dropout_BNTS=drop, **given)
    np.testing.assert_allclose(found, drop(plain), rtol=1e-6)
