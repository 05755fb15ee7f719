"""Reference: noisy data whose labels are known, and losses of a network by hand. Contract: what
the measure computes is what its row names.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from eval.claims.measures import rescaling
from eval.claims.measures.rows import MEASURES


def test_labels_are_those_of_other_classes_where_they_are_wrong(monkeypatch):
    """Rows without spread lie on their centres, which tell the right labels of all."""
    monkeypatch.setattr(rescaling, 'SPREAD', 0.0)
    data = rescaling._data(np.random.default_rng(0))
    right = {row.tobytes(): y for row, y in zip(data.held_out, data.held_out_labels, strict=True)}
    assert len(right) == rescaling.CLASSES * rescaling.CLUSTERS
    wanted = np.array([right[row.tobytes()] for row in data.x])
    np.testing.assert_array_equal(data.labels != wanted, data.is_wrong)
    assert data.is_wrong.sum() == round(0.3 * rescaling.TRAINED)
    assert set(data.labels[data.is_wrong > 0]) == set(range(rescaling.CLASSES))


@pytest.mark.full
def test_rows_have_the_loss_of_the_first_pass_and_its_gradient():
    """Catches one mask for all passes, and the loss of another."""
    rng = np.random.default_rng(0)
    sizes = (rescaling.INPUTS, 8), (8, 8), (8, rescaling.CLASSES)
    params = [np.float32(rng.normal(size=size)) for size in sizes]
    x, labels = np.float32(rng.normal(size=(4, rescaling.INPUTS))), np.int32([3, 0, 1, 9])
    masks = np.float32(rng.integers(0, 2, (rescaling.PASSES, 2, 4, 8)) / 0.9)

    def logits(masks):
        hidden = masks[0] * np.maximum(x @ params[0], 0)
        return masks[1] * np.maximum(hidden @ params[1], 0) @ params[2]

    each = [-special.log_softmax(logits(own), -1)[np.arange(4), labels] for own in masks]

    def loss(params):
        losses, features = rescaling._rows(params, (x, labels, masks))
        return jnp.sum(losses), (losses, features)

    grads, (losses, features) = jax.jit(jax.grad(loss, has_aux=True))(list(map(jnp.array, params)))
    np.testing.assert_allclose(losses, each[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(features[:, 0], np.mean(each, 0), rtol=1e-4)
    np.testing.assert_allclose(features[:, 3], np.std(each, 0, ddof=1), rtol=1e-3)
    hidden = np.maximum(masks[0, 0] * np.maximum(x @ params[0], 0) @ params[1], 0) * masks[0, 1]
    errors = special.softmax(logits(masks[0]), -1) - np.eye(rescaling.CLASSES)[labels]
    np.testing.assert_allclose(grads[2], hidden.T @ errors, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_the_measure_has_the_values_of_its_row(monkeypatch):
    sizes = {'STEPS': 8, 'SEEDS': 2, 'RATES': (1e-3,), 'TRAINED': 64, 'HELD_OUT': 64, 'WIDTH': 8}
    for size, value in sizes.items():
        monkeypatch.setattr(rescaling, size, value)
    found = MEASURES['rescaled_rows'].compute()
    assert found.keys() == set(MEASURES['rescaled_rows'].values)
    assert all(np.isfinite(one.value) and one.n == 2 for one in found.values())
    assert found['weight_of_corrupted_over_clean_by_trimmed'].value < 1
