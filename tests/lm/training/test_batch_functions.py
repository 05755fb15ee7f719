"""Functions of a batch that optimizers have beside its gradient, and what these cannot serve."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm.config.resolve import update_recipe
from lm.training.state import build_learner, check_learner, make_hyper
from lm.training.step import batch_functions, split_microbatches, target_weights
from modules.params import named_leaves
from tests.helpers import (
    BOS,
    VOCAB,
    assert_trees_close,
    initial_state,
    packed_batch,
    program_of,
    stack,
    tiny_config,
    tiny_learner,
    train_step,
    trained,
    trained_on_all_devices,
)

REFERENCE = {'model.n_layers': 1, 'model.d_model': 8, 'model.d_ff': 16, 'model.position': 'none'}
REFERENCE |= {'kernels.implementation': 'reference'}
TIED = {'model.tie_embeddings': True, 'model.logit_softcap': 5.0, 'model.reparam': 'sigma'}
PLAIN = {'optim.name': 'sgd', 'optim.others': 'sgd', 'optim.eps': None, 'optim.momentum': 0.0}
PLAIN |= {'optim.weight_decay': 0.0, 'optim.clip_norm': math.inf, 'optim.lr': 0.1}
ROWS = {
    'sven': {'optim.sven_group': 2, 'optim.sven_kappa': 1.0},
    'cge': {'optim.cge_coordinates': 40},
    'gauss_newton': {'optim.lr': 1.0, 'optim.others_lr': 0.01},
    'normalized_gd': {'optim.lr': 0.1},
    'adamw': {'optim.ghost_radius': 0.1, 'loss.chunk': 20},
}


def step(changes):
    """(what is added, the metrics); one program for all numbers."""
    config = tiny_config(REFERENCE | changes)
    state = initial_state(config)
    new, metrics = train_step(program_of(config))(state, packed_batch(), make_hyper(config))
    return jax.tree.map(lambda a, b: np.asarray(a - b), new.params, state.params), metrics


@pytest.mark.full
def test_functions_agree_with_the_loss_of_the_step():
    """The shares of two microbatches, of eight sequences and of logits each add up to the loss of
    the step, padding left out; all are functions of the stored weights. Catches shares that are
    divided by their own tokens, and logits before the softcap.
    """
    config = tiny_config(REFERENCE | TIED)
    learner, state, hyper = tiny_learner(config), initial_state(config), make_hyper(config)
    batch = packed_batch()

    def sums(params):
        total = jnp.sum(target_weights(batch, BOS))
        halves = batch_functions(learner, state, hyper, split_microbatches(batch, 2), total)
        alone = batch_functions(learner, state, hyper, split_microbatches(batch, 8), total)

        def from_logits(rows):
            return halves.share_from_logits(halves.logits_fn(params, rows), rows)

        return {
            'value': halves.value_fn(params),
            'shares': jnp.sum(jax.lax.map(lambda r: halves.share_fn(params, r), halves.rows)),
            'sequences': jnp.sum(jax.lax.map(lambda r: alone.share_fn(params, r), alone.rows)),
            'logits': jnp.sum(jax.lax.map(from_logits, halves.rows)),
            'tokens': jnp.sum(halves.weights) - total,
        }

    found = jax.jit(sums)(state.params)
    _, metrics = train_step(config)(state, batch, hyper)
    for name in ('value', 'shares', 'sequences', 'logits'):
        np.testing.assert_allclose(found[name], metrics['loss'], rtol=1e-6, err_msg=name)
    assert found['tokens'] == 0


@pytest.mark.full
@pytest.mark.parametrize('name', ROWS)
def test_mapped_runs_in_microbatches_are_runs_alone(name):
    """Two steps of two runs with other seeds, beside adamw. Catches means of microbatches, and a
    batch whose sequences change places.
    """
    changes = REFERENCE | {'optim.name': name} | ROWS[name]
    config, batches = tiny_config(changes), [packed_batch(seed) for seed in range(2)]
    hypers = stack([make_hyper(config)] * 2)
    mapped = trained(tiny_learner(update_recipe(config, {'train.microbatches': 2})), runs=2)
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    rows = stack([stack([batch, batch]) for batch in batches])
    _, found = mapped(keys, hypers, rows)
    alone = []
    for seed in range(2):
        state = initial_state(config, seed)
        for batch in batches:
            state, _ = train_step(config)(state, batch, make_hyper(config))
        alone.append(state.params)
    # The differences of two losses over 0.005, and of a search, round otherwise.
    rtol = {'cge': 1e-3, 'gauss_newton': 1e-3}.get(name, 1e-4)
    assert_trees_close(found.params, stack(alone), rtol=rtol, atol=rtol / 10)


@pytest.mark.full
@pytest.mark.parametrize('name', ['sven', 'adamw'])
def test_cut_over_devices_it_is_the_step_on_one(name):
    """Catches a largest, or a mean, of one device's rows."""
    config = tiny_config(REFERENCE | {'optim.name': name} | ROWS[name])
    found = trained_on_all_devices(
        tiny_learner(config), stack([packed_batch()]), make_hyper(config)
    )
    state, _ = train_step(config)(initial_state(config), packed_batch(), make_hyper(config))
    assert_trees_close(found.params, state.params, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_descent_is_divided_by_the_probability_of_errors():
    """The mean over target tokens of 1 - p, which is recorded of such runs alone."""
    config = tiny_config(REFERENCE | PLAIN)
    learner, batch, state = tiny_learner(config), packed_batch(), initial_state(config)
    logits = learner.model.apply({'params': state.params}, batch['tokens'][:, :-1])
    p = np.take_along_axis(
        np.asarray(jax.nn.softmax(logits)), batch['tokens'][:, 1:, None].astype(int), -1
    )[..., 0]
    weights = np.asarray(target_weights(batch, BOS))
    wanted = np.sum(weights * (1 - p)) / weights.sum()
    normalized = {'optim.name': 'normalized_gd', 'optim.others': 'normalized_gd'}
    normalized |= {'optim.momentum': None, 'loss.chunk': 20}
    plain, plainly = step(PLAIN)
    found, metrics = step(PLAIN | normalized)
    np.testing.assert_allclose(metrics['error_probability'], wanted, rtol=1e-5)
    assert 'error_probability' not in plainly
    scaled = jax.tree.map(lambda u: u / wanted, plain)
    assert_trees_close(found, scaled, rtol=1e-4, atol=1e-7)


@pytest.mark.full
def test_no_gradient_is_computed_of_what_reads_none():
    """Its norm is that of the others. Catches a backward pass that the metrics keep."""
    plain, _ = step(PLAIN)
    _, metrics = step(PLAIN | {'optim.name': 'cge', 'optim.cge_coordinates': 2})
    specs = named_leaves(tiny_learner(tiny_config(REFERENCE | PLAIN)).description.specs)
    moved = named_leaves(plain)
    others = [moved[path] / 0.1 for path, spec in specs.items() if spec.role != 'hidden']
    np.testing.assert_allclose(metrics['grad_norm'], optax.tree.norm(others), rtol=1e-5)


SERVED = (
    r'the logits in forward mode, and kernels.attention=blocked has no such derivative; choose '
    r'kernels.attention=reference$'
)


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        (
            {'optim.name': 'sven', 'model.d_model': 1024, 'model.d_ff': 4096},
            r'optim.name=sven is for at most 5,000,000 parameters; got 25,165,824. .*smaller',
        ),
        (
            {'optim.name': 'cge', 'model.d_model': 128, 'model.d_ff': 512},
            r'optim.name=cge is for at most 100,000 parameters; got 393,216',
        ),
        (
            {'optim.others': 'cge', 'data.seq_len': 1000, 'model.position': 'learned'}
            | {'model.d_model': 128},
            r'optim.others=cge is for at most 100,000 parameters; got 132,\d+',
        ),
        ({'optim.ghost_radius': 1.0}, 'optim.ghost_radius differentiates ' + SERVED),
        ({'optim.name': 'gauss_newton'}, 'optim.name=gauss_newton differentiates ' + SERVED),
        ({'optim.ghost_radius': 1.0, 'kernels.attention': 'reference'}, None),
        ({'optim.ghost_radius': 1.0, 'model.attention': 'linear'}, None),
        ({'optim.name': 'sophia'}, None),
        ({'optim.name': 'sven', 'optim.others': 'sven', 'optim.eps': None}, None),
    ],
)
def test_what_an_optimizer_cannot_serve(changes, said):
    """Said of shapes alone, before anything is compiled."""
    learner = build_learner(tiny_config(changes), VOCAB, BOS, 'cpu')
    if said is None:
        check_learner(learner)
        return
    with pytest.raises(ValueError, match=said):
        check_learner(learner)
