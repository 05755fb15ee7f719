"""Reference: what is measured of activations and matrices, against float64 and closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import ParamSpec, as_matrices
from modules.spectrum import largest_singular_value
from modules.stream import moments, sink_share

VALID = np.array([[1, 1, 1, 0], [1, 0, 0, 0]])


def drawn(scale=1.0):
    return scale * np.random.default_rng(0).normal(0.3, 1, (2, 4, 8)).astype(np.float32)


@pytest.mark.parametrize('scale', [1.0, 1e-12, 1e12])
def test_moments_of_the_tokens_that_count(scale):
    """Catches padding that counts, a mean that is left in, or fourth powers out of range."""
    x_BTD = drawn(scale)
    x_BTD[VALID == 0] = np.nan
    kept = np.float64(x_BTD[VALID == 1])
    apart = kept - kept.mean()
    wanted = {
        'rms': np.sqrt(np.mean(kept**2)),
        'largest': np.abs(kept).max(),
        'kurtosis': np.mean(apart**4) / np.mean(apart**2) ** 2,
    }
    found = moments(jnp.asarray(x_BTD), jnp.asarray(VALID))
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5)


def test_kurtosis_of_signs_is_one_and_that_of_an_outlier_its_inverse_share():
    signs = np.sign(drawn())
    signs[..., ::2], signs[..., 1::2] = 1, -1
    assert moments(jnp.asarray(signs))['kurtosis'] == pytest.approx(1)
    outlier = np.zeros((1, 1, 1000), np.float32)
    outlier[..., 3] = 5
    assert moments(jnp.asarray(outlier))['kurtosis'] == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize('scale', [1.0, 1e25])
def test_sink_is_the_share_of_the_largest_coordinates(scale):
    """Of 200 coordinates the two largest, summed over tokens first: catches one alone, the largest
    of each token, and squares out of range.
    """
    x_BTD = np.ones((1, 3, 200), np.float32)
    x_BTD[..., 7], x_BTD[0, 0, 9], x_BTD[0, 1, 11] = 30, 20, 10
    energy = np.sum(np.float64(x_BTD) ** 2, (0, 1))
    wanted = (energy[7] + energy[9]) / energy.sum()
    assert sink_share(jnp.asarray(scale * x_BTD)) == pytest.approx(wanted, rel=1e-5)
    assert sink_share(jnp.ones((1, 3, 8))) == pytest.approx(1 / 8)


def test_singular_values_of_stacked_matrices():
    """Against numpy's decomposition: catches sides in the wrong order and layers that mix."""
    rng = np.random.default_rng(0)
    spec = ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',))
    weight = rng.normal(size=(3, 6, 2, 5)) * np.array([1.0, 2.0, 0.0])[:, None, None, None]
    matrices = as_matrices(spec, jnp.float32(weight))
    assert matrices.shape == (3, 6, 10)
    wanted = np.linalg.svd(weight.reshape(3, 6, 10), compute_uv=False)[:, 0]
    found = np.asarray(largest_singular_value(matrices))
    np.testing.assert_allclose(found, wanted, rtol=1e-3)
    assert (found <= wanted * (1 + 1e-6)).all()
    joined = ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim'))
    assert as_matrices(joined, jnp.zeros((3, 2, 5, 6))).shape == (3, 10, 6)
    experts = ParamSpec('hidden', ('layer', 'expert', 'embed', 'mlp'), ('embed',))
    assert as_matrices(experts, jnp.zeros((3, 4, 6, 7))).shape == (3, 4, 6, 7)
