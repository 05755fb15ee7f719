"""Reference: distillation against numpy float64, by formulas of the authors' code, and balances of
teachers by hand. Property: what logits drift by does not count.
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
    bernoulli_norm: lambda s, t: _centred(T / 2 * np.tanh((_centred(s) - _centred(t)) / (2 * T))),
    kl: lambda s, t: T * (special.softmax(s / T, -1) - special.softmax(t / T, -1)),
}


def _centred(z):
    return z - z.mean(-1, keepdims=True)


@pytest.mark.parametrize('ours, theirs', [(log_cosh, bernoulli_norm), (kl_divergence, kl)])
def test_a_distance_is_the_published_one(ours, theirs):
    """Values and gradient; and both are 0 at the teacher."""
    student, teacher = jnp.float32(STUDENT), jnp.float32(TEACHER)

    @jax.jit
    def found(student):
        each = ours(student, teacher, T)
        return jnp.sum(each), (each, ours(teacher, teacher, T))

    (_, (values, at_teacher)), grad = jax.value_and_grad(found, has_aux=True)(student)
    np.testing.assert_allclose(values, theirs(STUDENT, TEACHER), rtol=1e-5)
    np.testing.assert_allclose(grad, GRADIENTS[theirs](STUDENT, TEACHER), atol=1e-5)
    np.testing.assert_allclose(at_teacher, 0, atol=1e-5)


@pytest.mark.parametrize('distance', [log_cosh, kl_divergence])
def test_what_logits_drift_by_does_not_count(distance):
    """A number a token more, of student or teacher; bfloat16 is reduced in float32."""
    found = distance(jnp.float32(STUDENT), jnp.float32(TEACHER), T)
    drift = np.arange(7.0)[:, None]
    drifted = distance(jnp.float32(STUDENT + drift), jnp.float32(TEACHER - 2 * drift), T)
    np.testing.assert_allclose(drifted, found, rtol=1e-4)
    assert distance(jnp.bfloat16(STUDENT), jnp.bfloat16(TEACHER), T).dtype == jnp.float32


def test_log_cosh_far_away_is_finite_and_linear():
    student = jnp.float32([[1e4, 0.0]])  # centred: 5000 and -5000
    wanted = 2 * T**2 * (5000 / (2 * T) - np.log(2))
    np.testing.assert_allclose(log_cosh(student, 0 * student, T), [wanted], rtol=1e-6)


def test_the_sharper_teacher_gets_smoother():
    """Reference: one step by hand, both bounds, and equal entropies, which move nothing."""
    entropy = entropies(jnp.float32(TEACHER), T)
    wanted = special.entr(special.softmax(TEACHER / T, -1)).sum(-1)
    np.testing.assert_allclose(entropy, wanted, rtol=1e-5)
    moved = balanced_temperatures(jnp.float32([2.0, 3.0]), jnp.float32([0.5, 1.0]), 0.25)
    np.testing.assert_allclose(moved, [2.25, 2.75])
    bounded = balanced_temperatures(jnp.float32([10.0, 1.0]), jnp.float32([0.5, 1.0]), 0.25)
    np.testing.assert_allclose(bounded, [10.0, 1.0])
    equal = balanced_temperatures(jnp.float32([2.0, 3.0]), jnp.float32([0.5, 0.5]), 0.25)
    np.testing.assert_allclose(equal, [2.0, 3.0])


def test_what_has_fallen_least_gets_more_weight():
    """Reference: l = (0.2, 0.6), shares (1/4, 3/4); a rate above 1 can empty a weight, not more."""
    losses, first = jnp.float32([0.4, 3.0]), jnp.float32([2.0, 5.0])
    moved = balanced_weights(jnp.float32([0.5, 0.5]), losses, first, 0.1)
    np.testing.assert_allclose(moved, [0.475, 0.525], rtol=1e-6)
    far = balanced_weights(jnp.float32([0.5, 0.5]), losses, first, 4.0)
    np.testing.assert_allclose(far, [0.0, 1.0])
