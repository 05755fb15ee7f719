"""Reference: noisy data with known labels, and losses of a network by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from eval.claims.measures import rescaling


def test_wrong_labels_come_from_other_classes(monkeypatch):
    """Without spread rows lie on their centres, which determine the correct labels."""
    task = dataclasses.replace(rescaling.TASK, spread=0.0)
    monkeypatch.setattr(rescaling, 'TASK', task)
    (x, labels, held_out, held_out_labels), is_wrong, _ = rescaling._draw_noisy(
        np.random.default_rng(0)
    )
    label_by_centre = {row.tobytes(): y for row, y in zip(held_out, held_out_labels, strict=True)}
    assert len(label_by_centre) == task.clusters
    np.testing.assert_array_equal(labels != [label_by_centre[row.tobytes()] for row in x], is_wrong)
    assert is_wrong.sum() == round(0.3 * task.n_train)
    assert set(labels[is_wrong > 0]) == set(range(task.classes))


@pytest.mark.full
def test_rows_use_first_pass_loss():
    """Catches one mask for all passes, and the loss of another pass."""
    rng = np.random.default_rng(0)
    sizes = (rescaling.TASK.inputs, 8), (8, 8), (8, rescaling.TASK.classes)
    params = [np.float32(rng.normal(size=size)) for size in sizes]
    x, labels = np.float32(rng.normal(size=(4, rescaling.TASK.inputs))), np.int32([3, 0, 1, 9])
    masks = np.float32(rng.integers(0, 2, (rescaling.PASSES, 2, 4, 8)) / 0.9)

    def logits(masks):
        hidden = masks[0] * np.maximum(x @ params[0], 0)
        return masks[1] * np.maximum(hidden @ params[1], 0) @ params[2]

    losses_by_pass = [
        -special.log_softmax(logits(masks_of_pass), -1)[np.arange(4), labels]
        for masks_of_pass in masks
    ]

    def loss(params):
        losses, features = rescaling._row_losses(params, (x, labels, masks))
        return jnp.sum(losses), (losses, features)

    grads, (losses, features) = jax.jit(jax.grad(loss, has_aux=True))(list(map(jnp.array, params)))
    np.testing.assert_allclose(losses, losses_by_pass[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(features[:, 0], np.mean(losses_by_pass, 0), rtol=1e-4)
    np.testing.assert_allclose(features[:, 3], np.std(losses_by_pass, 0, ddof=1), rtol=1e-3)
    hidden = np.maximum(masks[0, 0] * np.maximum(x @ params[0], 0) @ params[1], 0) * masks[0, 1]
    errors = special.softmax(logits(masks[0]), -1) - np.eye(rescaling.TASK.classes)[labels]
    np.testing.assert_allclose(grads[2], hidden.T @ errors, rtol=1e-3, atol=1e-4)
