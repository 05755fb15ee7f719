"""Reference: measurements of activations and matrices, against float64 and closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import ParamSpec, as_matrices
from modules.spectrum import largest_singular_value
from modules.stream import moments, sink_share

VALID = np.array([[1, 1, 1, 0], [1, 0, 0, 0]])


def draw(scale=1.0):
    return scale * np.random.default_rng(0).normal(0.3, 1, (2, 4, 8)).astype(np.float32)


@pytest.mark.parametrize('scale', [1.0, 1e-12, 1e12])
def test_moments_ignore_padding(scale):
    """Catches padding that counts, a mean that is not subtracted, and powers out of range."""
    x_BTD = draw(scale)
    x_BTD[VALID == 0] = np.nan
    valid = np.float64(x_BTD[VALID == 1])
    centered = valid - valid.mean()
    expected = {
        'rms': np.sqrt(np.mean(valid**2)),
        'largest': np.abs(valid).max(),
        'kurtosis': np.mean(centered**4) / np.mean(centered**2) ** 2,
    }
    actual = moments(jnp.asarray(x_BTD), jnp.asarray(VALID))
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5)


def test_kurtosis_closed_forms():
    signs = np.sign(draw())
    signs[..., ::2], signs[..., 1::2] = 1, -1
    assert moments(jnp.asarray(signs))['kurtosis'] == pytest.approx(1)
    outlier = np.zeros((1, 1, 1000), np.float32)
    outlier[..., 3] = 5
    assert moments(jnp.asarray(outlier))['kurtosis'] == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize('scale', [1.0, 1e25])
def test_sink_share_has_largest_coordinates(scale):
    """The two largest of 200 coordinates, summed over tokens first: catches a single coordinate,
    the largest of each token, and squares out of range.
    """
    x_BTD = np.ones((1, 3, 200), np.float32)
    x_BTD[..., 7], x_BTD[0, 0, 9], x_BTD[0, 1, 11] = 30, 20, 10
    energy = np.sum(np.float64(x_BTD) ** 2, (0, 1))
    expected = (energy[7] + energy[9]) / energy.sum()
    assert sink_share(jnp.asarray(scale * x_BTD)) == pytest.approx(expected, rel=1e-5)
    assert sink_share(jnp.ones((1, 3, 8))) == pytest.approx(1 / 8)


def test_stacked_matrices_have_separate_singular_values():
    """Reference: numpy's decomposition. Catches sides in the wrong order and layers that mix."""
    rng = np.random.default_rng(0)
    spec = ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',))
    weight = rng.normal(size=(3, 6, 2, 5)) * np.array([1.0, 2.0, 0.0])[:, None, None, None]
    matrices = as_matrices(spec, jnp.float32(weight))
    assert matrices.shape == (3, 6, 10)
    expected = np.linalg.svd(weight.reshape(3, 6, 10), compute_uv=False)[:, 0]
    actual = np.asarray(largest_singular_value(matrices))
    np.testing.assert_allclose(actual, expected, rtol=1e-3)
    assert (actual <= expected * (1 + 1e-6)).all()
    joined = ParamSpec('hidden', ('layer', 'heads', 'head_dim', 'embed'), ('heads', 'head_dim'))
    assert as_matrices(joined, jnp.zeros((3, 2, 5, 6))).shape == (3, 10, 6)
    experts = ParamSpec('hidden', ('layer', 'expert', 'embed', 'mlp'), ('embed',))
    assert as_matrices(experts, jnp.zeros((3, 4, 6, 7))).shape == (3, 4, 6, 7)
