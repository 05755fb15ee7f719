"""The adversarial comp-sum loss. Reference: NumPy float64, with a full decomposition. Property: no
shift moves the margins further.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.kernels.matmul import direct
from modules.losses.label_probability import comp_sum
from modules.losses.linear_readout import adversarial_comp_sum, worst_shift
from modules.products import Readout

RNG = np.random.default_rng(0)
M, D, V = 6, 5, 9
X, LABELS = RNG.normal(size=(M, D)), RNG.integers(0, V, M)
WEIGHT, BIAS = RNG.normal(size=(D, V)) * np.linspace(0.2, 2, V), RNG.normal(size=V)


def readout(weight, bias=None, dtype=jnp.float64):
    return Readout(weight, bias, softcap=0.0, matmul=direct, dtype=dtype)


def differences(label):
    return (WEIGHT[:, [label]] - WEIGHT).T


@pytest.mark.full
def test_worst_shift_is_largest_singular_value():
    """Compared with the matrix of differences, with the same gradient. Catches a mean that is not
    subtracted, and a rank-one part without V.
    """
    with jax.enable_x64(True):

        def total(weight):
            return jnp.sum(worst_shift(readout(weight), jnp.asarray(LABELS), 300))

        def compute_expected(weight):
            rows = weight[:, LABELS].T[:, None] - weight.T[None]
            return jnp.sum(jnp.linalg.svd(rows, compute_uv=False)[:, 0])

        weight = jnp.asarray(WEIGHT)
        (actual, grad), (value, exact) = (
            jax.value_and_grad(f)(weight) for f in (total, compute_expected)
        )
    np.testing.assert_allclose(actual, value, rtol=1e-12)
    np.testing.assert_allclose(grad, exact, atol=1e-8)
    np.testing.assert_allclose(
        value, sum(np.linalg.norm(differences(label), 2) for label in LABELS), rtol=1e-12
    )


@pytest.mark.full
def test_ascent_approaches_from_below():
    """Runs the default number of steps, on a random readout."""
    weight = RNG.normal(size=(32, 200)).astype(np.float32)
    labels = np.arange(40)
    actual = worst_shift(readout(weight, dtype=jnp.float32), labels, 10)
    rows = weight[:, labels].T[:, None] - weight.T[None]
    exact = np.linalg.norm(np.float64(rows), 2, axis=(1, 2))
    assert np.all(actual <= exact * (1 + 1e-5)) and np.all(actual > 0.98 * exact)


@pytest.mark.full
@pytest.mark.parametrize('tau', [0.5, 1.0, 1.7])
def test_smooth_part_matches_paper(tau):
    """phi of the sum over the other words, with rho. Catches a label in the sum, and a ce with
    rho.
    """
    rho = 0.7
    logits = X @ WEIGHT + BIAS
    is_other = np.arange(V)[None] != LABELS[:, None]
    margins = logits - logits[np.arange(M), LABELS][:, None]
    u = np.sum(np.exp(margins / rho) * is_other, -1)
    phi = np.log1p(u) if tau == 1 else ((1 + u) ** (1 - tau) - 1) / (1 - tau)
    worst = np.array([np.linalg.norm(differences(label), 2) for label in LABELS])
    weights = np.float64([1, 1, 0, 1, 0.5, 1])
    with jax.enable_x64(True):
        terms = adversarial_comp_sum(
            jnp.asarray(X),
            readout(jnp.asarray(WEIGHT), jnp.asarray(BIAS)),
            jnp.asarray(LABELS),
            jnp.asarray(weights),
            tau=tau,
            comp_sum_rho=rho,
            adversarial_weight=0.3,
            adversarial_steps=300,
        )
    np.testing.assert_allclose(terms['objective'], weights @ (phi + 0.3 * worst), rtol=1e-10)
    ce = np.log(np.sum(np.exp(logits), -1)) - logits[np.arange(M), LABELS]
    np.testing.assert_allclose(terms['ce'], weights @ ce, rtol=1e-10)


@pytest.mark.full
def test_no_shift_exceeds_worst_shift():
    """Among many shifts of equal length, none; and without the term it is comp_sum."""
    arrays = jnp.float32(X), readout(jnp.float32(WEIGHT), dtype=jnp.float32), LABELS, np.ones(M)
    sigma = np.asarray(worst_shift(arrays[1], LABELS, 100))
    shifts = RNG.normal(size=(2000, M, D))
    shifts *= 0.1 / np.linalg.norm(shifts, axis=-1, keepdims=True)
    for i, label in enumerate(LABELS):
        distances = np.linalg.norm(shifts[:, i] @ differences(label).T, axis=-1)
        assert 0.9 * 0.1 * sigma[i] < distances.max() <= 0.1 * sigma[i] * (1 + 1e-5)
    terms = adversarial_comp_sum(*arrays, tau=1.5, adversarial_weight=0.0)
    np.testing.assert_allclose(
        terms['objective'], comp_sum(*arrays, tau=1.5)['objective'], rtol=1e-6
    )
