"""Reference and property: dropout of activations and of attention probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.dropout import Dropout
from modules.kernels.attention import attend
from modules.kernels.attention.base import Scores


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_dropout_keeps_mean(dtype):
    """The dtype is kept; a rate of 0, traced too, keeps every bit."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), dtype)
    rates = jnp.float32([0.0, 0.25])
    dropped = jax.jit(jax.vmap(lambda rate: Dropout(rate, jax.random.key(1))(x)))(rates)
    assert dropped.dtype == x.dtype
    np.testing.assert_array_equal(dropped[0], x)
    remains = np.float32(dropped[1]) != 0
    np.testing.assert_allclose(np.mean(~remains), 0.25, atol=0.02)  # deviation 0.0068
    expected = np.float32(x)[remains] / 0.75
    np.testing.assert_allclose(np.float32(dropped[1])[remains], expected, rtol=5e-3)


@pytest.mark.default_rows('True')
@pytest.mark.parametrize('sinks', [False, True])
def test_probabilities_are_dropped_after_softmax(sinks):
    """With unit vectors as values the output is the probabilities. Catches dropped logits, with
    which rows would still sum to 1.
    """
    rng, tokens = np.random.default_rng(0), 6
    q, k = (jnp.float32(rng.normal(size=(2, 3, tokens, tokens))) for _ in 'qk')
    v = jnp.broadcast_to(jnp.eye(tokens), q.shape)
    sink_arrays = {'sinks_N': jnp.zeros(3)} if sinks else {}
    drop = Dropout(jnp.float32(0.5), jax.random.key(0))
    plain = attend('reference', q, k, v, Scores(sinks=sinks), **sink_arrays)
    scores = Scores(sinks=sinks, dropout=True)
    actual = attend('reference', q, k, v, scores, dropout_BNTS=drop, **sink_arrays)
    np.testing.assert_allclose(actual, drop(plain), rtol=1e-6)
