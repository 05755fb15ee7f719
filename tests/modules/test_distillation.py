"""Reference: distillation against NumPy float64, by formulas of the authors' code, and balancing of
teachers by hand. Property: a drift of all logits does not count.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from modules.losses.distillation import (
    balanced_temperatures,
    balanced_weights,
    entropies,
    kl_divergence,
    log_cosh,
)

RNG = np.random.default_rng(0)
STUDENT, TEACHER = RNG.normal(0, 3, (2, 7, 11))
T = 2.0


def bernoulli_norm(student, teacher):
    """The authors' formula: KL divergences of Bernoulli variables from 1/2, summed over classes."""
    s, t = (z - z.mean(-1, keepdims=True) for z in (student, teacher))
    q = special.expit((s - t) / T)
    return T**2 * np.sum(0.5 * np.log(0.5 / q) + 0.5 * np.log(0.5 / (1 - q)), -1)


def kl(student, teacher):
    p, q = special.softmax(teacher / T, -1), special.softmax(student / T, -1)
    return T**2 * np.sum(p * np.log(p / q), -1)


GRADIENTS = {  # in the student's logits
    bernoulli_norm: lambda s, t: _centre(T / 2 * np.tanh((_centre(s) - _centre(t)) / (2 * T))),
    kl: lambda s, t: T * (special.softmax(s / T, -1) - special.softmax(t / T, -1)),
}


def _centre(z):
    return z - z.mean(-1, keepdims=True)


@pytest.mark.parametrize('ours, theirs', [(log_cosh, bernoulli_norm), (kl_divergence, kl)])
def test_distances_match_published_formulas(ours, theirs):
    """Values and gradient; both are 0 at the teacher."""
    student, teacher = jnp.float32(STUDENT), jnp.float32(TEACHER)

    @jax.jit
    def total(student):
        distances = ours(student, teacher, T)
        return jnp.sum(distances), (distances, ours(teacher, teacher, T))

    (_, (values, at_teacher)), grad = jax.value_and_grad(total, has_aux=True)(student)
    np.testing.assert_allclose(values, theirs(STUDENT, TEACHER), rtol=1e-5)
    np.testing.assert_allclose(grad, GRADIENTS[theirs](STUDENT, TEACHER), atol=1e-5)
    np.testing.assert_allclose(at_teacher, 0, atol=1e-5)


@pytest.mark.parametrize('distance', [log_cosh, kl_divergence])
def test_logit_drift_does_not_count(distance):
    """A number added per token, to student or teacher; bfloat16 is reduced in float32."""
    plain = distance(jnp.float32(STUDENT), jnp.float32(TEACHER), T)
    drift = np.arange(7.0)[:, None]
    drifted = distance(jnp.float32(STUDENT + drift), jnp.float32(TEACHER - 2 * drift), T)
    np.testing.assert_allclose(drifted, plain, rtol=1e-4)
    assert distance(jnp.bfloat16(STUDENT), jnp.bfloat16(TEACHER), T).dtype == jnp.float32


def test_log_cosh_far_away_is_finite_and_linear():
    student = jnp.float32([[1e4, 0.0]])  # centred: 5000 and -5000
    expected = 2 * T**2 * (5000 / (2 * T) - np.log(2))
    np.testing.assert_allclose(log_cosh(student, 0 * student, T), [expected], rtol=1e-6)


def test_sharper_teacher_gets_smoother():
    """Reference: one step by hand, both bounds, and equal entropies, which change nothing."""
    entropy = entropies(jnp.float32(TEACHER), T)
    expected = special.entr(special.softmax(TEACHER / T, -1)).sum(-1)
    np.testing.assert_allclose(entropy, expected, rtol=1e-5)
    balanced = balanced_temperatures(jnp.float32([2.0, 3.0]), jnp.float32([0.5, 1.0]), 0.25)
    np.testing.assert_allclose(balanced, [2.25, 2.75])
    bounded = balanced_temperatures(jnp.float32([10.0, 1.0]), jnp.float32([0.5, 1.0]), 0.25)
    np.testing.assert_allclose(bounded, [10.0, 1.0])
    equal = balanced_temperatures(jnp.float32([2.0, 3.0]), jnp.float32([0.5, 0.5]), 0.25)
    np.testing.assert_allclose(equal, [2.0, 3.0])


def test_slowest_loss_gets_more_weight():
    """Reference: l = (0.2, 0.6), shares (1/4, 3/4); a rate above 1 can empty a weight, but no
    more.
    """
    losses, first = jnp.float32([0.4, 3.0]), jnp.float32([2.0, 5.0])
    balanced = balanced_weights(jnp.float32([0.5, 0.5]), losses, first, 0.1)
    np.testing.assert_allclose(balanced, [0.475, 0.525], rtol=1e-6)
    far = balanced_weights(jnp.float32([0.5, 0.5]), losses, first, 4.0)
    np.testing.assert_allclose(far, [0.0, 1.0])
