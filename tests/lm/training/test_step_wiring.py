"""The wiring of a step: the parametrisation's factors, and an optimizer's inputs beside
gradients.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm.config.resolve import update_recipe
from lm.training.state import build_learner, init_state, make_hyper
from lm.training.step import loss_sums, make_train_step, token_sums
from lm.training.update import build_optimizer, peak_lrs
from modules.kernels.matmul import direct
from modules.optim import OPTIMIZERS
from modules.optim.base import optimizer_row
from modules.params import named_leaves
from modules.products import Readout
from modules.scaling import PARAMETRIZATIONS, Growth
from modules.scaling.parametrization import parametrization, standard
from modules.statistics import AUXILIARY
from tests.helpers import (
    BOS,
    VOCAB,
    packed_batch,
    tiny_config,
    tiny_learner,
)
from tests.lm.training.test_step import CONFIG, STATE


@pytest.mark.full
def test_parametrisation_factors_are_applied(monkeypatch):
    """Hidden matrices: used twice as large, rate times 3, decay times 4, Adam's eps times 5."""

    @parametrization(('adam',), grows=())
    def scaled_standard(spec, growth, family):
        assert (growth, family) == (Growth(), 'adam')
        factors = {'forward': 2.0, 'lr': 3.0, 'decay': 4.0, 'eps': 5.0}
        scaling = standard(spec, growth, family)
        return dataclasses.replace(scaling, **factors) if spec.role == 'hidden' else scaling

    monkeypatch.setitem(PARAMETRIZATIONS, 'standard', scaled_standard)
    learner = build_learner(update_recipe(CONFIG, {}), VOCAB, BOS, 'cpu')  # with the new row
    batch, hidden = packed_batch(), 'layers/mlp/up'
    changes = {'optim.lr': 0.1, 'optim.weight_decay': 0.5, 'optim.clip_norm': np.inf}
    hyper = make_hyper(CONFIG) | {path: jnp.float32(value) for path, value in changes.items()}

    @jax.jit
    def everything():
        state = init_state(learner, hyper, jax.random.key(0))
        used = learner.variables(state.weights)['params']

        def mean(used):
            sums = token_sums(learner, {'params': used}, batch, hyper)
            return sums['objective'] / sums['tokens']

        return state, used, jax.grad(mean)(used), make_train_step(learner)(state, batch, hyper)[0]

    state, used, grads, after = jax.device_get(everything())
    start, used, grads = (named_leaves(tree)[hidden] for tree in (state.params, used, grads))
    np.testing.assert_allclose(start, named_leaves(STATE().params)[hidden], rtol=1e-6)
    np.testing.assert_allclose(used, 2 * start, rtol=1e-6)
    grad = 2 * grads
    expected = -0.3 * grad / (np.abs(grad) + 5 * CONFIG.optim.eps) - 0.3 * 0.5 * 4 * start
    np.testing.assert_allclose(named_leaves(after.params)[hidden] - start, expected, atol=1e-5)


@pytest.mark.full
def test_optimizer_gets_loss_and_gradient(monkeypatch):
    """The loss of the whole batch, as a number and as a function, and the unclipped gradient."""

    @optimizer_row('adam')
    def differences(specs, **numbers):
        def update(clipped, state, params, *, value, grad, value_fn, **arguments):
            loss, gradient = jax.value_and_grad(value_fn)(params)
            difference = jax.tree.map(lambda a, b: a - b, gradient, grad)
            return jax.tree.map(lambda leaf: leaf + (loss - value), difference), state

        return optax.GradientTransformationExtraArgs(lambda params: (), update)

    monkeypatch.setitem(OPTIMIZERS, 'adamw', differences)
    config = update_recipe(CONFIG, {'train.microbatches': 2})
    learner = build_learner(config, VOCAB, BOS, 'cpu')
    hyper = make_hyper(config) | {'optim.weight_decay': 0.0, 'optim.clip_norm': 1e-3}
    state = STATE().replace(
        opt_state=build_optimizer(config, learner.description, hyper).init(None)
    )
    step = jax.jit(make_train_step(learner))
    _, metrics = step(state, packed_batch(), hyper)
    assert metrics['grad_norm'] > 0.1
    assert metrics['update_norm'] < 1e-5


def test_auxiliary_losses_are_weighted_in_objective():
    """Each counts once per target token. Catches a missing weight, and a weight in the record."""
    config = tiny_config({'model.mlp': 'moe'})
    learner, batch = tiny_learner(config), packed_batch()
    x = jnp.ones((*batch['tokens'][:, 1:].shape, 4))
    readout = Readout(jnp.ones((4, VOCAB)), None, 0.0, direct, jnp.float32)
    hyper = make_hyper(config) | {'loss.balance_loss': jnp.float32(0.25)}
    sown = {AUXILIARY: {'layers': {'mlp': {'balance_loss': (jnp.float32([1.0, 3.0]),)}}}}
    plain = loss_sums(learner, x, readout, {}, batch, hyper)
    sums = loss_sums(learner, x, readout, sown, batch, hyper)
    np.testing.assert_allclose(sums['balance_loss'], 4.0 * plain['tokens'])
    difference = sums['objective'] - plain['objective']
    np.testing.assert_allclose(difference, 0.25 * 4.0 * plain['tokens'], rtol=1e-5)


def test_peak_others_lr_defaults_to_lr():
    rates = {'optim.lr': 0.5, 'optim.others_lr': 0.125}
    peaks = peak_lrs(rates)
    assert (peaks['hidden'], peaks['router']) == (0.5, 0.5)
    assert {peaks[group] for group in ('others', 'embedding', 'norm', 'readout')} == {0.125}
    for lr_only in ({'optim.lr': 0.5}, {'optim.lr': 0.5, 'optim.others_lr': None}):
        assert {*peak_lrs(lr_only).values()} == {0.5}
