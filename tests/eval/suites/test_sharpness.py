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
def some(**changes):
    """(checkpoint, state), with random second moments of COUNT updates where AdamW has them."""
    config = checked_config(SMALL | {k.replace('__', '.'): v for k, v in changes.items()})
    hyper, state, rng = make_hyper(config), initial_state(config), np.random.default_rng(0)

    def updated(node):
        if not is_adam(node):
            return node
        v = jax.tree.map(lambda x: rng.uniform(1e-6, 1e-4, x.shape).astype(x.dtype), node.nu)
        return node._replace(count=np.int32(COUNT), nu=v)

    moved = jax.tree.map(updated, state.opt_state, is_leaf=is_adam)
    mesh, learner = make_mesh(MeshConfig(data=1), jax.devices()[:1]), tiny_learner(config)
    named = Path('x'), config, COUNT, {}, learner, mesh, hyper, state.weights, None
    return Checkpoint(*named), state.replace(opt_state=moved)


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def dense_hessian(checkpoint, learner):
    flat, back = ravel_pytree(checkpoint.weights.params)

    def loss(flat):
        weights = checkpoint.weights.replace(params=back(flat))
        return mean_loss(learner, weights, BATCH, checkpoint.hyper)

    return np.asarray(jax.jit(jax.hessian(loss))(flat), np.float64)


def test_eigenvalues_of_a_quadratic_of_what_is_trained():
    """sum_i c_i w_i^2 / 2 over all weights, of which norms alone are trained: c s^2 is found."""
    checkpoint, _ = some(train__trainable='norms')
    learner = checkpoint.learner

    def quadratic(learner, weights, batch, hyper):
        leaves = enumerate(jax.tree.leaves(weights.params), 2)
        return sum(i * jnp.sum((w - 1) ** 2) / 2 for i, w in leaves)

    params, flags = checkpoint.weights.params, learner.description.trainable
    counted = [(i, w) for i, (w, t) in enumerate(leaves_with(params, flags), 2) if t]
    scales = [(0.5 + np.arange(w.size, dtype=np.float32)).reshape(w.shape) for _, w in counted]
    wanted = np.concatenate(
        [i * np.ravel(s) ** 2 for (i, _), s in zip(counted, scales, strict=True)]
    )
    spectrum = build_spectrum(learner, 100, quadratic)
    found, _ = spectrum(checkpoint.weights, BATCH, checkpoint.hyper, scales)
    assert len(counted) < len(jax.tree.leaves(params))
    np.testing.assert_allclose(found[:3], np.unique(wanted)[::-1][:3], rtol=1e-4)
    np.testing.assert_allclose(found[-1], wanted.min(), rtol=1e-4)


@pytest.mark.full
def test_eigenvalues_are_those_of_the_dense_hessian_plain_and_preconditioned():
    """To 1e-4 of the largest; the scales are those that AdamW's state has."""
    checkpoint, state = some()
    learner = build_float32_learner(checkpoint, 'reference')
    hessian = dense_hessian(checkpoint, learner)
    spectrum = build_spectrum(build_float32_learner(checkpoint, 'xla'), 60)
    scales, why = adam_scales(checkpoint.learner, checkpoint.hyper, state)
    assert not why
    ones = [jnp.ones_like(s) for s in scales]
    for given in (ones, scales):
        flat = np.concatenate([np.ravel(s) for s in given])
        wanted = np.linalg.eigvalsh(flat[:, None] * hessian * flat)
        found, bounds = spectrum(checkpoint.weights, BATCH, checkpoint.hyper, given)
        np.testing.assert_allclose(found[:3], wanted[::-1][:3], rtol=1e-4)
        np.testing.assert_allclose(found[-1], wanted[0], rtol=1e-3)
        assert bounds[0] < 1e-4 * wanted[-1]
        assert wanted[-1] > -wanted[0] > 0


@pytest.mark.full
def test_scales_are_of_the_second_moment_without_its_bias():
    checkpoint, state = some()
    (adam,) = filter(is_adam, jax.tree.leaves(state.opt_state, is_leaf=is_adam))
    scales, _ = adam_scales(checkpoint.learner, checkpoint.hyper, state)
    for scale, v in zip(scales, jax.tree.leaves(adam.nu), strict=True):
        wanted = np.sqrt(v / (1 - B2**COUNT)) + 1e-3
        np.testing.assert_allclose(1 / np.square(scale), wanted, rtol=1e-4)


@pytest.mark.full
def test_an_optimizer_without_second_moments_is_named():
    for name in ('muon', 'sgd'):
        checkpoint, state = some(optim__name=name, optim__others='adamw')
        scales, why = adam_scales(checkpoint.learner, checkpoint.hyper, state)
        assert scales is None and why == f'optim.name={name} keeps no second moment as AdamW does'


@pytest.mark.full
@pytest.mark.parametrize('placement', ['pre', 'resi_dual'])
def test_blocks_stretch_as_far_as_their_dense_jacobian(placement):
    """Never further, and after many rounds as far; of two streams the Jacobian has both."""
    checkpoint, _ = some(model__placement=placement)
    learner = build_float32_learner(checkpoint, 'reference')
    given = learner, checkpoint.weights, BATCH, checkpoint.hyper
    (found_B,) = measure_stretches(*given, 60)
    (early_B,) = measure_stretches(*given, 1)
    for row in range(len(found_B)):
        wanted = np.linalg.svd(dense_jacobian(checkpoint, learner, row), compute_uv=False)[0]
        np.testing.assert_allclose(found_B[row], wanted, rtol=2e-3)
        assert early_B[row] < wanted * (1 - 1e-4)


def dense_jacobian(checkpoint, learner, row):
    """The derivative of the only block in what enters it, of one row."""
    tokens = BATCH['tokens'][row : row + 1, :-1]
    embedded = checkpoint.weights.params['embedding'][tokens]
    streams = learner.recipe.placement.row.split(jnp.asarray(embedded))
    sequence = make_sequence(learner, BATCH['segments'][row : row + 1, :-1])
    (one,) = iterate_blocks(learner, learner.variables(checkpoint.weights))
    flat, back = ravel_pytree(streams)
    apply = functools.partial(one.apply, one.variables, one.number)
    return jax.jacobian(lambda x: ravel_pytree(apply(back(x), sequence))[0])(flat)


@pytest.mark.full
def test_the_loss_is_a_mean_over_targets():
    """At weights of zero every token has the probability 1 / V."""
    checkpoint, _ = some()
    nothing = jax.tree.map(jnp.zeros_like, checkpoint.weights)
    assert 0 < np.sum(target_weights(BATCH, BOS)) < BATCH['tokens'][:, 1:].size
    loss = mean_loss(checkpoint.learner, nothing, BATCH, checkpoint.hyper)
    wanted = np.log(VOCAB) + checkpoint.hyper['loss.z_loss'] * np.log(VOCAB) ** 2
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
