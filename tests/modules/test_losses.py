"""Reference: token losses against numpy float64, forward and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from modules.losses import LOSSES
from modules.losses.cross_entropy import cross_entropy, z_loss

RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.normal(0, 3, (7, 11)), RNG.integers(0, 11, 7)
ONE_HOT = np.eye(11)[LABELS]


def test_cross_entropy():
    """Values, and the gradient softmax - onehot. Catches another label's logit."""
    log_p = special.log_softmax(LOGITS, -1)
    token = cross_entropy(jnp.float32(LOGITS), jnp.int32(LABELS), 0.0)
    wanted = -log_p[np.arange(7), LABELS]
    np.testing.assert_allclose(token.objective, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(token.ce, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(token.log_z, special.logsumexp(LOGITS, -1), rtol=1e-6)
    grad = jax.grad(lambda z: cross_entropy(z, jnp.int32(LABELS), 0.0).objective.sum())
    np.testing.assert_allclose(grad(jnp.float32(LOGITS)), np.exp(log_p) - ONE_HOT, atol=1e-6)


@pytest.mark.parametrize('smoothing', [0.1, 1.0])
def test_label_smoothing(smoothing):
    """Cross-entropy to (1 - s) onehot + s / V; `ce`, which is reported, stays without."""
    log_p = special.log_softmax(LOGITS, -1)
    target = (1 - smoothing) * ONE_HOT + smoothing / 11

    @jax.jit
    def objective(z, s):
        token = cross_entropy(z, jnp.int32(LABELS), s)
        return token.objective.sum(), token

    (_, token), grad = jax.value_and_grad(objective, has_aux=True)(jnp.float32(LOGITS), smoothing)
    np.testing.assert_allclose(token.objective, -np.sum(target * log_p, -1), rtol=1e-5)
    np.testing.assert_allclose(token.ce, -np.sum(ONE_HOT * log_p, -1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad, np.exp(log_p) - target, atol=1e-6)


def test_z_loss_gradient():
    """d (log Z)^2 / dz = 2 log Z softmax(z)."""
    log_z = special.logsumexp(LOGITS, -1, keepdims=True)
    np.testing.assert_allclose(z_loss(jnp.float32(log_z[:, 0])), log_z[:, 0] ** 2, rtol=1e-6)
    grad = jax.grad(lambda z: z_loss(cross_entropy(z, jnp.int32(LABELS), 0.0).log_z).sum())
    wanted = 2 * log_z * special.softmax(LOGITS, -1)
    np.testing.assert_allclose(grad(jnp.float32(LOGITS)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', LOSSES)
def test_every_loss_is_finite_for_large_logits(name):
    """Logits of 1e4, right and wrong: catches exp or log without the maximum taken off."""
    logits = jnp.float32([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0]])
    labels = jnp.int32([0, 1])

    def total(z):
        token = LOSSES[name](z, labels, 0.1)
        return jnp.sum(token.objective + 1e-4 * z_loss(token.log_z)), token

    (value, token), grad = jax.value_and_grad(total, has_aux=True)(logits)
    assert np.isfinite(value)
    assert np.isfinite(grad).all()
    np.testing.assert_allclose(token.ce, [0, 2e4], atol=1e-3)


@pytest.mark.parametrize('name', LOSSES)
def test_every_loss_is_computed_in_float32(name):
    logits = jnp.bfloat16(LOGITS)
    ours = LOSSES[name](logits, jnp.int32(LABELS), 0.1)
    exact = LOSSES[name](logits.astype(jnp.float32), jnp.int32(LABELS), 0.1)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == jnp.float32
        assert a.shape == (7,)
        np.testing.assert_array_equal(a, b)
