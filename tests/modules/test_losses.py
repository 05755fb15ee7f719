"""Reference: token losses against numpy float64, forward and gradient."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from modules.losses import AUXILIARIES
from modules.losses.cross_entropy import cross_entropy

RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.normal(0, 3, (7, 11)), RNG.integers(0, 11, 7)
ONE_HOT = np.eye(11)[LABELS]


def losses(logits, labels=LABELS, z_loss=0.0, label_smoothing=0.0):
    """The terms of each token, [M]: the function that the adapter sums."""
    per_token = inspect.unwrap(cross_entropy)
    labels = jnp.int32(labels)
    return per_token(logits, labels, z_loss=z_loss, label_smoothing=label_smoothing)


def test_cross_entropy():
    """Values, and the gradient softmax - onehot. Catches another label's logit."""
    log_p = special.log_softmax(LOGITS, -1)
    found = losses(jnp.float32(LOGITS))
    wanted = -log_p[np.arange(7), LABELS]
    np.testing.assert_allclose(found['objective'], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found['ce'], wanted, rtol=1e-5, atol=1e-6)
    grad = jax.grad(lambda z: losses(z)['objective'].sum())
    np.testing.assert_allclose(grad(jnp.float32(LOGITS)), np.exp(log_p) - ONE_HOT, atol=1e-6)


@pytest.mark.parametrize('smoothing', [0.1, 1.0])
def test_label_smoothing(smoothing):
    """Cross-entropy to (1 - s) onehot + s / V; `ce`, which is reported, stays without."""
    log_p = special.log_softmax(LOGITS, -1)
    target = (1 - smoothing) * ONE_HOT + smoothing / 11

    @jax.jit
    def objective(z, s):
        found = losses(z, label_smoothing=s)
        return found['objective'].sum(), found

    (_, found), grad = jax.value_and_grad(objective, has_aux=True)(jnp.float32(LOGITS), smoothing)
    np.testing.assert_allclose(found['objective'], -np.sum(target * log_p, -1), rtol=1e-5)
    np.testing.assert_allclose(found['ce'], -np.sum(ONE_HOT * log_p, -1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad, np.exp(log_p) - target, atol=1e-6)


def test_z_loss():
    """c (log Z)^2 on top, recorded without c; d (log Z)^2 / dz = 2 log Z softmax(z)."""
    log_z = special.logsumexp(LOGITS, -1, keepdims=True)
    with_z, without = (losses(jnp.float32(LOGITS), z_loss=c) for c in (0.5, 0.0))
    np.testing.assert_allclose(with_z['z_loss'], log_z[:, 0] ** 2, rtol=1e-5)
    added = with_z['objective'] - without['objective']
    np.testing.assert_allclose(added, 0.5 * log_z[:, 0] ** 2, rtol=1e-4)
    grad = jax.grad(lambda z: losses(z)['z_loss'].sum())
    wanted = 2 * log_z * special.softmax(LOGITS, -1)
    np.testing.assert_allclose(grad(jnp.float32(LOGITS)), wanted, rtol=1e-4, atol=1e-5)


def test_losses_are_finite_for_large_logits():
    """Logits of 1e4, right and wrong: catches exp or log without the maximum taken off."""
    logits = jnp.float32([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0]])

    def total(z):
        found = losses(z, [0, 1], z_loss=1e-4, label_smoothing=0.1)
        return jnp.sum(found['objective']), found

    (value, found), grad = jax.value_and_grad(total, has_aux=True)(logits)
    assert np.isfinite(value)
    assert np.isfinite(grad).all()
    np.testing.assert_allclose(found['ce'], [0, 2e4], atol=1e-3)


def test_losses_are_computed_in_float32():
    logits = jnp.bfloat16(LOGITS)
    ours, exact = losses(logits), losses(logits.astype(jnp.float32))
    for term, value in ours.items():
        assert value.dtype == jnp.float32
        assert value.shape == (7,)
        np.testing.assert_array_equal(value, exact[term])


def test_balance_loss_is_weighed():
    np.testing.assert_allclose(AUXILIARIES['balance_loss'](3.0, balance_loss=0.5), 1.5)
