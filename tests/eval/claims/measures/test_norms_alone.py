"""Reference: a network with norms by hand. Property: what is not trained stays."""

import jax
import numpy as np
import pytest

from eval.claims.measures import norms_alone


@pytest.fixture(scope='module')
def params():
    return jax.device_get(jax.jit(norms_alone.init_params)(jax.random.key(0)))


def test_norms_and_as_many_weights_are_trained(params):
    """Catches weights of units that have none, and a readout that is trained."""
    masks = {
        part: norms_alone.build_mask(part, params, jax.random.key(1)) for part in norms_alone.PARTS
    }
    counts = {
        part: {name: sum(np.sum(x) for x in jax.tree.leaves(mask[name])) for name in mask}
        for part, mask in masks.items()
    }
    each = norms_alone.HIDDEN * norms_alone.WIDTH
    assert counts['norms'] == {'kernels': 0, 'gains': each, 'biases': each, 'readout': 0}
    assert counts['weights'] == {'kernels': 2 * each, 'gains': 0, 'biases': 0, 'readout': 0}
    for kernel in masks['weights']['kernels']:
        np.testing.assert_array_equal(np.sum(kernel, 0), 2)
        assert len(np.unique(np.argmax(kernel, 0))) > 1


def test_logits_are_those_of_norms_over_the_batch(params):
    x = np.float32(np.random.default_rng(0).normal(size=(9, norms_alone.TASK.inputs)))
    biases = np.float32(np.random.default_rng(1).normal(size=params['biases'].shape))
    wanted = x
    for kernel, gain, bias in zip(params['kernels'], params['gains'], biases, strict=True):
        z = wanted @ kernel
        z = (z - z.mean(0)) / np.sqrt(z.var(0) + norms_alone.EPS)
        wanted = np.maximum(gain * z + bias, 0)
    found = jax.jit(norms_alone.normed_logits)(params | {'biases': biases}, x)
    np.testing.assert_allclose(found, wanted @ params['readout'], rtol=1e-3, atol=1e-4)
