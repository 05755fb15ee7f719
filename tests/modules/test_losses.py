"""Reference: token losses against NumPy float64, forward and gradient."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from modules.kernels.matmul import direct
from modules.losses import AUXILIARIES, LOSSES
from modules.losses.base import cross_entropy
from modules.losses.label_probability import MAX_POWER, comp_sum_from_ce
from modules.products import Readout

RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.normal(0, 3, (7, 11)), RNG.integers(0, 11, 7)
ONE_HOT = np.eye(11)[LABELS]
P = special.softmax(LOGITS, -1)


def losses(logits, labels=LABELS, z_loss=0.0, label_smoothing=0.0):
    """Returns the terms of each token, [M]: the function that the adapter sums."""
    compute = inspect.unwrap(cross_entropy)
    labels = jnp.int32(labels)
    return compute(logits, labels, z_loss=z_loss, label_smoothing=label_smoothing)


def test_cross_entropy():
    """Values, and the gradient softmax - onehot. Catches another label's logit."""
    log_p = special.log_softmax(LOGITS, -1)
    terms = losses(jnp.float32(LOGITS))
    expected = -log_p[np.arange(7), LABELS]
    np.testing.assert_allclose(terms['objective'], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(terms['ce'], expected, rtol=1e-5, atol=1e-6)
    grad = jax.grad(lambda z: losses(z)['objective'].sum())
    np.testing.assert_allclose(grad(jnp.float32(LOGITS)), np.exp(log_p) - ONE_HOT, atol=1e-6)


@pytest.mark.parametrize('smoothing', [0.1, 1.0])
def test_label_smoothing_matches_equation(smoothing):
    """Cross-entropy to (1 - s) onehot + s / V; the reported `ce` is not smoothed."""
    log_p = special.log_softmax(LOGITS, -1)
    target = (1 - smoothing) * ONE_HOT + smoothing / 11

    @jax.jit
    def objective(z, s):
        terms = losses(z, label_smoothing=s)
        return terms['objective'].sum(), terms

    (_, terms), grad = jax.value_and_grad(objective, has_aux=True)(jnp.float32(LOGITS), smoothing)
    np.testing.assert_allclose(terms['objective'], -np.sum(target * log_p, -1), rtol=1e-5)
    np.testing.assert_allclose(terms['ce'], -np.sum(ONE_HOT * log_p, -1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad, np.exp(log_p) - target, atol=1e-6)


def test_z_loss_adds_squared_log_partition():
    """Adds c (log Z)^2, recorded without c; d (log Z)^2 / dz = 2 log Z softmax(z)."""
    log_z = special.logsumexp(LOGITS, -1, keepdims=True)
    with_z, without = (losses(jnp.float32(LOGITS), z_loss=c) for c in (0.5, 0.0))
    np.testing.assert_allclose(with_z['z_loss'], log_z[:, 0] ** 2, rtol=1e-5)
    added = with_z['objective'] - without['objective']
    np.testing.assert_allclose(added, 0.5 * log_z[:, 0] ** 2, rtol=1e-4)
    grad = jax.grad(lambda z: losses(z)['z_loss'].sum())
    expected = 2 * log_z * special.softmax(LOGITS, -1)
    np.testing.assert_allclose(grad(jnp.float32(LOGITS)), expected, rtol=1e-4, atol=1e-5)


def test_losses_are_finite_for_large_logits():
    """Logits of 1e4, right and wrong. Catches exp or log without subtraction of the maximum."""
    logits = jnp.float32([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0]])

    def total(z):
        terms = losses(z, [0, 1], z_loss=1e-4, label_smoothing=0.1)
        return jnp.sum(terms['objective']), terms

    (value, terms), grad = jax.value_and_grad(total, has_aux=True)(logits)
    assert np.isfinite(value)
    assert np.isfinite(grad).all()
    np.testing.assert_allclose(terms['ce'], [0, 2e4], atol=1e-3)


def test_losses_are_computed_in_float32():
    logits = jnp.bfloat16(LOGITS)
    terms, exact = losses(logits), losses(logits.astype(jnp.float32))
    for term, actual in terms.items():
        assert actual.dtype == jnp.float32
        assert actual.shape == (7,)
        np.testing.assert_array_equal(actual, exact[term])


def test_balance_loss_is_weighted():
    np.testing.assert_allclose(AUXILIARIES['balance_loss'](3.0, balance_loss=0.5), 1.5)


def per_token(name, logits, labels, **options):
    """Returns the sums of each token alone, [M], as rows of one token; the readout is the
    identity.
    """
    readout = Readout(
        jnp.eye(logits.shape[-1], dtype=logits.dtype), None, 0.0, direct, logits.dtype
    )

    def single_token(weights):
        return LOSSES[name](logits[:, None], readout, labels[:, None], weights[:, None], **options)

    return jax.jit(jax.vmap(single_token))(jnp.eye(len(logits), dtype=logits.dtype))


def probability_loss(function):
    """Makes a loss of the label's probability only."""
    return lambda: function(special.softmax(LOGITS, -1)[np.arange(7), LABELS])


def taylor():
    t = 1 + LOGITS + LOGITS**2 / 2
    return -np.log(t[np.arange(7), LABELS] / t.sum(-1))


def dice(alpha, smooth):
    q = (1 - P) ** alpha * P
    return np.sum(1 - (2 * q * ONE_HOT + smooth) / (q + ONE_HOT + smooth), -1)


def dco(tries):
    p = P[np.arange(7), LABELS]
    factor = tries * (1 - p) ** (tries - 1) * p / (1 - (1 - p) ** tries)
    return factor * -np.log(p)


def spherical_z(a, b):
    lead = (LOGITS - LOGITS.mean(-1, keepdims=True)) / LOGITS.std(-1, keepdims=True)
    return np.log1p(np.exp(a * (b - lead[np.arange(7), LABELS]))) / a


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
    token_lambda = lam * (1 - divergence / (alpha * np.log(11)))
    return (
        ldr(token_lambda, margin, scores)
        - alpha * np.log(11) / (2 * lam) * (token_lambda - lam) ** 2
    )


PUBLISHED = [
    ('comp_sum', {}, probability_loss(lambda p: -np.log(p))),
    ('comp_sum', {'tau': 0.0}, probability_loss(lambda p: 1 / p - 1)),
    ('comp_sum', {'tau': 1.7}, probability_loss(lambda p: (1 - p**0.7) / 0.7)),
    ('comp_sum', {'tau': 2.0}, probability_loss(lambda p: 1 - p)),
    ('focal', {}, probability_loss(lambda p: -((1 - p) ** 2) * np.log(p))),
    ('focal', {'gamma': 0.0}, probability_loss(lambda p: -np.log(p))),
    ('dice', {}, lambda: dice(0.0, 1.0)),
    ('dice', {'dice_alpha': 0.6, 'dice_smooth': 0.1}, lambda: dice(0.6, 0.1)),
    ('dco', {}, probability_loss(lambda p: -np.log(p))),
    ('dco', {'dco_tries': 8.0}, lambda: dco(8.0)),
    ('spherical_z', {}, lambda: spherical_z(0.1, 10.0)),
    ('spherical_z', {'spherical_a': 2.0, 'spherical_b': 1.0}, lambda: spherical_z(2.0, 1.0)),
    ('taylor_softmax', {}, taylor),
    ('ldr_kl', {}, lambda: ldr(1.0, 2.0)),
    ('ldr_kl', {'ldr_lambda': 0.5, 'ldr_margin': 0.3}, lambda: ldr(0.5, 0.3)),
    ('ldr_kl', {'ldr_scores': 'softplus'}, lambda: ldr(1.0, 2.0, softplus_scores())),
    ('aldr_kl', {'ldr_scores': 'l1', 'ldr_alpha': 2.0}, lambda: aldr(1.0, 1.0, 2.0)),
    ('aldr_kl', {'ldr_scores': 'l1', 'ldr_lambda': 3.0}, lambda: aldr(3.0, 1.0, 1.0)),
]


@pytest.mark.parametrize(('name', 'options', 'expected'), PUBLISHED)
def test_published_equations(name, options, expected):
    """Compares in float64, `ce` too."""
    with jax.enable_x64(True):
        terms = per_token(name, jnp.asarray(LOGITS), jnp.asarray(LABELS), **options)
        np.testing.assert_allclose(terms['objective'], expected(), rtol=1e-10)
        ce = -special.log_softmax(LOGITS, -1)[np.arange(7), LABELS]
        np.testing.assert_allclose(terms['ce'], ce, rtol=1e-12)


@pytest.mark.parametrize('tau', [0.5, 1.0, 1.5])
def test_comp_sum_gradient_scales_cross_entropy(tau):
    """The factor is a power of p. tau may be a tracer, where a division by tau - 1 would give NaN
    at 1.
    """
    logits, labels = jnp.float32(LOGITS), jnp.int32(LABELS)

    def total(z, tau):
        return per_token('comp_sum', z, labels, tau=tau)['objective'].sum()

    grad = jax.jit(jax.grad(total))
    p = special.softmax(LOGITS, -1)
    expected = p[np.arange(7), LABELS][:, None] ** (tau - 1) * (p - ONE_HOT)
    np.testing.assert_allclose(grad(logits, tau), expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize('tau', [0.0, 0.5])
def test_comp_sum_is_linear_beyond_bound(tau):
    """Finite in value and gradient, and in their squares; as published below the bound."""
    ce = jnp.array([0.1, 20.0, MAX_POWER, 60.0, 300.0, 1e4]) / (1 - tau)
    actual, slope = jax.vmap(jax.value_and_grad(lambda ce: comp_sum_from_ce(ce, tau)))(ce)
    expected = np.expm1(np.minimum(np.float64(ce) * (1 - tau), MAX_POWER)) / (1 - tau)
    expected += np.exp(MAX_POWER) * np.maximum(np.float64(ce) - MAX_POWER / (1 - tau), 0)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    slopes = np.exp(np.minimum(np.float64(ce) * (1 - tau), MAX_POWER))
    np.testing.assert_allclose(slope, slopes, rtol=1e-5)
    assert np.isfinite(np.square(np.float32(slope)).sum())


def test_ldr_is_between_largest_and_mean_margin():
    """The limits of lambda. Catches lambda instead of 1 / lambda."""
    logits, labels = jnp.float32(LOGITS), jnp.int32(LABELS)
    lead = LOGITS - LOGITS[np.arange(7), LABELS][:, None] + 2.0 * (1 - ONE_HOT)
    low, high = (
        per_token('ldr_kl', logits, labels, ldr_lambda=lam)['objective'] for lam in (0.01, 1e4)
    )
    np.testing.assert_allclose(low, lead.max(-1) - 0.01 * np.log(11), atol=0.01)
    np.testing.assert_allclose(high, lead.mean(-1), atol=0.02)


@pytest.mark.parametrize('name', sorted(set(LOSSES) - {'cross_entropy'}))
def test_extreme_probabilities_have_finite_gradients(name):
    """Right and wrong, by 60 nats: p is 1 in float32, or e^-60."""
    logits, labels = jnp.float32([[60.0, 0.0, 0.0], [60.0, 0.0, 0.0]]), jnp.int32([0, 1])

    def total(z):
        objectives = per_token(name, z, labels)['objective']
        return objectives.sum(), objectives

    grad, objectives = jax.jit(jax.grad(total, has_aux=True))(logits)
    assert np.isfinite(objectives).all() and np.isfinite(grad).all()
    assert objectives[1] > objectives[0]


@pytest.mark.parametrize('name', ['spherical_z', 'taylor_softmax'])
def test_spherical_losses_match_logit_form(name):
    """For a readout with a bias, float64: value and gradients from D^2 operations per token match
    the same loss of all logits. Catches a bias missing from a square.
    """
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        x, w, b = (jnp.asarray(rng.normal(size=s)) for s in ((2, 5, 4), (4, 9), (9,)))
        labels, weights = jnp.asarray(rng.integers(0, 9, (2, 5))), jnp.asarray(rng.random((2, 5)))

        def compute(x, w, b):
            readout = Readout(w, b, 0.0, direct, jnp.dtype('float64'))
            return LOSSES[name](x, readout, labels, weights)['objective']

        def plain(x, w, b):
            z = (x @ w).reshape(-1, 9) + b[None]
            label = z[jnp.arange(10), labels.reshape(-1)]
            token_losses = inspect.unwrap(LOSSES[name])(z.sum(-1), (z**2).sum(-1), label, 9)
            return jnp.sum(weights.reshape(-1) * token_losses)

        functions = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2))) for f in (compute, plain))
        actual, expected = (f(x, w, b) for f in functions)
        for a, c in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, c, rtol=1e-10, atol=1e-12)


def test_spherical_z_ignores_shift_and_scale():
    logits, labels = jnp.float32(LOGITS), jnp.int32(LABELS)
    transformed, plain = (per_token('spherical_z', z, labels) for z in (3 * logits - 5, logits))
    np.testing.assert_allclose(transformed['objective'], plain['objective'], rtol=1e-4)


@pytest.mark.full
def test_coverage_counts_whole_rows():
    """The gradient of -log(1 - (1 - p)^N) with p of all valid tokens, also for N p so small that
    its terms cancel. Catches p of single tokens, and of padding.
    """
    rng = np.random.default_rng(2)
    labels, weights = jnp.asarray(rng.integers(0, 5, (3, 4))), jnp.asarray([[1, 1, 0, 1.0]] * 3)
    for scale, tries in ((4.0, 16.0), (4.0, 2.0), (0.1, 3.0)):
        logits = scale * jax.nn.one_hot(labels, 5) + 0.1 * rng.normal(size=(3, 4, 5))

        def objective(z, tries=tries):
            readout = Readout(jnp.eye(5), None, 0.0, direct, jnp.dtype('float32'))
            return LOSSES['dco'](z, readout, labels, weights, dco_tries=tries)['objective']

        def coverage(z, tries=tries):
            log_p = jnp.take_along_axis(jax.nn.log_softmax(z), labels[..., None], -1)[..., 0]
            wrong = jnp.log1p(-jnp.exp(jnp.sum(weights * log_p, -1)))
            return -jnp.sum(jnp.log(-jnp.expm1(tries * wrong)))

        np.testing.assert_allclose(
            *(jax.jit(jax.grad(f))(logits) for f in (objective, coverage)), rtol=2e-3, atol=1e-5
        )
