"""Sharpness. Reference: the dense Hessian of a tiny model, and the dense Jacobian of its blocks."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from eval.suites.sharpness import (
    adam_scales,
    build_float32_learner,
    build_spectrum,
    leaves_with,
    mean_loss,
    measure_stretches,
)
from lm.config.fields import MeshConfig
from lm.devices.mesh import make_mesh
from lm.inference.blocks import iterate_blocks, make_sequence
from lm.inference.load import Checkpoint
from lm.training.state import make_hyper
from lm.training.step import target_weights
from tests.helpers import (
    BOS,
    VOCAB,
    checked_config,
    initial_state,
    packed_batch,
    tiny_learner,
)

SMALL = {'model.d_model': 4, 'model.n_layers': 1, 'model.d_ff': 6, 'optim.eps': 1e-3}
COUNT, B2 = 5, 0.95
BATCH = packed_batch(rows=2, length=5)


@functools.cache
def make_trained_checkpoint(**changes):
    """Returns (checkpoint, state), with random second moments after COUNT updates of AdamW."""
    config = checked_config(SMALL | {k.replace('__', '.'): v for k, v in changes.items()})
    hyper, state, rng = make_hyper(config), initial_state(config), np.random.default_rng(0)

    def set_moments(node):
        if not is_adam(node):
            return node
        v = jax.tree.map(lambda x: rng.uniform(1e-6, 1e-4, x.shape).astype(x.dtype), node.nu)
        return node._replace(count=np.int32(COUNT), nu=v)

    moved = jax.tree.map(set_moments, state.opt_state, is_leaf=is_adam)
    mesh, learner = make_mesh(MeshConfig(data=1), jax.devices()[:1]), tiny_learner(config)
    named = Path('x'), config, COUNT, {}, learner, mesh, hyper, state.weights, None
    return Checkpoint(*named), state.replace(opt_state=moved)


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def dense_hessian(checkpoint, learner):
    flat, unravel = ravel_pytree(checkpoint.weights.params)

    def loss(flat):
        weights = checkpoint.weights.replace(params=unravel(flat))
        return mean_loss(learner, weights, BATCH, checkpoint.hyper)

    return np.asarray(jax.jit(jax.hessian(loss))(flat), np.float64)


def test_eigenvalues_match_quadratic():
    """sum_i c_i w_i^2 / 2 over all weights, with only norms trained: c s^2 are the eigenvalues."""
    checkpoint, _ = make_trained_checkpoint(train__trainable='norms')
    learner = checkpoint.learner

    def quadratic(learner, weights, batch, hyper):
        leaves = enumerate(jax.tree.leaves(weights.params), 2)
        return sum(i * jnp.sum((w - 1) ** 2) / 2 for i, w in leaves)

    params, flags = checkpoint.weights.params, learner.description.trainable
    counted = [(i, w) for i, (w, t) in enumerate(leaves_with(params, flags), 2) if t]
    scales = [(0.5 + np.arange(w.size, dtype=np.float32)).reshape(w.shape) for _, w in counted]
    expected = np.concatenate(
        [i * np.ravel(s) ** 2 for (i, _), s in zip(counted, scales, strict=True)]
    )
    spectrum = build_spectrum(learner, 100, quadratic)
    eigenvalues, _ = spectrum(checkpoint.weights, BATCH, checkpoint.hyper, scales)
    assert len(counted) < len(jax.tree.leaves(params))
    np.testing.assert_allclose(eigenvalues[:3], np.unique(expected)[::-1][:3], rtol=1e-4)
    np.testing.assert_allclose(eigenvalues[-1], expected.min(), rtol=1e-4)


@pytest.mark.full
def test_eigenvalues_match_dense_hessian():
    """They agree to 1e-4 of the largest eigenvalue. The scales are from AdamW's state."""
    checkpoint, state = make_trained_checkpoint()
    learner = build_float32_learner(checkpoint, 'reference')
    hessian = dense_hessian(checkpoint, learner)
    spectrum = build_spectrum(build_float32_learner(checkpoint, 'xla'), 60)
    scales, why = adam_scales(checkpoint.learner, checkpoint.hyper, state)
    assert not why
    ones = [jnp.ones_like(s) for s in scales]
    for scales_given in (ones, scales):
        flat = np.concatenate([np.ravel(s) for s in scales_given])
        expected = np.linalg.eigvalsh(flat[:, None] * hessian * flat)
        eigenvalues, bounds = spectrum(checkpoint.weights, BATCH, checkpoint.hyper, scales_given)
        np.testing.assert_allclose(eigenvalues[:3], expected[::-1][:3], rtol=1e-4)
        np.testing.assert_allclose(eigenvalues[-1], expected[0], rtol=1e-3)
        assert bounds[0] < 1e-4 * expected[-1]
        assert expected[-1] > -expected[0] > 0


@pytest.mark.full
def test_scales_use_unbiased_second_moment():
    checkpoint, state = make_trained_checkpoint()
    (adam,) = filter(is_adam, jax.tree.leaves(state.opt_state, is_leaf=is_adam))
    scales, _ = adam_scales(checkpoint.learner, checkpoint.hyper, state)
    for scale, v in zip(scales, jax.tree.leaves(adam.nu), strict=True):
        expected = np.sqrt(v / (1 - B2**COUNT)) + 1e-3
        np.testing.assert_allclose(1 / np.square(scale), expected, rtol=1e-4)


@pytest.mark.full
def test_optimizer_without_second_moments():
    for name in ('muon', 'sgd'):
        checkpoint, state = make_trained_checkpoint(optim__name=name, optim__others='adamw')
        scales, why = adam_scales(checkpoint.learner, checkpoint.hyper, state)
        assert scales is None and why.startswith(f'optim.name={name} stores no second moment')


@pytest.mark.full
@pytest.mark.parametrize('placement', ['pre', 'resi_dual'])
def test_stretches_match_dense_jacobian(placement):
    """Never further, and equally far after many rounds. With two streams the Jacobian has both."""
    checkpoint, _ = make_trained_checkpoint(model__placement=placement)
    learner = build_float32_learner(checkpoint, 'reference')
    arguments = learner, checkpoint.weights, BATCH, checkpoint.hyper
    (found_B,) = measure_stretches(*arguments, 60)
    (early_B,) = measure_stretches(*arguments, 1)
    for row in range(len(found_B)):
        expected = np.linalg.svd(dense_jacobian(checkpoint, learner, row), compute_uv=False)[0]
        np.testing.assert_allclose(found_B[row], expected, rtol=2e-3)
        assert early_B[row] < expected * (1 - 1e-4)


def dense_jacobian(checkpoint, learner, row):
    """The derivative of the only block in its input, for one row."""
    tokens = BATCH['tokens'][row : row + 1, :-1]
    embedded = checkpoint.weights.params['embedding'][tokens]
    streams = learner.recipe.placement.row.split(jnp.asarray(embedded))
    sequence = make_sequence(learner, BATCH['segments'][row : row + 1, :-1])
    (layer,) = iterate_blocks(learner, learner.variables(checkpoint.weights))
    flat, unravel = ravel_pytree(streams)
    apply = functools.partial(layer.apply, layer.variables, layer.number)
    return jax.jacobian(lambda x: ravel_pytree(apply(unravel(x), sequence))[0])(flat)


@pytest.mark.full
def test_loss_is_a_mean_over_targets():
    """With weights of zero every token has the probability 1 / V."""
    checkpoint, _ = make_trained_checkpoint()
    nothing = jax.tree.map(jnp.zeros_like, checkpoint.weights)
    assert 0 < np.sum(target_weights(BATCH, BOS)) < BATCH['tokens'][:, 1:].size
    loss = mean_loss(checkpoint.learner, nothing, BATCH, checkpoint.hyper)
    expected = np.log(VOCAB) + checkpoint.hyper['loss.z_loss'] * np.log(VOCAB) ** 2
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
