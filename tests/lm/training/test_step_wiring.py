"""What a step hands on: to the parametrisation's factors, and to an optimizer beside gradients."""

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
def test_the_factors_of_a_parametrisation(monkeypatch):
    """Of hidden matrices: used twice as large, rate times 3, decay times 4, Adam's eps times 5."""

    @parametrization(('adam',), grows=())
    def scaled(spec, growth, family):
        assert (growth, family) == (Growth(), 'adam')
        factors = {'forward': 2.0, 'lr': 3.0, 'decay': 4.0, 'eps': 5.0}
        found = standard(spec, growth, family)
        return dataclasses.replace(found, **factors) if spec.role == 'hidden' else found

    monkeypatch.setitem(PARAMETRIZATIONS, 'standard', scaled)
    learner = build_learner(update_recipe(CONFIG, {}), VOCAB, BOS, 'cpu')  # with that row
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

    state, used, grads, new = jax.device_get(everything())
    old, used, grads = (named_leaves(tree)[hidden] for tree in (state.params, used, grads))
    np.testing.assert_allclose(old, named_leaves(STATE().params)[hidden], rtol=1e-6)
    np.testing.assert_allclose(used, 2 * old, rtol=1e-6)
    grad = 2 * grads
    wanted = -0.3 * grad / (np.abs(grad) + 5 * CONFIG.optim.eps) - 0.3 * 0.5 * 4 * old
    np.testing.assert_allclose(named_leaves(new.params)[hidden] - old, wanted, atol=1e-5)


@pytest.mark.full
def test_what_an_optimizer_gets_beside_the_gradient(monkeypatch):
    """The loss of the whole batch, as a number and as a function, and the unclipped gradient."""

    @optimizer_row('adam')
    def differences(specs, **numbers):
        def update(clipped, state, params, *, value, grad, value_fn, **more):
            again, found = jax.value_and_grad(value_fn)(params)
            wrong = jax.tree.map(lambda a, b: a - b, found, grad)
            return jax.tree.map(lambda leaf: leaf + (again - value), wrong), state

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


def test_what_layers_sow_is_weighed_in_the_objective_and_recorded_as_it_is():
    """Once for each token that is a target. Catches a weight that is lost, or that records have."""
    config = tiny_config({'model.mlp': 'moe'})
    learner, batch = tiny_learner(config), packed_batch()
    x = jnp.ones((*batch['tokens'][:, 1:].shape, 4))
    readout = Readout(jnp.ones((4, VOCAB)), None, 0.0, direct, jnp.float32)
    hyper = make_hyper(config) | {'loss.balance_loss': jnp.float32(0.25)}
    sown = {AUXILIARY: {'layers': {'mlp': {'balance_loss': (jnp.float32([1.0, 3.0]),)}}}}
    plain = loss_sums(learner, x, readout, {}, batch, hyper)
    found = loss_sums(learner, x, readout, sown, batch, hyper)
    np.testing.assert_allclose(found['balance_loss'], 4.0 * plain['tokens'])
    added = found['objective'] - plain['objective']
    np.testing.assert_allclose(added, 0.25 * 4.0 * plain['tokens'], rtol=1e-5)


def test_the_peak_of_the_others_is_that_of_all_where_none_is_given():
    rates = {'optim.lr': 0.5, 'optim.others_lr': 0.125}
    assert peak_lrs(rates) == {'optim.name': 0.5, 'optim.others': 0.125}
    for alone in ({'optim.lr': 0.5}, {'optim.lr': 0.5, 'optim.others_lr': None}):
        assert peak_lrs(alone) == {'optim.name': 0.5, 'optim.others': 0.5}
