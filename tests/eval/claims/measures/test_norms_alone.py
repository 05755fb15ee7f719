"""Reference: a network with norms by hand. Property: parameters outside the mask stay."""

import jax
import numpy as np
import pytest

from eval.claims.measures import norms_alone


@pytest.fixture(scope='module')
def params():
    return jax.device_get(jax.jit(norms_alone.init_params)(jax.random.key(0)))


def test_mask_has_as_many_weights_as_norms(params):
    """Catches units without a trained weight, and a trained readout."""
    masks = {
        part: norms_alone.build_mask(part, params, jax.random.key(1))
        for part in ('norms', 'weights')
    }
    counts = {
        part: {name: sum(np.sum(x) for x in jax.tree.leaves(mask[name])) for name in mask}
        for part, mask in masks.items()
    }
    n_units = norms_alone.HIDDEN * norms_alone.WIDTH
    assert counts['norms'] == {'kernels': 0, 'gains': n_units, 'biases': n_units, 'readout': 0}
    assert counts['weights'] == {'kernels': 2 * n_units, 'gains': 0, 'biases': 0, 'readout': 0}
    for kernel in masks['weights']['kernels']:
        np.testing.assert_array_equal(np.sum(kernel, 0), 2)
        assert len(np.unique(np.argmax(kernel, 0))) > 1


def test_logits_normalize_over_batch(params):
    x = np.float32(np.random.default_rng(0).normal(size=(9, norms_alone.TASK.inputs)))
    biases = np.float32(np.random.default_rng(1).normal(size=params['biases'].shape))
    expected = x
    for kernel, gain, bias in zip(params['kernels'], params['gains'], biases, strict=True):
        z = expected @ kernel
        z = (z - z.mean(0)) / np.sqrt(z.var(0) + norms_alone.EPS)
        expected = np.maximum(gain * z + bias, 0)
    logits = jax.jit(norms_alone.normed_logits)(params | {'biases': biases}, x)
    np.testing.assert_allclose(logits, expected @ params['readout'], rtol=1e-3, atol=1e-4)
