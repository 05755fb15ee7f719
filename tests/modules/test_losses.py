"""Reference: token losses against numpy float64, forward and gradient."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from modules.losses import AUXILIARIES, LOSSES
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


def of_probability(function):
    """A loss of the label's probability alone."""
    return lambda: function(special.softmax(LOGITS, -1)[np.arange(7), LABELS])


def taylor():
    t = 1 + LOGITS + LOGITS**2 / 2
    return -np.log(t[np.arange(7), LABELS] / t.sum(-1))


def ldr(lam, margin, scores=LOGITS):
    lead = scores - scores[np.arange(7), LABELS][:, None] + margin * (1 - ONE_HOT)
    return lam * np.log(np.mean(np.exp(lead / np.reshape(lam, (-1, 1))), -1))


def softplus_scores():
    s = np.log1p(np.exp(LOGITS))
    return s / s.mean(-1, keepdims=True)


def aldr(lam, margin, alpha):
    scores = LOGITS / np.abs(LOGITS).mean(-1, keepdims=True)
    p = special.softmax(scores / lam, -1)
    divergence = np.sum(p * np.log(11 * p), -1)
    own = lam * (1 - divergence / (alpha * np.log(11)))
    return ldr(own, margin, scores) - alpha * np.log(11) / (2 * lam) * (own - lam) ** 2


PUBLISHED = [
    ('comp_sum', {}, of_probability(lambda p: -np.log(p))),
    ('comp_sum', {'tau': 0.0}, of_probability(lambda p: 1 / p - 1)),
    ('comp_sum', {'tau': 1.7}, of_probability(lambda p: (1 - p**0.7) / 0.7)),
    ('comp_sum', {'tau': 2.0}, of_probability(lambda p: 1 - p)),
    ('focal', {}, of_probability(lambda p: -((1 - p) ** 2) * np.log(p))),
    ('focal', {'gamma': 0.0}, of_probability(lambda p: -np.log(p))),
    ('taylor_softmax', {}, taylor),
    ('ldr_kl', {}, lambda: ldr(1.0, 2.0)),
    ('ldr_kl', {'ldr_lambda': 0.5, 'ldr_margin': 0.3}, lambda: ldr(0.5, 0.3)),
    ('ldr_kl', {'ldr_scores': 'softplus'}, lambda: ldr(1.0, 2.0, softplus_scores())),
    ('aldr_kl', {'ldr_scores': 'l1', 'ldr_alpha': 2.0}, lambda: aldr(1.0, 1.0, 2.0)),
    ('aldr_kl', {'ldr_scores': 'l1', 'ldr_lambda': 3.0}, lambda: aldr(3.0, 1.0, 1.0)),
]


@pytest.mark.parametrize(('name', 'given', 'wanted'), PUBLISHED, ids=str)
def test_published_equations(name, given, wanted):
    """In float64, `ce` too."""
    with jax.enable_x64(True):
        found = inspect.unwrap(LOSSES[name])(jnp.asarray(LOGITS), jnp.asarray(LABELS), **given)
        np.testing.assert_allclose(found['objective'], wanted(), rtol=1e-10)
        ce = -special.log_softmax(LOGITS, -1)[np.arange(7), LABELS]
        np.testing.assert_allclose(found['ce'], ce, rtol=1e-12)


@pytest.mark.parametrize('tau', [0.5, 1.0, 1.5])
def test_comp_sum_gradient_is_a_power_of_p_times_that_of_cross_entropy(tau):
    """Also with tau as a tracer, where a division by tau - 1 would give NaN at 1."""
    logits, labels = jnp.float32(LOGITS), jnp.int32(LABELS)
    per_token = inspect.unwrap(LOSSES['comp_sum'])
    grad = jax.jit(jax.grad(lambda z, tau: per_token(z, labels, tau=tau)['objective'].sum()))
    p = special.softmax(LOGITS, -1)
    wanted = p[np.arange(7), LABELS][:, None] ** (tau - 1) * (p - ONE_HOT)
    np.testing.assert_allclose(grad(logits, tau), wanted, rtol=2e-4, atol=1e-6)


def test_ldr_is_between_the_largest_margin_and_their_mean():
    """The limits of lambda. Catches lambda where 1 / lambda belongs."""
    logits, labels = jnp.float32(LOGITS), jnp.int32(LABELS)
    per_token = inspect.unwrap(LOSSES['ldr_kl'])
    lead = LOGITS - LOGITS[np.arange(7), LABELS][:, None] + 2.0 * (1 - ONE_HOT)
    low, high = (per_token(logits, labels, ldr_lambda=lam)['objective'] for lam in (0.01, 1e4))
    np.testing.assert_allclose(low, lead.max(-1) - 0.01 * np.log(11), atol=0.01)
    np.testing.assert_allclose(high, lead.mean(-1), atol=0.02)


@pytest.mark.parametrize('name', sorted(set(LOSSES) - {'cross_entropy'}))
def test_losses_have_finite_gradients_where_the_model_is_certain(name):
    """Right and wrong, by 60 nats: p is 1 in float32, or e^-60."""
    logits, labels = jnp.float32([[60.0, 0.0, 0.0], [60.0, 0.0, 0.0]]), jnp.int32([0, 1])
    per_token = inspect.unwrap(LOSSES[name])
    found = per_token(logits, labels)
    grad = jax.grad(lambda z: per_token(z, labels)['objective'].sum())(logits)
    assert np.isfinite(found['objective']).all() and np.isfinite(grad).all()
    assert found['objective'][1] > found['objective'][0]
